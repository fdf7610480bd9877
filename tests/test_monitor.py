"""What a run says of itself: real loggers and bars, planted bottlenecks, a trace that is whole."""

import csv
import json
import time
from dataclasses import replace

import lightning as L
import pytest
import torch
from graphs import module, random_graph
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from scenarios.training import Sage, adamw
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_mqgnn import AdaptiveQueueCallback, NeighborSampler, PipelineMonitor
from lightning_mqgnn.cache.rows import FileRows
from lightning_mqgnn.monitor.report import ExchangeSummary, StageSummary, Summary, diagnose

SLOW = 0.1  # seconds of a planted delay; all else takes some milliseconds


class SlowSage(Sage):
    """A step takes `seconds` at least."""

    def __init__(self, seconds=0.0):
        super().__init__(adamw)
        self.seconds = seconds

    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 5,
}


def fit(monitor, datamodule, *callbacks, seconds=0.0, **arguments):
    arguments = {**QUIET, "max_epochs": 1, **arguments}
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[monitor, *callbacks], **arguments)
    trainer.fit(SlowSage(seconds), datamodule=datamodule)
    return trainer


def slow_down(monkeypatch, owner, name, seconds):
    own = getattr(owner, name)

    def slow(*arguments, **keywords):
        time.sleep(seconds)
        return own(*arguments, **keywords)

    monkeypatch.setattr(owner, name, slow)


def large(**arguments):
    return module(random_graph(num_nodes=4000, num_edges=20_000), batch_size=32, **arguments)


def test_a_slow_sampler_is_named(monkeypatch, tmp_path):
    monitor = PipelineMonitor(timeline_batches=0)
    slow_down(monkeypatch, NeighborSampler, "sample", SLOW)
    fit(monitor, large(queue_size=2), limit_train_batches=15)
    assert monitor.diagnosis.bottleneck == "sample"
    assert monitor.diagnosis.advice == "sampling_threads=2"


def test_a_slow_transform_is_named(tmp_path):
    monitor = PipelineMonitor(timeline_batches=0)
    fit(monitor, large(queue_size=2, transform=lambda batch: time.sleep(SLOW) or batch), limit_train_batches=15)
    assert monitor.diagnosis.bottleneck == "prepare"
    assert monitor.diagnosis.advice == "prepare_threads=2"


def test_a_slow_disk_is_named(monkeypatch, tmp_path):
    monitor = PipelineMonitor(timeline_batches=0)
    slow_down(monkeypatch, FileRows, "read", SLOW)
    datamodule = large(queue_size=2, feature_cache=60_000, feature_policy="lru", store_path=tmp_path / "graph")
    fit(monitor, datamodule, limit_train_batches=15)
    assert monitor.diagnosis.bottleneck == "disk"
    assert monitor.diagnosis.advice == "set a larger feature_cache"


def test_slow_compute_is_named(capsys):
    monitor = PipelineMonitor(timeline_batches=0)
    fit(monitor, large(queue_size=2), seconds=SLOW, limit_train_batches=15)
    assert monitor.diagnosis.bottleneck == "compute"
    assert 'edge_format="csc"' in monitor.diagnosis.advice
    said = " ".join(capsys.readouterr().out.split())
    assert "Bottleneck: compute." in said
    assert "One thing to change:" in said
    for stage in monitor.summary.stages:  # though they also waited while the model was validated
        assert stage.busy + stage.starved + stage.blocked <= 1 + 1e-9
        assert stage.blocked > 0.5
    assert "sample" in said


def test_a_memory_limit_is_named():
    monitor = PipelineMonitor(timeline_batches=0)
    sizing = AdaptiveQueueCallback(interval=0.05, memory_limit="200MiB")
    fit(monitor, large(queue_size=4, transform=lambda batch: time.sleep(SLOW) or batch), sizing, limit_train_batches=15)
    assert monitor.diagnosis.bottleneck == "memory"
    assert "memory_limit" in monitor.diagnosis.advice


def test_of_another_loader_it_says_how_long_training_waited():
    batches = list(large().train_dataloader())[:15]

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, number):
            time.sleep(SLOW)
            return batches[number]

    monitor = PipelineMonitor(timeline_batches=0)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **QUIET)
    trainer.fit(SlowSage(), train_dataloaders=torch.utils.data.DataLoader(Slow(), batch_size=None))
    assert monitor.diagnosis.bottleneck == "loader"
    assert "MQGNNDataModule" in monitor.diagnosis.advice
    assert monitor.summary.wait > 0.5 * monitor.summary.seconds
    assert monitor.summary.seeds == sum(batch.batch_size for batch in batches[1:])


@pytest.mark.parametrize("limit", [7, 1.0])
def test_what_was_trained_on_is_counted_and_not_what_was_made_ahead(limit):
    monitor = PipelineMonitor(report=False, timeline_batches=0)
    counts = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            counts.append((batch.batch_size, batch.num_edges))

    fit(monitor, large(queue_size=8), Count(), max_epochs=3, limit_train_batches=limit)
    assert len(counts) == 3 * (7 if limit == 7 else 75)
    seeds, edges = zip(*counts[1:], strict=True)  # the first is not counted
    assert (monitor.summary.batches, monitor.summary.seeds, monitor.summary.edges) == (
        len(seeds),
        sum(seeds),
        sum(edges),
    )


