"""PipelineMonitor: measures a run and says, while it runs and at its end, what it waits for."""

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console
from torch_geometric.data import Data

from lightning_mqgnn.adaptive import AdaptiveQueueCallback
from lightning_mqgnn.datamodule import MQGNNDataModule
from lightning_mqgnn.loader import MQGNNLoader, StageState
from lightning_mqgnn.monitor.recording import Recording, Work
from lightning_mqgnn.monitor.report import (
    Diagnosis,
    ExchangeSummary,
    StageSummary,
    Summary,
    as_table,
    diagnose,
)
from lightning_mqgnn.monitor.timeline import TRAINING, Level, Resize, Timeline, draw, write_trace
from lightning_mqgnn.probes import device_memory, device_utilisation, host_memory, process_memory, processors
from lightning_mqgnn.racom import RaCoMExchange

_log = logging.getLogger(__name__)

_BAR_INTERVAL = 1.0  # seconds between two looks at what the bar shows
_EVENTS_PER_BATCH = 8  # stages, training and queues; what the timeline remembers is so many times its batches


class PipelineMonitor(Callback):
    """Says where the time of training goes: in the logger, in the progress bar, in a table and in a timeline.

    * At each logging step (`log_every_n_steps`), of the time since the one before, as `mqgnn/...`: seeds and edges per
      second; the shares of waiting for batches and for other ranks; per stage the shares of work and of waiting, items
      and bytes per second, median and 99th percentile of the milliseconds per item, threads, depth and capacity of its
      queue; hit rates of the caches; period, staleness and distance of the replicas; memory and utilisation.
    * In the progress bar: seeds per second, and what training waits for.
    * At the end of fit: a table, with the bottleneck and the one setting to change.
    * A timeline of the last batches: `mqgnn-timeline.json`, which https://ui.perfetto.dev opens, and, with the `plot`
      extra, `mqgnn-timeline.png`, also sent to TensorBoard and W&B. They lie in the logger's folder.

    What is shown is that of the first rank. Works with any strategy; of loaders that are not `MQGNNDataModule`'s it
    knows only how long training waited. The first batch of a fit is not counted.

    Args:
        report: Print the table at the end of fit.
        progress_bar: Show seeds per second and the bottleneck in the progress bar.
        timeline_batches: Batches in the timeline; 0 for no timeline.

    Attributes:
        summary: Of the last fit, None before its end.
        diagnosis: Of the last fit, None before its end.

    Raises:
        ValueError: `timeline_batches` is negative.
    """

    def __init__(self, report: bool = True, progress_bar: bool = True, timeline_batches: int = 100) -> None:
        if timeline_batches < 0:
            raise ValueError(f"timeline_batches={timeline_batches}: give 0, for no timeline, or more")
        self.summary: Summary | None = None
        self.diagnosis: Diagnosis | None = None
        self._report = report
        self._progress_bar = progress_bar
        self._timeline_batches = timeline_batches
        self._begin()

    def _begin(self) -> None:
        self._recording = Recording(_EVENTS_PER_BATCH * self._timeline_batches)
        self._levels: deque[Level] = deque(maxlen=_EVENTS_PER_BATCH * self._timeline_batches)
        self._clock = _Clock()
        self._resumed = self._step_began = 0.0
        self._first: _Snapshot | None = None
        self._logged: _Snapshot | None = None
        self._shown: _Snapshot | None = None
        self._bar_texts: dict[str, str] = {}

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begin to record."""
        self._begin()
        loader = trainer.train_dataloader
        if isinstance(loader, MQGNNLoader):
            loader.observer = self._recording.begin_pass
        bar: Any = trainer.progress_bar_callback
        if self._progress_bar and bar is not None:
            own: Callable[..., dict[str, Any]] = bar.get_metrics
            bar.get_metrics = lambda *arguments: {**own(*arguments), **self._bar_texts}

    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Go on with the training thread's time."""
        self._resumed = time.perf_counter()

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Go on with the training thread's time."""
        self._resumed = time.perf_counter()

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """A batch has come."""
        self._step_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step; now and then look at everything else."""
        now = time.perf_counter()
        clock = self._clock
        clock.seconds += now - self._resumed
        clock.between += self._step_began - self._resumed
        self._resumed = now
        clock.batches += 1
        if isinstance(batch, Data):
            clock.seeds += int(batch.get("batch_size") or 0)
            clock.edges += len(batch.e_id) if "e_id" in batch else batch.num_edges
        loader = trainer.train_dataloader
        if self._timeline_batches and isinstance(loader, MQGNNLoader):
            item = self._recording.num_passes, loader.num_yielded - 1
            self._recording.work.append(Work(item, TRAINING, TRAINING, self._step_began, now))
            for name, level in loader.levels().items():
                self._levels.append(Level(now, name, *level))
        if self._first is None:
            self._first = self._logged = self._shown = self._look(trainer)
            return
        assert self._logged is not None
        assert self._shown is not None
        if self._progress_bar and now - self._shown.time >= _BAR_INTERVAL:
            recent = self._summarise(trainer, self._shown, self._look(trainer))
            self._shown = self._look(trainer)
            self._bar_texts = {
                "seeds/s": f"{recent.seeds / max(recent.seconds, 1e-9):,.0f}",
                "bottleneck": diagnose(recent).bottleneck,
            }
        if trainer.loggers and trainer._logger_connector.should_update_logs:
            snapshot = self._look(trainer)
            metrics = _metrics(self._summarise(trainer, self._logged, snapshot))
            self._logged = snapshot
            for logger in trainer.loggers:
                logger.log_metrics(metrics, trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Report."""
        if self._first is not None and self._clock.batches > self._first.clock.batches:
            self.summary = self._summarise(trainer, self._first, self._look(trainer))
            self.diagnosis = diagnose(self.summary)
            if trainer.is_global_zero:
                if self._report:
                    Console().print(as_table(self.summary, self.diagnosis))
                self._save_timeline(trainer)
                self._log_staleness(trainer)
        self._end(trainer)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Leave nothing behind."""
        self._end(trainer)

    def _end(self, trainer: "pl.Trainer") -> None:
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.__dict__.pop("get_metrics", None)
        loader = trainer.train_dataloader
        if isinstance(loader, MQGNNLoader):
            loader.observer = None

    def _look(self, trainer: "pl.Trainer") -> "_Snapshot":
        loader = trainer.train_dataloader
        datamodule = getattr(trainer, "datamodule", None)
        stages: dict[str, StageState] = {}
        wait = self._clock.between
        if isinstance(loader, MQGNNLoader):
            stages = {state.stage.name: state for state in loader.stages()}
            wait = loader.times()[0]
        hits = {}
        if isinstance(datamodule, MQGNNDataModule):
            features, subgraphs = datamodule.feature_report(), datamodule.subgraph_counts()
            if features is not None:
                hits["feature_cache"] = features.hits, features.accesses
            if subgraphs is not None and subgraphs.hits + subgraphs.misses:
                hits["subgraph_cache"] = subgraphs.hits, subgraphs.hits + subgraphs.misses
        exchange = _exchange(trainer)
        return _Snapshot(
            time=time.perf_counter(),
            clock=self._clock.copy(),
            wait=wait,
            exchange_wait=0.0 if exchange is None else exchange.seconds,
            exchanged=0 if exchange is None else exchange.bytes,
            staleness={} if exchange is None else dict(exchange.statistics.staleness),
            stages=stages,
            nbytes={name: self._recording.nbytes(name) for name in stages},
            hits=hits,
            processor_seconds=time.process_time(),
        )

    def _summarise(self, trainer: "pl.Trainer", before: "_Snapshot", after: "_Snapshot") -> Summary:
        passed = max(after.time - before.time, 1e-9)
        seconds = after.clock.seconds - before.clock.seconds  # without validation, in which the stages have a rest
        stages = []
        for name, state in after.stages.items():
            shares = state.since(before.stages.get(name), seconds)
            p50, p99 = self._recording.latencies(name)
            stages.append(
                StageSummary(
                    name=name,
                    threads=state.stage.threads,
                    busy=shares.busy,
                    starved=shares.starved,
                    blocked=shares.blocked,
                    on_cpu=shares.on_cpu,
                    items=shares.items,
                    nbytes=after.nbytes[name] - before.nbytes.get(name, 0),
                    p50=p50,
                    p99=p99,
                    depth=0 if state.queue is None else state.queue.depth,
                    capacity=0 if state.queue is None else state.queue.capacity,
                )
            )
        here = processors()
        busy = (after.processor_seconds - before.processor_seconds) / passed
        device = trainer.strategy.root_device
        memory = {"host": tuple(host_memory()), "process": (process_memory(), host_memory().limit)}
        on_device = device_memory(device)
        if on_device is not None:
            memory["device"] = tuple(on_device)
        exchange = _exchange(trainer)
        datamodule = getattr(trainer, "datamodule", None)
        ours = datamodule if isinstance(datamodule, MQGNNDataModule) else None
        return Summary(
            seconds=seconds,
            wait=after.wait - before.wait,
            exchange_wait=after.exchange_wait - before.exchange_wait,
            batches=after.clock.batches - before.clock.batches,
            seeds=after.clock.seeds - before.clock.seeds,
            edges=after.clock.edges - before.clock.edges,
            stages=tuple(stages),
            exchange=None if exchange is None else _summary_of(exchange, before, after),
            hit_rates={
                name: (hits - before.hits.get(name, (0, 0))[0]) / max(asked - before.hits.get(name, (0, 0))[1], 1)
                for name, (hits, asked) in after.hits.items()
            },
            features_on_disk=ours is not None and ours.features_on_disk,
            has_feature_cache="feature_cache" in after.hits,
            has_transform=ours is not None and ours.has_transform,
            edge_format="coo" if ours is None else ours.edge_format,
            memory_bound=_is_short_of_memory(trainer),
            processors=busy / here,
            spare_threads=max(int(here / max(trainer.num_devices, 1) - busy), 0),
            memory={place: (int(used), int(limit)) for place, (used, limit) in memory.items()},
            utilisation=device_utilisation(device),
        )

    def _save_timeline(self, trainer: "pl.Trainer") -> None:
        if not self._timeline_batches or not self._recording.work:
            return
        resizes = [
            Resize(when, f"{change.what} of {change.stage}: {change.before} -> {change.after}")
            for callback in _callbacks(trainer)
            if isinstance(callback, AdaptiveQueueCallback)
            for when, change in callback.changes
        ]
        timeline = Timeline(list(self._recording.work), list(self._levels), resizes, trainer.global_rank)
        timeline = timeline.last_batches(self._timeline_batches)
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        write_trace(timeline, folder / "mqgnn-timeline.json")
        try:
            figure = draw(timeline)
        except ModuleNotFoundError:
            _log.info("The timeline is in %s; for a picture, install lightning-mqgnn[plot].", folder)
            return
        picture = folder / "mqgnn-timeline.png"
        figure.savefig(picture, dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("mqgnn/timeline", figure, trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_image("mqgnn/timeline", [str(picture)])

    def _log_staleness(self, trainer: "pl.Trainer") -> None:
        exchange = _exchange(trainer)
        if exchange is None or not exchange.statistics.staleness:
            return
        late = [steps for steps, count in exchange.statistics.staleness.items() for _ in range(count)]
        for logger in trainer.loggers:
            _log_histogram(logger, "mqgnn/racom/staleness_histogram", late, trainer.global_step)


class _Clock:
    """The training thread's time, and what it trained on."""

    __slots__ = ("batches", "between", "edges", "seconds", "seeds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.between = 0.0  # from the end of a step to the begin of the next
        self.batches = self.seeds = self.edges = 0

    def copy(self) -> "_Clock":
        twin = _Clock()
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin


class _Snapshot(NamedTuple):
    """All counters at a time."""

    time: float
    clock: _Clock
    wait: float
    exchange_wait: float
    exchanged: int
    staleness: dict[int, int]
    stages: dict[str, StageState]
    nbytes: dict[str, int]
    hits: dict[str, tuple[int, int]]
    processor_seconds: float


def _exchange(trainer: "pl.Trainer") -> RaCoMExchange | None:
    exchange = getattr(trainer.strategy, "exchange", None)
    return exchange if isinstance(exchange, RaCoMExchange) and trainer.world_size > 1 else None


def _summary_of(exchange: RaCoMExchange, before: _Snapshot, after: _Snapshot) -> ExchangeSummary:
    settings = exchange.settings
    staleness = {
        steps: count - before.staleness.get(steps, 0)
        for steps, count in after.staleness.items()
        if count > before.staleness.get(steps, 0)
    }
    return ExchangeSummary(
        synchronous=settings.synchronous,
        period=exchange.period,
        max_staleness=settings.max_staleness,
        staleness=staleness,
        delta=exchange.statistics.delta,
        nbytes=after.exchanged - before.exchanged,
        lossy=settings.exchange_dtype.itemsize == 2,
    )


def _is_short_of_memory(trainer: "pl.Trainer") -> bool:
    """Whether the last change of any queue was to shorten it."""
    last = {}
    for callback in _callbacks(trainer):
        if isinstance(callback, AdaptiveQueueCallback):
            last.update({change.stage: change for _, change in callback.changes if change.what == "capacity"})
    return any(change.after < change.before for change in last.values())


def _callbacks(trainer: "pl.Trainer") -> list[Callback]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]  # the Trainer sets it, its class does not name it


