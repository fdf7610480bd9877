"""Training in which ranks step by themselves."""

import random
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_mqgnn import MQGNNStrategy, PipelineMonitor
from scenarios.training import Sage, adamw, datamodule, fit, make_trainer, result, scenario, sgd


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


class Drains(L.Callback):
    """Notes the model where ranks should agree, and where they need not."""

    def __init__(self) -> None:
        self.noted: dict[str, list[list[torch.Tensor]]] = {}

    def note(self, name: str, module: torch.nn.Module) -> None:
        self.noted.setdefault(name, []).append(weights(module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            self.note("within an epoch", pl_module)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.note("validation", pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        last = trainer.current_epoch + 1 == trainer.max_epochs
        self.note("end of the last epoch" if last else "end of an epoch", pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.note("checkpoint", pl_module)
        moments = [v for s in checkpoint["optimizer_states"][0]["state"].values() for v in s.values()]
        self.noted.setdefault("optimizer", []).append([moment.clone() for moment in moments])


@scenario
def drains(strategy: str, folder: Path) -> dict[str, Any]:
    """Validation after every second epoch of 4 batches; checkpoints after every fifth step."""
    noting, saving = Drains(), ModelCheckpoint(folder / "drains", every_n_train_steps=5, save_top_k=-1)
    module = Sage(adamw, batch_norm=True)
    outcome = fit(
        module,
        strategy,
        max_epochs=3,
        limit_val_batches=1.0,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        callbacks=[noting, saving],
        enable_checkpointing=True,
    )
    return {**outcome, "noted": noting.noted}


@scenario
def drains_at_each_epoch(strategy: str, folder: Path) -> dict[str, Any]:
    noting = Drains()
    racom = MQGNNStrategy(period=3, max_staleness=5, warmup=0, drain_each_epoch=True)
    return {**fit(Sage(adamw), racom, max_epochs=3, callbacks=[noting]), "noted": noting.noted}


@scenario
def one_rank_ahead(strategy: str, folder: Path) -> dict[str, Any]:
    """Rank 1 begins when rank 0 has taken as many steps as the bound allows; then it sleeps in every step.

    If anything locked ranks together, this would not end.
    """
    bound, period = 6, 4

    class OneAhead(Sage):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            mark = folder / "rank-0-is-ahead"
            step = self.trainer.global_step
            if self.global_rank == 0 and step == period + bound - 1:
                mark.touch()
            while self.global_rank == 1 and step == 0 and not mark.exists():
                time.sleep(0.01)
            if self.global_rank == 1:
                time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    racom = MQGNNStrategy(period=period, max_staleness=bound, warmup=0, adaptive=False)
    outcome = fit(OneAhead(sgd), racom, datamodule(batch_size=4), max_steps=24)
    return {**outcome, "waited": racom.exchange.statistics.wait_seconds if racom.exchange else 0.0}


@scenario
def repeated(strategy: str, folder: Path) -> dict[str, Any]:
    """Twice the same, but for the delays; and a deterministic Trainer."""

    class Delayed(Sage):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(self.delays.random() * 0.02)
            return super().training_step(batch, batch_idx)

    outcomes = []
    for run in range(2):
        L.seed_everything(1, verbose=False)
        module = Delayed(adamw)
        module.delays = random.Random(10 * run + int(L.pytorch.utilities.rank_zero_only.rank))
        outcomes.append(fit(module, "fixed"))
    trainer = make_trainer("mqgnn", deterministic=True, max_steps=20)
    trainer.fit(Sage(sgd), datamodule=datamodule())
    torch.use_deterministic_algorithms(False)
    settings = trainer.strategy.exchange.settings
    return {**outcomes[0], "again": outcomes[1], "arrival": settings.arrival, "warmup": settings.warmup}


@scenario
def compiled(strategy: str, folder: Path) -> dict[str, Any]:
    class Plain(Sage):
        """Notes nothing, so that it need not be compiled anew in each step."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self(batch), batch.y[: batch.batch_size])

    return fit(torch.compile(Plain(adamw), backend="eager"), strategy)


@scenario
def learning_rate_found(strategy: str, folder: Path) -> dict[str, Any]:
    """The search trains for some steps, and then loads the checkpoint that it began with."""

    class WithRate(Sage):
        lr = 1e-3

        def on_train_start(self) -> None:
            self.begun = weights(self)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.lr)

    module = WithRate(sgd)
    own = weights(module)
    trainer = make_trainer(strategy, max_epochs=2, default_root_dir=folder)
    Tuner(trainer).lr_find(module, datamodule=datamodule(), num_training=12, update_attr=False)
    trainer.fit(module, datamodule=datamodule())
    return result(module, own=own, begun=module.begun, windows=trainer.strategy.exchange.statistics.windows)


class SlowWork:
    """A collective that takes a while longer."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        def delayed(done: Any) -> Any:
            time.sleep(seconds)
            return done.value()

        self._future = work.get_future().then(delayed)

    def wait(self) -> None:
        self._future.wait()

    def get_future(self) -> Any:
        return self._future


@scenario
def slow_network(strategy: str, folder: Path) -> dict[str, Any]:
    """Each all-reduce takes 50 ms longer; a monitor watches."""
    all_reduce = dist.all_reduce

    def slow(*arguments: Any, async_op: bool = False, **keywords: Any) -> Any:
        work = all_reduce(*arguments, async_op=async_op, **keywords)
        return SlowWork(work, 0.05) if async_op else work

    monitor = PipelineMonitor(timeline_batches=5)
    dist.all_reduce = slow
    try:
        outcome = fit(Sage(adamw), strategy, callbacks=[monitor], default_root_dir=folder / "slow_network")
    finally:
        dist.all_reduce = all_reduce
    return {**outcome, "diagnosis": monitor.diagnosis, "summary": monitor.summary}


@scenario
def slow_rank(strategy: str, folder: Path) -> dict[str, Any]:
    """Rank 1 takes 50 ms longer for each step; a monitor watches."""

    class Slow(Sage):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.05 * self.global_rank)
            return super().training_step(batch, batch_idx)

    monitor = PipelineMonitor(timeline_batches=0)
    outcome = fit(Slow(adamw), strategy, callbacks=[monitor], default_root_dir=folder / "slow_rank")
    return {**outcome, "diagnosis": monitor.diagnosis}
