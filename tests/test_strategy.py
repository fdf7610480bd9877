"""The strategy in real processes, started by Lightning's launchers; `launch.py` holds what they run."""

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_mqgnn import MQGNNStrategy

EQUAL_TO_DDP = [
    "plain_sgd",
    "plain_adamw",
    "plain_lbfgs",
    "accumulation_and_clipping",
    "clipping_by_value",
    "bf16_mixed",
    "bf16_true",
    "float64_true",
    "fp16_with_a_scaler",
    "two_optimizers",
    "batch_norm",
    "unused_on_one_rank",
    "unused_on_all_ranks",
    "frozen_parameters",
    "ranks_begin_alike",
    "plain_dataloader",
]
EQUAL_BUT_FOR_ROUNDING = ["two_optimizers_and_accumulation"]
VISITS = ["uneven_nodes", "shards_of_9_and_8", "limited_batches", "a_fast_dev_run", "overfitting"]
RESUMED = ["resume_within_an_epoch", "resume_between_epochs", "resume_with_a_schedule_over_all_steps"]
ONLY_MQGNN = [
    "unfreezing",
    "validation_averages_buffers",
    "weight_averaging",
    "strategy_as_object",
    "fit_then_test",
    "one_copy",
    "sync_batchnorm_on_the_cpu",
    *RESUMED,
]


