"""What a ready batch costs: our loader, PyG's where its compiled samplers are installed, and the limit of the memory.

python benchmarks/loader.py                        # 500k nodes, 12.9M edges, 100 features, fan-out 15 10
python benchmarks/loader.py --fan-out 10 10 10
python benchmarks/loader.py --nodes 20000 --edges 300000 --batches 5 --rounds 2   # a quick look

A round runs all loaders in turn, so that a slow moment of the machine hits them alike. CPU time is that of the process
and its workers; wall time is what a consumer that does nothing else sees. The limit of the memory is measured
before each turn: a thread that touches, batch by batch, the memory that our batches touch, and does nothing else.
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
from lightning_mqgnn.sampling import SampledSubgraph

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
            prefetch(flat, np.uint64(index[i + 32]) * np.uint64(8))
        total ^= flat[np.uint64(index[i]) * np.uint64(8)]
    return total


def _read_rows(source: np.ndarray, index: np.ndarray) -> Any:
    """Read rows of 64-bit words and do nothing with them."""
    width = np.uint64(source.shape[1])
    flat = source.reshape(-1)
    total = np.uint64(0)
    for i in range(np.uint64(len(index))):
        if i + np.uint64(16) < np.uint64(len(index)):
            ahead = np.uint64(index[i + np.uint64(16)]) * width
            for j in range(np.uint64(0), width, np.uint64(8)):
                prefetch(flat, ahead + j)
        begin = np.uint64(index[i]) * width
        for j in range(width):
            total ^= flat[begin + j]
    return total


read_lines: Any = numba.njit(nogil=True)(_read_lines)
read_rows: Any = numba.njit(nogil=True)(_read_rows)


class Limit:
    """Touches what the batches of a pass touch, where they touch it, once, and does nothing else.

    That is: each feature row, and each other distinct cache line in the order in which it is needed first, read; and as
    many bytes as a batch has, written.
    """

    def __init__(self, store: GraphStore, blocks: list[SampledSubgraph]) -> None:
        assert store.edge_id is not None
        self._blocks = blocks
        self._x = store.node_attrs["x"].numpy().view(np.uint64)
        table = np.zeros(store.num_nodes, np.int64)
        arrays = (store.colptr.numpy(), store.row.numpy(), table, store.edge_id.numpy(), store.node_attrs["y"].numpy())
        self._arrays = [array.view(np.uint8)[: array.nbytes // 64 * 64].view(np.uint64) for array in arrays]
        self._lines = []
        for block in blocks:
            targets = block.node[: len(block.colptr) - 1]
            touched = (targets, block.position, block.node, block.position, block.node)
            pairs = zip(touched, arrays, strict=True)
            self._lines.append([_lines(index, array) for index, array in pairs])
        row_bytes = self._x.shape[1] * 8
        self._bytes = [  # x, y and n_id; edge_index and e_id
            len(block.node) * (row_bytes + 8 + 8) + len(block.row) * (16 + 8) for block in blocks
        ]
        self._out = [np.zeros(max(self._bytes), np.uint8) for _ in range(4)]  # in turn, as a loader's buffers

    def measure(self) -> tuple[float, float, float]:
        """Milliseconds of CPU per batch for rows, for other cache lines, and for what is written."""
        seconds = np.zeros(3)
        for i, block in enumerate(self._blocks):
            times = [time.thread_time()]
            read_rows(self._x, block.node)
            times.append(time.thread_time())
            for array, lines in zip(self._arrays, self._lines[i], strict=True):
                read_lines(array, lines)
            times.append(time.thread_time())
            self._out[i % len(self._out)][: self._bytes[i]].fill(i)
            times.append(time.thread_time())
            seconds += np.diff(times)
        rows, lines, written = (seconds / len(self._blocks) * 1e3).tolist()
        return rows, lines, written

    def sizes(self) -> dict[str, float]:
        """What a batch touches."""
        count = len(self._blocks)
        nodes = sum(len(block.node) for block in self._blocks) / count
        return {
            "nodes per batch": nodes,
            "edges per batch": sum(len(block.row) for block in self._blocks) / count,
            "MB of rows": nodes * self._x.shape[1] * 8 / 1e6,
            "MB of other cache lines": sum(len(part) for parts in self._lines for part in parts) * 64 / count / 1e6,
            "MB written": sum(self._bytes) / count / 1e6,
        }


def _lines(index: np.ndarray, array: np.ndarray) -> np.ndarray:
    """The distinct whole cache lines in which `array[index]` lies, in the order of their first use."""
    lines = index.astype(np.int64) * array.itemsize // 64
    distinct, first = np.unique(lines, return_index=True)
    distinct = distinct[np.argsort(first)]
    return distinct[distinct < array.nbytes // 64].astype(np.int32)


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
    sampler = NeighborSampler(store, arguments.fan_out)
    chosen = seeds[: arguments.batches * arguments.batch_size].split(arguments.batch_size)
    limit = Limit(store, [sampler.sample(some.numpy(), key) for key, some in enumerate(chosen)])
    limit.measure()  # compiles
    touching: dict[str, list[tuple[float, float, float]]] = {name: [] for name in makers}
    figures = {name: Figures([], []) for name in makers}
    for _ in range(arguments.rounds):
        for name, make in makers.items():
            touching[name].append(limit.measure())
            wall, cpu = measure(make(), arguments.batches)
            figures[name].wall.append(wall)
            figures[name].cpu.append(cpu)

    all_touching = [parts for of in touching.values() for parts in of]
    limit_ms = [*map(sum, all_touching)]
    ratios = {
        name: median(cpu / sum(touch) for cpu, touch in zip(of.cpu, touching[name], strict=True))
        for name, of in figures.items()
    }
    print(f"{store}\nfan-out {arguments.fan_out}, {arguments.batch_size} seeds a batch; {arguments.rounds} rounds of")
    print(f"{arguments.batches} batches in turn; ms per batch: median (smallest to largest)\n")
    print(f"{'':<30}{'CPU':>24}{'wall':>24}{'CPU / limit':>13}")
    for name, figure in figures.items():
        print(f"{name:<30}{_spread(figure.cpu):>24}{_spread(figure.wall):>24}{ratios[name]:>13.2f}")
    print(f"{'limit of the memory':<30}{_spread(limit_ms):>24}\n")
    sizes = limit.sizes()
    for name, parts in zip(("rows", "other cache lines", "writing"), zip(*all_touching, strict=True), strict=True):
        sizes[f"ms, {name}"] = median(parts)
    for name, value in sizes.items():
        print(f"{name:<30}{value:>24,.1f}")
    if arguments.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
        results = {name: vars(figure) for name, figure in figures.items()}
        arguments.json.write_text(
            json.dumps(
                {
                    "settings": settings,
                    "ms_per_batch": results,
                    "cpu / limit": ratios,
                    "limit, ms": touching,
                    **sizes,
                },
                indent=1,
            )
        )


def _spread(values: list[float]) -> str:
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
