"""What it costs to change 1 % of a graph's edges and feature rows, in proportion to building it anew.

python benchmarks/update.py FOLDER                                # 500k nodes, 12.9M edges, 100 features
python benchmarks/update.py FOLDER --nodes 20000 --edges 300000   # a quick look

The edges come in random order. Half of the changed ones are removed, the others added. A graph in memory is compared
with `from_data`, one that is mapped from a folder with `build_store`. Builds and updates take turns, so that a slow
moment of the machine hits them alike. The first change of rows stands apart: it copies the features of a graph in
memory. The kernels are compiled before.
"""

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore, synthetic_graph
from lightning_mqgnn.graph import build_store


def make_graph(num_nodes: int, num_edges: int, num_features: int) -> Data:
    """A synthetic graph whose edges are in random order."""
    data = synthetic_graph(num_nodes, num_edges, num_features=num_features)
    order = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(0))
    data.edge_index = data.edge_index[:, order]
    return data


def other_edges(store: GraphStore, share: float, generator: np.random.Generator) -> dict[str, Any]:
    """Arguments of an update that removes and adds edges, in equal parts."""
    count = int(store.num_edges * share / 2)
    places = generator.choice(store.num_edges, count, replace=False)
    destinations = np.searchsorted(store.colptr.numpy(), places, side="right") - 1
    return {
        "edges_removed": np.stack([store.row.numpy()[places], destinations]),
        "edges_added": generator.integers(store.num_nodes, size=(2, count)),
    }


def other_rows(store: GraphStore, share: float, generator: np.random.Generator) -> dict[str, Any]:
    """Arguments of an update that changes rows of `x`."""
    nodes = generator.choice(store.num_nodes, int(store.num_nodes * share), replace=False)
    rows = generator.standard_normal((len(nodes), store.node_attrs["x"].shape[1]), np.float32)
    return {"features": {"x": (nodes, rows)}}


def seconds(function: Callable[..., Any], **arguments: Any) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    function(**arguments)
    return time.perf_counter() - began


@dataclass
class Figures:
    """Seconds, one number per round."""

    build: list[float] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)


def measure(build: Callable[[], GraphStore], rounds: int, share: float) -> tuple[Figures, float]:
    """Times of builds and of updates, and of the first change of rows."""
    generator = np.random.default_rng(0)
    store = build()
    first = seconds(store.update, **other_rows(store, share, generator))
    figures = Figures()
    for _ in range(rounds):
        edges, rows = other_edges(store, share, generator), other_rows(store, share, generator)
        figures.edges.append(seconds(store.update, **edges))
        figures.rows.append(seconds(store.update, **rows))
        edges, rows = other_edges(store, share, generator), other_rows(store, share, generator)
        figures.both.append(seconds(store.update, **edges, **rows))
        figures.build.append(seconds(build))
    return figures, first


def print_row(name: str, times: list[float], build: list[float]) -> None:
    """Print milliseconds, and the median as a part of that of the builds."""
    spread = f"{min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms"
    print(f"| {name} | {median(times) * 1e3:.0f} ms | {spread} | {median(times) / median(build):.1%} |", flush=True)


def main() -> None:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the files, which are removed in the end; on the disk to measure")
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=13_300_000, help="before duplicates are removed")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.01, help="of the edges and of the rows that change")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    small = GraphStore.from_data(make_graph(1000, 10_000, 4))
    small.update(**other_edges(small, 0.1, np.random.default_rng(0)))  # compiles the kernels

    data = make_graph(arguments.nodes, arguments.edges, arguments.features)
    files = arguments.folder / "update-benchmark"
    files.mkdir(parents=True)
    try:
        np.save(files / "edges.npy", data.edge_index.numpy())
        np.save(files / "x.npy", data.x.numpy())

        def build_in_folder() -> GraphStore:
            shutil.rmtree(files / "graph", ignore_errors=True)  # those who have mapped it keep it
            return build_store(files / "graph", [files / "edges.npy"], node_attrs={"x": files / "x.npy"})

        print(f"{data.num_nodes:,} nodes, {data.num_edges:,} edges; {arguments.share:.1%} of them changed\n")
        print("| | median | smallest to largest | of the build |")
        print("| --- | --- | --- | --- |")
        for kind, build in (("from_data", lambda: GraphStore.from_data(data)), ("build_store", build_in_folder)):
            figures, first = measure(build, arguments.rounds, arguments.share)
            print_row(f"`{kind}`", figures.build, figures.build)
            print_row("edges", figures.edges, figures.build)
            print_row("rows", figures.rows, figures.build)
            print_row("edges and rows", figures.both, figures.build)
            print_row("rows, for the first time", [first], figures.build)
    finally:
        shutil.rmtree(files)


if __name__ == "__main__":
    main()
