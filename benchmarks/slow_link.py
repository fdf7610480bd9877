"""`ddp` and `mqgnn` between hosts with a slow network: network namespaces joined by rate-limited links.

python benchmarks/slow_link.py --rates 10 100 1000 0 --parameters 1 4      # as root, with iproute2

Each host is a namespace of its own with one rank in it, gloo over its link, started by Lightning's environment
variables as on a cluster. A token bucket (`tc tbf`) limits each link in both directions; 0 is no limit. An epoch is
timed from its first batch until all ranks have the same model for the validation, so what an asynchronous exchange has
still to do counts. Bytes are those that left a host, by its interface's counter. The namespaces are removed at the end.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

_COUNTER = Path("/sys/class/net/wire/statistics/tx_bytes")
_NETWORK = "10.203.17"


@contextmanager
def hosts(count: int, rate: int) -> Iterator[list[str]]:
    """Make `count` namespaces behind a bridge, with links of `rate` Mbit/s (0: unlimited); yield their names."""
    prefix, bridge = f"mqgnn-{os.getpid()}", f"mq{os.getpid()}"
    with ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("link", "set", bridge, "up")
        names = [f"{prefix}-{i}" for i in range(count)]
        for i, name in enumerate(names):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", f"{bridge}h{i}", "type", "veth", "peer", "name", "wire", "netns", name)
            undo.callback(ip, "link", "del", f"{bridge}h{i}")  # both ends
            ip("link", "set", f"{bridge}h{i}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{_NETWORK}.{i + 1}/24", "dev", "wire")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "wire", "up")
            if rate:
                # Enough for 10 ms at once, and never less than a large packet.
                bucket = ["tbf", "rate", f"{rate}mbit", "burst", str(max(rate * 1250, 70_000)), "latency", "100ms"]
                command("tc", "qdisc", "add", "dev", f"{bridge}h{i}", "root", *bucket)
                command("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", *bucket)
        yield names


def ip(*arguments: str) -> None:
    """Run `ip`."""
    command("ip", *arguments)


def command(*arguments: str) -> None:
    """Run a command, and raise with what it said if it fails."""
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")


def run(names: list[str], settings: dict[str, Any]) -> dict[str, Any]:
    """Train with a rank on each host and return what rank 0 measured."""
    environment = {
        **os.environ,
        "MASTER_ADDR": f"{_NETWORK}.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "wire",
        "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "0",
    }
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, __file__, "--train", json.dumps(settings)],
            env={**environment, "NODE_RANK": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(names)
    ]
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for i, process in enumerate(processes):
        if process.returncode:
            raise RuntimeError(f"rank {i} ended with {process.returncode}:\n{said[i][1][-4000:]}")
    result: dict[str, Any] = json.loads(said[0][0].splitlines()[-1])
    return result


def train(settings: dict[str, Any]) -> None:
    """Be one rank. A small GraphSAGE, with most parameters in dense layers behind it, so that a step takes little."""
    import lightning as L
    import torch
    import torch.nn.functional as F
    from torch_geometric.nn import SAGEConv
    from torchmetrics.classification import MulticlassAccuracy

    from lightning_mqgnn import MQGNNDataModule, MQGNNStrategy, synthetic_graph

    classes, width = 8, round((settings["parameters"] * 1e6) ** 0.5 - 40)

    class Wide(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = SAGEConv(64, 64)
            self.head = torch.nn.Sequential(
                torch.nn.Linear(64, width),
                torch.nn.ReLU(),
                torch.nn.Linear(width, width),
                torch.nn.ReLU(),
                torch.nn.Linear(width, classes),
            )
            self.accuracy = MulticlassAccuracy(classes, average="micro")
            self.seconds: list[float] = []
            self.sent: list[int] = []

        def forward(self, batch: Any) -> torch.Tensor:
            seeds = self.convolution(batch.x, batch.edge_index)[: batch.batch_size]
            logits: torch.Tensor = self.head(seeds.relu())
            return logits

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self(batch), batch.y[: batch.batch_size])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.accuracy(self(batch), batch.y[: batch.batch_size])
            self.log("accuracy", self.accuracy, batch_size=batch.batch_size)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_train_epoch_start(self) -> None:
            self.trainer.strategy.barrier()
            self._since, self._sent = time.perf_counter(), int(_COUNTER.read_text())

        def on_validation_epoch_start(self) -> None:
            self.seconds.append(time.perf_counter() - self._since)
            self.sent.append(int(_COUNTER.read_text()) - self._sent)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    graph = synthetic_graph(num_nodes=settings["hosts"] * 32 * 48 * 2, num_edges=80_000, num_classes=classes)
    datamodule = MQGNNDataModule(
        graph, num_neighbors=[10], batch_size=32, eval_loader_kwargs={"batch_size": 512, "num_neighbors": [20]}
    )
    module = Wide()
    strategy = MQGNNStrategy(**settings["options"]) if settings["options"] else settings["strategy"]
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=settings["hosts"],
        max_epochs=settings["epochs"],
        limit_train_batches=settings["steps"],
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)
    (tested,) = trainer.test(module, datamodule=datamodule, verbose=False)
    result = {"seconds": module.seconds, "sent": module.sent, "accuracy": tested["accuracy"]}
    exchange = getattr(trainer.strategy, "exchange", None)
    if exchange is not None:
        result["period"], result["delta"] = exchange.statistics.period, exchange.statistics.delta
    print(json.dumps(result))
    torch.distributed.destroy_process_group()  # else a process in some dozens aborts at its exit, under `ddp`


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON if it is any."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def print_row(cells: list[str]) -> None:
    """A row of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measure each rate and size, the strategies in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[10, 100, 1000, 0], help="Mbit/s; 0: unlimited")
    parser.add_argument("--parameters", type=float, nargs="+", default=[1, 4], help="millions")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "mqgnn"])
    parser.add_argument("--option", type=parse_option, action="append", default=[], help="NAME=VALUE of RaCoM")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--most-steps", type=int, default=48, help="steps per epoch")
    parser.add_argument("--seconds", type=float, default=120, help="what ddp may take; fewer steps on slow links")
    parser.add_argument("--json", type=Path, help="append the results to this file, a line each")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        raise SystemExit("needs root, and `ip` and `tc`: run as root and install iproute2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed

    columns = ["Mbit/s", "parameters", "strategy", "steps", "s per epoch: mean", "median", "MB", "accuracy", "faster"]
    print_row(columns)
    print_row(["---"] * len(columns))
    for rate in arguments.rates:
        for parameters in arguments.parameters:
            step_seconds = 32 * parameters / rate if rate else 0.01
            steps = round(min(max(arguments.seconds / arguments.epochs / step_seconds, 12), arguments.most_steps))
            reference = 0.0
            for strategy in arguments.strategies:
                settings = {
                    "strategy": strategy,
                    "parameters": parameters,
                    "hosts": arguments.hosts,
                    "epochs": arguments.epochs,
                    "steps": steps,
                    "options": dict(arguments.option) if strategy == "mqgnn" else {},
                }
                with hosts(arguments.hosts, rate) as names:
                    result = run(names, settings)
                if arguments.json:
                    with arguments.json.open("a") as file:
                        file.write(json.dumps({"rate": rate, **settings, **result}) + "\n")
                seconds = mean(result["seconds"])
                reference = reference or seconds
                print_row(
                    [
                        str(rate or "unlimited"),
                        f"{parameters:g} M",
                        strategy,
                        str(steps),
                        f"{seconds:.2f}",
                        f"{median(result['seconds']):.2f}",
                        f"{mean(result['sent']) / 1e6:.1f}",
                        f"{result['accuracy']:.3f}",
                        f"{reference / seconds:.1f}",
                    ]
                )


if __name__ == "__main__":
    main()
