"""Trains small models in real processes, for `test_strategy.py`.

python tests/launch.py FOLDER STRATEGY DEVICES SCENARIO [SCENARIO ...]

Lightning's launcher starts this script again for each further rank. Each rank writes what a scenario returns to
FOLDER/SCENARIO.RANK.pt. One start serves many scenarios, each with a Trainer of its own.
"""

import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from graphs import random_graph
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_mqgnn import MQGNNDataModule, MQGNNStrategy

SCENARIOS: dict[str, Callable[[str, Path], dict[str, Any]]] = {}
DDP_NEEDS_UNUSED = {"unused_on_one_rank", "unused_on_all_ranks", "two_optimizers", "two_optimizers_and_accumulation"}


def scenario(function: Callable[[str, Path], dict[str, Any]]) -> Callable[[str, Path], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


class Sage(L.LightningModule):
    """Two layers; notes which seed nodes it saw, by epoch."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], batch_norm: bool = False, **settings: Any):
        super().__init__()
        self.first, self.second = SAGEConv(8, 16), SAGEConv(16, 4)
        self.norm = torch.nn.BatchNorm1d(16) if batch_norm else torch.nn.Identity()
        self.make_optimizer, self.settings = optimizer, settings
        if "use_extra" in settings:
            self.extra = torch.nn.Linear(4, 4)
        self.trained: dict[int, list[int]] = {}
        self.validated: dict[int, list[int]] = {}

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.norm(self.first(batch.x, batch.edge_index)).relu()
        return self.second(x, batch.edge_index)[: batch.batch_size]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.setdefault(self.current_epoch, []).extend(batch.input_id.tolist())
        logits = self(batch)
        if "use_extra" in self.settings and self.settings["use_extra"](self.global_rank, self.global_step):
            logits = self.extra(logits)
        return F.cross_entropy(logits, batch.y[: batch.batch_size])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.setdefault(self.current_epoch, []).extend(batch.input_id.tolist())

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class TwoOptimizers(Sage):
    """Manual optimisation of the two layers in turn, the second with the gradients of `accumulate` batches."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(sgd)
        self.accumulate = accumulate
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, other = self.optimizers()
        self.toggle_optimizer(one)
        one.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch), batch.y[: batch.batch_size]))
        self.clip_gradients(one, 0.1, "norm")
        one.step()
        self.untoggle_optimizer(one)
        last = (batch_idx + 1) % self.accumulate == 0
        with other.toggle_model(sync_grad=last):
            self.manual_backward(F.cross_entropy(self(batch), batch.y[: batch.batch_size]))
            if last:
                other.step()
                other.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.first.parameters(), 1e-2),
            torch.optim.SGD(self.second.parameters(), 1e-1, momentum=0.9),
        ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, 0.1, max_iter=3)


def datamodule(**arguments: Any) -> MQGNNDataModule:
    return MQGNNDataModule(**{"data": random_graph(), "num_neighbors": [4, 3], "batch_size": 30, **arguments})


def make_trainer(strategy: Any, **arguments: Any) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": int(sys.argv[3]),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    return L.Trainer(strategy=strategy, **{**defaults, **arguments})


def result(module: Sage, **more: Any) -> dict[str, Any]:
    return {
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "buffers": {name: value.detach().clone() for name, value in module.named_buffers()},
        "trained": module.trained,
        "validated": module.validated,
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("mqgnn-")],
        **more,
    }


def fit(module: Sage, strategy: Any, data: Any = None, **arguments: Any) -> dict[str, Any]:
    """20 optimizer steps, unless told otherwise."""
    if "max_epochs" not in arguments:
        arguments.setdefault("max_steps", 20)
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(module, datamodule=data or datamodule())
    return result(module, steps=trainer.global_step)


# Weights must be those of ddp


@scenario
def plain_sgd(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy)


@scenario
def plain_adamw(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy)


@scenario
def plain_lbfgs(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(lbfgs), strategy)


@scenario
def accumulation_and_clipping(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy, accumulate_grad_batches=3, gradient_clip_val=0.05, max_epochs=10)


@scenario
def clipping_by_value(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@scenario
def bf16_mixed(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy, precision="bf16-mixed")


@scenario
def bf16_true(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy, precision="bf16-true")


@scenario
def float64_true(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy, precision="64-true")


@scenario
def fp16_with_a_scaler(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy, plugins=[MixedPrecision("16-mixed", "cpu")])


@scenario
def two_optimizers(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(TwoOptimizers(), strategy, max_steps=40)


@scenario
def two_optimizers_and_accumulation(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(TwoOptimizers(accumulate=2), strategy, max_steps=30)


@scenario
def batch_norm(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw, batch_norm=True), strategy)


@scenario
def unused_on_one_rank(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw, use_extra=lambda rank, step: rank == 1 and step % 2 == 0), strategy)


@scenario
def unused_on_all_ranks(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw, use_extra=lambda rank, step: step % 3 == 0), strategy)


@scenario
def frozen_parameters(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(adamw)
    module.first.requires_grad_(False)
    return fit(module, strategy)


@scenario
def ranks_begin_alike(strategy: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(100 + int(torch.distributed.get_rank()) if torch.distributed.is_initialized() else 99)
    return fit(Sage(sgd), strategy)


@scenario
def plain_dataloader(strategy: str, folder: Path) -> dict[str, Any]:
    class Linear(Sage):
        def __init__(self) -> None:
            super().__init__(sgd)
            self.first, self.second = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained.setdefault(self.current_epoch, []).extend(batch[1].tolist())
            return F.cross_entropy(self.second(self.first(batch[0]).relu()), batch[1] % 4)

    module = Linear()
    trainer = make_trainer(strategy, max_epochs=3)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(40)), 5, shuffle=True))
    return result(module)


