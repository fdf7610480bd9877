"""Hand-made and random graphs for the tests, and their batches."""

import torch
from torch_geometric.data import Data

from lightning_mqgnn import MQGNNDataModule


def make_graph(num_nodes: int, edges: list[tuple[int, int]], num_features: int = 3) -> Data:
    """A graph with the given (source, destination) edges; row `i` of `x` holds `i` in its first column."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_nodes, num_features, generator=generator)
    x[:, 0] = torch.arange(num_nodes)
    return Data(
        x=x,
        y=torch.arange(num_nodes) % 3,
        edge_index=torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous(),
    )


def random_graph(num_nodes: int = 400, num_edges: int = 4000, num_features: int = 8, seed: int = 0) -> Data:
    """Random edges in random order, with edge attributes and a split: 60 % train, 20 % val, 20 % test."""
    generator = torch.Generator().manual_seed(seed)
    data = Data(
        x=torch.randn(num_nodes, num_features, generator=generator),
        y=torch.randint(0, 4, (num_nodes,), generator=generator),
        edge_index=torch.randint(0, num_nodes, (2, num_edges), generator=generator),
        edge_attr=torch.randn(num_edges, 2, generator=generator),
    )
    order = torch.randperm(num_nodes, generator=generator)
    for split, chosen in zip(
        ("train", "val", "test"), order.tensor_split([num_nodes * 6 // 10, num_nodes * 8 // 10]), strict=True
    ):
        mask = torch.zeros(num_nodes, dtype=torch.bool)
        mask[chosen] = True
        data[f"{split}_mask"] = mask
    return data


def module(data=None, **arguments) -> MQGNNDataModule:
    """A DataModule of a small random graph, or of `data`."""
    arguments = {"num_neighbors": [4, 3], "batch_size": 32, **arguments}
    return MQGNNDataModule(random_graph() if data is None else data, **arguments)


def assert_same_batch(one: Data, other: Data) -> None:
    """Bit by bit, attribute by attribute."""
    assert one.keys() == other.keys()
    for name, value in one.to_dict().items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name
