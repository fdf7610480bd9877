"""Pipeline: stages that run at once, each in threads of its own and with a queue behind it."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

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
        serial: Items pass one after the other, in order: the stage keeps to one thread.
    """

    name: str
    work: Callable[[Any], Any]
    threads: int = 0
    queue_size: int = 2
    group: int = 1
    together: Callable[[list[Any]], list[Any]] | None = None
    serial: bool = False

    def resized(self, queue_size: int | None = None, threads: int | None = None) -> "Stage":
        """Return a stage with another size of its queue, or number of threads.

        Raises:
            ValueError: A number is below 1, the stage has no threads, or it is serial and would get several.
        """
        for name, value in (("queue_size", queue_size), ("threads", threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} for stage {self.name!r}: give 1 or more")
        if not self.threads:
            raise ValueError(f"stage={self.name!r} has no threads, and so no queue: make it with 1 thread or more")
        if self.serial and threads is not None and threads > 1:
            raise ValueError(f"threads={threads} for stage {self.name!r}: items pass it one after the other, give 1")
        return replace(self, queue_size=queue_size or self.queue_size, threads=threads or self.threads)


def find_stage(stages: Sequence[Stage], name: str) -> int:
    """Return the place of the stage of that name.

    Raises:
        ValueError: There is none.
    """
    names = [stage.name for stage in stages]
    if name not in names:
        raise ValueError(f"stage={name!r}: give one of {', '.join(names)}")
    return names.index(name)


class Observer(Protocol):
    """Is told of each item that a stage has worked on, in the thread that did it; must be quick and safe to share."""

    def __call__(self, stage: str, number: int, began: float, ended: float, item: Any, /) -> object:
        """Take note; `began` and `ended` are times of `time.perf_counter`, `item` is what the stage made."""


class StageClock:
    """Where the time of one stage went, in seconds, and how many items it finished; of one thread or of several.

    Attributes:
        busy: Spent in the stage's work.
        cpu: Of that, on a processor; the rest was spent waiting, for a disk, another thread or a turn.
        wait_for_input: Spent waiting for the stage before.
        wait_for_room: Spent waiting for room in the queue behind it.
        items: Finished so far.
    """

    __slots__ = ("busy", "cpu", "items", "wait_for_input", "wait_for_room")

    def __init__(self) -> None:
        self.busy = 0.0
        self.cpu = 0.0
        self.wait_for_input = 0.0
        self.wait_for_room = 0.0
        self.items = 0

    def add(self, other: "StageClock") -> None:
        """Count `other` in."""
        for field in self.__slots__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class QueueLevel(NamedTuple):
    """Items in a queue, and how many it holds."""

    depth: int
    capacity: int


class Pipeline(Iterator[Any]):
    """Sends tasks through stages and yields the results in the order of the tasks.

    Threads start at the first `next`. They end when the last result was yielded, when an exception was raised, with
    `close`, or when the pipeline is dropped. What a stage raises is raised by the `next` that would have yielded the
    item, with the traceback of the thread where it happened.

    Args:
        tasks: The items that go into the first stage. They may become more while the pipeline runs: each is asked for
            by its number, when the first stage is free for it. An IndexError says that there are no more, for good.
        stages: The stages, in the order in which items pass them.
        observer: Told of each item that passed a stage. What it raises befalls the item.

    Attributes:
        num_yielded: Results that were yielded so far.
        closed: Whether nothing more will come.
        wait: Seconds that the consumer waited for results.
    """

    def __init__(self, tasks: Tasks, stages: Sequence[Stage], observer: Observer | None = None) -> None:
        self._tasks = tasks
        self._stages = list(stages)
        self._observer = observer
        self.num_yielded = 0
        self.closed = False
        self.wait = 0.0
        self._clocks: dict[str, list[StageClock]] = {stage.name: [] for stage in stages}
        self._output: _Chain | None = None
        self._crews: dict[str, _Crew] = {}
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

    def resize(self, stage: str, queue_size: int | None = None, threads: int | None = None) -> None:
        """Change the size of the queue behind a stage, or its number of threads, before or while it runs.

        No item is lost or comes out of turn. What becomes less does so as items leave the queue, and when a thread has
        handed on what it has in hand.

        Args:
            stage: Name of a stage that has threads.
            queue_size: 1 or more.
            threads: 1 or more.

        Raises:
            ValueError: The stage is unknown or has no threads, or the number does not fit.
        """
        number = find_stage(self._stages, stage)
        new = self._stages[number] = self._stages[number].resized(queue_size, threads)
        if stage in self._crews and not self.closed:
            self._crews[stage].queue.capacity = new.queue_size
            self._crews[stage].resize(new.threads)

    def levels(self) -> dict[str, QueueLevel]:
        """How full the queue behind each stage with threads is."""
        return {name: QueueLevel(len(crew.queue), crew.queue.capacity) for name, crew in list(self._crews.items())}

    def _start(self) -> "_Chain":
        source: _Tasks | StageQueue[Any] = _Tasks(self._tasks, self._stages[0].group if self._stages else 1)
        all_started = threading.Event()
        inline: list[Stage] = []
        for stage in self._stages:
            inline.append(stage)
            if stage.threads:
                queue: StageQueue[Any] = StageQueue(stage.queue_size)
                make_chain = partial(_Chain, source, inline, self._clocks, self._observer, queue)
                self._crews[stage.name] = _Crew(stage.name, make_chain, queue, all_started)
                source, inline = queue, []
        # The threads know their queues but not the pipeline, so that dropping it ends them.
        self._stop = weakref.finalize(self, _stop, all_started, list(self._crews.values()))
        for stage in self._stages:
            if stage.threads:
                self._crews[stage.name].resize(stage.threads)
        all_started.set()
        return _Chain(source, inline, self._clocks, self._observer)


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
        observer: Observer | None,
        output: "StageQueue[Any] | None" = None,
    ) -> None:
        self._source = source
        self._observer = observer
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

    @property
    def has_in_hand(self) -> bool:
        """Whether there are items of the present group that were not handed on."""
        return bool(self._done)

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
        began, cpu = time.perf_counter(), time.thread_time()
        try:
            items = stage.together([item for _, item in done])
        except BaseException as error:
            items = [_Failure(error)] * len(done)
        clock.busy += time.perf_counter() - began
        clock.cpu += time.thread_time() - cpu
        return [(number, item) for (number, _), item in zip(done, items, strict=True)]

    def _work(self, number: int, item: Any, waited: float = 0.0) -> Any:
        for stage, clock in self._stages:
            began, cpu = time.perf_counter(), time.thread_time()
            clock.wait_for_input, waited = clock.wait_for_input + waited, 0.0
            if not isinstance(item, _Failure):
                try:
                    item = stage.work(item)
                except StopIteration as error:  # must not look like the end of the data
                    item = _Failure(RuntimeError(f"stage {stage.name!r} raised StopIteration at item {number}"))
                    item.exception.__cause__ = error
                except BaseException as error:
                    item = _Failure(error)
            ended = time.perf_counter()
            clock.busy += ended - began
            clock.cpu += time.thread_time() - cpu
            clock.items += 1
            if self._observer is not None and not isinstance(item, _Failure):
                try:
                    self._observer(stage.name, number, began, ended, item)
                except BaseException as error:  # somebody will wait for this item
                    item = _Failure(error)
        return item


