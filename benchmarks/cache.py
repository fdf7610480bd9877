"""What the caches give: hit rates and bytes of each policy at each size, and the time of an epoch.

python benchmarks/cache.py hits synthetic GRAPH.npz GRAPH.npz --png docs/cache.png --json cache.json
python benchmarks/cache.py time
python benchmarks/cache.py disk FOLDER

`hits`: sizes in per cent of the graph's nodes. Policies are measured in the second epoch, after the first has filled
the cache. "optimal" knows the whole epoch, "optimal, 16" sixteen batches at a time.
`time`: CPU ms per batch of an epoch of training batches, without any compute, for several settings in turn; and the
memory that they take.
`disk`: a graph is built in FOLDER, whose features are dropped from the page cache before each epoch.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from large_graph import private_bytes

from lightning_mqgnn import FeatureCache, GraphStore, MQGNNDataModule, NeighborSampler, synthetic_graph
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.cache.features import Access, AccessPlanner
from lightning_mqgnn.plan import EpochPlan

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from graphs import load_graph

SIZES = (0, 1, 2, 5, 10, 20, 30, 40, 50, 60, 80, 100)  # per cent of the nodes
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


def measure_disk(arguments: argparse.Namespace) -> None:
    """Print the time and the bytes of an epoch whose features are on the disk."""
    folder = arguments.folder / "cache-benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    data = synthetic_graph(arguments.nodes, 10 * arguments.nodes, num_features=2)
    data.x = torch.randn(arguments.nodes, 128, generator=generator).half()
    GraphStore.from_data(data).save(folder)
    del data
    gc.collect()
    size = (folder / "node.x.npy").stat().st_size
    print(f"{arguments.nodes} nodes, features of {size / 1e6:.0f} MB, cache of {arguments.budget}\n")
    print("| policy | s per epoch: each | hits | MB read | private MiB |\n|" + " --- |" * 5)
    for policy in ("none", "lru", "degree", "frequency", "optimal"):
        module = MQGNNDataModule(
            folder,
            torch.arange(0, arguments.nodes, arguments.nodes // 50_000),
            num_neighbors=[15, 10],
            batch_size=1024,
            feature_cache=arguments.budget,
            feature_policy=policy,
            subgraph_cache="128MiB",
        )
        module.setup()
        seconds = []
        for _ in range(arguments.epochs):
            drop_from_page_cache(folder / "node.x.npy")
            began = time.perf_counter()
            for _ in module.train_dataloader():
                pass
            seconds.append(time.perf_counter() - began)
        report = module.feature_report()
        hits = f"{100 * report.hit_rate:.1f} %" if report else "-"
        moved = f"{report.bytes_moved / 1e6:.0f}" if report else "-"
        private = private_bytes(os.getpid()) / 2**20
        print(f"| {policy} | {', '.join(f'{s:.1f}' for s in seconds)} | {hits} | {moved} | {private:.0f} |", flush=True)
        module.teardown()
        del module
        gc.collect()
    shutil.rmtree(folder)


def drop_from_page_cache(file: Path) -> None:
    """Let the next reads come from the disk; pages that are mapped somewhere stay."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measure one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(required=True)
    hits = what.add_parser("hits")
    hits.add_argument("graphs", nargs="+", help="'synthetic' or .npz files, see examples/graphs.py")
    hits.add_argument("--batch-size", type=int, default=256)
    hits.add_argument("--fan-out", type=int, nargs="+", default=[10, 10])
    hits.add_argument("--json", type=Path)
    hits.add_argument("--png", type=Path)
    hits.set_defaults(measure=measure_hits)
    times = what.add_parser("time")
    times.add_argument("--epochs", type=int, default=8)
    times.set_defaults(measure=measure_time)
    disk = what.add_parser("disk")
    disk.add_argument("folder", type=Path)
    disk.add_argument("--nodes", type=int, default=4_000_000)
    disk.add_argument("--budget", default="256MiB")
    disk.add_argument("--epochs", type=int, default=2)
    disk.set_defaults(measure=measure_disk)
    arguments = parser.parse_args()
    arguments.measure(arguments)


if __name__ == "__main__":
    main()
