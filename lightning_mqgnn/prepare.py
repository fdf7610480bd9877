"""The prepare stage: gathers the rows that a sampled subgraph needs and makes the batch of them."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_mqgnn.buffers import BufferPool, as_words
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.sampling import SampledSubgraph, kernels


class Prepare:
    """Turns a `SampledSubgraph` into the `Data` that PyG's `NeighborLoader` yields.

    The batch has the attributes of the graph with the rows of its nodes and edges, and `edge_index` (2, edges), `n_id`
    (nodes,), `e_id` (edges,), `input_id` (seeds,), all int64, `batch_size`, and the lists `num_sampled_nodes` and
    `num_sampled_edges`, and `graph_version`, that of the graph it was sampled from. Its tensors are lent by `pool`.

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
        self._sources = _Sources(store)
        self._pool = pool
        self._transform = transform
        self._edge_format = edge_format

    def __call__(self, subgraph: SampledSubgraph, x: Tensor | None = None) -> Data:
        """Make the batch of `subgraph`; `x` are its nodes' rows of the attribute of that name, if they were fetched."""
        with self._store.reading():
            batch = self._make(subgraph, x)
        return batch if self._transform is None else self._transform(batch)

    def warm_up(self) -> None:
        """Compile the kernels for the dtypes of this graph, or load them from the disk cache."""
        ids = np.zeros(0, self._store.row.numpy().dtype)
        self._make(
            SampledSubgraph(
                node=ids,
                colptr=np.zeros(1, np.int32),
                row=np.zeros(0, np.int32),
                position=np.zeros(0, self._store.colptr.numpy().dtype),
                num_sampled_nodes=[0],
                num_sampled_edges=[0],
                input_id=np.zeros(0, np.int64),
                version=self._store.version,
            )
        )

    def _make(self, subgraph: SampledSubgraph, x: Tensor | None = None) -> Data:
        store = self._store
        topology, sources = store.topology, self._sources
        if subgraph.version != topology.version:
            raise RuntimeError(
                f"the graph was updated to version {topology.version} while a batch sampled from version "
                f"{subgraph.version} was prepared: call GraphStore.update between two epochs"
            )
        if sources.version != topology.version:
            sources = self._sources = _Sources(store)
        num_nodes, num_edges = len(subgraph.node), len(subgraph.row)
        n_id = self._pool.lend("n_id", (num_nodes,), torch.int64)
        n_id.numpy()[:] = subgraph.node
        e_id = self._pool.lend("e_id", (num_edges,), torch.int64)
        if topology.edge_id is None:
            e_id.numpy()[:] = subgraph.position
        else:
            kernels.gather_entries(topology.edge_id.numpy(), subgraph.position, e_id.numpy())

        batch = Data(edge_index=self._edge_index(subgraph)) if self._edge_format == "coo" else Data()
        for name, words in sources.node.items():
            fetched = x if name == "x" else None
            tensor = store.node_attrs[name]
            batch[name] = self._gather(name, tensor, words, subgraph.node) if fetched is None else fetched
        for name, tensor in store.edge_attrs.items():
            batch[name] = self._gather(name, tensor, sources.edge[name], e_id.numpy())
        if subgraph.edge_weight is not None:
            batch.edge_weight = self._weigh(batch.edge_weight, subgraph.edge_weight)
        if self._edge_format == "csc":
            weighted = "edge_weight" in batch
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
        batch.graph_version = subgraph.version
        return batch

    def _edge_index(self, subgraph: SampledSubgraph) -> Tensor:
        edge_index = self._pool.lend("edge_index", (2, len(subgraph.row)), torch.int64)
        kernels.expand_edges(subgraph.colptr, subgraph.row, edge_index.numpy())
        return edge_index

    def _weigh(self, own: Tensor | None, importance: np.ndarray) -> Tensor:
        """Importance weights in memory of the pool, times the edges' `own` weights, whose dtype and shape they get."""
        if own is None:
            own = self._pool.lend("edge_weight", importance.shape, torch.float32)
            own.numpy()[:] = importance
            return own
        return own.mul_(torch.from_numpy(importance).view(-1, *[1] * (own.dim() - 1)))

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
            kernels.gather_entries(words[:, 0], index, as_words(out)[:, 0])
        elif words.size:
            kernels.gather_rows(words, index, as_words(out))
        return out


class _Sources:
    """The attributes of one version of the graph, as words."""

    def __init__(self, store: GraphStore) -> None:
        self.version = store.version
        # The largest one last: it drives all else out of the caches, the interpreter too.
        by_size = sorted(store.node_attrs.items(), key=lambda item: item[1].nbytes)
        self.node = {name: as_words(tensor) for name, tensor in by_size}
        self.edge = {name: as_words(tensor) for name, tensor in store.edge_attrs.items()}