def _metrics(summary: Summary) -> dict[str, float]:
    seconds = max(summary.seconds, 1e-9)
    metrics = {
        "seeds_per_second": summary.seeds / seconds,
        "edges_per_second": summary.edges / seconds,
        "wait_for_batches": summary.wait / seconds,
        "compute": summary.compute / seconds,
        "processors": summary.processors,
    }
    for stage in summary.stages:
        metrics |= {
            f"{stage.name}/busy": stage.busy,
            f"{stage.name}/wait_for_input": stage.starved,
            f"{stage.name}/wait_for_room": stage.blocked,
            f"{stage.name}/items_per_second": stage.items / seconds,
            f"{stage.name}/bytes_per_second": stage.nbytes / seconds,
            f"{stage.name}/p50_ms": 1e3 * stage.p50,
            f"{stage.name}/p99_ms": 1e3 * stage.p99,
            f"{stage.name}/threads": stage.threads,
            f"{stage.name}/depth": stage.depth,
            f"{stage.name}/capacity": stage.capacity,
        }
    metrics |= {f"{name}/hit_rate": rate for name, rate in summary.hit_rates.items()}
    if summary.exchange is not None:
        late = summary.exchange.staleness
        metrics |= {
            "racom/period": summary.exchange.period,
            "racom/staleness_max": max(late, default=0),
            "racom/staleness_mean": sum(steps * n for steps, n in late.items()) / max(sum(late.values()), 1),
            "racom/delta": summary.exchange.delta,
            "racom/wait": summary.exchange_wait / seconds,
            "racom/bytes": summary.exchange.nbytes,
        }
    metrics |= {f"memory/{place}": used for place, (used, _) in summary.memory.items()}
    if summary.utilisation is not None:
        metrics["device_utilisation"] = summary.utilisation
    return {f"mqgnn/{name}": float(value) for name, value in metrics.items()}


def _log_histogram(logger: Logger, name: str, values: list[int], step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        import numpy as np

        logger.experiment.add_histogram(name, np.asarray(values), step)
    elif isinstance(logger, WandbLogger):
        import wandb

        logger.experiment.log({name: wandb.Histogram(values)})
