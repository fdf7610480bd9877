"""FeatureCache: rows of the feature matrix, kept between a far store and the batches that need them."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_mqgnn.buffers import BufferPool, as_words
from lightning_mqgnn.cache.policies import (
    NEVER,
    Belady,
    Directory,
    LeastRecentlyUsed,
    find_first_uses,
    find_next_uses,
)
from lightning_mqgnn.cache.rows import FileRows
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.sampling.bias import out_degrees
from lightning_mqgnn.sampling.kernels import copy_rows

_DIRECTORIES: dict[str, type[Directory]] = {
    "none": Directory,
    "degree": Directory,
    "frequency": Directory,
    "lru": LeastRecentlyUsed,
    "optimal": Belady,
}
POLICIES = tuple(_DIRECTORIES)
_PIECE = 1 << 14  # rows


@dataclass(frozen=True, eq=False)
class Access:
    """What a batch reads, and what is known of the batches after it.

    Attributes:
        node: (nodes,) distinct node ids.
        epoch: The epoch of the batch.
        next_use: (nodes,) int32, the number within its super-batch of the next batch that reads the node; `NEVER` if
            none does.
        opening: On the first batch of a super-batch: all nodes that it reads, the first batch that reads each, and how
            many batches there are.
    """

    node: np.ndarray
    epoch: int = 0
    next_use: np.ndarray | None = None
    opening: tuple[np.ndarray, np.ndarray, int] | None = None


class AccessPlanner:
    """Notes for each access of a super-batch when its nodes are read again.

    Safe to use from several threads at once; each holds 4 bytes per node of the graph.

    Args:
        num_nodes: Nodes of the graph.
    """

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._idle: deque[np.ndarray] = deque()

    def plan(self, accesses: Sequence[Access]) -> list[Access]:
        """Return the accesses of a super-batch, in order, with `next_use`, and `opening` on the first."""
        try:
            table = self._idle.pop()
        except IndexError:
            table = np.full(self._num_nodes, NEVER, np.int32)
        planned: list[Access] = []
        for number in reversed(range(len(accesses))):
            node = accesses[number].node
            next_use = np.empty(len(node), np.int32)
            find_next_uses(node, number, table, next_use)
            planned.append(replace(accesses[number], next_use=next_use))
        planned.reverse()
        read = sum(len(access.node) for access in accesses)
        nodes, first_use = np.empty(read, np.int64), np.empty(read, np.int32)
        found = 0
        for number, access in enumerate(accesses):
            found = find_first_uses(access.node, number, table, nodes, first_use, found)
        if planned:
            opening = nodes[:found].copy(), first_use[:found].copy(), len(planned)
            planned[0] = replace(planned[0], opening=opening)
        self._idle.append(table)
        return planned


class CacheReport(NamedTuple):
    """What a `FeatureCache` did so far.

    Attributes:
        accesses: Rows that batches asked for.
        hits: Those of them that were held.
        bytes_moved: Bytes read from the far store, what only filled the cache included.
        best_hits: Hits of Belady's rule with as many rows and the same knowledge; None if it was not measured.
    """

    accesses: int
    hits: int
    bytes_moved: int
    best_hits: int | None

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that were hits."""
        return self.hits / max(self.accesses, 1)

    @property
    def best_hit_rate(self) -> float | None:
        """Share of the accesses that could have been hits."""
        return None if self.best_hits is None else self.best_hits / max(self.accesses, 1)