class _Crew:
    """The threads of one stage, whose number may change; it knows nothing of the pipeline."""

    def __init__(
        self, name: str, make_chain: Callable[[], _Chain], queue: StageQueue[Any], may_begin: threading.Event
    ) -> None:
        self.queue = queue
        self._name = name
        self._make_chain = make_chain
        self._may_begin = may_begin
        self._threads: list[threading.Thread] = []
        self._wanted = 0
        self._present = 0
        self._lock = threading.Lock()
        self._closed = False

    def resize(self, threads: int) -> None:
        """Start threads, or let some leave."""
        with self._lock:
            self._wanted = threads
            while self._present < self._wanted and not self._closed:
                name = f"mqgnn-{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._run, args=(self._make_chain(),), name=name, daemon=True)
                self._threads.append(thread)
                self._present += 1
                thread.start()

    def close(self) -> None:
        """Tell the threads to end: each finishes the item that it has in hand."""
        self._closed = True
        self.queue.close()

    def join(self) -> None:
        """Wait for their end, after `close`."""
        for thread in list(self._threads):
            started = thread.ident is not None  # not all are if Ctrl-C came in between
            if started and thread is not threading.current_thread():  # garbage collection may run in any thread
                thread.join()

    def _may_leave(self) -> bool:
        if self._present <= self._wanted:
            return False
        with self._lock:
            leaves = self._present > self._wanted
            self._present -= leaves
            return leaves

    def _run(self, chain: _Chain) -> None:
        self._may_begin.wait()  # so a thread whose start Ctrl-C interrupts has not begun anything, and ends at once
        clock = chain.last_clock
        try:
            while not self.queue.closed and (chain.has_in_hand or not self._may_leave()):
                number, item = chain.get()
                began = time.perf_counter()
                self.queue.put(number, item)
                clock.wait_for_room += time.perf_counter() - began
                del item  # else it would be held here until the next one is ready
        except QueueClosed:
            pass


def _stop(all_started: threading.Event, crews: Sequence[_Crew]) -> None:
    for crew in crews:
        crew.close()
    all_started.set()
    for crew in crews:
        crew.join()
