"""SubgraphCache: sampled subgraphs in compact form, within a budget of bytes, for batches that come again."""

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_mqgnn.compiled import kernel
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.graph.store import Topology
from lightning_mqgnn.sampling import SampledSubgraph

_log = logging.getLogger(__name__)

_OVERHEAD = 2048  # bytes that an entry takes beside its arrays: Python objects, rounded up


class SubgraphCounts(NamedTuple):
    """What a `SubgraphCache` did so far, and what it holds."""

    hits: int
    misses: int
    entries: int
    nbytes: int
    spilled_bytes: int


class SubgraphCache:
    """Keeps the sampled subgraphs of one epoch per split, for the epochs that have the same batches.

    An entry holds node ids, in-degrees and, for each edge, its place among the incoming edges of its node and whether
    its source was new to the block: such a one has the next local id, so only the other edges' are kept. All numbers
    are in the narrowest dtype that fits. As places count from the beginning of a node's own edges, an entry outlives an
    update of the graph that changes none of its columns; another one is dropped when it is asked for.

    What exceeds the budget is not kept, or is written to a file. An entry is whole or not there, so a pass that is cut
    off leaves nothing behind that a later one could take for an epoch.

    Safe to use from several threads at once.

    Args:
        store: The graph.
        budget: Bytes that the entries may take in memory, whatever belongs to them included.
        spill_path: Folder for temporary files that take what exceeds the budget; with None it is not kept.
    """

    def __init__(self, store: GraphStore, budget: int, spill_path: str | Path | None = None) -> None:
        self._store = store
        self._budget = budget
        self._spill_path = spill_path
        self._splits: dict[str, _Split] = {}
        self._nbytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    def get(self, split: str, epoch: int, batch: int) -> SampledSubgraph | None:
        """Return what was sampled as global batch `batch` of `epoch`; None if it is not kept."""
        topology = self._store.topology
        with self._lock:
            found = self._find(split, epoch, batch)
            if found is None:
                self._misses += 1
                return None
            self._hits += 1
        return _unpack(*found, topology)

    def put(self, split: str, epoch: int, batch: int, subgraph: SampledSubgraph) -> bool:
        """Keep a subgraph if there is room, and let go of those of the split's earlier epochs; say if it is kept."""
        topology = self._store.topology
        if subgraph.version != topology.version:
            return False
        with self._lock:
            kept = self._splits.get(split)
            if kept is not None and kept.is_full and kept.epoch >= epoch:
                return False
        entry = _pack(subgraph, topology)
        with self._lock:
            kept = self._splits.get(split)
            if kept is not None and kept.epoch < epoch:
                self._let_go(split)
                kept = None
            if kept is None:
                kept = self._splits[split] = _Split(epoch)
            if kept.epoch > epoch:
                return False
            if batch in kept.entries:  # another thread sampled it too
                return True
            if self._nbytes + entry.nbytes > self._budget and not self._spills(kept, entry):
                kept.is_full = True
                return False
            self._nbytes += entry.nbytes
            kept.entries[batch] = entry
            return True

    def counts(self) -> SubgraphCounts:
        """Return what was found and not found, and what is kept."""
        with self._lock:
            entries = sum(len(kept.entries) for kept in self._splits.values())
            spilled = sum(kept.spill.nbytes for kept in self._splits.values() if kept.spill is not None)
            return SubgraphCounts(self._hits, self._misses, entries, self._nbytes, spilled)

    def close(self) -> None:
        """Let go of everything, and remove the files. The cache may be used again."""
        with self._lock:
            for split in list(self._splits):
                self._let_go(split)

    def _find(self, split: str, epoch: int, batch: int) -> "tuple[_Entry, np.ndarray] | None":
        kept = self._splits.get(split)
        if kept is None or kept.epoch != epoch or batch not in kept.entries:
            return None
        entry = kept.entries[batch]
        buffer = kept.read(entry)
        if not _is_up_to_date(entry, buffer, self._store):
            self._nbytes -= entry.nbytes
            del kept.entries[batch]
            kept.is_full = False
            return None
        return entry, buffer

    def _let_go(self, split: str) -> None:
        kept = self._splits.pop(split)
        self._nbytes -= sum(entry.nbytes for entry in kept.entries.values())
        if kept.spill is not None:
            kept.spill.close()

    def _spills(self, kept: "_Split", entry: "_Entry") -> bool:
        """Write an entry's buffer to the file, and others' too until there is room for what belongs to it."""
        if self._spill_path is None:
            return False
        try:
            if kept.spill is None:
                kept.spill = _SpillFile(self._spill_path)
            kept.spill.write(entry)
            in_memory = (other for other in kept.entries.values() if other.buffer is not None)
            while self._nbytes + entry.nbytes > self._budget:
                other = next(in_memory, None)
                if other is None:
                    return False
                before = other.nbytes
                kept.spill.write(other)
                self._nbytes -= before - other.nbytes
        except OSError as error:
            _log.warning("spill_path=%r takes no more (%s): the rest is sampled again", str(self._spill_path), error)
            self._spill_path = None
            return False
        return True


class _Part(NamedTuple):
    """Where an array lies in an entry's buffer."""

    begin: int
    length: int
    dtype: np.dtype

    @property
    def end(self) -> int:
        return self.begin + self.length * self.dtype.itemsize


