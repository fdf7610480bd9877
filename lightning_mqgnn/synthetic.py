"""A graph made on the spot, so that examples, tests and benchmarks need no download."""

import numpy as np
import torch
from torch_geometric.data import Data


def synthetic_graph(
    num_nodes: int = 20_000,
    num_edges: int = 300_000,
    num_classes: int = 8,
    num_features: int = 64,
    homophily: float = 0.6,
    signal: float = 0.15,
    seed: int = 0,
) -> Data:
    """Make an undirected graph with power-law degrees and planted classes.

    A degree-corrected stochastic block model (Karrer and Newman, 2011): each edge picks its first end in proportion to
    a Pareto weight (exponent 2.5 of the degree distribution), and its second end likewise, among the nodes of the same
    class with probability `homophily`, else among all. The features of a node are standard normal noise around
    `signal` times a random direction of its class, so a classifier does better the more neighbours it looks at.

    The same arguments give the same graph.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of directed edges before self-loops and duplicates are removed; both directions are present.
        num_classes: Number of classes.
        num_features: Width of `x`.
        homophily: Share of edges drawn within a class.
        signal: Distance of the class means from the origin, in standard deviations of the noise, per feature.
        seed: Seed of everything.

    Returns:
        `x` (num_nodes, num_features) float32, `y` (num_nodes,) int64, `edge_index` int64, and masks of a random split
        in 50 % training, 20 % validation and 30 % test nodes.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    y = generator.integers(num_classes, size=num_nodes)
    weight = generator.pareto(1.5, num_nodes) + 1.0
    of_class = [np.flatnonzero(y == c) for c in range(num_classes)]

    first = _pick(generator, np.arange(num_nodes), weight, num_edges // 2)
    second = _pick(generator, np.arange(num_nodes), weight, num_edges // 2)
    within = generator.random(num_edges // 2) < homophily
    for c, members in enumerate(of_class):
        chosen = np.flatnonzero(within & (y[first] == c))
        second[chosen] = _pick(generator, members, weight[members], len(chosen))
    low, high = np.minimum(first, second), np.maximum(first, second)
    pairs = np.unique(low[low != high] * num_nodes + high[low != high])
    low, high = np.divmod(pairs, num_nodes)

    direction = generator.standard_normal((num_classes, num_features))
    x = signal * direction[y] + generator.standard_normal((num_nodes, num_features))
    data = Data(
        x=torch.from_numpy(x.astype(np.float32)),
        y=torch.from_numpy(y),
        edge_index=torch.from_numpy(np.stack([np.concatenate([low, high]), np.concatenate([high, low])])),
    )
    order = generator.permutation(num_nodes)
    cuts = num_nodes // 2, num_nodes * 7 // 10
    for split, chosen in zip(("train", "val", "test"), np.split(order, cuts), strict=True):
        mask = torch.zeros(num_nodes, dtype=torch.bool)
        mask[chosen] = True
        data[f"{split}_mask"] = mask
    return data


def _pick(generator: np.random.Generator, nodes: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Draw `count` of `nodes`, with replacement, in proportion to `weight`."""
    cumulative = np.cumsum(weight)
    picked: np.ndarray = nodes[np.searchsorted(cumulative, generator.random(count) * cumulative[-1], side="right")]
    return picked
