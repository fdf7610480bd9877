"""What a ready batch costs: our loader, PyG's where its compiled samplers are installed, and the limit of the memory.

python benchmarks/loader.py                        # 500k nodes, 12.9M edges, 100 features, fan-out 15 10
python benchmarks/loader.py --fan-out 10 10 10
python benchmarks/loader.py --nodes 20000 --edges 300000 --batches 5 --rounds 2   # a quick look

A round runs all loaders in turn, so that a slow moment of the machine hits them alike. CPU time is that of the process
and its workers; wall time is what a consumer that does nothing else sees. The limit is what the batch must touch, at
the speed that this machine was measured to read random rows, read random cache lines, and write, in one thread.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from lightning_mqgnn import GraphStore, MQGNNDataModule, NeighborSampler, synthetic_graph
from lightning_mqgnn.compiled import prefetch
from lightning_mqgnn.graph.memory import use_huge_pages

_WARM_UP = 4  # batches before the clock starts


@dataclass
class Figures:
    """Milliseconds per batch, one number per round."""

    wall: list[float]
    cpu: list[float]


def ours(store: GraphStore, seeds: torch.Tensor, arguments: argparse.Namespace, threads: int) -> Iterator[Data]:
    """Our batches, with `threads` threads beside the consumer's (2: one samples, one prepares)."""
    datamodule = MQGNNDataModule(
        store,
        input_train_nodes=seeds,
        num_neighbors=arguments.fan_out,
        batch_size=arguments.batch_size,
        sampling_threads=1 if threads == 2 else 0,
        prepare_threads=min(threads, 1),
    )
    datamodule.setup("fit")
    return iter(datamodule.train_dataloader())


def pygs(data: Data, seeds: torch.Tensor, arguments: argparse.Namespace, workers: int) -> Iterator[Data]:
    """PyG's batches."""
    loader = NeighborLoader(
        data,
        num_neighbors=arguments.fan_out,
        batch_size=arguments.batch_size,
        input_nodes=seeds,
        shuffle=True,
        num_workers=workers,
    )
    return iter(loader)


