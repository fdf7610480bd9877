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

from lightning_mqgnn import MQGNNDataModule, MQGNNStrategy, RaCoM
from lightning_mqgnn.peers import PeerError

SCENARIOS: dict[str, Callable[[str, Path], dict[str, Any]]] = {}
DDP_NEEDS_UNUSED = {
    "unused_on_one_rank",
    "unused_on_all_ranks",
    "two_optimizers",
    "two_optimizers_and_accumulation",
    "unfreezing",
}


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
    if isinstance(strategy, str) and strategy.startswith("lockstep"):
        _, _, start_method = strategy.partition("_")
        strategy = MQGNNStrategy(period=1, max_staleness=0, start_method=start_method or "popen")
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
    counted = {}
    if isinstance(trainer.strategy, MQGNNStrategy) and trainer.strategy.exchange is not None:
        counted = {"exchanges": trainer.strategy.exchange.gradients.exchanges, "bytes": trainer.strategy.exchange.bytes}
    return result(module, steps=trainer.global_step, **counted)


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
def fp16_overflow_on_one_rank(strategy: str, folder: Path) -> dict[str, Any]:
    class Overflowing(Sage):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e38 if (self.global_rank, self.global_step) == (1, 3) else loss

    scaling = MixedPrecision("16-mixed", "cpu")
    return {**fit(Overflowing(sgd), strategy, plugins=[scaling]), "scale": scaling.scaler.get_scale()}


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
    module = Sage(lambda _: adamw(module.parameters()))  # the optimizer has them too
    module.first.requires_grad_(False)
    return fit(module, strategy)


