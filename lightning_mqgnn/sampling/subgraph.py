"""What a sampler returns: a message-flow block in compact form."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SampledSubgraph:
    """The nodes and edges that a batch of seed nodes needs, as sampled; nothing is gathered yet.

    Edges are ordered by destination, and destinations by the hop that found them, so the block is stored column-wise:
    the edges into local node `i` are `row[colptr[i]:colptr[i + 1]]`. Nodes of the last hop have no incoming edges and
    no entry in `colptr`.

    Attributes:
        node: (nodes,) ids in the graph, int32 or int64; the seeds first, in their order, then hop by hop.
        colptr: (frontier nodes + 1,) int32.
        row: (edges,) int32 local ids of the edges' sources.
        position: (edges,) places of the edges in `GraphStore.row`, int32 or int64.
        num_sampled_nodes: new nodes per hop, beginning with the number of seeds (hops + 1 numbers).
        num_sampled_edges: edges per hop (hops numbers).
        input_id: (seeds,) int64, what the loader's `input_nodes` call the seeds (see `MQGNNDataModule`).
        version: `GraphStore.version` of the graph that it was sampled from.
        edge_weight: (edges,) float32 importance weights, if neighbours were not all equally likely.
    """

    node: np.ndarray
    colptr: np.ndarray
    row: np.ndarray
    position: np.ndarray
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    input_id: np.ndarray
    version: int = 0
    edge_weight: np.ndarray | None = None

    @property
    def num_seeds(self) -> int:
        """Number of seed nodes."""
        return self.num_sampled_nodes[0]

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays hold."""
        arrays = (self.node, self.colptr, self.row, self.position, self.input_id, self.edge_weight)
        return sum(array.nbytes for array in arrays if array is not None)