def cpu_seconds() -> float:
    """CPU time of this process, all its threads, and its live children."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(batches: Iterator[Data], count: int) -> tuple[float, float]:
    """Wall and CPU milliseconds per batch."""
    batch = None
    for _ in range(_WARM_UP):
        batch = next(batches)
    wall, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        batch = next(batches)
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    del batch
    return wall / count * 1e3, cpu / count * 1e3


def _read_lines(flat: np.ndarray, index: np.ndarray) -> Any:
    """Read the first word of each cache line of 64-bit words."""
    total = np.uint64(0)
    for i in range(len(index)):
        if i + 32 < len(index):
            prefetch(flat, np.int64(index[i + 32]) * 8)
        total ^= flat[np.int64(index[i]) * 8]
    return total


def _read_rows(source: np.ndarray, index: np.ndarray) -> Any:
    """Read rows of 64-bit words and do nothing with them."""
    width = np.uint64(source.shape[1])
    flat = source.reshape(-1)
    total = np.uint64(0)
    for i in range(len(index)):
        if i + 16 < len(index):
            ahead = np.uint64(index[i + 16]) * width
            for j in range(np.uint64(0), width, np.uint64(8)):
                prefetch(flat, ahead + j)
        begin = np.uint64(index[i]) * width
        for j in range(width):
            total ^= flat[begin + j]
    return total


read_lines: Any = numba.njit(nogil=True)(_read_lines)
read_rows: Any = numba.njit(nogil=True)(_read_rows)


def best_of(function: Callable[..., Any], *arguments: np.ndarray) -> float:
    """Seconds of CPU of the fastest of some calls."""
    function(*arguments)
    seconds = []
    for _ in range(7):
        began = time.thread_time()
        function(*arguments)
        seconds.append(time.thread_time() - began)
    return min(seconds)


def distinct_lines(index: np.ndarray, itemsize: int) -> int:
    """How many cache lines the entries of an array at `index` lie in."""
    return len(np.unique(index.astype(np.int64) * itemsize // 64))


def limit(store: GraphStore, seeds: torch.Tensor, arguments: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Milliseconds that the memory needs for a batch, and the speeds that went into it."""
    blocks = [
        NeighborSampler(store, arguments.fan_out).sample(chosen.numpy(), key)
        for key, chosen in enumerate(seeds.split(arguments.batch_size)[:3])
    ]
    nodes = sum(len(block.node) for block in blocks) // len(blocks)
    edges = sum(len(block.row) for block in blocks) // len(blocks)
    lines = (
        sum(
            2 * distinct_lines(block.position, 4)  # row and edge_id
            + 2 * distinct_lines(block.node, 8)  # the table and y
            + distinct_lines(block.node[: len(block.colptr) - 1], 4)  # colptr
            for block in blocks
        )
        // len(blocks)
    )
    generator = np.random.default_rng(0)
    x = store.node_attrs["x"]
    row_bytes = x[0].nbytes
    chosen = generator.choice(store.num_nodes, nodes, replace=False).astype(np.int32)
    seconds_per_row = best_of(read_rows, x.numpy().view(np.uint64), chosen) / nodes
    array = np.ones(max(store.row.nbytes // 64, 1) * 8, np.uint64)
    use_huge_pages(torch.from_numpy(array))
    some = generator.integers(len(array) // 8, size=lines).astype(np.int32)
    seconds_per_line = best_of(read_lines, array, some) / lines
    out = np.empty(nodes * row_bytes, np.uint8)
    seconds_per_byte = best_of(lambda array: array.fill(0), out) / out.nbytes
    written = nodes * (row_bytes + 8 + 8) + edges * (16 + 8)  # x, y, n_id; edge_index, e_id
    seconds = nodes * seconds_per_row + lines * seconds_per_line + written * seconds_per_byte
    return seconds * 1e3, {
        "nodes per batch": nodes,
        "edges per batch": edges,
        "other cache lines per batch": lines,
        "random rows, GB/s": row_bytes / seconds_per_row / 1e9,
        "random cache lines, GB/s": 64 / seconds_per_line / 1e9,
        "writing, GB/s": 1 / seconds_per_byte / 1e9,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=13_300_000, help="before duplicates are removed")
    parser.add_argument("--features", type=int, default=100, help="even; float32")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[15, 10])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=20, help="per loader and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    """Measure and print a table."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # more make PyG's gathering slower here, and leave the CPU time of workers unclear
    data = synthetic_graph(arguments.nodes, arguments.edges, num_features=arguments.features)
    for split in ("train", "val", "test"):
        del data[f"{split}_mask"]
    store = GraphStore.from_data(data.clone())
    count = (arguments.batches + _WARM_UP) * arguments.batch_size
    seeds = torch.randperm(arguments.nodes, generator=torch.Generator().manual_seed(0))[:count]
    makers: dict[str, Callable[[], Iterator[Data]]] = {
        "ours, 0 threads": lambda: ours(store, seeds, arguments, 0),
        "ours, 1 thread": lambda: ours(store, seeds, arguments, 1),
        "ours, 2 threads": lambda: ours(store, seeds, arguments, 2),
    }
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        backend = "pyg-lib" if WITH_PYG_LIB else "torch-sparse"
        makers[f"PyG ({backend}), 0 workers"] = lambda: pygs(data, seeds, arguments, 0)
        makers[f"PyG ({backend}), 2 workers"] = lambda: pygs(data, seeds, arguments, 2)
    else:
        print("PyG's NeighborLoader needs pyg-lib or torch-sparse, which is not installed: only ours is measured.")
    figures = {name: Figures([], []) for name in makers}
    for _ in range(arguments.rounds):
        for name, make in makers.items():
            wall, cpu = measure(make(), arguments.batches)
            figures[name].wall.append(wall)
            figures[name].cpu.append(cpu)
    limit_ms, speeds = limit(store, seeds, arguments)

    print(f"{store}\nfan-out {arguments.fan_out}, {arguments.batch_size} seeds a batch; {arguments.rounds} rounds of")
    print(f"{arguments.batches} batches in turn; ms per batch: median (smallest to largest)\n")
    print(f"{'':<30}{'CPU':>24}{'wall':>24}{'CPU / limit':>13}")
    for name, figure in figures.items():
        cells = [f"{median(of):.1f} ({min(of):.1f} to {max(of):.1f})" for of in (figure.cpu, figure.wall)]
        print(f"{name:<30}{cells[0]:>24}{cells[1]:>24}{median(figure.cpu) / limit_ms:>13.2f}")
    print(f"{'limit of the memory':<30}{limit_ms:>24.1f}\n")
    for name, value in speeds.items():
        print(f"{name:<30}{value:>24,.1f}")
    if arguments.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        results = {name: vars(figure) for name, figure in figures.items()}
        arguments.json.write_text(
            json.dumps({"settings": settings, "ms_per_batch": results, "limit_ms": limit_ms, **speeds}, indent=1)
        )


if __name__ == "__main__":
    main()
