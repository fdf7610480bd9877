"""Recording: what the stages of a pipeline did, item by item."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch_geometric.data import Data

from lightning_mqgnn.buffers import num_bytes_of
from lightning_mqgnn.fetch import Announced, Fetched
from lightning_mqgnn.pipeline import QueueLevel
from lightning_mqgnn.sampling import SampledSubgraph

MAKES_BATCHES = "prepare"  # the stage
_LATENCIES = 1024  # of the latest items of a thread
_AHEAD = 1024  # batches that may be ready and not yet taken, far more than any queue holds


class Work(NamedTuple):
    """An item on its way through a stage.

    Attributes:
        item: The pass and the item's number in it: the same in all stages.
        stage: Its name.
        thread: The thread that worked on it.
        began: Time of `time.perf_counter`.
        ended: Likewise.
    """

    item: tuple[int, int]
    stage: str
    thread: str
    began: float
    ended: float


class Counts(NamedTuple):
    """Seed nodes and edges of some batches."""

    seeds: int = 0
    edges: int = 0

    def plus(self, seeds: int, edges: int) -> "Counts":
        """With more."""
        return Counts(self.seeds + seeds, self.edges + edges)


class Recording:
    """Takes note of each item that passes a stage, in the thread that worked on it: the training thread has no time.

    Safe to use from many threads: none writes what another one does, but for what belongs to the stage that makes
    batches, which takes a lock.

    Args:
        keep: Steps of items to remember; the oldest are forgotten.
        levels: Asked, once per batch, how full the queues are.

    Attributes:
        work: The latest steps.
        levels: How full the queues were when the latest batches were made: time, and level by stage.
        num_taken: Set by the training thread: items of the present pass that came out of it.
    """

    def __init__(self, keep: int, levels: Callable[[], dict[str, QueueLevel]]) -> None:
        self.work: deque[Work] = deque(maxlen=keep)
        self.levels: deque[tuple[float, dict[str, QueueLevel]]] = deque(maxlen=keep)
        self.num_taken = 0
        self._ask_levels = levels
        self._num_passes = 0
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._latencies: dict[tuple[str, str], deque[float]] = defaultdict(partial(deque, maxlen=_LATENCIES))
        self._made = self._in_former_passes = Counts()
        self._made_lately: deque[tuple[int, int, int]] = deque(maxlen=_AHEAD)
        self._lock = threading.Lock()

    @property
    def num_passes(self) -> int:
        """Passes that were begun."""
        return self._num_passes

    def begin_pass(self) -> Callable[[str, int, float, float, Any], None]:
        """Return what is to be told of the items of another pass, see `pipeline.Observer`."""
        with self._lock:
            self._in_former_passes = self._taken()
            self._made, self.num_taken = Counts(), 0
            self._made_lately.clear()
            self._num_passes += 1
            return partial(self._note, self._num_passes)

    def nbytes(self, stage: str) -> int:
        """Bytes of all that a stage made."""
        return sum(count for (name, _), count in list(self._bytes.items()) if name == stage)

    def latencies(self, stage: str) -> tuple[float, float]:
        """Median and 99th percentile of the seconds that a stage took for its latest items."""
        latest = np.array(
            [value for (name, _), values in list(self._latencies.items()) if name == stage for value in [*values]]
        )
        if not len(latest):
            return 0.0, 0.0
        ranks = [len(latest) // 2, len(latest) * 99 // 100]
        median, late = np.partition(latest, ranks)[ranks]
        return float(median), float(late)

    def taken(self) -> Counts:
        """Seed nodes and edges of the batches that were taken, in all passes."""
        with self._lock:
            return self._taken()

    def _taken(self) -> Counts:
        ahead = [made for made in self._made_lately if made[0] >= self.num_taken]
        return self._in_former_passes.plus(
            self._made.seeds - sum(seeds for _, seeds, _ in ahead), self._made.edges - sum(edges for *_, edges in ahead)
        )

    def _note(self, number_of_pass: int, stage: str, number: int, began: float, ended: float, item: Any) -> None:
        thread = threading.current_thread().name
        self.work.append(Work((number_of_pass, number), stage, thread, began, ended))
        self._latencies[stage, thread].append(ended - began)
        self._bytes[stage, thread] += _size_of(item)
        if stage == MAKES_BATCHES:
            if self.levels.maxlen:
                self.levels.append((ended, self._ask_levels()))
            counts = count_in(item)
            with self._lock:
                if number_of_pass == self._num_passes:
                    self._made = self._made.plus(*counts)
                    self._made_lately.append((number, *counts))


def count_in(batch: Any) -> Counts:
    """Seed nodes and edges of a batch, of any loader."""
    if not isinstance(batch, Data):
        return Counts()
    try:
        return Counts(int(batch.batch_size), batch.e_id.numel())
    except (AttributeError, TypeError):  # not from a neighbour loader
        return Counts(0, batch.num_edges)


def _size_of(item: Any) -> int:
    if isinstance(item, SampledSubgraph):
        return item.nbytes
    if isinstance(item, Data):
        return num_bytes_of(item)
    if isinstance(item, Announced):
        return item.subgraph.nbytes
    if isinstance(item, Fetched):
        return item.subgraph.nbytes + item.rows.nbytes
    return 0
