"""Runs that are slow, and what becomes of them if one does what their reports say: reports and pictures for the docs.

python benchmarks/slow_training.py FOLDER docs

The features are built in FOLDER, and are larger than the memory that a run may have: as root, each is in a control
group (version 1) whose memory, the page cache included, is limited. Writes docs/slow-training-1.png and so on, and
prints the reports.
"""

import argparse
import logging
import multiprocessing
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from cache import drop_from_page_cache, memory_limit, save_graph
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_mqgnn import MQGNNDataModule, PipelineMonitor, trim_adj

_NODES, _FEATURES, _BATCH_SIZE = 2_000_000, 512, 256
RUNS: list[dict[str, Any]] = [
    {},
    {"feature_cache": "512MiB", "subgraph_cache": "64MiB"},
    {"feature_cache": "512MiB", "subgraph_cache": "64MiB", "edge_format": "csc"},
]


class GraphSAGE(L.LightningModule):
    """Two layers, for both formats of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(_FEATURES, 64), SAGEConv(64, 8)])

    def forward(self, batch: Data) -> Tensor:
        """Return the logits of the seed nodes."""
        x: Tensor = batch.x.float()
        for i, conv in enumerate(self.convs):
            x = x.relu() if i else x
            if "adj_t" in batch:
                adj_t = trim_adj(i, batch.num_sampled_nodes, batch.num_sampled_edges, batch.adj_t)
                x = conv((x, x[: adj_t.size(0)]), adj_t)
            else:
                x = conv(x, batch.edge_index)
        return x[: batch.batch_size]

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        """Cross-entropy of the seed nodes."""
        return F.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 3e-3)


def train(path: Path, group: Path | None, batches: int, settings: dict[str, Any], picture: Path) -> None:
    """Train in a control group, and save the timeline."""
    if group is not None:
        group.write_text(str(os.getpid()))
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    seeds = torch.arange(0, _NODES, _NODES // (batches * _BATCH_SIZE))[: batches * _BATCH_SIZE]
    datamodule = MQGNNDataModule(
        path, seeds, num_neighbors=[10, 5], batch_size=_BATCH_SIZE, prepare_threads=1, **settings
    )
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[PipelineMonitor(timeline_batches=20)],
            default_root_dir=folder,
        ).fit(GraphSAGE(), datamodule=datamodule)
        shutil.copy(f"{folder}/mqgnn-timeline.png", picture)


def main() -> None:
    """Train once per setting, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the graph")
    parser.add_argument("pictures", type=Path, help="for the pictures")
    parser.add_argument("--memory", default="1536MiB", help="of each run, page cache included")
    parser.add_argument("--batches", type=int, default=40, help="per epoch")
    arguments = parser.parse_args()
    path = save_graph(arguments.folder, _NODES, _FEATURES)
    with memory_limit(arguments.memory) as group:
        for number, settings in enumerate(RUNS, 1):
            print(f"\n{number}: " + ", ".join(f"{name}={value!r}" for name, value in settings.items()), flush=True)
            drop_from_page_cache(path / "node.x.npy")
            run = multiprocessing.get_context("spawn").Process(
                target=train,
                args=(path, group, arguments.batches, settings, arguments.pictures / f"slow-training-{number}.png"),
            )
            run.start()
            run.join()
    shutil.rmtree(path)


if __name__ == "__main__":
    main()
