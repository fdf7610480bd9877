"""Which nodes are visited, and how many copies of the graph there are."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch_geometric.data import Data

from scenarios.training import Sage, datamodule, fit, scenario, sgd


def nodes(split_sizes: dict[str, int], batch_size: int, strategy: str, **arguments: Any) -> dict[str, Any]:
    chosen = {f"input_{split}_nodes": torch.arange(size) for split, size in split_sizes.items()}
    data = datamodule(batch_size=batch_size, **chosen)
    module = Sage(sgd)
    return fit(module, strategy, data, **{"max_epochs": 3, "limit_val_batches": 1.0, **arguments})


@scenario
def uneven_nodes(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy)


@scenario
def uneven_nodes_again(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy)


@scenario
def validation_within_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy, val_check_interval=2)


@scenario
def shards_of_9_and_8(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 17, "val": 3}, 8, strategy)


@scenario
def limited_batches(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy, limit_train_batches=2, limit_val_batches=1)


@scenario
def a_fast_dev_run(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy, fast_dev_run=2)


@scenario
def overfitting(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy, overfit_batches=2)


@scenario
def stopped_within_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 6

    return fit(Sage(sgd), strategy, max_epochs=10, callbacks=[Stop()])


def private_bytes() -> int:
    """What this process alone has in memory, without what it shares with others or could read again from files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous"))


@scenario
def one_copy(strategy: str, folder: Path) -> dict[str, Any]:
    def load() -> Data:
        (folder / f"loaded-by-{os.getpid()}").touch()
        num_nodes = 60_000
        ring = torch.arange(num_nodes)
        return Data(x=torch.ones(num_nodes, 256), y=ring % 4, edge_index=torch.stack([ring, ring.roll(1)]))

    def narrow(batch: Data) -> Data:
        batch.x = batch.x[:, :8]
        return batch

    fit(Sage(sgd), strategy)  # whatever a first run loads is there
    before = private_bytes()
    data = datamodule(
        data=load, store_path=folder / "store", input_train_nodes=range(1000), num_neighbors=[2, 2], transform=narrow
    )
    outcome = fit(Sage(sgd), strategy, data)
    return {**outcome, "private": private_bytes() - before, "features": 60_000 * 256 * 4}
