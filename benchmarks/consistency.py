"""What bounded staleness does to accuracy: `RaCoM` against lock-step (what `ddp` does), on several graphs and models.

python benchmarks/consistency.py GRAPH [GRAPH ...] --ranks 2 --models sage gcn gat --seeds 5 --json results.jsonl
python benchmarks/consistency.py --summarize results.jsonl

GRAPH is `synthetic` or the path of an .npz file, see examples/graphs.py. Ranks are real processes of one machine, one
thread each. After each epoch all windows are completed, and the common model is tested on the whole graph with all
neighbours; there is no early stopping and no choice of an epoch. Features wider than `--features` are projected to
that width by a fixed random matrix, for the sake of time, alike for all settings. `--setting` adds a setting: NAME=JSON
with the fields of `RaCoM`, or with arguments of the datamodule such as "resample_every".
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor
from torchmetrics.functional.classification import binary_auroc

from lightning_mqgnn import GraphStore, MQGNNDataModule, RaCoM, RaCoMExchange

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from graphs import load_graph
from node_classification import NodeClassifier, normalize_for_gcn

LOADING = ("resample_every", "feature_cache", "cache_bias", "redraw_every")  # arguments of the datamodule
LOCK_STEP = "lock-step"
SETTINGS: dict[str, dict[str, Any]] = {
    LOCK_STEP: {"period": 1, "max_staleness": 0},
    "default": {},
}


def all_edges(data: Data, model: str) -> Tensor:
    """The graph for a convolution over all of it: as a sparse matrix, of which PyG makes no row per edge, if it may."""
    edges: Tensor = data.edge_index
    if model != "gat":
        edges = to_torch_csr_tensor(edges.flip(0), data.edge_weight, (data.num_nodes, data.num_nodes))
    return edges


@torch.no_grad()
def test_accuracy(module: NodeClassifier, data: Data, edges: Tensor) -> float:
    """On the test nodes, with all neighbours: share that is right, or ROC AUC if there are two classes."""
    module.eval()
    x = data.x
    for i, convolution in enumerate(module.convolutions):
        x = convolution(x, edges)
        if i < len(module.convolutions) - 1:
            x = x.relu()
    module.train()
    logits, y = x[data.test_mask], data.y[data.test_mask]
    if logits.shape[1] == 2:
        return float(binary_auroc(logits[:, 1] - logits[:, 0], y))
    return float((logits.argmax(1) == y).float().mean())


def train(
    data: Data,
    edges: Tensor,
    store: GraphStore,
    model: str,
    seed: int,
    setting: dict[str, Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Train on all ranks and return the test accuracy after each epoch and what the exchange did."""
    torch.manual_seed(seed)
    module = NodeClassifier(
        model,
        in_channels=data.x.shape[1],
        hidden=arguments.hidden,
        num_classes=int(data.y.max()) + 1,
        layers=2,
        dropout=arguments.dropout,
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
    )
    optimizer = module.configure_optimizers()
    fields = {**setting}
    loading = {name: fields.pop(name) for name in LOADING if name in fields}
    datamodule = MQGNNDataModule(
        store, num_neighbors=arguments.fan_out, batch_size=arguments.batch_size, seed=seed, **loading
    )
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()
    if "exchange_dtype" in fields:
        fields["exchange_dtype"] = getattr(torch, fields["exchange_dtype"])
    settings = RaCoM(**fields)
    settings = replace(settings, warmup=settings.warmup_steps(len(loader), arguments.epochs * len(loader)))
    exchange = RaCoMExchange([optimizer], settings, dist.group.WORLD)
    torch.manual_seed(1000 * seed + dist.get_rank())  # dropout
    accuracies, deltas = [], []
    for epoch in range(arguments.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            loss: Tensor = F.cross_entropy(module(batch), batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            exchange.average_gradients([optimizer])
            exchange.before_step()
            optimizer.step()
            exchange.after_step()
        exchange.drain()
        deltas.append(exchange.statistics.delta)
        if dist.get_rank() == 0:
            accuracies.append(test_accuracy(module, data, edges))
        dist.barrier()
    statistics = exchange.statistics
    exchange.close()
    return {
        "accuracies": accuracies,
        "steps": exchange.steps,
        "period": statistics.period,
        "delta": max(deltas),
        "mean_staleness": statistics.staleness.total()
        and sum(late * count for late, count in statistics.staleness.items()) / statistics.staleness.total(),
        "megabytes": (statistics.bytes + exchange.gradients.bytes) / 1e6,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


def load(graph: str, width: int) -> Data:
    """Load a graph, with its features projected to `width` if they are wider (Johnson and Lindenstrauss, 1984)."""
    data = load_graph(graph)
    if isinstance(data, GraphStore):
        raise ValueError(f"GRAPH={graph}: is a saved store; give 'synthetic' or an .npz file")
    if data.x.shape[1] > width:
        generator = torch.Generator().manual_seed(0)
        data.x = data.x @ (torch.randn(data.x.shape[1], width, generator=generator) / width**0.5)
    return data


def run_rank(rank: int, arguments: argparse.Namespace, rendezvous: str) -> None:
    """Run everything in turn on one rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=arguments.ranks)
    settings = {**SETTINGS, **dict(arguments.setting)}
    for graph in arguments.graphs:
        plain = load(graph, arguments.features)
        for model in arguments.models:
            data = normalize_for_gcn(plain.clone()) if model == "gcn" else plain
            store, edges = GraphStore.from_data(data), all_edges(data, model)
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                for name in arguments.only or settings:
                    record = train(data, edges, store, model, seed, settings[name], arguments)
                    if rank == 0:
                        place = {"graph": Path(graph).stem, "model": model, "ranks": arguments.ranks, "seed": seed}
                        with arguments.json.open("a") as file:
                            file.write(json.dumps({**place, "setting": name, **record}) + "\n")
                        print(*place.values(), name, *(f"{a:.3f}" for a in record["accuracies"]), flush=True)
    dist.destroy_process_group()


def epochs_to(accuracies: list[float], goal: float) -> float:
    """Epochs until the accuracy first reached `goal`, between two by linear interpolation."""
    before = 0.0
    for epoch, accuracy in enumerate(accuracies):
        if accuracy >= goal:
            return epoch + (goal - before) / max(accuracy - before, 1e-9)
        before = accuracy
    return float("inf")


def summarize(path: Path) -> None:
    """Print a table from the results: each setting beside lock-step."""
    runs: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        record = json.loads(line)
        runs[record["ranks"], record["graph"], record["model"]][record["setting"]].append(record)
    print(
        "| graph | model | ranks | seeds | setting | accuracy, lock-step | accuracy | epochs, lock-step | epochs "
        "| period | staleness | delta | MB, lock-step | MB |"
    )
    print("|" + " --- |" * 14)
    for (ranks, graph, model), settings in runs.items():
        reference = settings.pop(LOCK_STEP)
        goal = 0.95 * mean(record["accuracies"][-1] for record in reference)
        for setting, records in settings.items():
            cells = [
                *(_spread([r["accuracies"][-1] for r in of]) for of in (reference, records)),
                *(f"{mean(epochs_to(r['accuracies'], goal) for r in of):.1f}" for of in (reference, records)),
                f"{mean(r['period'] for r in records):.3g}" if any(r["period"] for r in records) else "drains",
                f"{mean(r['mean_staleness'] for r in records):.1f}",
                f"{mean(r['delta'] for r in records):.3f}" if any(r["period"] for r in records) else "",
                *(f"{mean(r['megabytes'] for r in of):.1f}" for of in (reference, records)),
            ]
            print(f"| {graph} | {model} | {ranks} | {len(records)} | {setting} | " + " | ".join(cells) + " |")


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def parse_setting(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON."""
    name, _, fields = text.partition("=")
    return name, json.loads(fields)


def main() -> None:
    """Run, or summarize what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["sage", "gcn", "gat"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--fan-out", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--setting", type=parse_setting, action="append", default=[], help="NAME=JSON")
    parser.add_argument("--only", nargs="+", help="names of the settings to run")
    parser.add_argument("--json", type=Path, default=Path("consistency.jsonl"))
    parser.add_argument("--summarize", type=Path)
    arguments = parser.parse_args()
    if arguments.summarize:
        summarize(arguments.summarize)
        return
    rendezvous = arguments.json.resolve().with_suffix(".rendezvous")
    rendezvous.unlink(missing_ok=True)
    spawn(run_rank, (arguments, str(rendezvous)), nprocs=arguments.ranks)
    rendezvous.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
