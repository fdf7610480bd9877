import threading
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lightning_mqgnn import StageQueue, queues
from lightning_mqgnn.queues import QueueClosed


class CountedLock:
    """A lock that counts how often it is made and asked for."""

    made = 0
    acquired = 0

    def __init__(self):
        CountedLock.made += 1
        self._lock = threading.Lock()

    def acquire(self):
        CountedLock.acquired += 1
        return self._lock.acquire()

    def release(self):
        self._lock.release()


@pytest.fixture
def counted_lock(monkeypatch):
    monkeypatch.setattr(queues, "allocate_lock", CountedLock)
    CountedLock.made = CountedLock.acquired = 0
    return CountedLock


def run_all(*functions):
    """Run functions in threads of their own and raise what they raise."""
    errors = []

    def guard(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def begin(function):
    """Start a thread and return it with the list that will get its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    return thread, result


def wait_until(condition):
    """Give other threads turns until the condition holds."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.001)


def is_waiting(exchange, number):
    return isinstance(exchange._left.get(number), queues._Waiter)


def test_items_come_out_in_the_order_of_their_numbers():
    queue = StageQueue(3)
    for number in (2, 0, 1):
        queue.put(number, f"item {number}")
    assert [queue.get() for _ in range(3)] == [(0, "item 0"), (1, "item 1"), (2, "item 2")]


def test_no_lock_is_made_or_taken_when_nobody_waits(counted_lock):
    queue = StageQueue(2)
    for number in range(0, 1000, 2):
        queue.put(number, None)
        queue.put(number + 1, None)
        queue.get()
        queue.get()
    assert counted_lock.made == 0


def test_a_waiting_consumer_asks_for_one_lock_once_more_than_to_set_it_up(counted_lock):
    queue = StageQueue(1)
    thread, result = begin(queue.get)
    wait_until(lambda: is_waiting(queue._items, 0))
    queue.put(0, "item")
    thread.join()
    assert result == [(0, "item")]
    assert (counted_lock.made, counted_lock.acquired) == (1, 2)  # parked, not polling


def test_a_producer_waits_for_room_and_goes_on_when_an_item_leaves():
    queue = StageQueue(1)
    queue.put(0, "first")
    thread, _ = begin(lambda: queue.put(1, "second"))
    wait_until(lambda: is_waiting(queue._places, 1))
    assert len(queue) == 1
    assert queue.get() == (0, "first")
    thread.join()
    assert queue.get() == (1, "second")


def test_the_next_item_always_has_room_however_many_later_ones_wait():
    queue = StageQueue(2)
    queue.put(1, "b")
    late = [begin(lambda n=n: queue.put(n, "later"))[0] for n in (2, 3, 4)]
    wait_until(lambda: all(is_waiting(queue._places, n) for n in (2, 3, 4)))
    queue.put(0, "a")
    assert [queue.get()[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    for thread in late:
        thread.join()


def test_a_larger_capacity_wakes_a_waiting_producer():
    queue = StageQueue(1)
    queue.put(0, "first")
    thread, _ = begin(lambda: queue.put(1, "second"))
    wait_until(lambda: is_waiting(queue._places, 1))
    queue.capacity = 2
    thread.join()
    assert len(queue) == 2


def test_a_smaller_capacity_drops_nothing_and_holds_once_items_have_left():
    queue = StageQueue(4)
    for number in range(4):
        queue.put(number, number)
    queue.capacity = 1
    assert [queue.get() for _ in range(4)] == [(n, n) for n in range(4)]
    queue.put(4, 4)
    thread, _ = begin(lambda: queue.put(5, 5))
    wait_until(lambda: is_waiting(queue._places, 5))
    assert len(queue) == 1
    assert [queue.get()[0], queue.get()[0]] == [4, 5]
    thread.join()


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_queue_without_room_is_refused(capacity):
    with pytest.raises(ValueError, match=f"capacity={capacity}: a queue holds 1 or more items"):
        StageQueue(capacity)


def test_close_wakes_everybody_who_waits():
    queue = StageQueue(1)
    queue.put(0, "item")
    queue.get()
    outcomes = []

    def expect_closed(function):
        with pytest.raises(QueueClosed):
            function()
        outcomes.append("closed")

    consumers = [begin(lambda: expect_closed(queue.get))[0] for _ in range(2)]
    producers = [begin(lambda n=n: expect_closed(lambda: queue.put(n, None)))[0] for n in (7, 8)]
    wait_until(lambda: all(is_waiting(queue._items, n) for n in (1, 2)))
    wait_until(lambda: all(is_waiting(queue._places, n) for n in (7, 8)))
    queue.close()
    queue.close()
    for thread in [*consumers, *producers]:
        thread.join()
    assert outcomes == ["closed"] * 4
    with pytest.raises(QueueClosed):
        queue.get()


@given(
    num_items=st.integers(1, 60),
    num_producers=st.integers(1, 4),
    num_consumers=st.integers(1, 4),
    capacity=st.integers(1, 5),
    resizes=st.lists(st.integers(1, 6), max_size=6),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.0005]), min_size=8, max_size=8),
)
def test_every_item_comes_out_once_and_in_order(num_items, num_producers, num_consumers, capacity, resizes, delays):
    queue = StageQueue(capacity)
    most = max([capacity, *resizes])
    numbers, arrivals = count(), count(1)
    received = [[] for _ in range(num_consumers)]
    pause = threading.Event()

    def produce():
        while (number := next(numbers)) < num_items:
            pause.wait(delays[number % 8])
            queue.put(number, -number)
            assert len(queue) <= most

    def consume(into):
        try:
            while True:
                into.append(queue.get())
                if next(arrivals) == num_items:
                    queue.close()  # wakes the other consumers
        except QueueClosed:
            pass

    def resize():
        for size in resizes:
            pause.wait(delays[size])
            queue.capacity = size

    run_all(*[produce] * num_producers, *[lambda into=into: consume(into) for into in received], resize)
    assert all(items == sorted(items) for items in received)
    assert sorted(item for items in received for item in items) == [(n, -n) for n in range(num_items)]


