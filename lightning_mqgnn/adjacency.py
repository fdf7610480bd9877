"""A batch's edges as a sparse matrix: what `edge_format="csc"` needs beside the prepare stage."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mqgnn.graph import GraphStore


def check_edge_format(edge_format: object) -> None:
    """Raise if there is no such format."""
    if edge_format not in ("coo", "csc"):
        raise ValueError(f"edge_format={edge_format!r}: give 'coo' for batch.edge_index, or 'csc' for batch.adj_t")


def check_edge_weight(store: GraphStore) -> None:
    """Raise if the graph's `edge_weight` can't be the values of a sparse matrix."""
    weight = store.edge_attrs.get("edge_weight")
    if weight is None:
        return
    if weight.dim() != 1:
        raise ValueError(
            f"edge_weight has shape {tuple(weight.shape)}: edge_format='csc' makes it the values of a matrix, so give "
            f"a number per edge, ({len(weight)},), or name it edge_attr"
        )
    if not weight.is_floating_point():
        raise TypeError(
            f"edge_weight has dtype {weight.dtype}: edge_format='csc' multiplies features by it, so give it the "
            "features' dtype, data.edge_weight.float()"
        )


def trim_adj(layer: int, num_sampled_nodes: Sequence[int], num_sampled_edges: Sequence[int], adj_t: Tensor) -> Tensor:
    """Narrow a batch's `adj_t` to the edges that layer `layer` of the model needs: what `trim_to_layer` is to COO.

    Layer `i` of a model with one layer per hop has no use for the `i` outermost hops, nor for results at the nodes of
    the hop after them. Nodes and edges are ordered by hop, so this takes slices and copies nothing::

        for i, conv in enumerate(convs):
            adj_t = trim_adj(i, batch.num_sampled_nodes, batch.num_sampled_edges, batch.adj_t)
            x = conv((x, x[: adj_t.size(0)]), adj_t)  # GCNConv: conv(x, adj_t)

    Args:
        layer: Number of the layer, beginning with 0.
        num_sampled_nodes: The batch's list of that name (hops + 1 numbers).
        num_sampled_edges: The batch's list of that name (hops numbers).
        adj_t: (nodes, nodes) the batch's matrix, untrimmed.

    Returns:
        A view of `adj_t`, (targets, sources): the rows of the nodes that the next layer reads, or of the seeds, and the
        columns of the nodes that the layer before has computed.

    Raises:
        ValueError: `layer` is not one of the hops, or `adj_t` is not a whole batch's.
    """
    hops = len(num_sampled_edges)
    if not 0 <= layer < hops:
        raise ValueError(f"layer={layer}: the batch has {hops} hops, so give 0 to {hops - 1}")
    if adj_t.layout != torch.sparse_csr or adj_t.shape != (sum(num_sampled_nodes), sum(num_sampled_nodes)):
        raise ValueError(
            f"adj_t has shape {tuple(adj_t.shape)} and layout {adj_t.layout}: give the batch's own, "
            f"{sum(num_sampled_nodes)} nodes in torch.sparse_csr, at every layer"
        )
    num_targets = sum(num_sampled_nodes[: hops - layer])
    num_sources = num_targets + num_sampled_nodes[hops - layer]
    num_edges = sum(num_sampled_edges[: hops - layer])
    return torch.sparse_csr_tensor(
        adj_t.crow_indices()[: num_targets + 1],
        adj_t.col_indices()[:num_edges],
        adj_t.values()[:num_edges],
        (num_targets, num_sources),
        check_invariants=False,
    )
