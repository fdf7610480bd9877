"""MQGNNLoader: iterates over the batches of one split on one rank."""

import threading
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from torch_geometric.data import Data

from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.pipeline import Observer, Pipeline, QueueLevel, Stage, StageClock, find_stage
from lightning_mqgnn.plan import EpochPlan
from lightning_mqgnn.sample import Task, tasks_of


class _Begun(NamedTuple):
    """What other numbers of ranks did of an epoch: their parts, see `EpochPlan.rest`, and how many batches of ours."""

    before: list[list[int]]
    num_batches: int


_NOT_BEGUN = _Begun([], 0)


class Shares(NamedTuple):
    """Where the time of a stage's threads went, as shares of it; of `busy`, the share on a processor; and items."""

    busy: float
    starved: float
    blocked: float
    on_cpu: float
    items: int


class StageState(NamedTuple):
    """A stage, where its time went in all passes so far, and how full its queue is; None if it has none."""

    stage: Stage
    clock: StageClock
    queue: QueueLevel | None

    def since(self, before: "StageState | None", seconds: float) -> Shares:
        """What happened in the so many seconds since the state was `before`; None for the beginning."""
        old, new = StageClock() if before is None else before.clock, self.clock
        busy, threads_seconds = new.busy - old.busy, max(seconds * max(self.stage.threads, 1), 1e-9)
        share = min(busy / threads_seconds, 1.0)
        starved = (new.wait_for_input - old.wait_for_input) / threads_seconds
        blocked = (new.wait_for_room - old.wait_for_room) / threads_seconds
        # A wait counts when it ends: it may have begun before, or in what `seconds` leaves out.
        fits = min((1.0 - share) / max(starved + blocked, 1e-9), 1.0)
        return Shares(
            busy=share,
            starved=fits * starved,
            blocked=fits * blocked,
            on_cpu=min((new.cpu - old.cpu) / max(busy, 1e-9), 1.0),
            items=new.items - old.items,
        )


