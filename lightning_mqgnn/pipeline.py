"""Pipeline: stages that run at once, each in threads of its own and with a queue behind it."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from lightning_mqgnn.queues import QueueClosed, StageQueue


class Tasks(Protocol):
    """A list, or anything that has a length and items by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        name: What reports and errors call it.
        work: Called with each item; what it returns goes on. Must be safe to call from `threads` threads at once.
        threads: Threads that do the work; with 0 it is done by the thread that needs its result.
        queue_size: How many finished items may wait for the next stage (unused with 0 threads).
        group: How many consecutive items a thread of the first stage takes at a time: it works on one after the other
            and only then hands them on. Groups begin small, so that the first item is not late. Unused with 0 threads.
        together: Called with what `work` returned for the items of a group, unless one of them failed; what it returns
            goes on in their place.
    """

    name: str
    work: Callable[[Any], Any]
    threads: int = 0
    queue_size: int = 2
    group: int = 1
    together: Callable[[list[Any]], list[Any]] | None = None


class StageClock:
    """Where the time of one stage went, in seconds, and how many items it finished; of one thread or of several."""

    __slots__ = ("busy", "items", "wait_for_input", "wait_for_room")

    def __init__(self) -> None:
        self.busy = 0.0
        self.wait_for_input = 0.0
        self.wait_for_room = 0.0
        self.items = 0

    def add(self, other: "StageClock") -> None:
        """Count `other` in."""
        for field in self.__slots__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class Pipeline(Iterator[Any]):
    """Sends tasks through stages and yields the results in the order of the tasks.

    Threads start at the first `next`. They end when the last result was yielded, when an exception was raised, with
    `close`, or when the pipeline is dropped. What a stage raises is raised by the `next` that would have yielded the
    item, with the traceback of the thread where it happened.

    Args:
        tasks: The items that go into the first stage. They may become more while the pipeline runs: each is asked for
            by its number, when the first stage is free for it. An IndexError says that there are no more, for good.
        stages: The stages, in the order in which items pass them.

    Attributes:
        num_yielded: Results that were yielded so far.
        closed: Whether nothing more will come.
        wait: Seconds that the consumer waited for results.
    """

    def __init__(self, tasks: Tasks, stages: Sequence[Stage]) -> None:
        self._tasks = tasks
        self._stages = stages
        self.num_yielded = 0
        self.closed = False
        self.wait = 0.0
        self._clocks: dict[str, list[StageClock]] = {stage.name: [] for stage in stages}
        self._output: _Chain | None = None
        self._stop: Callable[[], Any] | None = None

    def __next__(self) -> Any:
        if self.num_yielded == len(self._tasks):
            raise StopIteration
        if self.closed:
            raise RuntimeError(
                f"the pipeline was closed after {self.num_yielded} of {len(self._tasks)} items: begin a new pass"
            )
        try:
            if self._output is None:
                self._output = self._start()
            began = time.perf_counter()
            _, item = self._output.get()
            self.wait += time.perf_counter() - began
            if isinstance(item, _Failure):
                raise item.exception
        except BaseException:
            self.close()
            raise
        self.num_yielded += 1
        if self.num_yielded == len(self._tasks):
            self.close()
        return item

    def close(self) -> None:
        """Stop the threads and wait for their end: each finishes the item that it has in hand. May be called again."""
        self.closed = True
        if self._stop is not None:
            self._stop()

    def clocks(self) -> dict[str, StageClock]:
        """Where the time went so far, by stage, over all its threads."""
        totals = {}
        for name, clocks in self._clocks.items():
            totals[name] = StageClock()
            for clock in list(clocks):
                totals[name].add(clock)
        return totals

    def _start(self) -> "_Chain":
        source: _Tasks | StageQueue[Any] = _Tasks(self._tasks, self._stages[0].group if self._stages else 1)
        queues: list[StageQueue[Any]] = []
        threads: list[threading.Thread] = []
        all_started = threading.Event()
        inline: list[Stage] = []
        for stage in self._stages:
            inline.append(stage)
            if stage.threads:
                queue: StageQueue[Any] = StageQueue(stage.queue_size)
                for i in range(stage.threads):
                    chain = _Chain(source, inline, self._clocks, queue)
                    name = f"mqgnn-{stage.name}-{i}"
                    threads.append(
                        threading.Thread(target=_run, args=(all_started, chain, queue), name=name, daemon=True)
                    )
                queues.append(queue)
                source, inline = queue, []
        # The threads know their queues but not the pipeline, so that dropping it ends them.
        self._stop = weakref.finalize(self, _stop, all_started, queues, threads)
        for thread in threads:
            thread.start()
        all_started.set()
        return _Chain(source, inline, self._clocks)


class _Tasks:
    """The tasks, as a queue that is full from the beginning and closed after the last one."""

    def __init__(self, tasks: Tasks, largest_group: int) -> None:
        self._tasks = tasks
        self._next = count()
        self._next_group = count()
        self._largest_group = largest_group

    def get(self) -> tuple[int, Any]:
        return self._task(next(self._next))

    def get_group(self) -> list[tuple[int, Any]]:
        """The next group: of 1 task, 2, 4, 8 and so on up to the largest."""
        group = next(self._next_group)
        doublings = self._largest_group.bit_length()
        first = 2 ** min(group, doublings) - 1 + max(group - doublings, 0) * self._largest_group
        size = min(2 ** min(group, doublings), self._largest_group)
        tasks: list[tuple[int, Any]] = []
        for number in range(first, first + size):
            try:
                tasks.append(self._task(number))
            except QueueClosed:
                if not tasks:
                    raise
        return tasks

    def _task(self, number: int) -> tuple[int, Any]:
        try:
            return number, self._tasks[number]
        except Exception as error:
            if isinstance(error, IndexError) and number >= len(self._tasks):
                raise QueueClosed from None
            return number, _Failure(error)  # the number is taken: somebody will wait for its result


class _Failure:
    """An exception on its way to the consumer, in the place of the item that it befell."""

    def __init__(self, exception: BaseException) -> None:
        self.exception = exception


class _Chain:
    """A source of items and the stages that one thread applies to each of them."""

    def __init__(
        self,
        source: "_Tasks | StageQueue[Any]",
        stages: Sequence[Stage],
        clocks: dict[str, list[StageClock]],
        output: "StageQueue[Any] | None" = None,
    ) -> None:
        self._source = source
        self._stages = [(stage, StageClock()) for stage in stages]
        for stage, clock in self._stages:
            clocks[stage.name].append(clock)
        self._output = output
        self._groups: _Tasks | None = None  # where groups come from, if this thread takes tasks in groups
        if isinstance(source, _Tasks) and output is not None and len(stages) == 1:
            self._groups = source if stages[0].group > 1 or stages[0].together is not None else None
        self._done: deque[tuple[int, Any]] = deque()  # of the present group

    @property
    def last_clock(self) -> StageClock:
        return self._stages[-1][1]

    def get(self) -> tuple[int, Any]:
        if self._groups is not None:
            if not self._done:
                self._done.extend(self._work_on_group(self._groups.get_group()))
            return self._done.popleft()
        began = time.perf_counter()
        number, item = self._source.get()
        return number, self._work(number, item, waited=time.perf_counter() - began)

    def _work_on_group(self, group: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
        assert self._output is not None
        done = []
        for number, item in group:
            if self._output.closed:
                raise QueueClosed
            done.append((number, self._work(number, item)))
        stage, clock = self._stages[0]
        if stage.together is None or any(isinstance(item, _Failure) for _, item in done):
            return done
        began = time.perf_counter()
        try:
            items = stage.together([item for _, item in done])
        except BaseException as error:
            items = [_Failure(error)] * len(done)
        clock.busy += time.perf_counter() - began
        return [(number, item) for (number, _), item in zip(done, items, strict=True)]

    def _work(self, number: int, item: Any, waited: float = 0.0) -> Any:
        for stage, clock in self._stages:
            began = time.perf_counter()
            clock.wait_for_input, waited = clock.wait_for_input + waited, 0.0
            if not isinstance(item, _Failure):
                try:
                    item = stage.work(item)
                except StopIteration as error:  # must not look like the end of the data
                    item = _Failure(RuntimeError(f"stage {stage.name!r} raised StopIteration at item {number}"))
                    item.exception.__cause__ = error
                except BaseException as error:
                    item = _Failure(error)
            clock.busy += time.perf_counter() - began
            clock.items += 1
        return item


def _run(all_started: threading.Event, chain: _Chain, queue: StageQueue[Any]) -> None:
    all_started.wait()  # so a thread whose start Ctrl-C interrupts has not begun anything, and ends at once
    clock = chain.last_clock
    try:
        while not queue.closed:
            number, item = chain.get()
            began = time.perf_counter()
            queue.put(number, item)
            clock.wait_for_room += time.perf_counter() - began
            del item  # else it would be held here until the next one is ready
    except QueueClosed:
        pass


def _stop(all_started: threading.Event, queues: Sequence[StageQueue[Any]], threads: Sequence[threading.Thread]) -> None:
    for queue in queues:
        queue.close()
    all_started.set()
    for thread in threads:
        started = thread.ident is not None  # not all are if Ctrl-C came in between
        if started and thread is not threading.current_thread():  # garbage collection may run in any thread
            thread.join()
