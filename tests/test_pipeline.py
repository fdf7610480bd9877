import gc
import signal
import subprocess
import sys
import threading
import traceback

import pytest
from conftest import our_threads
from hypothesis import given
from hypothesis import strategies as st

from lightning_mqgnn import Pipeline, Stage


def double(x):
    return 2 * x


@given(
    num_tasks=st.integers(0, 30),
    threads=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 1)),
    queue_size=st.integers(1, 3),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.001]), min_size=7, max_size=7),
)
def test_results_are_those_of_the_serial_run_whatever_the_delays(num_tasks, threads, queue_size, delays):
    pause = threading.Event()

    def slow(stage):
        def work(x):
            pause.wait(delays[(x[0] * (stage + 1)) % 7])
            return [*x, stage]

        return work

    stages = [Stage(f"stage{i}", slow(i), n, queue_size) for i, n in enumerate(threads)]
    results = list(Pipeline([[n] for n in range(num_tasks)], stages))
    assert results == [[n, 0, 1, 2] for n in range(num_tasks)]
    assert our_threads() == []


@given(num_tasks=st.integers(0, 60), threads=st.integers(0, 3), group=st.integers(1, 9), queue_size=st.integers(1, 9))
def test_groups_change_nothing_but_who_is_worked_on_together(num_tasks, threads, group, queue_size):
    sizes = []

    def together(items):
        sizes.append(len(items))
        return [(item, len(items)) for item in items]

    first = Stage("first", double, threads, queue_size, group, together if threads else None)
    results = list(Pipeline(range(num_tasks), [first, Stage("second", lambda item: item, 1)]))
    assert our_threads() == []
    if not threads:
        assert results == [2 * n for n in range(num_tasks)]
        return
    assert [item for item, _ in results] == [2 * n for n in range(num_tasks)]
    assert sum(sizes) == num_tasks
    assert max(sizes, default=0) <= group
    assert [size for _, size in results[:3]] == [1, min(2, group), min(2, group)][: len(results)] or num_tasks < 3


def test_a_group_is_not_handed_on_before_it_is_complete_and_stops_early_when_it_is_closed():
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    worked_on = []

    def work(n):
        worked_on.append(n)
        begun.release()
        go_on.acquire()
        return n

    pipeline = Pipeline(range(100), [Stage("first", work, 1, 8, group=8)])
    for _ in range(3):  # the groups of one and of two
        go_on.release()
    assert [next(pipeline), next(pipeline), next(pipeline)] == [0, 1, 2]
    for _ in range(4):
        begun.acquire()  # the thread is at item 3, the first of four
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    while not pipeline.closed or not pipeline._output._source.closed:
        pass
    go_on.release()
    closing.join()
    assert worked_on == [0, 1, 2, 3]


@pytest.mark.parametrize("group", [2, 8])
def test_a_failure_in_a_group_is_raised_at_its_item_and_one_in_together_at_the_first(group):
    pipeline = Pipeline(range(20), [Stage("first", fail_at_3, 1, 4, group, together=lambda items: items)])
    assert [next(pipeline) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="planted"):
        next(pipeline)

    def fail(items):
        raise ArithmeticError("planted")

    with pytest.raises(ArithmeticError, match="planted"):
        next(Pipeline(range(20), [Stage("first", double, 1, 4, group, together=fail)]))
    assert our_threads() == []


def test_threads_start_at_the_first_next_and_end_with_the_last_item():
    pipeline = Pipeline(range(5), [Stage("a", double, 2), Stage("b", double, 1)])
    assert our_threads() == []
    assert next(pipeline) == 0
    results = [0, *(next(pipeline) for _ in range(4))]
    assert our_threads() == []  # before anybody asks for a sixth
    assert results == [0, 4, 8, 12, 16]
    with pytest.raises(StopIteration):
        next(pipeline)


