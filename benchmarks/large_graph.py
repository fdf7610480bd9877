"""Graphs from 10^5 to 10^8 edges: built in pieces, trained from the mapped files; what memory and time that takes.

python benchmarks/large_graph.py FOLDER                  # up to 10M nodes, 100M edges, 128 half-precision features
python benchmarks/large_graph.py FOLDER --edges 100000 1000000 --plot cost.png

Needs some 10 GB of disk for the largest size. Memory is what the process alone holds (anonymous), polled.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_mqgnn import GraphStore, MQGNNDataModule
from lightning_mqgnn.graph import build_store

_EDGES_PER_NODE = 10
_PIECE = 10_000_000  # edges a file
_FAN_OUT = [10, 10]
_SEEDS = 1024
_WARM_UP = 50  # batches: the first touch of a mapped page costs more than a miss of the cache
_BATCHES = 30


def private_bytes(pid: int) -> int:
    """What a process alone has in memory, without what it could read again from files."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous"))


def watched(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float, int]:
    """Run a function in a new process; return its result, its seconds, and its largest private memory in bytes."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_put_result, args=(results, function, *arguments))
    process.start()
    assert process.pid is not None
    largest = 0
    while results.empty() and process.is_alive():
        largest = max(largest, private_bytes(process.pid))
        process.join(0.05)
    result, seconds = results.get()
    process.join()
    return result, seconds, largest


def _put_result(results: Any, function: Callable[..., Any], *arguments: Any) -> None:
    began = time.perf_counter()
    result = function(*arguments)
    results.put((result, time.perf_counter() - began))


def write_files(folder: Path, num_edges: int, num_features: int) -> None:
    """Write uniformly random edges, in pieces, and features and labels."""
    generator = np.random.default_rng(0)
    num_nodes = num_edges // _EDGES_PER_NODE
    for i, begin in enumerate(range(0, num_edges, _PIECE)):
        shape = 2, min(_PIECE, num_edges - begin)
        np.save(folder / f"edges-{i}.npy", generator.integers(num_nodes, size=shape, dtype=np.int32))
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float16, (num_nodes, num_features))
    for begin in range(0, num_nodes, 100_000):
        rows = x[begin : begin + 100_000]
        rows[:] = generator.standard_normal(rows.shape, np.float32)
    np.save(folder / "y.npy", generator.integers(0, 8, num_nodes))


def build(folder: Path) -> None:
    """Build the graph from its files."""
    build_store(
        folder / "graph",
        sorted(folder.glob("edges-*.npy")),
        node_attrs={"x": folder / "x.npy", "y": folder / "y.npy"},
        memory_bytes=2**29,
    )


def train(folder: Path) -> dict[str, float]:
    """Train a linear model on sampled batches; return the CPU time of sampling and preparing them."""
    torch.set_num_threads(1)
    store = GraphStore.open(folder / "graph")
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randperm(store.num_nodes, generator=generator)[: _SEEDS * (_WARM_UP + _BATCHES)]
    datamodule = MQGNNDataModule(
        store, seeds, num_neighbors=_FAN_OUT, batch_size=_SEEDS, sampling_threads=0, prepare_threads=0
    )
    datamodule.setup("fit")
    weight = torch.zeros(store.node_attrs["x"].shape[1], 8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    seeds_used, edges, nodes, began = 0, 0, 0, datamodule.times()
    epochs = (datamodule.train_dataloader() for _ in range(_WARM_UP + _BATCHES))
    for i, batch in enumerate(islice(chain.from_iterable(epochs), _WARM_UP + _BATCHES)):
        logits = batch.x.float()[: batch.batch_size] @ weight
        loss = torch.nn.functional.cross_entropy(logits, batch.y[: batch.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i == _WARM_UP - 1:
            began = datamodule.times()
        if i >= _WARM_UP:
            seeds_used += batch.batch_size
            edges += batch.num_edges
            nodes += batch.num_nodes
    ended = datamodule.times()
    sampling, preparing = (ended["train"][stage] - began["train"][stage] for stage in ("sample", "prepare"))
    return {
        "us_per_seed": (sampling + preparing) / seeds_used * 1e6,
        "edges_per_seed": edges / seeds_used,
        "nodes_per_seed": nodes / seeds_used,
        "ns_per_sampled_edge": sampling / edges * 1e9,
        "ns_per_gathered_row": preparing / nodes * 1e9,
    }


def plot(rows: list[dict[str, float]], file: Path) -> None:
    """Draw the costs over the number of edges."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    sizes = [row["edges"] for row in rows]
    for cost, label in (("ns_per_sampled_edge", "sample: per edge"), ("ns_per_gathered_row", "prepare: per node")):
        axes.plot(sizes, [row[cost] for row in rows], marker="o", label=label)
    axes.set(xscale="log", xlabel="edges of the graph", ylabel="ns, one thread", ylim=(0, None))
    axes.set_title("Cost of sampling an edge and preparing a node", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Go through the sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the files; each size is removed when it is done")
    parser.add_argument("--edges", type=int, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG; needs matplotlib")
    arguments = parser.parse_args()
    columns = ("edges", "build: s", "MiB", "train: MiB", "µs a seed", "ns an edge", "ns a row")
    print("".join(f"{column:>13}" for column in columns))
    rows = []
    for num_edges in arguments.edges:
        folder = arguments.folder / f"{num_edges}-{os.getpid()}"
        folder.mkdir(parents=True)
        try:
            write_files(folder, num_edges, arguments.features)
            _, build_s, build_memory = watched(build, folder)
            train(folder)  # the kernels are compiled, and the files in the page cache as far as they fit
            cost, _, train_memory = watched(train, folder)
        finally:
            shutil.rmtree(folder)
        row = {"edges": num_edges, "build_s": build_s, "build_bytes": build_memory, "train_bytes": train_memory, **cost}
        rows.append(row)
        memory = f"{build_memory / 2**20:>13.0f}{train_memory / 2**20:>13.0f}"
        costs = "".join(f"{cost[key]:>13.1f}" for key in ("us_per_seed", "ns_per_sampled_edge", "ns_per_gathered_row"))
        print(f"{num_edges:>13,}{build_s:>13.1f}{memory}{costs}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
