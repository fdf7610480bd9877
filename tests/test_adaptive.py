"""Queues that size themselves under a Trainer."""

import random
import time

import lightning as L
import pytest
from graphs import module, random_graph
from scenarios.training import Sage, adamw

from lightning_mqgnn import AdaptiveQueueCallback
from lightning_mqgnn.sizing import replay


class SlowSage(Sage):
    """A step of 4 ms at least."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.004)
        return super().training_step(batch, batch_idx)


def in_bursts(batch):
    time.sleep(random.Random(int(batch.input_id[0])).choice([0, 0, 0, 0.016]))
    return batch


def fit(datamodule, *callbacks, **arguments):
    model = SlowSage(adamw)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        enable_model_summary=False,
        **{**quiet, **arguments},
    )
    trainer.fit(model, datamodule=datamodule)
    return trainer, model


def test_a_queue_in_want_of_room_grows_and_training_sees_the_same_batches(tmp_path):
    data = random_graph(num_nodes=8000, num_edges=40_000)
    arguments = {"num_neighbors": [3, 3], "batch_size": 16, "transform": in_bursts}
    log = tmp_path / "sizes.jsonl"
    callback = AdaptiveQueueCallback(interval=0.15, max=8, log_file=log)
    _, model = fit(module(data, **arguments), callback)
    _, fixed = fit(module(data, queue_size=2, **arguments))
    assert model.trained == fixed.trained
    capacities = [change.after for _, change in callback.changes if change.stage == "prepare"]
    assert capacities
    assert capacities == sorted(capacities)
    assert max(capacities) <= 8
    assert all(then == now for then, now in replay(log.read_text().splitlines()))


def test_auto_adds_the_callback_once_and_a_number_does_not():
    def callbacks(trainer):
        return [callback for callback in trainer.callbacks if isinstance(callback, AdaptiveQueueCallback)]

    own = AdaptiveQueueCallback(interval=60)
    assert callbacks(fit(module(), own)[0]) == [own]
    trainer, _ = fit(module())
    trainer.fit(SlowSage(adamw), datamodule=module())
    assert len(callbacks(trainer)) == 1
    assert callbacks(fit(module(queue_size=2))[0]) == []


def test_a_limit_that_is_used_up_shrinks_the_queue():
    data = random_graph(num_nodes=4000, num_edges=20_000)
    callback = AdaptiveQueueCallback(interval=0.05, memory_limit="200MiB")  # less than torch itself takes
    datamodule = module(data, queue_size=6, batch_size=16)
    fit(datamodule, callback)
    _, change = callback.changes[0]
    assert (change.stage, change.what, change.before, change.after) == ("prepare", "capacity", 6, 1)
    assert "MiB of host memory are in use or promised" in change.reason


def test_a_limit_below_one_batch_ends_training_with_an_error():
    with pytest.raises(ValueError, match="memory_limit=1000: one item behind stage 'sample' has"):
        fit(module(random_graph(4000, 20_000), batch_size=16), AdaptiveQueueCallback(0.05, memory_limit=1000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": 0}, "interval=0: give seconds"),
        ({"min": 0}, "min=0, max=16: give items"),
        ({"min": 4, "max": 3}, "min=4, max=3: give items"),
        ({"threads": 0}, "threads=0: give 1 or more"),
        ({"memory_limit": "much"}, "memory_limit='much': give bytes"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveQueueCallback(**arguments)
