"""Private memory of each rank, with a graph of 150k nodes and 512 features and with one that is almost empty.

python benchmarks/memory.py [--ranks 1 2 4]

Ranks are started by the Trainer. The graph is made by the first rank of the machine, and mapped by all. Private are the
pages that are in no file ("Anonymous" in /proc/PID/smaps_rollup), at the end of training: a mapped file's are those of
the page cache, of which there is one.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from large_graph import private_bytes
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_mqgnn import MQGNNDataModule, synthetic_graph

_FEATURES = 512


class OneLayer(L.LightningModule):
    """The smallest model there is, so that what is measured is the data's."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = SAGEConv(_FEATURES, 16)

    def training_step(self, batch: Data) -> torch.Tensor:
        """Return the loss of the seeds."""
        return F.cross_entropy(
            self.convolution(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.01)


def train(num_nodes: int, ranks: int, folder: Path) -> None:
    """Train for an epoch of 50 steps and write down the private memory of this rank."""
    torch.set_num_threads(1)

    def load() -> Data:
        return synthetic_graph(num_nodes, 10 * num_nodes, num_features=_FEATURES, num_classes=16)

    module = OneLayer()
    datamodule = MQGNNDataModule(load, store_path=folder / "store", num_neighbors=[5], batch_size=64)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="mqgnn", max_epochs=1, limit_train_batches=50, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, datamodule)
    gc.collect()
    (folder / f"private.{trainer.global_rank}").write_text(str(private_bytes(os.getpid())))


def measure(num_nodes: int, ranks: int) -> list[int]:
    """Private bytes of each rank of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--train", str(num_nodes), str(ranks), folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [int((Path(folder) / f"private.{rank}").read_text()) for rank in range(ranks)]


def main() -> None:
    """Measure and print a table, or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--nodes", type=int, default=150_000)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--train", nargs=3, metavar=("NODES", "RANKS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        num_nodes, ranks, folder = arguments.train
        train(int(num_nodes), int(ranks), Path(folder))
        return
    features = arguments.nodes * _FEATURES * 4
    print(f"features: {features / 1e6:.0f} MB; private memory of each rank in MB\n")
    print("| ranks | almost no data | with the graph | more, of the features' size |")
    print("| --- | --- | --- | --- |")
    figures = []
    for ranks in arguments.ranks:
        empty, full = measure(1000, ranks), measure(arguments.nodes, ranks)
        more = max(b - a for a, b in zip(empty, full, strict=True)) / features
        figures.append({"ranks": ranks, "empty": empty, "full": full})
        columns = [", ".join(f"{size / 1e6:.0f}" for size in sizes) for sizes in (empty, full)]
        print(f"| {ranks} | {columns[0]} | {columns[1]} | {more:.1%} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
