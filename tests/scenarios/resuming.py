"""Runs that are interrupted and resumed."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from scenarios.training import Sage, adamw, datamodule, make_trainer, result, scenario


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
    """Train 3 epochs at once; then again, and from the checkpoint called `at` in a new Trainer.

    With several names in `at`, the resumed run is itself resumed from the next of them. `stop` says when
    `ModelCheckpoint` saves, which it does in all runs: ranks exchange what is left of progress for a checkpoint.
    """
    arguments = {"max_epochs": 3, "limit_val_batches": 1.0, "enable_checkpointing": True, **arguments}
    whole, second = make(), make()
    trainer = make_trainer(strategy, callbacks=[ModelCheckpoint(folder / "whole", save_top_k=-1, **stop)], **arguments)
    trainer.fit(whole, datamodule=datamodule())
    path = None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*dataloader is not resumable.*")
        for number, name in enumerate(at):
            saving = ModelCheckpoint(folder / str(number), "{epoch}-{step}", save_top_k=-1, **stop)
            trainer = make_trainer(strategy, callbacks=[saving], **arguments)
            trainer.fit(make(), datamodule=datamodule(), ckpt_path=path)
            path = folder / str(number) / f"{name}.ckpt"
        saving = ModelCheckpoint(folder / "second", save_top_k=-1, **stop)
        make_trainer(strategy, callbacks=[saving], **arguments).fit(second, datamodule=datamodule(), ckpt_path=path)
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


def saving_each_step(strategy: str, folder: Path, path: Path | None = None) -> dict[str, Any]:
    """Train until the end of epoch 2, from the checkpoint at `path`, and keep a checkpoint of each step in `folder`."""
    module = Sage(adamw)
    saving = ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = make_trainer(strategy, max_epochs=3, limit_val_batches=1.0, enable_checkpointing=True, callbacks=[saving])
    trainer.fit(module, datamodule=datamodule(), ckpt_path=path)
    return result(module, steps=trainer.global_step)


@scenario
def from_the_start(strategy: str, folder: Path) -> dict[str, Any]:
    return saving_each_step(strategy, folder / "start")


@scenario
def from_two_ranks_within_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    return saving_each_step(strategy, folder / "within", folder.parent / "racom-2" / "start" / "epoch=1-step=5.ckpt")


@scenario
def from_two_ranks_after_an_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    return saving_each_step(strategy, folder / "after", folder.parent / "racom-2" / "start" / "epoch=1-step=8.ckpt")


@scenario
def from_two_and_then_three_ranks(strategy: str, folder: Path) -> dict[str, Any]:
    return saving_each_step(strategy, folder / "both", folder.parent / "racom-3" / "within" / "epoch=1-step=6.ckpt")
