"""CacheBias: the nodes that neighbour sampling prefers, because their features are kept near the consumer."""

import math
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.graph.store import Topology
from lightning_mqgnn.plan import random_key
from lightning_mqgnn.sampling import kernels

_KEPT_DRAWS = 2  # the next epoch is sampled while this one trains
_NEVER = 1e-30  # the weight of a node without outgoing edges: enough to come in random order, after all others


class CachedSet(NamedTuple):
    """A drawn set and the edges that begin in it.

    Attributes:
        nodes: (num_cached,) int64, in ascending order.
        ptr: (nodes + 1,) where the part of each node's incoming edges begins in `position`; dtype of `colptr`.
        position: (edges from the set,) their places in `GraphStore.row`, in ascending order; dtype of `colptr`.
    """

    nodes: np.ndarray
    ptr: np.ndarray
    position: np.ndarray


@dataclass(frozen=True, eq=False)
class CacheBias:
    """A set of nodes that is drawn anew every few epochs, and how much sampling prefers it.

    Global neighbour sampling (Dong, Zheng, Yang and Karypis, "Global Neighbor Sampling for Mixed CPU-GPU Training on
    Giant Graphs", KDD 2021): when the features of these nodes are held where they are used, drawing them saves copies.
    Edges get importance weights, so that means over neighbours keep their expectation (see `NeighborSampler`).

    Nodes are drawn without replacement in proportion to their number of outgoing edges, which is how often a node can
    be drawn as a neighbour (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006); nodes without
    any come last. The set is a pure function of the graph, `seed` and `epoch // redraw_every`.

    Safe to use from several threads at once; the first that needs a set draws it. A draw costs one pass over the
    edges. The last two draws are kept: per draw 8 bytes per node of the set, and, with int32 ids, 4 bytes per node of
    the graph and per edge that begins in the set. When the graph was changed, its sets are drawn again.

    Args:
        store: The graph.
        num_cached: Size of the set.
        bias: How much likelier a neighbour in the set is drawn than one outside. With 1 all are alike. A large one
            gives the neighbours outside rare draws of large weight.
        seed: Seed of the draws.
        redraw_every: Epochs that share a set.

    Raises:
        TypeError: An argument is not a number of its kind, or the graph's `edge_weight` can't be multiplied by
            importance weights because it holds integers.
        ValueError: A number is out of range.
    """

    store: GraphStore = field(repr=False)
    num_cached: int
    bias: float
    seed: int = 0
    redraw_every: int = 1
    _sets: dict[tuple[int, int], CachedSet] = field(default_factory=dict, init=False, repr=False)
    _out_degree: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_cached", "seed", "redraw_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name}={value!r}: give an integer")
        if isinstance(self.bias, bool) or not isinstance(self.bias, int | float | np.integer | np.floating):
            raise TypeError(f"bias={self.bias!r}: give a number, 1 for no preference")
        if not 0 <= self.num_cached <= self.store.num_nodes:
            raise ValueError(f"num_cached={self.num_cached}: give 0 to {self.store.num_nodes}, the nodes of the graph")
        if not 1 <= self.bias < math.inf:
            raise ValueError(f"bias={self.bias}: give a finite number of at least 1, which means no preference")
        if self.redraw_every < 1:
            raise ValueError(f"redraw_every={self.redraw_every}: give 1 or more")
        weight = self.store.edge_attrs.get("edge_weight")
        if weight is not None and not (weight.is_floating_point() or weight.is_complex()):
            raise TypeError(
                f"edge_weight has dtype {weight.dtype}: it is multiplied by importance weights, so make it "
                "data.edge_weight.float()"
            )

    def nodes(self, epoch: int) -> np.ndarray:
        """The set in `epoch`: (num_cached,) int64 node ids in ascending order, read-only."""
        return self.set_in(epoch, self.store.topology).nodes

    def set_in(self, epoch: int, topology: Topology) -> CachedSet:
        """The set in `epoch` of the graph as it is in `topology`, drawn if it is not at hand."""
        key = int(epoch) // self.redraw_every, topology.version
        at_hand = self._sets.get(key)
        if at_hand is not None:
            return at_hand
        with self._lock:
            if key not in self._sets:
                with self.store.reading():
                    drawn = self._draw(key[0], topology)
                while len(self._sets) >= _KEPT_DRAWS:
                    del self._sets[next(iter(self._sets))]
                self._sets[key] = drawn
            return self._sets[key]

    @property
    def nbytes(self) -> int:
        """Bytes that the sets at hand and the nodes' degrees hold."""
        with self._lock:
            arrays = [array for drawn in self._sets.values() for array in drawn]
            return sum(array.nbytes for array in (*arrays, *self._out_degree.values()))

    def _draw(self, number: int, topology: Topology) -> CachedSet:
        colptr, row = topology.colptr.numpy(), topology.row.numpy()
        num_nodes = len(colptr) - 1
        if topology.version not in self._out_degree:
            self._out_degree.clear()
            self._out_degree[topology.version] = out_degrees(topology)
        out_degree = self._out_degree[topology.version]
        key = random_key(self.seed, "cache set", number)
        # Each node comes at an exponential time, the sooner the larger its degree; the first ones are the set.
        time = np.random.Generator(np.random.Philox(key=key)).standard_exponential(num_nodes)
        time /= np.maximum(out_degree, _NEVER)
        chosen = np.ones(num_nodes, np.bool_)
        if self.num_cached < num_nodes:
            chosen[np.argpartition(time, self.num_cached)[self.num_cached :]] = False
        nodes = np.flatnonzero(chosen)
        nodes.flags.writeable = False
        ptr = np.empty(num_nodes + 1, colptr.dtype)
        position = np.empty(out_degree[nodes].sum(dtype=np.int64), colptr.dtype)
        kernels.find_edges_from(chosen, colptr, row, ptr, position)
        return CachedSet(nodes, ptr, position)

    def __reduce__(self) -> Any:  # the lock does not travel, and the sets can be drawn anywhere
        return CacheBias, (self.store, self.num_cached, self.bias, self.seed, self.redraw_every)


def out_degrees(topology: Topology) -> np.ndarray:
    """(nodes,) how many edges begin in each node, in the dtype of `colptr`."""
    counts = np.zeros(len(topology.colptr) - 1, topology.colptr.numpy().dtype)
    kernels.count_sources(topology.row.numpy(), counts)
    return counts
