"""The prepare stage: gathers the rows that a sampled subgraph needs and makes the batch of them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.sampling import SampledSubgraph, kernels


class Prepare:
    """Turns a `SampledSubgraph` into the `Data` that PyG's `NeighborLoader` yields.

    The batch has the attributes of the graph with the rows of its nodes and edges, and `edge_index` (2, edges), `n_id`
    (nodes,), `e_id` (edges,), `input_id` (seeds,), all int64, `batch_size`, and the lists `num_sampled_nodes` and
    `num_sampled_edges`. Its tensors are lent by `pool`.

    In the format "csc" it has `adj_t` in place of `edge_index` and `edge_weight`: a `torch.sparse_csr` matrix (nodes,
    nodes) with int64 indices, a row per target node and a column per source node; its values are the weights, else
    float32 ones. They stand in the order of `e_id`: a row's columns need not ascend, and parallel edges are entries of
    their own.

    Safe to call from several threads at once, as far as `transform` is.

    Args:
        store: Where the rows come from.
        pool: Where the memory of the batches comes from.
        transform: Called with each batch; what it returns is the batch.
        edge_format: "coo" or "csc".
    """

    def __init__(
        self,
        store: GraphStore,
        pool: BufferPool,
        transform: Callable[[Data], Data] | None = None,
        edge_format: str = "coo",
    ) -> None:
        self._store = store
        self._node_words = {name: _words(tensor) for name, tensor in store.node_attrs.items()}
        self._edge_words = {name: _words(tensor) for name, tensor in store.edge_attrs.items()}
        self._pool = pool
        self._transform = transform
        self._edge_format = edge_format

    def __call__(self, subgraph: SampledSubgraph) -> Data:
        """Make the batch of `subgraph`."""
        batch = self._make(subgraph)
        return batch if self._transform is None else self._transform(batch)

    def warm_up(self) -> None:
        """Compile the kernels for the dtypes of this graph, or load them from the disk cache."""
        ids = np.zeros(0, self._store.row.numpy().dtype)
        positions = np.zeros(0, self._store.colptr.numpy().dtype)
        nothing = np.zeros(0, np.int32)
        self._make(SampledSubgraph(ids, np.zeros(1, np.int32), nothing, positions, [0], [0], np.zeros(0, np.int64)))

    def _make(self, subgraph: SampledSubgraph) -> Data:
        store = self._store
        num_nodes, num_edges = len(subgraph.node), len(subgraph.row)
        n_id = self._pool.lend("n_id", (num_nodes,), torch.int64)
        n_id.numpy()[:] = subgraph.node
        e_id = self._pool.lend("e_id", (num_edges,), torch.int64)
        if store.edge_id is None:
            e_id.numpy()[:] = subgraph.position
        else:
            kernels.gather_entries(store.edge_id.numpy(), subgraph.position, e_id.numpy())

        batch = Data(edge_index=self._edge_index(subgraph)) if self._edge_format == "coo" else Data()
        for name, tensor in store.node_attrs.items():
            batch[name] = self._gather(name, tensor, self._node_words[name], subgraph.node)
        for name, tensor in store.edge_attrs.items():
            batch[name] = self._gather(name, tensor, self._edge_words[name], e_id.numpy())
        if self._edge_format == "csc":
            weighted = "edge_weight" in store.edge_attrs
            batch.adj_t = self._adj_t(subgraph, batch.edge_weight if weighted else None)
            if weighted:
                del batch.edge_weight
        for name, value in store.graph_attrs.items():
            batch[name] = value
        batch.n_id = n_id
        batch.e_id = e_id
        batch.num_sampled_nodes = subgraph.num_sampled_nodes
        batch.num_sampled_edges = subgraph.num_sampled_edges
        batch.input_id = torch.from_numpy(subgraph.input_id)
        batch.batch_size = subgraph.num_seeds
        return batch

    def _edge_index(self, subgraph: SampledSubgraph) -> Tensor:
        edge_index = self._pool.lend("edge_index", (2, len(subgraph.row)), torch.int64)
        kernels.expand_edges(subgraph.colptr, subgraph.row, edge_index.numpy())
        return edge_index

    def _adj_t(self, subgraph: SampledSubgraph, weight: Tensor | None) -> Tensor:
        num_nodes, num_edges = len(subgraph.node), len(subgraph.row)
        # int64 and not the sampler's int32: with that some of PyG's layers compute wrong gradients without a word.
        crow = self._pool.lend("crow_indices", (num_nodes + 1,), torch.int64)
        crow.numpy()[: len(subgraph.colptr)] = subgraph.colptr
        crow.numpy()[len(subgraph.colptr) :] = num_edges  # nothing was sampled into the nodes of the last hop
        col = self._pool.lend("col_indices", (num_edges,), torch.int64)
        col.numpy()[:] = subgraph.row
        if weight is None:
            weight = self._pool.lend("values", (num_edges,), torch.float32)
            weight.numpy().fill(1)
        # The check would refuse rows whose sources are not in ascending order; nothing that multiplies needs them so.
        return torch.sparse_csr_tensor(crow, col, weight, (num_nodes, num_nodes), check_invariants=False)

    def _gather(self, name: str, source: Tensor, words: np.ndarray, index: np.ndarray) -> Tensor:
        out = self._pool.lend(name, (len(index), *source.shape[1:]), source.dtype)
        if words.shape[1] == 1:
            kernels.gather_entries(words[:, 0], index, _words(out)[:, 0])
        elif words.size:
            kernels.gather_rows(words, index, _words(out))
        return out


def _words(tensor: Tensor) -> np.ndarray:
    """The rows of a contiguous tensor as a matrix of the widest unsigned words that divide them."""
    row_bytes = tensor.shape[1:].numel() * tensor.itemsize
    word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    rows = tensor.reshape(len(tensor), tensor.shape[1:].numel())
    if tensor.dtype in (torch.bool, torch.bfloat16):
        rows = rows.view(torch.uint8)
    words: np.ndarray = rows.numpy().view(f"u{word}")
    return words