class _Entry:
    """A packed subgraph in one buffer; `_pack` says of what."""

    __slots__ = ("buffer", "num_sampled_edges", "num_sampled_nodes", "offset", "parts", "version")

    def __init__(self, subgraph: SampledSubgraph, arrays: list[np.ndarray]) -> None:
        self.num_sampled_nodes = subgraph.num_sampled_nodes
        self.num_sampled_edges = subgraph.num_sampled_edges
        self.version = subgraph.version
        self.parts: list[_Part] = []
        end = 0
        for array in arrays:
            self.parts.append(_Part(-(-end // 8) * 8, len(array), array.dtype))
            end = self.parts[-1].end
        self.offset = 0  # in the file, if there is no buffer
        self.buffer: np.ndarray | None = np.empty(end, np.uint8)
        for part, array in zip(self.parts, arrays, strict=True):
            self.buffer[part.begin : part.end].view(part.dtype)[:] = array

    @property
    def nbytes(self) -> int:
        return _OVERHEAD + (0 if self.buffer is None else self.buffer.nbytes)

    def arrays(self, buffer: np.ndarray) -> list[np.ndarray]:
        return [buffer[part.begin : part.end].view(part.dtype) for part in self.parts]


class _Split:
    """What is kept of one split."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.entries: dict[int, _Entry] = {}
        self.is_full = False  # then packing another subgraph is lost work
        self.spill: _SpillFile | None = None

    def read(self, entry: _Entry) -> np.ndarray:
        if entry.buffer is not None:
            return entry.buffer
        assert self.spill is not None
        return self.spill.read(entry)


class _SpillFile:
    """A file without a name, so that it is gone when this process is, however that ends."""

    def __init__(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="mqgnn-subgraphs-", buffering=0)  # noqa: SIM115
        self.nbytes = 0

    def write(self, entry: _Entry) -> None:
        assert entry.buffer is not None
        rest = entry.buffer.data
        while rest:
            rest = rest[os.pwrite(self._file.fileno(), rest, self.nbytes + len(entry.buffer) - len(rest)) :]
        entry.offset, self.nbytes = self.nbytes, self.nbytes + len(entry.buffer)
        entry.buffer = None

    def read(self, entry: _Entry) -> np.ndarray:
        buffer = np.empty(entry.parts[-1].end, np.uint8)
        if os.preadv(self._file.fileno(), [buffer.data], entry.offset) != len(buffer):
            raise OSError("a temporary file of the subgraph cache was cut short: is another program writing to it?")
        return buffer

    def close(self) -> None:
        self._file.close()


def _pack(subgraph: SampledSubgraph, topology: Topology) -> _Entry:
    in_degree = np.diff(subgraph.colptr)
    begin = topology.colptr.numpy()[subgraph.node[: len(in_degree)]]
    weight = np.zeros(0, np.float32) if subgraph.edge_weight is None else subgraph.edge_weight
    place = subgraph.position - np.repeat(begin, in_degree)
    is_new, known = np.empty(len(subgraph.row), np.uint8), np.zeros(len(subgraph.row) + 1, np.int32)
    known = known[: split_sources(subgraph.row, subgraph.num_seeds, is_new, known) + 1]  # one more: no branch reads it
    narrow = [_narrow(array) for array in (subgraph.input_id, known, place, in_degree)]
    return _Entry(subgraph, [subgraph.node, weight, np.packbits(is_new), *narrow])


def _unpack(entry: _Entry, buffer: np.ndarray, topology: Topology) -> SampledSubgraph:
    node, weight, is_new, input_id, known, place, in_degree = entry.arrays(buffer)
    colptr = np.zeros(len(in_degree) + 1, np.int32)
    np.cumsum(in_degree, out=colptr[1:])
    begin = topology.colptr.numpy()[node[: len(in_degree)]]
    position = np.repeat(begin, in_degree)
    position += place
    row = np.empty(len(place), np.int32)
    is_new = np.unpackbits(is_new, count=len(place))
    join_sources(is_new, known.astype(np.int32, copy=False), entry.num_sampled_nodes[0], row)
    return SampledSubgraph(
        node=node,
        colptr=colptr,
        row=row,
        position=position,
        num_sampled_nodes=entry.num_sampled_nodes,
        num_sampled_edges=entry.num_sampled_edges,
        input_id=input_id.astype(np.int64),
        version=entry.version,
        edge_weight=weight if len(weight) else None,
    )


@kernel
def split_sources(row: np.ndarray, num_seeds: int, is_new: np.ndarray, known: np.ndarray) -> int:
    """Mark the edges whose sources were new, and so got the next local id; write down the others', return how many."""
    num_known, num_nodes = 0, num_seeds
    for edge in range(len(row)):
        new = row[edge] == num_nodes
        is_new[edge] = new
        known[num_known] = row[edge]
        num_nodes += new
        num_known += not new
    return num_known


@kernel
def join_sources(is_new: np.ndarray, known: np.ndarray, num_seeds: int, row: np.ndarray) -> None:
    """Undo `split_sources`."""
    num_known, num_nodes = 0, num_seeds
    for edge in range(len(row)):
        new = np.int64(is_new[edge])
        row[edge] = known[num_known] + new * (num_nodes - known[num_known])
        num_nodes += new
        num_known += 1 - new


def _narrow(array: np.ndarray) -> np.ndarray:
    largest = array.max() if len(array) else 0
    return array.astype(np.min_scalar_type(largest), copy=False)


def _is_up_to_date(entry: _Entry, buffer: np.ndarray, store: GraphStore) -> bool:
    """Whether sampling would give the same again: no node whose edges were drawn from has others now."""
    if entry.version == store.version:
        return True
    node, weight, *_, in_degree = entry.arrays(buffer)
    changed = store.changes(entry.version).columns
    if len(weight) or bool(np.isin(node[: len(in_degree)], changed).any()):  # weights depend on the whole graph
        return False
    entry.version = store.version
    return True
