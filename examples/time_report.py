"""Where the time of a training run went, as a short table."""

import time

import lightning as L

from lightning_mqgnn import MQGNNDataModule, MQGNNStrategy


class TrainingTime(L.Callback):
    """Adds up the time spent in training, without validation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Comes after the strategy has completed its exchange.
        if not trainer.sanity_checking:
            self.seconds += time.perf_counter() - self._since

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds += time.perf_counter() - self._since


def time_report(trainer: L.Trainer, datamodule: MQGNNDataModule, seconds: float) -> str:
    """Say where `seconds` of training went on this rank."""
    times = datamodule.times()["train"]
    batches = times["batches"]
    waited = times["wait"]
    strategy = trainer.strategy
    exchanging = strategy.exchange.seconds if isinstance(strategy, MQGNNStrategy) and strategy.exchange else 0.0
    in_series = {
        "wait for the batch": waited,
        "wait for other ranks": exchanging,
        "forward, backward, optimizer, Lightning": seconds - waited - exchanging,
    }
    lines = [f"Where the time went on rank {trainer.global_rank}: {seconds:.1f} s for {batches} training batches", ""]
    lines.append(f"  {'training thread':<42}{'ms/batch':>9}{'share':>8}")
    lines += [f"  {name:<42}{value / batches * 1e3:>9.2f}{value / seconds:>8.0%}" for name, value in in_series.items()]
    lines += ["", f"  {'beside it, in other threads':<42}{'ms/batch':>9}{'busy':>8}"]
    lines += [
        f"  {stage:<42}{busy / batches * 1e3:>9.2f}{busy / seconds:>8.0%}"
        for stage, busy in times.items()
        if stage not in ("wait", "batches")
    ]
    return "\n".join(lines)