# Only for mqgnn


class LayerByLayer(L.Callback):
    """Trains the second layer first, and the whole from epoch 2 on."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.first.requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            pl_module.first.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": pl_module.first.parameters()})


@scenario
def unfreezing(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(lambda _: sgd(module.second.parameters()))
    before = module.first.lin_l.weight.detach().clone()
    return {**fit(module, strategy, callbacks=[LayerByLayer()]), "before": before}


@scenario
def validation_averages_buffers(strategy: str, folder: Path) -> dict[str, Any]:
    class Watching(Sage):
        def on_validation_epoch_start(self) -> None:
            self.settings.setdefault("means", []).append(self.norm.running_mean.clone())

    module = Watching(sgd, batch_norm=True)
    outcome = fit(module, strategy, limit_val_batches=1.0, max_epochs=3, num_sanity_val_steps=0)
    return {**outcome, "means": module.settings["means"]}


@scenario
def weight_averaging(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(sgd, batch_norm=True)
    return fit(module, strategy, max_epochs=6, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=3)])


@scenario
def strategy_as_object(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), MQGNNStrategy())


@scenario
def fit_then_test(strategy: str, folder: Path) -> dict[str, Any]:
    class Tested(Sage):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.setdefault(0, []).extend(batch.input_id.tolist())

    module, data = Tested(sgd), datamodule()
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    return result(module)


class OneCycle(Sage):
    """Asks the Trainer for the number of steps, which makes Lightning set up the data early."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def interrupted_and_resumed(make: Callable[[], Sage], stop_at: int, strategy: str, folder: Path) -> dict[str, Any]:
    """Train 12 steps at once; then up to `stop_at`, and from its checkpoint again in a new Trainer."""
    whole = make()
    make_trainer(strategy, max_epochs=3).fit(whole, datamodule=datamodule())

    first = make()
    saving = ModelCheckpoint(folder, f"{make.__name__}-{{step}}", every_n_train_steps=stop_at, save_top_k=-1)
    trainer = make_trainer(strategy, max_epochs=3, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(first, datamodule=datamodule())
    second = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dataloader is not resumable.*")
        make_trainer(strategy, max_epochs=3).fit(
            second, datamodule=datamodule(), ckpt_path=f"{folder}/{make.__name__}-step={stop_at}.ckpt"
        )
    return {"whole": result(whole), "second": result(second)}


def adamw_module() -> Sage:
    return Sage(adamw)


def one_cycle_module() -> Sage:
    return OneCycle(adamw)


@scenario
def resume_within_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    return interrupted_and_resumed(adamw_module, 6, strategy, folder)


@scenario
def resume_between_epochs(strategy: str, folder: Path) -> dict[str, Any]:
    return interrupted_and_resumed(adamw_module, 8, strategy, folder)


@scenario
def resume_with_a_schedule_over_all_steps(strategy: str, folder: Path) -> dict[str, Any]:
    return interrupted_and_resumed(one_cycle_module, 7, strategy, folder)


# Which nodes are visited


def nodes(split_sizes: dict[str, int], batch_size: int, strategy: str, **arguments: Any) -> dict[str, Any]:
    chosen = {f"input_{split}_nodes": torch.arange(size) for split, size in split_sizes.items()}
    data = datamodule(batch_size=batch_size, **chosen)
    module = Sage(sgd)
    return fit(module, strategy, data, **{"max_epochs": 3, "limit_val_batches": 1.0, **arguments})


@scenario
def uneven_nodes(strategy: str, folder: Path) -> dict[str, Any]:
    return nodes({"train": 41, "val": 21}, 5, strategy)


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


# Memory


def private_bytes() -> int:
    """What this process alone has in memory, without what it shares with others or could read again from files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty"))


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


# Failures


class Planted(Exception):
    pass


def failing(module: Sage, data: MQGNNDataModule, expected: type[BaseException], **arguments: Any) -> dict[str, Any]:
    trainer = make_trainer(max_epochs=1, **arguments)
    try:
        trainer.fit(module, datamodule=data)
    except expected as error:
        return result(module, error=type(error).__name__, traceback="".join(traceback.format_tb(error.__traceback__)))
    return result(module, error=None)


def planted_transform(batch: Any) -> Any:
    raise Planted


@scenario
def failing_training_step(strategy: str, folder: Path) -> dict[str, Any]:
    def fail(rank: int, step: int) -> bool:
        raise Planted

    return failing(Sage(sgd, use_extra=fail), datamodule(), Planted, strategy=strategy)


@scenario
def failing_transform(strategy: str, folder: Path) -> dict[str, Any]:
    return failing(Sage(sgd), datamodule(transform=planted_transform), Planted, strategy=strategy)


@scenario
def interrupted_training_step(strategy: str, folder: Path) -> dict[str, Any]:
    def interrupt(rank: int, step: int) -> bool:
        raise KeyboardInterrupt

    return failing(Sage(sgd, use_extra=interrupt), datamodule(), SystemExit, strategy=strategy)


@scenario
def sync_batchnorm_on_the_cpu(strategy: str, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(strategy, max_epochs=1, sync_batchnorm=True)
    try:
        trainer.fit(Sage(sgd, batch_norm=True), datamodule=datamodule())
    except Exception as error:
        return {"error": str(error)}
    return {"error": None}


def main() -> None:
    folder, strategy, _, *names = sys.argv[1:]
    torch.set_num_threads(1)
    for name in names:
        L.seed_everything(1, verbose=False)
        unused = strategy == "ddp" and name in DDP_NEEDS_UNUSED
        outcome = SCENARIOS[name]("ddp_find_unused_parameters_true" if unused else strategy, Path(folder))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(outcome, Path(folder) / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main()