class MQGNNLoader:
    """The batches of one split that fall to one rank, sampled and prepared ahead of their use.

    Made by `MQGNNDataModule`. `iter(loader)` costs nothing: the pass, its epoch and its threads begin at the first
    `next`. One pass is active at a time; a new one ends the one before. Where it is known that another epoch follows,
    its first batches are made while the last ones of this epoch are used.

    Args:
        plan: Which seeds come when.
        rank: This process.
        stages: What makes a batch of a `Task`, see `lightning_mqgnn.pipeline`.
        rebuild: Does the same for one task, in this thread, and leaves caches alone.
        current_epoch: Asked for the epoch at the start of each pass; None counts the passes.
        epoch_after: Asked for the epoch that will follow the given one; None if that is not known.
        graph_version: Asked for the version of the graph: what was made ahead of another one is dropped.
        pool: Where the memory of the batches comes from; keeps as many buffers as the queues need.

    Attributes:
        observer: Called at the start of each pass; returns what is told of each item that passes a stage in it.
    """

    def __init__(
        self,
        plan: EpochPlan,
        rank: int,
        stages: list[Stage],
        rebuild: Callable[[Task], Data],
        current_epoch: Callable[[], int | None],
        epoch_after: Callable[[int], int | None],
        graph_version: Callable[[], int],
        pool: BufferPool,
    ) -> None:
        self.plan = plan
        self.observer: Callable[[], Observer] | None = None
        self._rank = rank
        self._stages = list(stages)
        self._pool = pool
        self._size_pool()
        self._rebuild = rebuild
        self._current_epoch = current_epoch
        self._epoch_after = epoch_after
        self._graph_version = graph_version
        self._next_epoch = 0
        self._epoch = 0
        self._first_batch = 0
        self._num_taken = 0
        self._begun = self._begun_next = _NOT_BEGUN
        self._active: tuple[_Course, Pipeline] | None = None
        self._clocks = {stage.name: StageClock() for stage in self._stages}
        self._wait = 0.0

    def __len__(self) -> int:
        """Batches per epoch on this rank; the same on all ranks."""
        return self.plan.num_batches

    def __iter__(self) -> Iterator[Data]:
        # A generator: nothing below runs before the first `next`.
        epoch = self._current_epoch()
        epoch = self._next_epoch if epoch is None else epoch
        first_batch, self._first_batch = self._first_batch, 0
        self._begun, self._begun_next = self._begun_next, _NOT_BEGUN
        if not self._continues_with(epoch, first_batch):
            self.close()
            before = self._begun.before
            rest = self.plan.rest(epoch, self._rank, before) if before else None
            version = self._graph_version()
            course = _Course(self.plan, self._rank, epoch, first_batch, self._epoch_after, version, rest)
            observer = None if self.observer is None else self.observer()
            self._active = course, Pipeline(course, self._stages, observer)
        assert self._active is not None
        _, pipeline = self._active
        self._epoch, self._next_epoch, self._num_taken = epoch, epoch + 1, first_batch
        missing = len(self) - first_batch
        try:
            while missing:
                batch = next(pipeline)
                missing -= 1
                self._num_taken += 1
                yield batch
                del batch  # its memory may be used again as soon as the user lets go of it
        finally:
            if missing or pipeline.closed:  # else it has begun the next epoch
                self._retire(pipeline)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass be that of `epoch` (under a Trainer, its current epoch counts instead)."""
        self._next_epoch = epoch

    def replay(self, epoch: int, global_batch: int) -> Data:
        """Rebuild batch `global_batch` = batch * number of ranks + rank of `epoch`, in this thread."""
        if not 0 <= global_batch < len(self) * self.plan.world_size:
            raise IndexError(f"batch={global_batch}: an epoch has batches 0 to {len(self) * self.plan.world_size - 1}")
        batch, rank = divmod(global_batch, self.plan.world_size)
        return self._rebuild(tasks_of(self.plan, rank, epoch)[batch])

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands: its epoch, how many batches were taken from it, and of how many ranks."""
        return {
            "epoch": self._epoch,
            "batches": self._num_taken - self._begun.num_batches,
            "world_size": self.plan.world_size,
            "before": [*self._begun.before],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue where `state` was taken; a pass that was complete is followed by a new one.

        With another number of ranks, they share what was left of the epoch.
        """
        before, epoch = [list(part) for part in state["before"]], state["epoch"]
        taken = state["batches"]
        if state["world_size"] != self.plan.world_size:
            before, taken = [*before, [state["world_size"], taken]], 0
        begun = _Begun(before, len(self) - len(self.plan.rest(epoch, self._rank, before))) if before else _NOT_BEGUN
        complete = begun.num_batches + taken >= len(self)
        self._next_epoch = epoch + complete
        self._first_batch = 0 if complete else begun.num_batches + taken
        self._begun_next = _NOT_BEGUN if complete else begun

    @property
    def first_batch(self) -> int:
        """Number of the batch in its epoch, 0 to `len(self)`, that the next pass begins with."""
        return self._first_batch

    def times(self) -> tuple[float, dict[str, StageClock]]:
        """Seconds that the consumer waited for batches in all passes, and the clocks of the stages."""
        totals = {name: StageClock() for name in self._clocks}
        pipelines = [] if self._active is None else [self._active[1]]
        for clocks in (self._clocks, *(pipeline.clocks() for pipeline in pipelines)):
            for name, clock in clocks.items():
                totals[name].add(clock)
        return self._wait + sum(pipeline.wait for pipeline in pipelines), totals

    @property
    def num_yielded(self) -> int:
        """Batches that came out of the running pipeline, which may go on over several epochs."""
        return 0 if self._active is None else self._active[1].num_yielded

    def levels(self) -> dict[str, QueueLevel]:
        """How full the queues of the running pipeline are, by stage."""
        return {} if self._active is None else self._active[1].levels()

    def stages(self) -> list[StageState]:
        """The stages, in the order in which batches pass them."""
        clocks, levels = self.times()[1], self.levels()
        return [StageState(stage, clocks[stage.name], levels.get(stage.name)) for stage in self._stages]

    def resize(self, stage: str, queue_size: int | None = None, threads: int | None = None) -> None:
        """Change the size of the queue behind a stage, or its number of threads, now and for later passes.

        Raises:
            ValueError: The stage is unknown or has no threads, or the number does not fit.
        """
        number = find_stage(self._stages, stage)
        self._stages[number] = self._stages[number].resized(queue_size, threads)
        if self._active is not None:
            self._active[1].resize(stage, queue_size, threads)
        self._size_pool()

    def close(self) -> None:
        """End the active pass, if there is one, and its threads. The loader may be used again."""
        if self._active is not None:
            self._retire(self._active[1])

    @property
    def _iterator(self) -> None:
        """Lightning's `CombinedLoader` sets this attribute to None when it is done, even after an exception."""

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.close()

    def _size_pool(self) -> None:
        """Keep a buffer for all that may wait or be worked on behind the first stage, and as many to change with."""
        room = max((stage.queue_size for stage in self._stages[1:] if stage.threads), default=1)
        self._pool.keep = 2 * room + sum(stage.threads for stage in self._stages[1:]) + 2

    def _continues_with(self, epoch: int, first_batch: int) -> bool:
        """Whether the pipeline of the last pass is about to yield this batch, because that pass is complete."""
        if self._active is None or first_batch or self._num_taken < len(self):
            return False
        course, pipeline = self._active
        if pipeline.closed or course.graph_version != self._graph_version():
            return False
        return course.place(pipeline.num_yielded) == (epoch, 0)

    def _retire(self, pipeline: Pipeline) -> None:
        pipeline.close()
        if self._active is not None and self._active[1] is pipeline:
            self._wait, self._clocks = self.times()
            self._active = None


class _Course:
    """The tasks of one pass and, for as long as the epoch after the last one is known, of the passes that follow it.

    The first epoch may be one that another number of ranks began; `rest` are its last batches then. Once the course has
    ended it stays so: a thread that was told of the end has left, and its task would never be done.
    """

    def __init__(
        self,
        plan: EpochPlan,
        rank: int,
        epoch: int,
        first_batch: int,
        epoch_after: Callable[[int], int | None],
        graph_version: int,
        rest: list[np.ndarray] | None = None,
    ) -> None:
        self.graph_version = graph_version
        self._plan = plan
        self._rank = rank
        self._num_batches = plan.num_batches
        self._tasks_of = lru_cache(maxsize=4)(partial(tasks_of, plan, rank))
        self._rest = rest
        self._skipped = first_batch
        self._epoch_after = epoch_after
        self._epochs = [epoch]
        self._extending = threading.Lock()
        self._ended = False

    def __len__(self) -> int:
        """Tasks of the epochs that are known."""
        return len(self._epochs) * self._num_batches - self._skipped

    def __getitem__(self, number: int) -> Task:
        epoch, batch = self.place(number)
        if self._rest is not None and epoch == self._epochs[0]:
            global_batch = batch * self._plan.world_size + self._rank
            return Task(epoch, self._rest[batch - self._num_batches], epoch, global_batch, recurs=False)
        return self._tasks_of(epoch)[batch]

    def place(self, number: int) -> tuple[int, int]:
        """Epoch and batch of a task."""
        index, batch = divmod(number + self._skipped, self._num_batches)
        if index >= len(self._epochs):
            self._extend(index)
        return self._epochs[index], batch

    def _extend(self, index: int) -> None:
        with self._extending:
            while index >= len(self._epochs):
                epoch = None if self._ended else self._epoch_after(self._epochs[-1])
                if epoch is None:
                    self._ended = True
                    raise IndexError(index)
                self._epochs.append(epoch)
