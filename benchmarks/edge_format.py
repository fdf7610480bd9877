"""What the form of a batch's edges does to a training step: `edge_index` or `adj_t`, whole or trimmed to each layer.

python benchmarks/edge_format.py                      # 200k nodes, 5M edges, 100 features, fan-out 15 10
python benchmarks/edge_format.py --fan-out 10 10 10
python benchmarks/edge_format.py --nodes 20000 --edges 300000 --batches 2 --rounds 2   # a quick look

A step is forward, backward and Adam on a batch that is ready. All variants take the same steps on the same batches in
turn, so that a slow moment of the machine hits them alike, and their losses are compared.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.transforms import GCNNorm
from torch_geometric.utils import trim_to_layer

from lightning_mqgnn import GraphStore, NeighborSampler, synthetic_graph, trim_adj
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.prepare import Prepare

Forward = Callable[[torch.nn.ModuleList, Data], Tensor]


def convolve(conv: torch.nn.Module, x: Tensor, edges: Tensor, weight: Tensor | None, targets: int) -> Tensor:
    """Return the layer's results at the first `targets` nodes, and compute no others where the layer allows that."""
    sources = x if isinstance(conv, GCNConv) or targets == len(x) else (x, x[:targets])
    result: Tensor = conv(sources, edges) if weight is None else conv(sources, edges, weight)
    return result[:targets]


def coo(convs: torch.nn.ModuleList, batch: Data) -> Tensor:
    """All edges in all layers."""
    x: Tensor = batch.x
    for i, conv in enumerate(convs):
        x = convolve(conv, x if i == 0 else x.relu(), batch.edge_index, batch.edge_weight, len(x))
    return x


def coo_trim_to_layer(convs: torch.nn.ModuleList, batch: Data) -> Tensor:
    """PyG's trimming: the nodes and edges of the outermost `i` hops are left out in layer `i`."""
    x: Tensor = batch.x
    edges, weight = batch.edge_index, batch.edge_weight
    for i, conv in enumerate(convs):
        x, edges, weight = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edges, weight)
        x = convolve(conv, x if i == 0 else x.relu(), edges, weight, len(x))
    return x


def coo_targets(convs: torch.nn.ModuleList, batch: Data) -> Tensor:
    """As `trim_to_layer`, and results only at the nodes that the next layer reads."""
    x: Tensor = batch.x
    for i, conv in enumerate(convs):
        hops = len(convs) - i
        num_edges = sum(batch.num_sampled_edges[:hops])
        weight = None if batch.edge_weight is None else batch.edge_weight[:num_edges]
        targets = sum(batch.num_sampled_nodes[:hops])
        x = convolve(conv, x if i == 0 else x.relu(), batch.edge_index[:, :num_edges], weight, targets)
    return x


def csc(convs: torch.nn.ModuleList, batch: Data) -> Tensor:
    """The whole matrix in all layers."""
    x: Tensor = batch.x
    for i, conv in enumerate(convs):
        x = convolve(conv, x if i == 0 else x.relu(), batch.adj_t, None, len(x))
    return x


def csc_trim_adj(convs: torch.nn.ModuleList, batch: Data) -> Tensor:
    """The rows and columns that each layer needs."""
    x: Tensor = batch.x
    for i, conv in enumerate(convs):
        adj_t = trim_adj(i, batch.num_sampled_nodes, batch.num_sampled_edges, batch.adj_t)
        x = convolve(conv, x if i == 0 else x.relu(), adj_t, None, adj_t.size(0))
    return x


VARIANTS: dict[str, tuple[str, Forward]] = {
    "coo": ("coo", coo),
    "coo, trim_to_layer": ("coo", coo_trim_to_layer),
    "coo, only the targets": ("coo", coo_targets),
    "csc": ("csc", csc),
    "csc, trim_adj": ("csc", csc_trim_adj),
}