def fail_at_3(x):
    if x == 3:
        raise KeyError("planted")
    return x


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_failure_is_raised_at_its_item_with_its_own_traceback(threads):
    pipeline = Pipeline(range(10), [Stage("a", fail_at_3, threads), Stage("b", double, threads)])
    assert [next(pipeline) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(KeyError, match="planted") as caught:
        next(pipeline)
    assert "fail_at_3" in "".join(traceback.format_tb(caught.tb))
    assert our_threads() == []


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("kind", [KeyError, IndexError])
def test_tasks_that_fail_are_raised_like_failing_stages(threads, kind):
    class Failing(list):
        def __getitem__(self, number):
            if number == 3:
                raise kind("planted")
            return super().__getitem__(number)

    pipeline = Pipeline(Failing(range(10)), [Stage("a", double, threads)])
    assert [next(pipeline) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(kind, match="planted"):
        next(pipeline)
    assert our_threads() == []


@pytest.mark.parametrize("threads", [0, 2])
def test_a_stray_stop_iteration_does_not_end_the_data_silently(threads):
    pipeline = Pipeline(range(3), [Stage("a", lambda x: next(iter([])), threads)])
    with pytest.raises(RuntimeError, match="stage 'a' raised StopIteration at item 0"):
        next(pipeline)


def test_dropping_the_pipeline_ends_its_threads():
    pipeline = Pipeline(range(100), [Stage("a", double, 2), Stage("b", double, 2)])
    next(pipeline)
    assert our_threads()
    del pipeline
    gc.collect()
    assert our_threads() == []


def test_a_closed_pipeline_says_so_instead_of_ending_early():
    pipeline = Pipeline(range(100), [Stage("a", double, 1)])
    next(pipeline)
    pipeline.close()
    pipeline.close()
    assert our_threads() == []
    with pytest.raises(RuntimeError, match="closed after 1 of 100 items"):
        next(pipeline)


def test_producers_run_ahead_by_what_the_queues_hold_and_no_more():
    lock = threading.Lock()
    ahead, most = 0, 0

    def work(x):
        nonlocal ahead, most
        with lock:
            ahead += 1
            most = max(most, ahead)
        return x

    pipeline = Pipeline(range(200), [Stage("a", work, threads=2, queue_size=3)])
    for _ in pipeline:
        with lock:
            ahead -= 1
    # three in the queue, one in the hands of each thread, and the one that the consumer has just taken
    assert most <= 3 + 2 + 1


def test_clocks_count_the_items_and_the_waiting():
    release = threading.Event()

    def wait_for_release(x):
        release.wait()
        return x

    pipeline = Pipeline(range(4), [Stage("a", wait_for_release, 1), Stage("b", double, 0)])
    threading.Timer(0.05, release.set).start()
    list(pipeline)
    clocks = pipeline.clocks()
    assert (clocks["a"].items, clocks["b"].items) == (4, 4)
    assert clocks["a"].busy > clocks["b"].busy
    assert pipeline.wait > clocks["b"].busy


SCRIPT = """
import signal, sys, threading
from lightning_mqgnn import Pipeline, Stage
forever, had_two = threading.Event(), threading.Event()
def main_thread_waits():
    return sys._current_frames()[threading.main_thread().ident].f_code.co_filename.endswith("queues.py")
def interrupt(*_):
    forever.set()  # the item in hand is finished, then the thread ends
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
def work(x):
    if x == 2:
        while {stuck} and not (had_two.is_set() and main_thread_waits()):
            pass
        print("stuck", flush=True)
        forever.wait(None if {stuck} else 0)
    return x
pipeline = Pipeline(range(100), [Stage("a", work, 2), Stage("b", work, 1)])
try:
    next(pipeline), next(pipeline)
    had_two.set()
    if {stuck}:
        next(pipeline)
except KeyboardInterrupt:
    left = [t.name for t in threading.enumerate() if t.name.startswith("mqgnn")]
    print("interrupted", left, flush=True)
    sys.exit(3)
"""


def test_a_process_ends_although_its_pipeline_was_never_finished():
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(stuck=False)], timeout=120, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_reaches_a_consumer_that_waits_for_a_batch():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(stuck=True)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (3, "interrupted []\n", "")


@given(
    num_tasks=st.integers(1, 40),
    threads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    group=st.integers(1, 4),
    resizes=st.lists(
        st.tuples(st.integers(0, 39), st.sampled_from(["first", "second"]), st.integers(1, 5), st.integers(1, 4)),
        max_size=8,
    ),
    delays=st.lists(st.sampled_from([0.0, 0.0, 0.001]), min_size=7, max_size=7),
)
def test_resizing_loses_no_item_and_keeps_the_order(num_tasks, threads, group, resizes, delays):
    pause = threading.Event()

    def slow(x):
        pause.wait(delays[x % 7])
        return x + 1

    pipeline = Pipeline(
        range(num_tasks), [Stage("first", slow, threads[0], 2, group), Stage("second", slow, threads[1])]
    )
    for number in range(num_tasks):
        for at, stage, queue_size, count in resizes:
            if at == number:
                pipeline.resize(stage, queue_size, count)
                if number:
                    assert pipeline.levels()[stage].capacity == queue_size
        assert next(pipeline) == number + 2
    assert our_threads() == []


def test_threads_come_and_go():
    working, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def work(x):
        working.release()
        go_on.acquire()
        return x

    pipeline = Pipeline(range(100), [Stage("work", work, 1, queue_size=100)])
    go_on.release()
    assert next(pipeline) == 0
    pipeline.resize("work", threads=4)
    for _ in range(5):  # item 0, and four at once
        working.acquire()
    assert len(our_threads()) == 4
    pipeline.resize("work", threads=1)
    for _ in range(4):
        go_on.release()
    assert [next(pipeline) for _ in range(4)] == [1, 2, 3, 4]
    working.acquire()  # the one that stayed
    pause = threading.Event()
    while len(our_threads()) > 1:
        pause.wait(0.001)
    go_on.release(100)
    pipeline.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("third",), "stage='third': give one of first, inline, serial"),
        (("inline", 3), "stage='inline' has no threads"),
        (("first", 0), "queue_size=0 for stage 'first': give 1 or more"),
        (("first", None, 0), "threads=0 for stage 'first': give 1 or more"),
        (("serial", None, 2), "threads=2 for stage 'serial': items pass it one after the other"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(arguments, message):
    stages = [Stage("first", double, 1), Stage("inline", double), Stage("serial", double, 1, serial=True)]
    with pytest.raises(ValueError, match=message):
        Pipeline(range(3), stages).resize(*arguments)


def test_an_observer_sees_each_item_in_each_stage():
    seen = []
    stages = [Stage("first", double, 2), Stage("second", double)]
    pipeline = Pipeline(range(5), stages, lambda *event: seen.append(event))
    assert list(pipeline) == [0, 4, 8, 12, 16]
    assert sorted((stage, number, item) for stage, number, _, _, item in seen) == [
        *(("first", n, 2 * n) for n in range(5)),
        *(("second", n, 4 * n) for n in range(5)),
    ]
    assert all(began <= ended for _, _, began, ended, _ in seen)


@pytest.mark.parametrize("threads", [0, 2])
def test_what_an_observer_raises_is_raised_at_its_item(threads):
    def observe(stage, number, *_):
        if number == 3:
            raise KeyError("planted")

    pipeline = Pipeline(range(9), [Stage("double", double, threads)], observe)
    assert [next(pipeline) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(KeyError, match="planted"):
        next(pipeline)
    assert our_threads() == []