def test_nothing_is_lost_in_a_long_race():
    queue = StageQueue(2)
    numbers = count()
    total = 20_000
    sums = []

    def produce():
        while (number := next(numbers)) < total:
            queue.put(number, number)

    def consume():
        sums.append(sum(queue.get()[1] for _ in range(total // 2)))

    run_all(produce, produce, produce, consume, consume)
    assert sum(sums) == total * (total - 1) // 2


class ResizedQueue(RuleBasedStateMachine):
    """One queue, producers that may wait, and a model: item n has room when n < the largest of taken + capacity."""

    def __init__(self):
        super().__init__()
        self.queue = StageQueue(2)
        self.next_put = self.taken = 0
        self.capacity = self.room = 2
        self.producers = {}

    def settle(self):
        """Those who have room are done; the others wait, each at its place."""
        self.room = max(self.room, self.taken + self.capacity)
        for number in [n for n in self.producers if n < self.room]:
            self.producers.pop(number).join(timeout=30)
        for number in self.producers:
            wait_until(lambda n=number: is_waiting(self.queue._places, n))

    @rule(how_many=st.integers(1, 3))
    def put(self, how_many):
        for number in range(self.next_put, self.next_put + how_many):
            self.producers[number] = begin(lambda n=number: self.queue.put(n, -n))[0]
        self.next_put += how_many
        self.settle()

    @rule(how_many=st.integers(1, 4))
    def get(self, how_many):
        for _ in range(how_many):
            if self.taken == min(self.next_put, self.room):
                break
            assert self.queue.get() == (self.taken, -self.taken)
            self.taken += 1
            self.settle()

    @rule(capacity=st.integers(1, 6))
    def resize(self, capacity):
        self.queue.capacity = self.capacity = capacity
        self.settle()

    @invariant()
    def what_is_ready_is_what_has_room(self):
        assert len(self.queue) == min(self.next_put, self.room) - self.taken
        assert all(thread.is_alive() for thread in self.producers.values())

    def teardown(self):
        while self.taken < self.next_put:
            assert self.queue.get() == (self.taken, -self.taken)
            self.taken += 1
        for thread in self.producers.values():
            thread.join()


TestResizedQueue = ResizedQueue.TestCase