SUMMARY = Summary(seconds=10, wait=0, exchange_wait=0, batches=100, seeds=100, edges=1000)
EXCHANGE = ExchangeSummary(False, 8, 64, {3: 5}, 0.1, 1000, lossy=False)
STAGE = StageSummary("sample", 1, busy=0.9, starved=0, blocked=0, on_cpu=0.95, items=100)


@pytest.mark.parametrize(
    ("summary", "bottleneck", "advice"),
    [
        (
            replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, synchronous=True)),
            "network",
            "without period=1",
        ),
        (replace(SUMMARY, exchange_wait=5, exchange=EXCHANGE), "network", "exchange_dtype=torch.bfloat16"),
        (replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, lossy=True)), "network", "max_staleness=128"),
        (
            replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, late=2, last={1: 9})),
            "network",
            "exchange_dtype=torch.bfloat16",
        ),
        (
            replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, late=4, last={0: 5, 1: 5}, synchronous=True)),
            "straggler",
            "without period=1",
        ),
        (
            replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, late=4, last={0: 1, 1: 9})),
            "straggler",
            "give rank 1 the processors",
        ),
        (
            replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, late=4, last={0: 5, 1: 5})),
            "straggler",
            "check_val_every_n_epoch=2",
        ),
        (
            replace(SUMMARY, exchange_wait=5, exchange=replace(EXCHANGE, late=4, last={0: 5, 1: 5}, max_staleness=3)),
            "straggler",
            "max_staleness=6",
        ),
        (replace(SUMMARY, wait=5), "loader", "num_workers"),
        (replace(SUMMARY, wait=5, stages=(STAGE,), spare_threads=1), "sample", "sampling_threads=2"),
        (replace(SUMMARY, wait=5, stages=(STAGE,)), "sample", "resample_every=2"),
        (replace(SUMMARY, wait=5, stages=(replace(STAGE, busy=0.3),)), "burst", 'queue_size="auto"'),
        (
            replace(SUMMARY, wait=5, stages=(replace(STAGE, name="prepare", on_cpu=0.1),), features_on_disk=True),
            "disk",
            "feature_cache=",
        ),
        (replace(SUMMARY, wait=5, stages=(replace(STAGE, name="transfer"),)), "transfer", "feature_cache"),
        (replace(SUMMARY, edge_format="csc"), "compute", "bf16-mixed"),
    ],
)
def test_what_training_waits_for_is_named_with_the_setting_to_change(summary, bottleneck, advice):
    diagnosis = diagnose(summary)
    assert diagnosis.bottleneck == bottleneck
    assert advice in diagnosis.advice


def test_all_loggers_get_the_same_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path), WandbLogger(save_dir=tmp_path, offline=True)]
    fit(PipelineMonitor(report=False), large(), logger=loggers)
    loggers[2].experiment.finish()
    with open(f"{loggers[1].log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["mqgnn/seeds_per_second"]]
    assert len(rows) > 5
    for name in ("sample/busy", "prepare/p99_ms", "prepare/depth", "prepare/bytes_per_second", "memory/host"):
        assert all(float(row[f"mqgnn/{name}"]) >= 0 for row in rows)
    events = EventAccumulator(loggers[0].log_dir, {"images": 0, "scalars": 0}).Reload()
    scalars = events.Scalars("mqgnn/seeds_per_second")
    assert [float(row["mqgnn/seeds_per_second"]) for row in rows] == pytest.approx([s.value for s in scalars], rel=1e-5)
    assert events.Images("mqgnn/timeline")[0].width > 500
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_seeds_per_second_and_the_bottleneck(bar, monkeypatch):
    monkeypatch.setattr("lightning_mqgnn.monitor.callback._BAR_INTERVAL", 0.05)
    progress, seen = bar(), []
    monitor = PipelineMonitor(report=False, timeline_batches=0)

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(dict(progress.get_metrics(trainer, pl_module)))

    trainer = fit(monitor, large(), Look(), progress, seconds=0.01, enable_progress_bar=True)
    assert float(seen[-1]["seeds/s"].replace(",", "")) > 0
    assert seen[-1]["bottleneck"] == "compute"
    assert "bottleneck" not in progress.get_metrics(trainer, trainer.lightning_module)


def test_the_timeline_is_a_whole_trace(tmp_path):
    fit(PipelineMonitor(report=False, timeline_batches=20), large(), default_root_dir=tmp_path)
    events = json.loads((tmp_path / "mqgnn-timeline.json").read_text())["traceEvents"]
    assert (tmp_path / "mqgnn-timeline.png").read_bytes()[:4] == b"\x89PNG"
    slices = [event for event in events if event["ph"] == "X"]
    trained = [event for event in slices if event["name"] == "training"]
    assert len(trained) == 20
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"training", "mqgnn-sample-0", "mqgnn-prepare-0"} <= set(names.values())
    flows = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
            assert any(
                each["tid"] == event["tid"] and each["ts"] <= event["ts"] <= each["ts"] + each["dur"] for each in slices
            )
    for event in trained:
        flow = flows[f"{event['args']['pass']}.{event['args']['batch']}"]
        assert [step["ph"] for step in flow] == ["s", "t", "f"]  # sample, prepare, training
        assert [step["ts"] for step in flow] == sorted(step["ts"] for step in flow)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"queue behind sample", "queue behind prepare"}
