"""What the caches give: hit rates and bytes of each policy at each size, and the time of an epoch.

python benchmarks/cache.py hits synthetic GRAPH.npz GRAPH.npz --png docs/cache.png --json cache.json
python benchmarks/cache.py bias
python benchmarks/cache.py time FOLDER
python benchmarks/cache.py disk FOLDER
python benchmarks/cache.py memory FOLDER

`hits`: sizes in per cent of the graph's nodes. Policies are measured in the second epoch, after the first has filled
the cache. "optimal" knows the whole epoch, "optimal, 16" sixteen batches at a time.
`bias`: the share of a batch's nodes that are held, for several `cache_bias`.
`time`: CPU ms per batch of an epoch of training batches, without any compute, for several settings in turn; and the
memory that they take.
`disk`: a graph is built in FOLDER and trained from there with less memory than its features need: as root, each run is
in a control group (version 1) whose memory, the page cache included, is limited.
`memory`: the largest private memory of runs with and without the caches.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from large_graph import watched

from lightning_mqgnn import CacheBias, FeatureCache, GraphStore, MQGNNDataModule, NeighborSampler, synthetic_graph
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.cache.budget import num_bytes
from lightning_mqgnn.cache.features import Access, AccessPlanner
from lightning_mqgnn.plan import EpochPlan

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from graphs import load_graph

SIZES = (0, 1, 2, 5, 10, 20, 30, 40, 50, 60, 80, 100)  # per cent of the nodes
BIASES = (1, 2, 5, 10, 100)
POLICIES = {"none": 0, "lru": 0, "degree": 0, "frequency": 0, "optimal, 16": 16, "optimal": 10**9}


def read_by_epochs(store: GraphStore, seeds: np.ndarray, batch_size: int, fan_out: list[int]) -> list[list[np.ndarray]]:
    """The nodes of each batch of two epochs."""
    plan = EpochPlan(len(seeds), batch_size)
    sampler = NeighborSampler(store, fan_out)
    return [
        [sampler.sample(seeds[chosen], plan.key(epoch, i)).node for i, chosen in enumerate(plan.batches(epoch, 0))]
        for epoch in range(2)
    ]


def measure_hits(arguments: argparse.Namespace) -> None:
    """Print hit rates, and write JSON and a picture."""
    results: list[dict[str, Any]] = []
    for name in arguments.graphs:
        graph = synthetic_graph(200_000, 4_000_000) if name == "synthetic" else load_graph(name)
        store = graph if isinstance(graph, GraphStore) else GraphStore.from_data(graph)
        seeds = store.node_attrs["train_mask"].nonzero().flatten().numpy()
        store = GraphStore(store.colptr, store.row, node_attrs={"x": torch.zeros(store.num_nodes, 25)})
        epochs = read_by_epochs(store, seeds, arguments.batch_size, arguments.fan_out)
        print(
            f"\n{Path(name).stem}: {store.num_nodes} nodes, {len(epochs[1])} batches, "
            f"{np.mean([len(nodes) for nodes in epochs[1]]):.0f} nodes each; hits in per cent\n"
        )
        print("| cached | " + " | ".join(POLICIES) + " |\n|" + " --- |" * (len(POLICIES) + 1))
        for percent in SIZES:
            row = []
            for policy, ahead in POLICIES.items():
                cache = FeatureCache(store, store.num_nodes * percent // 100, policy.split(",")[0])
                before = cache.report()
                for epoch, batches in enumerate(epochs):
                    before = cache.report()
                    use(cache, store, [Access(nodes, epoch) for nodes in batches], ahead)
                after = cache.report()
                accesses = after.accesses - before.accesses
                hit_rate = (after.hits - before.hits) / accesses
                record = {
                    "graph": Path(name).stem,
                    "percent": percent,
                    "policy": policy,
                    "hit_rate": hit_rate,
                    "bytes_moved": after.bytes_moved - before.bytes_moved,
                    "bytes_read": accesses * 100,
                }
                results.append(record)
                row.append(f"{100 * hit_rate:.1f}")
            print(f"| {percent} % | " + " | ".join(row) + " |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.png:
        draw(results, arguments.png)


def use(cache: FeatureCache, store: GraphStore, accesses: list[Access], ahead: int) -> None:
    """Send the accesses of an epoch through a cache, planned so many batches at a time."""
    planner, pool = AccessPlanner(store.num_nodes), BufferPool()
    for begin in range(0, len(accesses), max(ahead, 1)):
        group = accesses[begin : begin + max(ahead, 1)]
        for access in planner.plan(group) if ahead else group:
            cache.rows(access, pool)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """A panel per graph: hit rate over size, a line per policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    graphs = list(dict.fromkeys(record["graph"] for record in results))
    figure, axes = plt.subplots(1, len(graphs), figsize=(4.5 * len(graphs), 4), sharey=True, squeeze=False)
    for axis, graph in zip(axes[0], graphs, strict=True):
        for policy in POLICIES:
            of = [record for record in results if record["graph"] == graph and record["policy"] == policy]
            if policy != "none":
                axis.plot([r["percent"] for r in of], [100 * r["hit_rate"] for r in of], marker=".", label=policy)
        axis.set_title(graph)
        axis.set_xlabel("rows held, % of the nodes")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("rows that were held, % of those read")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def measure_bias(arguments: argparse.Namespace) -> None:
    """Print which share of the accesses of some batches goes to the preferred nodes, and how many nodes a batch has."""
    store = GraphStore.from_data(synthetic_graph(200_000, 4_000_000))
    plan = EpochPlan(100_000, arguments.batch_size)
    print("| cached | " + " | ".join(f"bias {bias}" for bias in BIASES) + " |\n|" + " --- |" * (len(BIASES) + 1))
    for percent in (1, 5, 10, 20):
        row = []
        for bias in BIASES:
            preferred = CacheBias(store, store.num_nodes * percent // 100, bias)
            sampler = NeighborSampler(store, arguments.fan_out, bias=preferred)
            held, asked = preferred.nodes(0), []
            for i, chosen in enumerate(plan.batches(0, 0)[: arguments.batches]):
                asked.append(sampler.sample(chosen, plan.key(0, i), epoch=0).node)
            share = np.isin(np.concatenate(asked), held).mean()
            row.append(f"{100 * share:.1f}, {np.mean([len(nodes) for nodes in asked]):.0f}")
        print(f"| {percent} % | " + " | ".join(row) + " |", flush=True)


def measure_time(arguments: argparse.Namespace) -> None:
    """Print CPU time per batch, what the subgraph cache did and the memory that it took."""
    data = synthetic_graph(500_000, 11_800_000, num_features=100)
    store = GraphStore.from_data(data)
    settings: dict[str, dict[str, Any]] = {
        "subgraph_cache=0": {"subgraph_cache": 0},
        "default": {},
        "resample_every=2": {"resample_every": 2, "subgraph_cache": "1GiB"},
        "resample_every=4": {"resample_every": 4, "subgraph_cache": "1GiB"},
        "resample_every=4, a tenth": {"resample_every": 4},
        "resample_every=4, spilled": {"resample_every": 4, "spill_path": arguments.folder},
    }
    modules = {
        name: MQGNNDataModule(store, torch.arange(102_400), num_neighbors=[15, 10], batch_size=1024, **fields)
        for name, fields in settings.items()
    }
    spent: dict[str, list[float]] = {name: [] for name in settings}
    sampling: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(arguments.epochs):
        for name, module in modules.items():
            busy = module.times().get("train", {}).get("sample", 0.0)
            began, count = time.process_time(), 0
            for _ in module.train_dataloader():
                count += 1
            spent[name].append(1e3 * (time.process_time() - began) / count)
            sampling[name].append(1e3 * (module.times()["train"]["sample"] - busy) / count)
    print("| setting | CPU ms per batch | sampling, ms per batch | subgraphs found | held, MB |\n|" + " --- |" * 5)
    for name, module in modules.items():
        counts = module.subgraph_counts()
        found = f"{counts.hits} of {counts.hits + counts.misses}" if counts else "-"
        held = f"{counts.nbytes / 1e6:.0f}" if counts else "-"
        mean_sampling = sum(sampling[name]) / len(sampling[name])
        print(f"| {name} | {median(spent[name]):.1f} | {mean_sampling:.2f} | {found} | {held} |")


def save_graph(folder: Path, num_nodes: int, num_features: int) -> Path:
    """Save a graph with half-precision features; they are written in pieces, and left out of the page cache."""
    path = folder / "cache-benchmark"
    shutil.rmtree(path, ignore_errors=True)
    data = synthetic_graph(num_nodes, 10 * num_nodes, num_features=2)
    data.x = torch.zeros(num_nodes, num_features, dtype=torch.half)
    GraphStore.from_data(data).save(path)
    x = np.load(path / "node.x.npy", mmap_mode="r+")
    generator = np.random.default_rng(0)
    for begin in range(0, num_nodes, 100_000):
        x[begin : begin + 100_000] = generator.standard_normal(x[begin : begin + 100_000].shape, np.float32)
    x.flush()
    del x
    drop_from_page_cache(path / "node.x.npy")
    return path


@contextmanager
def memory_limit(size: str) -> Iterator[Path | None]:
    """A control group with so much memory; its file of processes, None if there can't be one."""
    group = Path("/sys/fs/cgroup/memory/mqgnn-benchmark")
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(num_bytes("--memory", size, 0)))
    except OSError as error:
        print(f"no limit of memory: {error}\n")
        yield None
        return
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def train_from_disk(
    path: Path, group: Path | None, epochs: int, settings: dict[str, Any]
) -> tuple[list[float], float, Any, list[float]]:
    """Go through epochs; return seconds of each, seconds of CPU, what the cache did and MB read from the disk."""
    if group is not None:
        group.write_text(str(os.getpid()))
    num_nodes = GraphStore.open(path).num_nodes
    module = MQGNNDataModule(
        path, torch.arange(0, num_nodes, num_nodes // 10_000), num_neighbors=[15, 10], batch_size=1024, **settings
    )
    module.setup()
    seconds, read, cpu = [], [], time.process_time()
    for _ in range(epochs):
        began, before = time.perf_counter(), bytes_read()
        for _ in module.train_dataloader():
            pass
        seconds.append(time.perf_counter() - began)
        read.append((bytes_read() - before) / 1e6)
    cpu = time.process_time() - cpu
    report = module.feature_report()
    module.teardown()
    return seconds, cpu, report, read


def bytes_read() -> int:
    """Bytes that the disk gave to this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def measure_disk(arguments: argparse.Namespace) -> None:
    """Print the time and the bytes of an epoch whose features are on the disk."""
    path = save_graph(arguments.folder, arguments.nodes, arguments.features)
    size = (path / "node.x.npy").stat().st_size
    print(f"{arguments.nodes} nodes, features of {size / 1e6:.0f} MB, {arguments.memory} of memory\n")
    print("| features | s per epoch: each | CPU s per epoch | hits | MB read per epoch: each | private MiB |")
    print("|" + " --- |" * 6)
    runs: dict[str, dict[str, Any]] = {"mapped": {}}
    for policy in ("lru", "degree", "frequency", "optimal"):
        runs[policy] = {"feature_cache": arguments.budget, "feature_policy": policy, "subgraph_cache": "128MiB"}
    with memory_limit(arguments.memory) as group:
        for name, settings in runs.items():
            drop_from_page_cache(path / "node.x.npy")
            (seconds, cpu, report, read), _, private = watched(train_from_disk, path, group, arguments.epochs, settings)
            hits = f"{100 * report.hit_rate:.1f} %" if report else "-"
            each, megabytes = ", ".join(f"{s:.1f}" for s in seconds), ", ".join(f"{r:.0f}" for r in read)
            print(
                f"| {name} | {each} | {cpu / arguments.epochs:.1f} | {hits} | {megabytes} | {private / 2**20:.0f} |",
                flush=True,
            )
    shutil.rmtree(path)


def measure_memory(arguments: argparse.Namespace) -> None:
    """Print the largest private memory of runs whose budgets are given, and what it is above a run without caches."""
    path = save_graph(arguments.folder, arguments.nodes, arguments.features)
    ahead = {"subgraph_cache": "32MiB"}
    runs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "subgraph_cache": ({"subgraph_cache": 0}, {"subgraph_cache": arguments.budget, "resample_every": 4}),
        "feature_cache, degree": (ahead, {"feature_cache": arguments.budget, "feature_policy": "degree"}),
        "feature_cache, frequency": (ahead, {"feature_cache": arguments.budget, "feature_policy": "frequency"}),
        "feature_cache, lru": (ahead, {"feature_cache": arguments.budget, "feature_policy": "lru"}),
        "feature_cache, optimal": (ahead, {"feature_cache": arguments.budget}),
    }
    print(f"budget {arguments.budget}\n\n| budget of | largest private MiB without | with | more |\n|" + " --- |" * 4)
    for name, (without, settings) in runs.items():
        least, most = (
            watched(train_from_disk, path, None, arguments.epochs, {**without, **more})[2] / 2**20
            for more in ({}, settings)
        )
        print(f"| {name} | {least:.0f} | {most:.0f} | {most - least:.0f} |", flush=True)
    shutil.rmtree(path)


def drop_from_page_cache(file: Path) -> None:
    """Let the next reads come from the disk; pages that are mapped somewhere stay."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure one of the five."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(required=True)
    hits = what.add_parser("hits")
    hits.add_argument("graphs", nargs="+", help="'synthetic' or .npz files, see examples/graphs.py")
    hits.add_argument("--batch-size", type=int, default=256)
    hits.add_argument("--fan-out", type=int, nargs="+", default=[10, 10])
    hits.add_argument("--json", type=Path)
    hits.add_argument("--png", type=Path)
    hits.set_defaults(measure=measure_hits)
    bias = what.add_parser("bias")
    bias.add_argument("--batches", type=int, default=50)
    bias.add_argument("--batch-size", type=int, default=256)
    bias.add_argument("--fan-out", type=int, nargs="+", default=[10, 10])
    bias.set_defaults(measure=measure_bias)
    times = what.add_parser("time")
    times.add_argument("folder", type=Path, help="for temporary files")
    times.add_argument("--epochs", type=int, default=8)
    times.set_defaults(measure=measure_time)
    for name, measure in (("disk", measure_disk), ("memory", measure_memory)):
        disk = what.add_parser(name)
        disk.add_argument("folder", type=Path)
        disk.add_argument("--nodes", type=int, default=4_000_000)
        disk.add_argument("--features", type=int, default=512 if name == "disk" else 128)
        disk.add_argument("--budget", default="512MiB" if name == "disk" else "256MiB")
        disk.add_argument("--epochs", type=int, default=2 if name == "disk" else 4)
        disk.set_defaults(measure=measure)
        if name == "disk":
            disk.add_argument("--memory", default="3GiB", help="of each run, page cache included")
    arguments = parser.parse_args()
    arguments.measure(arguments)


if __name__ == "__main__":
    main()
