"""StageQueue: the bounded, order-preserving queue between two stages of a pipeline."""

from _thread import LockType, allocate_lock
from collections import deque
from itertools import count
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class QueueClosed(Exception):
    """The queue was closed; nothing more comes out of it or goes into it."""


class StageQueue(Generic[_T]):
    """A queue whose items are numbered 0, 1, 2, ... and come out in that order, whoever puts them in, and when.

    Any number of threads may put and get. An item may be put when fewer than `capacity` items before it are still
    inside; so the item that is due next always has room, and late producers can't shut it out.

    **No lock when nobody has to wait.** Items and free places are both handed over by number, through a dict: whoever
    comes first leaves the thing itself (producer) or a place to wait at (consumer) under the number, with
    `dict.setdefault`, and whoever comes second finds it there. `dict.setdefault`, `dict.pop`, `next(itertools.count())`
    and `deque.pop` are each atomic in CPython, so exactly one of the two is second, and no wake-up is lost. Only one
    who has to wait makes a lock, and parks on it until the other side releases it: no polling and no time-outs.

    Args:
        capacity: How many items the queue holds, 1 or more; may be changed at any time.
    """

    def __init__(self, capacity: int) -> None:
        self._items = _Exchange()
        self._places = _Exchange()
        self._next_get = count()
        self._next_place = count()
        self._to_withhold: deque[None] = deque()  # one entry per place that is not handed on after its item left
        self._capacity = 0
        self.capacity = capacity

    @property
    def capacity(self) -> int:
        """How many items fit. A larger one wakes waiting producers; a smaller one takes effect as items leave."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: a queue holds 1 or more items")
        for _ in range(self._capacity - capacity):
            self._to_withhold.append(None)
        for _ in range(capacity - self._capacity):
            self._hand_on_place()
        self._capacity = capacity

    def put(self, number: int, item: _T) -> None:
        """Put in item `number`, once there is room for it. Each number must be put exactly once.

        Raises:
            QueueClosed: The queue was closed before there was room.
        """
        self._places.take(number)
        self._items.leave(number, item)

    def get(self) -> tuple[int, _T]:
        """Take out the next item and its number, once it is there.

        Raises:
            QueueClosed: The queue was closed before the item came.
        """
        number = next(self._next_get)
        item: _T = self._items.take(number)
        self._hand_on_place()
        return number, item

    @property
    def closed(self) -> bool:
        """Whether the queue was closed."""
        return self._items.closed

    def close(self) -> None:
        """Drop all items and wake everybody who waits, with `QueueClosed`. May be called from any thread, and again."""
        self._items.close()
        self._places.close()

    def __len__(self) -> int:
        """How many items are ready to be taken out."""
        return self._items.count_left()

    def _hand_on_place(self) -> None:
        if self._to_withhold:
            try:
                self._to_withhold.pop()
            except IndexError:  # another thread withheld the last one
                pass
            else:
                return
        self._places.leave(next(self._next_place), None)


class _Waiter:
    """Where one thread waits for one number."""

    __slots__ = ("lock", "value")

    def __init__(self) -> None:
        self.lock: LockType = allocate_lock()
        self.lock.acquire()
        self.value: Any = _CLOSED


_CLOSED = object()
_ABSENT = object()


class _Exchange:
    """Hands over one value per number, from the thread that leaves it to the one that takes it."""

    def __init__(self) -> None:
        self._left: dict[int, Any] = {}  # per number: its value, or the waiter for it
        self.closed = False

    def leave(self, number: int, value: Any) -> None:
        waiter = self._left.setdefault(number, value)
        if waiter is not value and self._left.pop(number, _ABSENT) is waiter:  # else `close` woke it
            waiter.value = value
            waiter.lock.release()

    def take(self, number: int) -> Any:
        value = self._left.pop(number, _ABSENT)
        if value is _ABSENT:
            value = self._wait(number)
        if self.closed or value is _CLOSED:
            raise QueueClosed
        return value

    def close(self) -> None:
        self.closed = True
        for number in list(self._left):
            waiter = self._left.pop(number, _ABSENT)
            if isinstance(waiter, _Waiter):
                waiter.lock.release()

    def count_left(self) -> int:
        return sum([type(value) is not _Waiter for value in list(self._left.values())])

    def _wait(self, number: int) -> Any:
        waiter = _Waiter()
        value = self._left.setdefault(number, waiter)
        if value is not waiter:  # left in the meantime
            del self._left[number]
            return value
        # `close` sets its flag before it looks for waiters: either it finds this one, or the flag is seen here.
        if self.closed and self._left.pop(number, _ABSENT) is waiter:
            return _CLOSED
        waiter.lock.acquire()
        return waiter.value
