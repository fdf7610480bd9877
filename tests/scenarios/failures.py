"""Exceptions in the middle of training."""

import threading
import traceback
from pathlib import Path
from typing import Any

from lightning_mqgnn.peers import PeerError
from scenarios.training import Sage, datamodule, make_trainer, result, scenario, sgd


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