@dataclass
class Figures:
    """Seconds of each step, and its loss."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


class Training:
    """One variant's model and optimizer; all variants begin with the same weights."""

    def __init__(self, model: str, widths: list[int], forward: Forward) -> None:
        torch.manual_seed(0)
        self._convs = torch.nn.ModuleList(
            SAGEConv(before, after) if model == "sage" else GCNConv(before, after, normalize=False)
            for before, after in pairwise(widths)
        )
        self._optimizer = torch.optim.Adam(self._convs.parameters(), lr=3e-3)
        self._forward = forward

    def step(self, batch: Data) -> float:
        """Take a step and return the loss."""
        logits = self._forward(self._convs, batch)[: batch.batch_size]
        loss = F.cross_entropy(logits, batch.y[: batch.batch_size])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()


def measure(model: str, data: Data, arguments: argparse.Namespace) -> None:
    """Train all variants of a model in turn and print a table."""
    store = GraphStore.from_data(GCNNorm()(data.clone()) if model == "gcn" else data.clone())
    sampler = NeighborSampler(store, arguments.fan_out)
    seeds = torch.randperm(store.num_nodes, generator=torch.Generator().manual_seed(0))
    subgraphs = [
        sampler.sample(chosen.numpy(), key)
        for key, chosen in enumerate(seeds.split(arguments.batch_size)[: arguments.batches])
    ]
    prepare = {name: Prepare(store, BufferPool(), edge_format=name) for name in ("coo", "csc")}
    batches = {name: [stage(subgraph) for subgraph in subgraphs] for name, stage in prepare.items()}

    widths = [arguments.features, *[arguments.hidden] * (len(arguments.fan_out) - 1), int(data.y.max()) + 1]
    trainings = {name: Training(model, widths, forward) for name, (_, forward) in VARIANTS.items()}
    figures = {name: Figures() for name in VARIANTS}
    preparing: dict[str, list[float]] = {name: [] for name in prepare}
    for turn in range(arguments.rounds + 1):
        for i, subgraph in enumerate(subgraphs):
            for name, (edge_format, _) in VARIANTS.items():
                wall, cpu = time.perf_counter(), time.process_time()
                loss = trainings[name].step(batches[edge_format][i])
                if turn:  # the first round warms up
                    figures[name].wall.append(time.perf_counter() - wall)
                    figures[name].cpu.append(time.process_time() - cpu)
                figures[name].loss.append(loss)
            for name, stage in prepare.items():
                cpu = time.process_time()
                stage(subgraph)
                preparing[name].append(time.process_time() - cpu)

    nodes = median(len(subgraph.node) for subgraph in subgraphs)
    edges = median(len(subgraph.row) for subgraph in subgraphs)
    print(f"\n{model}, fan-out {arguments.fan_out}: {nodes:,.0f} nodes and {edges:,.0f} edges a batch")
    print(f"{'':<26}{'CPU, ms':>24}{'wall, ms':>24}{'CPU of coo / its':>18}")
    base = figures["coo"]
    for name, figure in figures.items():
        cells = [
            f"{median(of) * 1e3:.0f} ({min(of) * 1e3:.0f} to {max(of) * 1e3:.0f})" for of in (figure.cpu, figure.wall)
        ]
        print(f"{name:<26}{cells[0]:>24}{cells[1]:>24}{median(base.cpu) / median(figure.cpu):>18.2f}")
    apart = max(
        abs(one - other) for figure in figures.values() for one, other in zip(base.loss, figure.loss, strict=True)
    )
    print(f"losses of all variants are within {apart:.1e} of each other's")
    for name, seconds in preparing.items():
        print(f"preparing a batch in {name}, ms of CPU: {median(seconds) * 1e3:.2f}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=5_000_000, help="before duplicates are removed")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--fan-out", type=int, nargs="+", default=[15, 10])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="beside one that warms up")
    parser.add_argument("--torch-threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Measure GraphSAGE, and GCN with edge weights."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.torch_threads)
    data = synthetic_graph(arguments.nodes, arguments.edges, num_features=arguments.features)
    print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {arguments.features} features, hidden", end=" ")
    print(f"{arguments.hidden}, {arguments.batch_size} seeds, torch threads: {arguments.torch_threads}")
    print(f"median (smallest to largest) of {arguments.rounds} rounds of {arguments.batches} steps in turn")
    for model in ("sage", "gcn"):
        measure(model, data, arguments)


if __name__ == "__main__":
    main()
