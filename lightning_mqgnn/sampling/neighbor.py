"""NeighborSampler: neighbour sampling (Hamilton et al., GraphSAGE, 2017, algorithm 2), uniform or with a bias."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.sampling import kernels
from lightning_mqgnn.sampling.bias import CacheBias
from lightning_mqgnn.sampling.subgraph import SampledSubgraph

_log = logging.getLogger(__name__)

_MAX_TAG = 2**31 - 1  # a tag fills the upper half of an int64


class NeighborSampler:
    """Draws for each frontier node of each hop up to `num_neighbors[hop]` of its incoming edges.

    The result has the meaning of PyG's `NeighborSampler` (directional subgraphs): seeds first, nodes in order of
    discovery, edges by hop. What is drawn depends on `key`, the hop and the node alone, never on the state of a
    process or on what else is in the batch.

    With `bias`, it depends on the set of the epoch too: neighbours in the set are preferred, and edges get importance
    weights (see `SampledSubgraph.edge_weight`). The mean of weight * h over the neighbours drawn for a node has the
    expectation of the mean of h over all its neighbours. Where all are taken, and without preference, weights are 1.

    Safe to call from several threads at once. Each concurrent call holds 8 bytes per node of the graph as scratch
    memory, which is kept for later calls.

    Args:
        store: The graph.
        num_neighbors: Fan-out per hop; -1 takes all neighbours.
        replace: Draw with replacement; then a node with any neighbours gets exactly `num_neighbors[hop]` draws.
        bias: Which neighbours to prefer; by default all are equally likely.

    Raises:
        ValueError: `num_neighbors` is empty or holds a number below -1.
        TypeError: `num_neighbors` is not a sequence of integers.
    """

    def __init__(
        self,
        store: GraphStore,
        num_neighbors: Sequence[int],
        replace: bool = False,
        bias: CacheBias | None = None,
    ) -> None:
        self.num_neighbors = check_num_neighbors(num_neighbors)
        self.replace = bool(replace)
        self._store = store
        self._bias = bias
        self._num_nodes = store.num_nodes
        self._fanouts = np.asarray(self.num_neighbors, np.int64)
        self._idle: deque[_Scratch] = deque()

    def sample(
        self, seeds: np.ndarray, key: int, input_id: np.ndarray | None = None, epoch: int = 0
    ) -> SampledSubgraph:
        """Sample the block of `seeds`.

        Args:
            seeds: (seeds,) node ids, any integer dtype.
            key: Random key, 64 bits.
            input_id: (seeds,) what to call the seeds in the batch; their place in `seeds` if left out.
            epoch: Whose set of nodes is preferred; without `bias` it changes nothing.

        Raises:
            ValueError: A seed is no node of the graph.
        """
        if len(seeds) and not 0 <= seeds.min() <= seeds.max() < self._num_nodes:
            bad = seeds[(seeds < 0) | (seeds >= self._num_nodes)][0]
            raise ValueError(f"seeds hold node {bad}: ids go from 0 to {self._num_nodes - 1}")
        with self._store.reading():
            return self._sample(seeds, key, input_id, epoch)

    def _sample(self, seeds: np.ndarray, key: int, input_id: np.ndarray | None, epoch: int) -> SampledSubgraph:
        topology = self._store.topology
        colptr, row = topology.colptr.numpy(), topology.row.numpy()
        bias, cached_ptr, cached_position = None, None, None
        if self._bias is not None:
            bias = float(self._bias.bias)
            _, cached_ptr, cached_position = self._bias.set_in(epoch, topology)
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = _Scratch(self._num_nodes, row.dtype, colptr.dtype, weighted=bias is not None)
        num_seeds = len(seeds)
        hop_nodes = np.zeros(len(self._fanouts) + 1, np.int64)
        hop_edges = np.zeros(len(self._fanouts), np.int64)
        scratch.reserve(num_seeds + 1)
        while True:
            scratch.node[:num_seeds] = seeds
            if kernels.sample_neighbors(
                colptr,
                row,
                self._fanouts,
                self.replace,
                bias,
                cached_ptr,
                cached_position,
                np.uint64(key),
                num_seeds,
                scratch.next_tag(),
                scratch.table,
                scratch.node,
                scratch.neighbor,
                scratch.colptr,
                scratch.row,
                scratch.position,
                scratch.weight,
                hop_nodes,
                hop_edges,
            ):
                break
            scratch.reserve(2 * len(scratch.row))
        num_edges = int(hop_edges.sum())
        num_frontier = int(hop_nodes[:-1].sum())
        subgraph = SampledSubgraph(
            node=scratch.node[: hop_nodes.sum()].copy(),
            colptr=scratch.colptr[: num_frontier + 1].copy(),
            row=scratch.row[:num_edges].copy(),
            position=scratch.position[:num_edges].copy(),
            num_sampled_nodes=hop_nodes.tolist(),
            num_sampled_edges=hop_edges.tolist(),
            input_id=np.arange(num_seeds) if input_id is None else input_id,
            version=topology.version,
            edge_weight=None if scratch.weight is None else scratch.weight[:num_edges].copy(),
        )
        self._idle.append(scratch)
        return subgraph

    def warm_up(self, say: Callable[[str], object] = _log.info) -> None:
        """Compile the kernels, or load them from the disk cache, so that no batch pays; `say` that it takes time."""
        needed = kernels.sample_neighbors if self._bias is None else kernels.find_edges_from
        if not kernels.compiled_before(needed):
            say("Compiling the sampling kernels, once on this machine: some 10 seconds.")
        self.sample(np.zeros(0, self._store.row.numpy().dtype), key=0)


class _Scratch:
    """The arrays of one running call: a table entry per node of the graph, and outputs that grow when too short."""

    def __init__(self, num_nodes: int, id_dtype: np.dtype, position_dtype: np.dtype, weighted: bool) -> None:
        self.table = np.zeros(num_nodes, np.int64)
        self._tag = 0
        self._id_dtype = id_dtype
        self._position_dtype = position_dtype
        self._weighted = weighted
        self._allocate(1024)

    def reserve(self, capacity: int) -> None:
        if capacity > len(self.row):
            self._allocate(capacity)

    def next_tag(self) -> int:
        if self._tag == _MAX_TAG:
            self.table.fill(0)
            self._tag = 0
        self._tag += 1
        return self._tag

    def _allocate(self, capacity: int) -> None:
        self.node = np.empty(capacity, self._id_dtype)
        self.neighbor = np.empty(capacity, self._id_dtype)
        self.colptr = np.empty(capacity + 1, np.int32)
        self.row = np.empty(capacity, np.int32)
        self.position = np.empty(capacity, self._position_dtype)
        self.weight = np.empty(capacity, np.float32) if self._weighted else None


def check_num_neighbors(num_neighbors: Sequence[int]) -> tuple[int, ...]:
    """Return `num_neighbors` as a tuple of ints, or say what is wrong with it."""
    if not isinstance(num_neighbors, list | tuple):
        raise TypeError(f"num_neighbors={num_neighbors!r} is not a list with one fan-out per hop, e.g. [15, 10]")
    for fanout in num_neighbors:
        if isinstance(fanout, bool) or not isinstance(fanout, int | np.integer):
            raise TypeError(
                f"num_neighbors={list(num_neighbors)} holds {fanout!r}: give integers, -1 for all neighbours"
            )
        if not -1 <= fanout < 2**31:
            raise ValueError(f"num_neighbors={list(num_neighbors)} holds {fanout}: give -1 (all neighbours), 0 or more")
    if not num_neighbors:
        raise ValueError("num_neighbors=[] has no hop: give one fan-out per layer of the model, e.g. [15, 10]")
    return tuple(int(fanout) for fanout in num_neighbors)