def files_in_shared_memory() -> set[str]:
    """All but the semaphores of `multiprocessing`, whose own helper removes them some time after a process ended."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


class Outcomes:
    """Starts scenarios and loads what each rank wrote."""

    def __init__(self, folder: Path):
        self.folder = folder

    def run(self, strategy: str, devices: int, scenarios: list[str]) -> "Outcomes":
        folder = self.folder / f"{strategy}-{devices}"
        folder.mkdir()
        command = [sys.executable, str(Path(__file__).parent / "launch.py"), str(folder), strategy, str(devices)]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        shared_memory = files_in_shared_memory()
        done = subprocess.run([*command, *scenarios], capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        assert files_in_shared_memory() <= shared_memory
        return self

    def __call__(self, strategy: str, scenario: str, rank: int, devices: int = 2) -> dict:
        return torch.load(self.folder / f"{strategy}-{devices}" / f"{scenario}.{rank}.pt", weights_only=False)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    started = Outcomes(tmp_path_factory.mktemp("outcomes"))
    both = [*EQUAL_TO_DDP, *EQUAL_BUT_FOR_ROUNDING, *VISITS]
    started.run("ddp", 2, both)
    return started.run("mqgnn", 2, [*both, *ONLY_MQGNN, "failing_training_step", "failing_transform"])


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs by up to {(value - other[name]).abs().max()}"


# The exchange


@pytest.mark.parametrize("scenario", EQUAL_TO_DDP)
def test_weights_are_those_of_ddp_to_the_last_bit(outcomes, scenario):
    for rank in (0, 1):
        ours, ddp = outcomes("mqgnn", scenario, rank), outcomes("ddp", scenario, rank)
        assert_equal(ours["weights"], ddp["weights"])
        assert ours["trained"] == ddp["trained"]
        if "steps" in ours:
            assert ours["steps"] == ddp["steps"] >= 20


@pytest.mark.parametrize("scenario", [*EQUAL_TO_DDP, "unfreezing", "weight_averaging", "strategy_as_object"])
def test_all_ranks_end_with_the_same_model(outcomes, scenario):
    one, other = (outcomes("mqgnn", scenario, rank) for rank in (0, 1))
    assert_equal(one["weights"], other["weights"])
    assert_equal(one["buffers"], other["buffers"])
    assert one["threads"] == other["threads"] == []


def test_accumulation_by_hand_differs_from_ddp_by_rounding_only(outcomes):
    ours, ddp = (outcomes(strategy, EQUAL_BUT_FOR_ROUNDING[0], 0)["weights"] for strategy in ("mqgnn", "ddp"))
    for name, value in ddp.items():
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-6), name


def test_training_changes_the_weights_and_ranks_see_different_nodes(outcomes):
    sgd, adamw = outcomes("mqgnn", "plain_sgd", 0), outcomes("mqgnn", "plain_adamw", 0)
    assert not torch.equal(sgd["weights"]["first.lin_l.weight"], adamw["weights"]["first.lin_l.weight"])
    assert set(sgd["trained"][0]).isdisjoint(outcomes("mqgnn", "plain_sgd", 1)["trained"][0])


def test_parameters_that_are_unfrozen_in_the_middle_are_trained(outcomes):
    outcome = outcomes("mqgnn", "unfreezing", 0)
    assert not torch.equal(outcome["weights"]["first.lin_l.weight"], outcome["before"])


def test_all_ranks_validate_with_the_same_buffers(outcomes):
    one, other = (outcomes("mqgnn", "validation_averages_buffers", rank)["means"] for rank in (0, 1))
    assert len(one) == 3
    for mean, other_mean in zip(one, other, strict=True):
        assert torch.equal(mean, other_mean)
        assert mean.abs().max() > 0


def test_the_strategy_may_be_given_as_an_object(outcomes):
    by_name, as_object = (outcomes("mqgnn", scenario, 0) for scenario in ("plain_sgd", "strategy_as_object"))
    assert_equal(by_name["weights"], as_object["weights"])


def test_more_ranks_differ_from_ddp_by_rounding_only(outcomes):
    scenarios = ["plain_sgd", "uneven_nodes"]
    outcomes.run("ddp", 3, scenarios).run("mqgnn", 3, scenarios)
    ranks = [outcomes("mqgnn", "plain_sgd", rank, 3)["weights"] for rank in range(3)]
    assert_equal(ranks[0], ranks[1])
    assert_equal(ranks[0], ranks[2])
    for name, value in outcomes("ddp", "plain_sgd", 0, 3)["weights"].items():
        assert torch.allclose(ranks[0][name], value, rtol=1e-4, atol=1e-6), name
    visited = [outcomes("mqgnn", "uneven_nodes", rank, 3) for rank in range(3)]
    assert sorted(node for outcome in visited for node in outcome["validated"][0]) == list(range(21))


@pytest.mark.parametrize("strategy", ["mqgnn_spawn", "mqgnn_fork"])
def test_other_ways_to_start_processes_give_the_same_weights(outcomes, strategy):
    outcomes.run(strategy, 2, ["plain_sgd"])
    assert_equal(outcomes(strategy, "plain_sgd", 0)["weights"], outcomes("mqgnn", "plain_sgd", 0)["weights"])


def test_one_device_needs_no_exchange(outcomes):
    outcomes.run("mqgnn", 1, ["plain_sgd"]).run("auto", 1, ["plain_sgd"])
    alone, auto = (outcomes(strategy, "plain_sgd", 0, 1) for strategy in ("mqgnn", "auto"))
    assert_equal(alone["weights"], auto["weights"])


@pytest.mark.parametrize("scenario", RESUMED)
def test_a_resumed_run_ends_as_the_uninterrupted_one(outcomes, scenario):
    for rank in (0, 1):
        outcome = outcomes("mqgnn", scenario, rank)
        assert_equal(outcome["whole"]["weights"], outcome["second"]["weights"])


def test_a_resumed_epoch_goes_on_with_the_batch_that_was_next(outcomes):
    for rank in (0, 1):
        outcome = outcomes("mqgnn", "resume_within_an_epoch", rank)  # after 6 steps, 2 of them in epoch 1
        whole, second = outcome["whole"]["trained"], outcome["second"]["trained"]
        assert second == {1: whole[1][60:], 2: whole[2]}


# Which nodes are visited


@pytest.mark.parametrize("strategy", ["mqgnn", "ddp"])
@pytest.mark.parametrize(("scenario", "trained", "validated"), [("uneven_nodes", 41, 21), ("shards_of_9_and_8", 17, 3)])
def test_every_node_is_visited_exactly_once_per_epoch(outcomes, strategy, scenario, trained, validated):
    ranks = [outcomes(strategy, scenario, rank) for rank in (0, 1)]
    for epoch in range(3):
        for kind, size in (("trained", trained), ("validated", validated)):
            assert sorted(ranks[0][kind][epoch] + ranks[1][kind][epoch]) == list(range(size)), (kind, epoch)
    assert len({tuple(ranks[0]["trained"][epoch]) for epoch in range(3)}) == 3  # in a new order each time


def test_limits_cut_epochs_without_a_trace(outcomes):
    for rank in (0, 1):
        limited = outcomes("mqgnn", "limited_batches", rank)
        whole = outcomes("mqgnn", "uneven_nodes", rank)
        assert limited["trained"] == {epoch: seen[:10] for epoch, seen in whole["trained"].items()}
        assert limited["validated"] == {epoch: seen[:5] for epoch, seen in whole["validated"].items()}
        assert limited["threads"] == whole["threads"] == []
        dev_run = outcomes("mqgnn", "a_fast_dev_run", rank)
        assert dev_run["trained"] == {0: whole["trained"][0][:10]}
        two_batches = 10 if rank == 0 else 9  # rank 1 has a seed less, and as many batches
        assert dev_run["validated"] == {0: whole["validated"][0][:two_batches]}


def test_overfitting_repeats_the_same_batches(outcomes):
    trained = outcomes("mqgnn", "overfitting", 0)["trained"]
    assert trained[0] == trained[1] == trained[2]
    assert len(trained[0]) == 10


def test_the_test_after_a_fit_visits_every_node_once(outcomes):
    visited = [node for rank in (0, 1) for node in outcomes("mqgnn", "fit_then_test", rank)["validated"][0]]
    assert len(visited) == len(set(visited)) == 80


def test_ranks_of_a_machine_share_one_copy_of_the_graph(outcomes):
    ranks = [outcomes("mqgnn", "one_copy", rank) for rank in (0, 1)]
    assert len(list((outcomes.folder / "mqgnn-2").glob("loaded-by-*"))) == 1
    for outcome in ranks:
        assert outcome["private"] < outcome["features"] / 10


# Failures


@pytest.mark.parametrize(
    ("scenario", "frame"), [("failing_training_step", "training_step"), ("failing_transform", "planted_transform")]
)
def test_an_exception_reaches_the_user_and_leaves_no_thread(outcomes, scenario, frame):
    for rank in (0, 1):
        outcome = outcomes("mqgnn", scenario, rank)
        assert outcome["error"] == "Planted"
        assert frame in outcome["traceback"]
        assert outcome["threads"] == []


def test_ctrl_c_leaves_no_thread(tmp_path):
    outcome = Outcomes(tmp_path).run("mqgnn", 1, ["interrupted_training_step"])(
        "mqgnn", "interrupted_training_step", 0, 1
    )
    assert outcome["error"] == "SystemExit"  # Lightning's answer to KeyboardInterrupt
    assert outcome["threads"] == []


def test_sync_batchnorm_on_the_cpu_is_refused_with_the_remedy(outcomes):
    assert "needs CUDA devices: remove it" in outcomes("mqgnn", "sync_batchnorm_on_the_cpu", 0)["error"]


# Names and arguments


@pytest.mark.parametrize("name", ["mqgnn", "mqgnn_spawn", "mqgnn_fork", "mqgnn_notebook"])
def test_the_strategy_is_known_by_its_names(name):
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, MQGNNStrategy)


def test_options_of_the_ddp_wrapper_are_refused():
    with pytest.raises(TypeError, match="find_unused_parameters"):
        MQGNNStrategy(find_unused_parameters=True)
