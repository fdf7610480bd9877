"""AdaptiveQueueCallback: resizes queues, and moves threads between stages, while training runs."""

import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch import Callback
from torch_geometric.data import Data

from lightning_mqgnn.buffers import num_bytes_of
from lightning_mqgnn.cache.budget import num_bytes
from lightning_mqgnn.loader import MQGNNLoader, StageState
from lightning_mqgnn.probes import device_memory, host_memory, process_memory, processors
from lightning_mqgnn.sizing import Change, Limits, Readings, StageReading, State, decide, log_line

_log = logging.getLogger(__name__)


class AdaptiveQueueCallback(Callback):
    """Every few seconds, sizes the queues of the training loader, and the number of threads of its stages.

    A queue that runs both dry and full gets longer; when memory runs short the queue of ready batches gives way first;
    the stage that training waits for gets a thread more, which goes back if it does not help. `lightning_mqgnn.sizing`
    has the rules. `MQGNNDataModule(queue_size="auto")` adds this callback by itself; give one to the Trainer to set its
    arguments. Each rank sees to its own queues. What a batch holds does not depend on any of it.

    Args:
        interval: Seconds between two decisions.
        memory_limit: Host memory for this process: bytes, a size such as "8GiB", or, as a float, a fraction of the
            machine's. By default all that the machine or the control group (container, batch job) has.
        min: Shortest queue, in items.
        max: Longest queue, in items.
        threads: That the stages may have together; by default one less than this rank's share of the processors, but
            as many as there are stages with threads at least.
        log_file: A file that gets a line of JSON for each decision, see `lightning_mqgnn.sizing.replay`; of the first
            rank.

    Attributes:
        changes: When (`time.perf_counter`) what was changed.

    Raises:
        ValueError: A number is out of range; during training, if one batch does not fit into `memory_limit`.
    """

    def __init__(
        self,
        interval: float = 2.0,
        memory_limit: int | float | str | None = None,
        min: int = 1,
        max: int = 16,
        threads: int | None = None,
        log_file: str | Path | None = None,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"interval={interval}: give seconds, more than 0")
        if min < 1 or max < min:
            raise ValueError(f"min={min}, max={max}: give items of a queue, 1 <= min <= max")
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: give 1 or more")
        self.interval = interval
        self.changes: list[tuple[float, Change]] = []
        self._memory_limit = None
        if memory_limit is not None:
            self._memory_limit = num_bytes("memory_limit", memory_limit, host_memory().limit)
        self._min, self._max, self._threads = min, max, threads
        self._log_file = None if log_file is None else Path(log_file)
        self._state = State()
        self._mark: _Mark | None = None

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begin anew."""
        self._state, self._mark = State(), None
        if not isinstance(trainer.train_dataloader, MQGNNLoader):
            _log.warning(
                "AdaptiveQueueCallback: the training loader is a %s, which has no queues of ours; give the Trainer an "
                "MQGNNDataModule, or leave the callback out",
                type(trainer.train_dataloader).__name__,
            )

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Begin an interval; the first batch of an epoch may have taken long for reasons of its own."""
        if self._mark is None and isinstance(trainer.train_dataloader, MQGNNLoader):
            self._mark = _Mark.of(trainer.train_dataloader)

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of an interval, decide."""
        if self._mark is None or time.perf_counter() - self._mark.time < self.interval:
            return
        loader = trainer.train_dataloader
        assert isinstance(loader, MQGNNLoader)
        now = _Mark.of(loader)
        readings = self._read(trainer, self._mark, now, batch)
        self._mark = now
        limits = Limits(self._min, self._max, self._threads or _thread_budget(trainer, readings))
        changes, self._state = decide(readings, self._state, limits)
        if self._log_file is not None and trainer.is_global_zero:
            with self._log_file.open("a") as file:
                file.write(log_line(readings, limits, changes) + "\n")
        for change in changes:
            self._apply(trainer, loader, change)

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """What happens until the next training batch says nothing about training."""
        self._mark = None

    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """As in validation."""
        self._mark = None

    def _read(self, trainer: "pl.Trainer", before: "_Mark", now: "_Mark", batch: Any) -> Readings:
        seconds = now.time - before.time
        device = trainer.strategy.root_device
        on_device = device_memory(device)
        host = host_memory() if self._memory_limit is None else (process_memory(), self._memory_limit)
        memory = {"host": (int(host[0]), int(host[1]))}
        if on_device is not None:
            memory["device"] = on_device.used, on_device.limit
        sizes = _item_bytes(batch)
        stages = []
        for name, state in now.stages.items():
            if not state.stage.threads:
                continue
            shares = state.since(before.stages[name], seconds)
            in_device_memory = on_device is not None and name == "transfer"
            stages.append(
                StageReading(
                    name=name,
                    threads=state.stage.threads,
                    capacity=state.stage.queue_size,
                    busy=shares.busy,
                    starved=shares.starved,
                    blocked=shares.blocked,
                    item_bytes=sizes.get(name, sizes["batch"]),
                    depth=0 if state.queue is None else state.queue.depth,
                    memory="device" if in_device_memory else "host",
                    serial=state.stage.serial,
                )
            )
        return Readings(
            tuple(stages),
            min((now.wait - before.wait) / seconds, 1.0),
            now.num_yielded - before.num_yielded,
            seconds,
            memory,
        )

    def _apply(self, trainer: "pl.Trainer", loader: MQGNNLoader, change: Change) -> None:
        if change.what == "capacity":
            loader.resize(change.stage, queue_size=change.after)
        else:
            loader.resize(change.stage, threads=change.after)
        self.changes.append((time.perf_counter(), change))
        _log.info(
            "%s of stage %r: %d -> %d, since %s",
            change.what,
            change.stage,
            change.before,
            change.after,
            change.reason,
        )
        for logger in trainer.loggers:
            logger.log_metrics({f"mqgnn/{change.stage}/{change.what}": change.after}, trainer.global_step)


class _Mark(NamedTuple):
    """The loader's clocks at a time."""

    time: float
    wait: float
    num_yielded: int
    stages: dict[str, StageState]

    @classmethod
    def of(cls, loader: MQGNNLoader) -> "_Mark":
        wait, _ = loader.times()
        stages = {state.stage.name: state for state in loader.stages()}
        return cls(time.perf_counter(), wait, loader.num_yielded, stages)


def _item_bytes(batch: Any) -> dict[str, int]:
    """Bytes of a batch, and of the subgraph that it was made of, at most."""
    if not isinstance(batch, Data):
        return {"batch": 0}
    ids = (batch.get(name) for name in ("n_id", "e_id", "edge_index"))
    return {"batch": num_bytes_of(batch), "sample": sum(tensor.nbytes for tensor in ids if tensor is not None)}


def _thread_budget(trainer: "pl.Trainer", readings: Readings) -> int:
    return max(processors() // max(trainer.num_devices, 1) - 1, sum(stage.threads for stage in readings.stages))