class FeatureCache:
    """Holds rows of a node attribute in memory, or on a device, and fetches the others from where they lie.

    The rows of a store that is in memory, or whose rows an update has changed, are copied from there; those of a store
    that was opened from a folder are read from its file. What batches get does not depend on the policy:

    * `none`: nothing is held.
    * `degree`: the nodes with most outgoing edges, which are drawn most often (PaGraph, Lin et al., SoCC 2020).
    * `frequency`: the nodes that were read most often in the epoch before; those of `degree` in the first one.
    * `lru`: the rows that were read last.
    * `optimal`: the rows that are read again soonest, see `policies.Belady`.

    Safe to use from several threads: one batch after the other.

    Args:
        store: The graph.
        num_rows: Rows to hold; more than there are nodes are not used.
        policy: One of the above.
        name: The node attribute.
        device: Where rows are held and returned. On a CUDA device only those that are not held are copied to it.
        threads: Reads of a file that may wait for the disk at a time.
        measure_best: Also count what Belady's rule would have hit, with a second book-keeping (for accesses whose next
            use is known).

    Raises:
        ValueError: `policy` or `name` is unknown, or `num_rows` is negative.
    """

    def __init__(
        self,
        store: GraphStore,
        num_rows: int,
        policy: str = "optimal",
        *,
        name: str = "x",
        device: torch.device | None = None,
        threads: int = 8,
        measure_best: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: give one of {', '.join(POLICIES)}")
        if num_rows < 0:
            raise ValueError(f"num_rows={num_rows}: give 0 or more")
        if name not in store.node_attrs:
            raise ValueError(f"name={name!r} is no node attribute: give one of {', '.join(store.node_attrs)}")
        self._store = store
        self._policy = policy
        self._name = name
        self._num_rows = 0 if policy == "none" else min(num_rows, store.num_nodes)
        self._directory = _DIRECTORIES[policy](self._num_rows, store.num_nodes)
        self._best = Belady(self._num_rows, store.num_nodes) if measure_best and policy != "optimal" else None
        self._rows: HostRows = _rows(device)(store, name, self._num_rows, device, threads)
        self._counts = np.zeros(store.num_nodes, np.int32) if policy == "frequency" else None
        self._epoch: int | None = None
        self._loaded = policy not in ("degree", "frequency")
        self._accesses = self._hits = self._filled = self._best_hits = 0
        self._lock = threading.Lock()

    @classmethod
    def rows_for(cls, store: GraphStore, budget: int, policy: str, name: str = "x") -> int:
        """How many rows fit into `budget` bytes, with all tables that they need."""
        if policy == "none":
            return 0
        # Per node: the slot table, and what choosing the rows (counts, a copy, a mask) or planning accesses takes.
        tables = store.num_nodes * {"degree": 4 + 9, "frequency": 8 + 9, "optimal": 4 + 4}.get(policy, 4) + 64
        per_row = _row_bytes(store.node_attrs[name]) + _DIRECTORIES[policy].slot_bytes
        per_row += 4 if store.num_nodes > NEVER else 0
        per_row += 16 if policy in ("degree", "frequency") else 0
        return min(max(budget - tables, 0) // per_row, store.num_nodes)

    @property
    def num_rows(self) -> int:
        """Rows that may be held."""
        return self._num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and of the tables."""
        counts = 0 if self._counts is None else self._counts.nbytes
        return self._rows.nbytes + self._directory.nbytes + counts

    def rows(self, access: Access, pool: BufferPool) -> Tensor:
        """Return the rows of `access.node`, in this order: (nodes, ...), on the host in memory lent by `pool`."""
        with self._lock:
            self._begin(access)
            known = access.node, access.next_use, access.opening
            slot = self._directory.step(*known)
            self._accesses += len(slot)
            self._hits += int((slot >= 0).sum())
            if self._best is not None:
                self._best_hits += int((self._best.step(*known) >= 0).sum())
            into = self._directory.look_up(access.node)
            taken = np.flatnonzero((into >= 0) & (into != slot))
            return self._rows.move(access.node, slot, taken, into[taken], pool)

    def load(self, nodes: np.ndarray) -> None:
        """Hold exactly these nodes from now on, or the first of them (`degree` and `frequency`)."""
        with self._lock:
            self._loaded = True
            self._load(nodes)

    def invalidate(self, nodes: np.ndarray) -> None:
        """Read again what is held of these nodes, whose rows have changed in the store."""
        with self._lock:
            self._rows.look_again()
            slot = self._directory.look_up(nodes)
            held = slot >= 0
            self._fill(nodes[held], slot[held])

    def report(self) -> CacheReport:
        """Return what was asked for, held, and read from the far store."""
        with self._lock:
            best = self._best_hits if self._best is not None else None
            if self._policy == "optimal":
                best = self._hits
            moved = (self._accesses - self._hits + self._filled) * _row_bytes(self._store.node_attrs[self._name])
            return CacheReport(self._accesses, self._hits, moved, best)

    def close(self) -> None:
        """End the threads that read. The cache may be used again."""
        with self._lock:
            self._rows.close()

    def _begin(self, access: Access) -> None:
        if not self._loaded:
            self._loaded = True
            self._load(most(out_degrees(self._store.topology), self._num_rows))
        if self._counts is not None:
            if self._epoch is not None and access.epoch != self._epoch:
                self._load(most(self._counts, self._num_rows))
                self._counts.fill(0)
            self._counts[access.node] += 1
        self._epoch = access.epoch

    def _load(self, nodes: np.ndarray) -> None:
        self._fill(*self._directory.load(np.asarray(nodes)[: self._num_rows]))

    def _fill(self, nodes: np.ndarray, slots: np.ndarray) -> None:
        self._filled += len(nodes)
        self._rows.fill(nodes, slots)


class HostRows:
    """Rows held in memory."""

    def __init__(
        self, store: GraphStore, name: str, num_rows: int, device: torch.device | None = None, threads: int = 8
    ) -> None:
        self._store = store
        self._name = name
        self._threads = threads
        source = store.node_attrs[name]
        self._held = torch.empty((num_rows, *source.shape[1:]), dtype=source.dtype, device=device)
        self._place = store.node_file(name)
        self._file: FileRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the held rows."""
        return self._held.nbytes

    def look_again(self) -> None:
        """After an update: the file may not hold the rows any more."""
        self._place = self._store.node_file(self._name)

    def close(self) -> None:
        """Close the file; it is opened again when a row of it is needed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def move(
        self,
        node: np.ndarray,
        slot: np.ndarray,
        taken: np.ndarray,
        into: np.ndarray,
        pool: BufferPool,
    ) -> Tensor:
        """Make the rows of a batch from those that are held and those that are not, and take some of these in.

        Args:
            node: The batch's nodes.
            slot: Where they are held, -1 if they are not.
            taken: Places in the batch of those that are taken in.
            into: The slots that they get.
            pool: Lends the memory.
        """
        source = self._store.node_attrs[self._name]
        out = pool.lend(self._name, (len(node), *source.shape[1:]), source.dtype)
        words = as_words(out)
        if words.size:
            held, hit = as_words(self._held), np.flatnonzero(slot >= 0)
            copy_rows(held, slot[hit], words, hit)
            self._read(node, np.flatnonzero(slot < 0), words)
            copy_rows(words, taken, held, into)
        return out

    def fill(self, nodes: np.ndarray, slots: np.ndarray) -> None:
        """Read rows into slots, some at a time."""
        held = as_words(self._held)
        if not held.size:
            return
        for node, slot in _pieces(nodes, slots):
            rows, everything = np.empty((len(node), held.shape[1]), held.dtype), np.arange(len(node))
            self._read(node, everything, rows)
            copy_rows(rows, everything, held, slot)

    def _read(self, node: np.ndarray, at: np.ndarray, words: np.ndarray) -> None:
        source = self._store.node_attrs[self._name]
        if self._place is None:
            copy_rows(as_words(source), node[at], words, at)
            return
        if self._file is None:
            self._file = FileRows(*self._place, _row_bytes(source), self._threads)
        self._file.read(node, at, words)


class DeviceRows(HostRows):
    """Rows held on a device; those that are missed cross to it from page-locked memory, on a stream of their own."""

    def __init__(
        self, store: GraphStore, name: str, num_rows: int, device: torch.device | None = None, threads: int = 8
    ) -> None:
        super().__init__(store, name, num_rows, device, threads)
        self._device = self._held.device
        self._stream = torch.cuda.Stream(self._device)

    def move(
        self,
        node: np.ndarray,
        slot: np.ndarray,
        taken: np.ndarray,
        into: np.ndarray,
        pool: BufferPool,
    ) -> Tensor:
        """As on the host; returns when the rows are complete on the device."""
        source = self._store.node_attrs[self._name]
        hit, missed = np.flatnonzero(slot >= 0), np.flatnonzero(slot < 0)
        crossing = pool.lend(self._name, (len(missed), *source.shape[1:]), source.dtype)
        words = as_words(crossing)
        if words.size:
            self._read(node[missed], np.arange(len(missed)), words)
        with torch.cuda.stream(self._stream):
            out = torch.empty((len(node), *source.shape[1:]), dtype=source.dtype, device=self._device)
            arrived = crossing.to(self._device, non_blocking=True)
            out[self._on_device(hit)] = self._held[self._on_device(slot[hit])]
            out[self._on_device(missed)] = arrived
            self._held[self._on_device(into)] = out[self._on_device(taken)]
            done = self._stream.record_event()
        done.synchronize()
        return out

    def fill(self, nodes: np.ndarray, slots: np.ndarray) -> None:
        """Read rows and copy them into slots."""
        source = self._store.node_attrs[self._name]
        if not self._held.numel():
            return
        for node, slot in _pieces(nodes, slots):
            rows = torch.empty((len(node), *source.shape[1:]), dtype=source.dtype)
            self._read(node, np.arange(len(node)), as_words(rows))
            self._held[self._on_device(slot)] = rows.to(self._device)

    def _on_device(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index.astype(np.int64)).to(self._device)


def most(counts: np.ndarray, number: int) -> np.ndarray:
    """The nodes with the largest counts, those with smaller ids first among equals, in ascending order."""
    if not 0 < number < len(counts):
        return np.arange(len(counts) if number else 0)
    least = np.partition(counts, -number)[-number]
    chosen = counts > least
    equal = np.flatnonzero(counts == least)
    chosen[equal[: number - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def warm_up(store: GraphStore, policy: str) -> None:
    """Compile the kernels of a policy for this graph, or load them from the disk cache."""
    cache, pool = FeatureCache(store, 1, policy, threads=1), BufferPool()
    node = np.zeros(min(store.num_nodes, 1), store.row.numpy().dtype)
    for access in AccessPlanner(store.num_nodes).plan([Access(node), Access(node)]):
        cache.rows(access, pool)
    cache.close()


def _rows(device: torch.device | None) -> type[HostRows]:
    return HostRows if device is None or device.type == "cpu" else DeviceRows


def _pieces(nodes: np.ndarray, slots: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """So many at a time that what is read needs little memory beside the cache itself."""
    for begin in range(0, len(nodes), _PIECE):
        yield nodes[begin : begin + _PIECE], slots[begin : begin + _PIECE]


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.itemsize