class LayerByLayer(L.Callback):
    """Trains the second layer first, and the whole from epoch 2 on."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
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
def ranks_begin_alike(strategy: str, folder: Path) -> dict[str, Any]:
    class Watching(Sage):
        def on_train_start(self) -> None:
            self.settings["begun"] = self.first.lin_l.weight.detach().clone()

    torch.manual_seed(100 + int(os.environ.get("LOCAL_RANK", 0)))
    module = Watching(sgd)
    own = module.first.lin_l.weight.detach().clone()
    return {**fit(module, strategy), "own": own, "begun": module.settings["begun"]}


@scenario
def weight_averaging(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(sgd, batch_norm=True)
    return fit(module, strategy, max_epochs=6, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=3)])


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


@scenario
def validation_averages_buffers(strategy: str, folder: Path) -> dict[str, Any]:
    class Watching(Sage):
        def on_validation_epoch_start(self) -> None:
            self.settings.setdefault("means", []).append(self.norm.running_mean.clone())

    module = Watching(sgd, batch_norm=True)
    outcome = fit(module, strategy, limit_val_batches=1.0, max_epochs=3, num_sanity_val_steps=0)
    return {**outcome, "means": module.settings["means"]}


@scenario
def checkpoint_averages_buffers(strategy: str, folder: Path) -> dict[str, Any]:
    class Noting(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                pl_module.settings["own"] = pl_module.norm.running_mean.clone()

    saving = ModelCheckpoint(folder / "buffers", "{step}", every_n_train_steps=6, save_top_k=-1)
    module = Sage(sgd, batch_norm=True)
    outcome = fit(module, strategy, max_epochs=2, callbacks=[Noting(), saving], enable_checkpointing=True)
    saved = torch.load(folder / "buffers" / "step=6.ckpt", weights_only=True)["state_dict"]["norm.running_mean"]
    return {**outcome, "own": module.settings["own"], "saved": saved}


@scenario
def strategy_as_object(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), MQGNNStrategy(RaCoM(period=1, max_staleness=0)))


@scenario
def one_device(strategy: str, folder: Path) -> dict[str, Any]:
    """Run both here, as one start is enough for one process."""
    outcome = fit(Sage(sgd), strategy)
    L.seed_everything(1, verbose=False)
    return {**outcome, "auto": fit(Sage(sgd), "auto")["weights"]}


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


def interrupted_and_resumed(
    make: Callable[[], Sage], strategy: str, folder: Path, stop: dict[str, Any], *at: str, **arguments: Any
) -> dict[str, Any]:
    """Train 3 epochs at once; then again with checkpoints, and from the one called `at` in a new Trainer.

    With several names in `at`, the resumed run saves checkpoints too, and is itself resumed from the next of them.
    `stop` says when `ModelCheckpoint` saves.
    """
    arguments = {"max_epochs": 3, "limit_val_batches": 1.0, **arguments}
    whole, second = make(), make()
    make_trainer(strategy, **arguments).fit(whole, datamodule=datamodule())
    path = None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dataloader is not resumable.*")
        for number, name in enumerate(at):
            saving = ModelCheckpoint(folder / str(number), "{epoch}-{step}", save_top_k=-1, **stop)
            trainer = make_trainer(strategy, callbacks=[saving], **{**arguments, "enable_checkpointing": True})
            trainer.fit(make(), datamodule=datamodule(), ckpt_path=path)
            path = folder / str(number) / f"{name}.ckpt"
        make_trainer(strategy, **arguments).fit(second, datamodule=datamodule(), ckpt_path=path)
    return {"whole": result(whole), "second": result(second)}


def adamw_module() -> Sage:
    return Sage(adamw)


def one_cycle_module() -> Sage:
    return OneCycle(adamw)


@scenario
def resume_within_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    every = {"every_n_train_steps": 2}
    return interrupted_and_resumed(adamw_module, strategy, folder / "within", every, "epoch=1-step=6")


@scenario
def resume_twice_within_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    every, at = {"every_n_train_steps": 1}, ["epoch=1-step=5", "epoch=1-step=7"]
    return interrupted_and_resumed(adamw_module, strategy, folder / "twice", every, *at)


@scenario
def resume_after_the_last_batch_of_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    every = {"every_n_train_steps": 4}
    return interrupted_and_resumed(
        adamw_module, strategy, folder / "last", every, "epoch=1-step=8", limit_val_batches=0
    )


@scenario
def resume_between_epochs(strategy: str, folder: Path) -> dict[str, Any]:
    end = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    return interrupted_and_resumed(adamw_module, strategy, folder / "between", end, "epoch=0-step=4")


@scenario
def resume_while_accumulating(strategy: str, folder: Path) -> dict[str, Any]:
    every = {"every_n_train_steps": 3}
    return interrupted_and_resumed(
        adamw_module, strategy, folder / "accumulating", every, "epoch=1-step=3", accumulate_grad_batches=2
    )


@scenario
def resume_with_a_schedule_over_all_steps(strategy: str, folder: Path) -> dict[str, Any]:
    every = {"every_n_train_steps": 1}
    return interrupted_and_resumed(one_cycle_module, strategy, folder / "schedule", every, "epoch=1-step=6")


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


def failing(module: Sage, data: Any, expected: type[BaseException], **arguments: Any) -> dict[str, Any]:
    trainer = make_trainer(**{"max_epochs": 1, **arguments})
    try:
        trainer.fit(module, data)
    except (expected, PeerError) as error:
        frames = "".join(traceback.format_tb(error.__traceback__))
        return result(module, error=type(error).__name__, message=str(error), traceback=frames)
    return result(module, error=None)


def planted_transform(batch: Any) -> Any:
    raise Planted(threading.current_thread().name)


@scenario
def failing_training_step(strategy: str, folder: Path) -> dict[str, Any]:
    def fail(rank: int, step: int) -> bool:
        raise Planted

    return failing(Sage(sgd, use_extra=fail), datamodule(), Planted, strategy=strategy)


@scenario
def failing_training_step_with_loaders_by_hand(strategy: str, folder: Path) -> dict[str, Any]:
    def fail(rank: int, step: int) -> bool:
        raise Planted

    data = datamodule()
    data.setup("fit")
    return failing(Sage(sgd, use_extra=fail), data.train_dataloader(), Planted, strategy=strategy)


@scenario
def failing_validation_step(strategy: str, folder: Path) -> dict[str, Any]:
    """Fail between two epochs, when batches of the second are being made."""

    class Failing(Sage):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise Planted

    arguments = {"max_epochs": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    return failing(Failing(sgd), datamodule(), Planted, strategy=strategy, **arguments)


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
