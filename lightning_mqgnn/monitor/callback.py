"""PipelineMonitor: measures a run and says, while it runs and at its end, what it waits for."""

import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from rich.console import Console

from lightning_mqgnn.adaptive import AdaptiveQueueCallback
from lightning_mqgnn.datamodule import MQGNNDataModule
from lightning_mqgnn.loader import MQGNNLoader, StageState
from lightning_mqgnn.monitor.recording import Counts, Recording, Work, count_in
from lightning_mqgnn.monitor.report import (
    Diagnosis,
    ExchangeSummary,
    StageSummary,
    Summary,
    as_table,
    diagnose,
)
from lightning_mqgnn.monitor.timeline import TRAINING, Level, Resize, Timeline, draw, write_trace
from lightning_mqgnn.pipeline import QueueLevel
from lightning_mqgnn.probes import device_memory, device_utilisation, host_memory, process_memory, processors
from lightning_mqgnn.racom import RaCoMExchange

_log = logging.getLogger(__name__)

_BAR_INTERVAL = 1.0  # seconds between two looks at what the bar shows
_WORTH_A_THREAD = 0.2  # of a processor that is free
_PROBE_INTERVAL = 1.0  # seconds; to ask the system takes a millisecond
_STEPS_PER_BATCH = 6  # stages and training; what the recording remembers is so many times the batches of the timeline


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
        self._begin(None)

    def _begin(self, loader: MQGNNLoader | None) -> None:
        keep = _STEPS_PER_BATCH * self._timeline_batches
        self._loader = loader
        self._others = Counts()
        self._recording = Recording(keep, dict if loader is None else partial(_levels, weakref.ref(loader)))
        if loader is not None:
            loader.observer = self._recording.begin_pass
        self._clock = _Clock()
        self._resumed = self._step_began = 0.0
        self._first: _Snapshot | None = None
        self._logged: _Snapshot | None = None
        self._shown: _Snapshot | None = None
        self._bar_texts: dict[str, str] = {}
        self._probed: _Probed | None = None
        self._has_bar = False
        self._log_every_n_steps = 1
        self._folder = Path()

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Begin to record."""
        loader = trainer.train_dataloader
        self._begin(loader if isinstance(loader, MQGNNLoader) else None)
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: all ranks must ask
        self._log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        bar: Any = trainer.progress_bar_callback
        self._has_bar = self._progress_bar and bar is not None
        if self._has_bar:
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
        if self._loader is None:
            self._others = self._others.plus(*count_in(batch))
        else:
            recording = self._recording
            recording.num_taken = taken = self._loader.num_yielded
            recording.work.append(Work((recording.num_passes, taken - 1), TRAINING, TRAINING, self._step_began, now))
        if self._first is None:
            self._first = self._logged = self._shown = self._look(trainer)
            return
        assert self._logged is not None
        assert self._shown is not None
        if self._has_bar and now - self._shown.time >= _BAR_INTERVAL:
            snapshot = self._look(trainer)
            recent = self._summarise(trainer, self._shown, snapshot)
            self._shown = snapshot
            self._bar_texts = {
                "seeds/s": f"{recent.seeds / max(recent.seconds, 1e-9):,.0f}",
                "bottleneck": diagnose(recent).bottleneck,
            }
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # what Lightning's own metrics are logged at
        if trainer.loggers and (step + 1) % self._log_every_n_steps == 0:
            snapshot = self._look(trainer)
            metrics = _metrics(self._summarise(trainer, self._logged, snapshot))
            self._logged = snapshot
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Report."""
        if self._first is not None and self._clock.batches > self._first.batches:
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
        if self._loader is not None:
            self._loader.observer = None

    def _look(self, trainer: "pl.Trainer") -> "_Snapshot":
        datamodule = getattr(trainer, "datamodule", None)
        stages: dict[str, StageState] = {}
        wait, counts = self._clock.between, self._others
        if self._loader is not None:
            stages = {state.stage.name: state for state in self._loader.stages()}
            wait, counts = self._loader.times()[0], self._recording.taken()
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
            seconds=self._clock.seconds,
            batches=self._clock.batches,
            counts=counts,
            wait=wait,
            exchange_wait=0.0 if exchange is None else exchange.seconds,
            exchanged=0 if exchange is None else exchange.bytes,
            staleness=Counter() if exchange is None else exchange.statistics.staleness.copy(),
            late=0.0 if exchange is None else exchange.arrivals.late_seconds,
            last=Counter() if exchange is None else exchange.arrivals.last.copy(),
            stages=stages,
            nbytes={name: self._recording.nbytes(name) for name in stages},
            hits=hits,
            processor_seconds=time.process_time(),
        )

    def _summarise(self, trainer: "pl.Trainer", before: "_Snapshot", after: "_Snapshot") -> Summary:
        passed = max(after.time - before.time, 1e-9)
        seconds = after.seconds - before.seconds  # without validation, in which the stages have a rest
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
        if self._probed is None or after.time - self._probed.time > _PROBE_INTERVAL:
            self._probed = _probe(trainer.strategy.root_device, after.time)
        exchange = _exchange(trainer)
        datamodule = getattr(trainer, "datamodule", None)
        ours = datamodule if isinstance(datamodule, MQGNNDataModule) else None
        return Summary(
            seconds=seconds,
            wait=after.wait - before.wait,
            exchange_wait=after.exchange_wait - before.exchange_wait,
            batches=after.batches - before.batches,
            seeds=after.counts.seeds - before.counts.seeds,
            edges=after.counts.edges - before.counts.edges,
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
            spare_threads=max(math.ceil(here / max(trainer.num_devices, 1) - busy - _WORTH_A_THREAD), 0),
            memory=self._probed.memory,
            utilisation=self._probed.utilisation,
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
        levels = [Level(when, name, *level) for when, of in self._recording.levels for name, level in of.items()]
        timeline = Timeline(list(self._recording.work), levels, resizes, trainer.global_rank)
        timeline = timeline.last_batches(self._timeline_batches)
        folder = self._folder
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


class _Probed(NamedTuple):
    """What the system says of memory and the device, at a time."""

    time: float
    memory: dict[str, tuple[int, int]]
    utilisation: float | None


def _probe(device: torch.device, now: float) -> _Probed:
    host = host_memory()
    memory = {"host": (host.used, host.limit), "process": (process_memory(), host.limit)}
    on_device = device_memory(device)
    if on_device is not None:
        memory["device"] = on_device.used, on_device.limit
    return _Probed(now, memory, device_utilisation(device))


class _Clock:
    """The training thread's time, and how many batches it trained on."""

    __slots__ = ("batches", "between", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.between = 0.0  # from the end of a step to the begin of the next
        self.batches = 0


class _Snapshot(NamedTuple):
    """All counters at a time."""

    time: float
    seconds: float
    batches: int
    counts: Counts
    wait: float
    exchange_wait: float
    exchanged: int
    staleness: Counter[int]
    late: float
    last: Counter[int]
    stages: dict[str, StageState]
    nbytes: dict[str, int]
    hits: dict[str, tuple[int, int]]
    processor_seconds: float


def _levels(loader: "weakref.ref[MQGNNLoader]") -> dict[str, QueueLevel]:
    """How full its queues are; the threads that ask must not keep it alive, see `Pipeline`."""
    alive = loader()
    return {} if alive is None else alive.levels()


def _exchange(trainer: "pl.Trainer") -> RaCoMExchange | None:
    exchange = getattr(trainer.strategy, "exchange", None)
    return exchange if isinstance(exchange, RaCoMExchange) and trainer.world_size > 1 else None


def _summary_of(exchange: RaCoMExchange, before: _Snapshot, after: _Snapshot) -> ExchangeSummary:
    settings = exchange.settings
    return ExchangeSummary(
        synchronous=settings.synchronous,
        period=exchange.period,
        max_staleness=settings.max_staleness,
        staleness=after.staleness - before.staleness,
        delta=exchange.statistics.delta,
        nbytes=after.exchanged - before.exchanged,
        lossy=settings.exchange_dtype.itemsize == 2,
        late=after.late - before.late,
        last=after.last - before.last,
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
            "racom/wait_for_last_rank": summary.exchange.late / seconds,
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
