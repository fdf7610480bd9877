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
from lightning_mqgnn.sampling import SampledSubgraph

_LATENCIES = 1024  # of the latest items of a thread


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


class Recording:
    """Takes note of each item that passes a stage. Safe to use from many threads: none writes what another one does.

    Args:
        keep: Steps of items to remember; the oldest are forgotten.
    """

    def __init__(self, keep: int) -> None:
        self.work: deque[Work] = deque(maxlen=keep)
        self._num_passes = 0
        self._bytes: dict[tuple[str, str], int] = defaultdict(int)
        self._latencies: dict[tuple[str, str], deque[float]] = defaultdict(partial(deque, maxlen=_LATENCIES))

    @property
    def num_passes(self) -> int:
        """Passes that were begun."""
        return self._num_passes

    def begin_pass(self) -> Callable[[str, int, float, float, Any], None]:
        """Return what is to be told of the items of another pass, see `pipeline.Observer`."""
        self._num_passes += 1
        return partial(self._note, self._num_passes)

    def nbytes(self, stage: str) -> int:
        """Bytes of all that a stage made."""
        return sum(count for (name, _), count in list(self._bytes.items()) if name == stage)

    def latencies(self, stage: str) -> tuple[float, float]:
        """Median and 99th percentile of the seconds that a stage took for its latest items."""
        latest = [value for (name, _), values in list(self._latencies.items()) if name == stage for value in [*values]]
        if not latest:
            return 0.0, 0.0
        median, late = np.percentile(latest, [50, 99])
        return float(median), float(late)

    def _note(self, number_of_pass: int, stage: str, number: int, began: float, ended: float, item: Any) -> None:
        thread = threading.current_thread().name
        self.work.append(Work((number_of_pass, number), stage, thread, began, ended))
        self._latencies[stage, thread].append(ended - began)
        self._bytes[stage, thread] += _size_of(item)


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
