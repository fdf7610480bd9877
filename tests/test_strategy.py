"""The strategy in real processes, started by Lightning's launchers; `launch.py` holds what they run."""

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from graphs import random_graph

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
    "fp16_overflow_on_one_rank",
    "two_optimizers",
    "batch_norm",
    "unused_on_one_rank",
    "unused_on_all_ranks",
    "frozen_parameters",
    "unfreezing",
    "weight_averaging",
    "ranks_begin_alike",
    "plain_dataloader",
]
EQUAL_BUT_FOR_ROUNDING = ["two_optimizers_and_accumulation"]
VISITS = [
    "uneven_nodes",
    "uneven_nodes_again",
    "validation_within_an_epoch",
    "shards_of_9_and_8",
    "limited_batches",
    "a_fast_dev_run",
    "overfitting",
]
RESUMED = {  # the batches of 3 epochs of 4 that were left
    "resume_within_an_epoch": {1: 2, 2: 4},
    "resume_twice_within_an_epoch": {1: 1, 2: 4},
    "resume_after_the_last_batch_of_an_epoch": {2: 4},
    "resume_between_epochs": {1: 4, 2: 4},
    "resume_while_accumulating": {1: 2, 2: 4},
    "resume_with_a_schedule_over_all_steps": {1: 2, 2: 4},
}
ONLY_MQGNN = [
    "validation_averages_buffers",
    "checkpoint_averages_buffers",
    "stopped_within_an_epoch",
    "strategy_as_object",
    "fit_then_test",
    "one_copy",
    "sync_batchnorm_on_the_cpu",
    "slow_network",
    "slow_rank",
    *RESUMED,
]


FAILING = {  # a function that must be in the traceback
    "failing_training_step": "training_step",
    "failing_training_step_with_loaders_by_hand": "training_step",
    "failing_validation_step": "validation_step",
    "failing_transform": "planted_transform",
}
HAVE_WEIGHTS = [scenario for scenario in ONLY_MQGNN if scenario != "sync_batchnorm_on_the_cpu"]
TRAIN_NODES, VAL_NODES = (
    mask.nonzero().flatten().tolist() for mask in (random_graph().train_mask, random_graph().val_mask)
)


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
    return started.run("lockstep", 2, [*both, *ONLY_MQGNN, *FAILING])


@pytest.fixture(scope="module")
def elastic(tmp_path_factory):
    started = Outcomes(tmp_path_factory.mktemp("elastic"))
    started.run("racom", 2, ["from_the_start"])
    started.run("racom", 3, ["from_two_ranks_within_an_epoch", "from_two_ranks_after_an_epoch"])
    alone = ["from_two_ranks_within_an_epoch", "from_two_and_then_three_ranks", "from_two_ranks_after_an_epoch"]
    return started.run("racom", 1, alone)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs by up to {(value - other[name]).abs().max()}"


# The exchange


@pytest.mark.parametrize("scenario", EQUAL_TO_DDP)
def test_weights_are_those_of_ddp_to_the_last_bit(outcomes, scenario):
    for rank in (0, 1):
        ours, ddp = outcomes("lockstep", scenario, rank), outcomes("ddp", scenario, rank)
        assert_equal(ours["weights"], ddp["weights"])
        assert ours["trained"] == ddp["trained"]
        if "steps" in ours:
            assert ours["steps"] == ddp["steps"] >= 20


@pytest.mark.parametrize(
    "scenario",
    [*EQUAL_TO_DDP, *EQUAL_BUT_FOR_ROUNDING, *VISITS, *HAVE_WEIGHTS],
)
def test_all_ranks_end_with_the_same_model(outcomes, scenario):
    one, other = (outcomes("lockstep", scenario, rank) for rank in (0, 1))
    if scenario in RESUMED:
        one, other = one["second"], other["second"]
    assert_equal(one["weights"], other["weights"])
    assert_equal(one["buffers"], other["buffers"])
    assert one["threads"] == other["threads"] == []


def test_accumulation_by_hand_differs_from_ddp_by_rounding_only(outcomes):
    ours, ddp = (outcomes(strategy, EQUAL_BUT_FOR_ROUNDING[0], 0)["weights"] for strategy in ("lockstep", "ddp"))
    for name, value in ddp.items():
        assert torch.allclose(ours[name], value, rtol=0, atol=1e-7), name


@pytest.mark.parametrize(
    ("scenario", "exchanges"),
    [
        ("plain_sgd", 20),
        ("accumulation_and_clipping", 20),  # of 40 batches
        ("plain_lbfgs", 60),  # each step looks at 3 gradients
        ("weight_averaging", 24),  # its last pass only renews the statistics of BatchNorm
        ("two_optimizers_and_accumulation", 30),  # of 20 batches: each for the one, each second for the other
    ],
)
def test_gradients_travel_once_per_step_however_many_batches_it_accumulates(outcomes, scenario, exchanges):
    assert outcomes("lockstep", scenario, 0)["exchanges"] == outcomes("lockstep", scenario, 1)["exchanges"] == exchanges


def test_frozen_parameters_do_not_travel(outcomes):
    outcome = outcomes("lockstep", "frozen_parameters", 0)
    trained = [value for name, value in outcome["weights"].items() if name.startswith("second")]
    assert outcome["bytes"] == 20 * 4 * (sum(value.numel() + 1 for value in trained) + 2)


def test_an_overflow_on_one_rank_makes_all_skip_the_step(outcomes):
    for strategy in ("lockstep", "ddp"):
        scales = [outcomes(strategy, "fp16_overflow_on_one_rank", rank)["scale"] for rank in (0, 1)]
        assert scales == [2.0**15, 2.0**15], strategy  # half of what it began with


def test_ranks_that_were_seeded_differently_begin_with_the_weights_of_rank_0(outcomes):
    one, other = (outcomes("lockstep", "ranks_begin_alike", rank) for rank in (0, 1))
    assert not torch.equal(one["own"], other["own"])
    assert torch.equal(one["begun"], one["own"])
    assert torch.equal(other["begun"], one["own"])


def test_training_changes_the_weights_and_ranks_see_different_nodes(outcomes):
    sgd, adamw = outcomes("lockstep", "plain_sgd", 0), outcomes("lockstep", "plain_adamw", 0)
    assert not torch.equal(sgd["weights"]["first.lin_l.weight"], adamw["weights"]["first.lin_l.weight"])
    assert set(sgd["trained"][0]).isdisjoint(outcomes("lockstep", "plain_sgd", 1)["trained"][0])


def test_parameters_that_are_unfrozen_in_the_middle_are_trained(outcomes):
    outcome = outcomes("lockstep", "unfreezing", 0)
    assert not torch.equal(outcome["weights"]["first.lin_l.weight"], outcome["before"])


def test_all_ranks_validate_with_the_same_buffers(outcomes):
    one, other = (outcomes("lockstep", "validation_averages_buffers", rank)["means"] for rank in (0, 1))
    assert len(one) == 3
    for mean, other_mean in zip(one, other, strict=True):
        assert torch.equal(mean, other_mean)
        assert mean.abs().max() > 0


def test_a_checkpoint_holds_the_mean_of_the_buffers_of_all_ranks(outcomes):
    one, other = (outcomes("lockstep", "checkpoint_averages_buffers", rank) for rank in (0, 1))
    assert not torch.equal(one["own"], other["own"])
    assert torch.allclose(one["saved"], (one["own"] + other["own"]) / 2)


def test_the_strategy_may_be_given_as_an_object(outcomes):
    by_name, as_object = (outcomes("lockstep", scenario, 0) for scenario in ("plain_sgd", "strategy_as_object"))
    assert_equal(by_name["weights"], as_object["weights"])


def test_more_ranks_differ_from_ddp_by_rounding_only(outcomes):
    scenarios = ["plain_sgd", "uneven_nodes"]
    outcomes.run("ddp", 3, scenarios).run("lockstep", 3, scenarios)
    ranks = [outcomes("lockstep", "plain_sgd", rank, 3)["weights"] for rank in range(3)]
    assert_equal(ranks[0], ranks[1])
    assert_equal(ranks[0], ranks[2])
    for name, value in outcomes("ddp", "plain_sgd", 0, 3)["weights"].items():
        assert torch.allclose(ranks[0][name], value, rtol=0, atol=1e-6), name
    visited = [outcomes("lockstep", "uneven_nodes", rank, 3) for rank in range(3)]
    assert sorted(node for outcome in visited for node in outcome["validated"][0]) == list(range(21))


@pytest.mark.parametrize("strategy", ["lockstep_spawn", "lockstep_fork"])
def test_other_ways_to_start_processes_give_the_same_weights(outcomes, strategy):
    outcomes.run(strategy, 2, ["plain_sgd"])
    assert_equal(outcomes(strategy, "plain_sgd", 0)["weights"], outcomes("lockstep", "plain_sgd", 0)["weights"])


@pytest.mark.parametrize("scenario", RESUMED)
def test_a_resumed_run_ends_as_the_uninterrupted_one(outcomes, scenario):
    for rank in (0, 1):
        outcome = outcomes("lockstep", scenario, rank)
        assert_equal(outcome["whole"]["weights"], outcome["second"]["weights"])


@pytest.mark.parametrize(("scenario", "left"), RESUMED.items())
def test_a_resumed_epoch_goes_on_with_the_batch_that_was_next(outcomes, scenario, left):
    for rank in (0, 1):
        outcome = outcomes("lockstep", scenario, rank)
        whole, second = outcome["whole"]["trained"], outcome["second"]["trained"]
        assert second == {epoch: whole[epoch][-30 * batches :] for epoch, batches in left.items()}


@pytest.mark.parametrize("scenario", ["resume_within_an_epoch", "resume_with_a_schedule_over_all_steps"])
def test_both_parts_of_an_interrupted_epoch_visit_every_node_exactly_once(outcomes, scenario):
    visited = []
    for rank in (0, 1):
        outcome = outcomes("lockstep", scenario, rank)
        visited += outcome["whole"]["trained"][1][:60]  # 2 batches until the checkpoint
        visited += outcome["second"]["trained"][1]
    assert len(visited) == len(set(visited)) == 240


@pytest.mark.parametrize(
    ("devices", "scenario", "steps", "nodes_of_epoch_1"),
    [
        (3, "from_two_ranks_within_an_epoch", 5 + 2 + 3, 180),
        (1, "from_two_ranks_within_an_epoch", 5 + 6 + 8, 180),
        (1, "from_two_and_then_three_ranks", 6 + 3 + 8, 90),
        (3, "from_two_ranks_after_an_epoch", 8 + 3, 0),
        (1, "from_two_ranks_after_an_epoch", 8 + 8, 0),
    ],
)
def test_another_number_of_ranks_resumes_and_visits_what_was_left(elastic, devices, scenario, steps, nodes_of_epoch_1):
    ranks = [elastic("racom", scenario, rank, devices) for rank in range(devices)]
    for outcome in ranks:
        assert_equal(outcome["weights"], ranks[0]["weights"])
        assert outcome["steps"] == steps
    trained = {epoch: [node for outcome in ranks for node in outcome["trained"].get(epoch, [])] for epoch in (1, 2)}
    assert sorted(trained[2]) == TRAIN_NODES
    assert len(trained[1]) == nodes_of_epoch_1
    before = [node for rank in (0, 1) for node in elastic("racom", "from_the_start", rank)["trained"][1][:30]]
    if scenario == "from_two_and_then_three_ranks":
        three = [elastic("racom", "from_two_ranks_within_an_epoch", rank, 3)["trained"][1] for rank in range(3)]
        before += [node for visited in three for node in visited[:30]]
    if nodes_of_epoch_1:
        assert sorted(trained[1] + before) == TRAIN_NODES
    for epoch in (1, 2) if nodes_of_epoch_1 else (2,):
        assert sorted(node for outcome in ranks for node in outcome["validated"][epoch]) == VAL_NODES


# Ranks that step by themselves

ASYNCHRONOUS = [
    *(name for name in EQUAL_TO_DDP if name not in ("plain_dataloader", "ranks_begin_alike")),
    *EQUAL_BUT_FOR_ROUNDING,
    "compiled",
    "drains",
    "drains_at_each_epoch",
    "one_rank_ahead",
    "repeated",
    "learning_rate_found",
    "slow_network",
    "slow_rank",
]


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    started = Outcomes(tmp_path_factory.mktemp("asynchronous"))
    return started.run("racom", 2, ASYNCHRONOUS).run("fixed", 2, [*RESUMED])


@pytest.mark.parametrize("scenario", ASYNCHRONOUS)
def test_ranks_that_step_by_themselves_end_with_the_same_model(asynchronous, outcomes, scenario):
    one, other = (asynchronous("racom", scenario, rank) for rank in (0, 1))
    assert_equal(one["weights"], other["weights"])
    assert_equal(one["buffers"], other["buffers"])
    assert one["threads"] == other["threads"] == []
    assert one["windows"] == other["windows"] >= 3
    assert all(torch.isfinite(value).all() for value in one["weights"].values())
    if scenario in EQUAL_TO_DDP:
        lockstep = outcomes("lockstep", scenario, 0)
        assert one["trained"] == lockstep["trained"]
        assert one["steps"] == lockstep["steps"]
        assert max(one["staleness"]) <= 5
        assert one["exchanges"] < lockstep["exchanges"]
        moved = [not torch.equal(one["weights"][name], value) for name, value in lockstep["weights"].items()]
        assert any(moved)


def test_evaluation_and_checkpoints_see_one_model(asynchronous):
    one, other = (asynchronous("racom", "drains", rank)["noted"] for rank in (0, 1))
    assert {name: len(noted) for name, noted in one.items()} == {
        "within an epoch": 1,
        "validation": 1,
        "end of an epoch": 2,
        "end of the last epoch": 1,
        "checkpoint": 2,
        "optimizer": 2,
    }
    for name, equal in {
        "within an epoch": [False],
        "validation": [True],
        "end of an epoch": [False, True],
        "end of the last epoch": [False],  # but for the running statistics of BatchNorm
        "checkpoint": [True, True],
        "optimizer": [True, True],
    }.items():
        for ours, theirs, expected in zip(one[name], other[name], equal, strict=True):
            assert all(map(torch.equal, ours, theirs)) == expected, name


def test_epochs_end_with_one_model_where_that_is_asked_for(asynchronous):
    one, other = (asynchronous("racom", "drains_at_each_epoch", rank)["noted"] for rank in (0, 1))
    assert not all(map(torch.equal, one["within an epoch"][0], other["within an epoch"][0]))
    for name in ("end of an epoch", "end of the last epoch"):
        for ours, theirs in zip(one[name], other[name], strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_a_rank_is_not_held_up_by_another_until_the_bound(asynchronous):
    ahead, behind = (asynchronous("racom", "one_rank_ahead", rank) for rank in (0, 1))
    assert ahead["steps"] == behind["steps"] == 24
    assert max(ahead["staleness"]) == 6
    assert ahead["waited"] > behind["waited"]


def test_runs_repeat_bit_by_bit_where_arrival_is_fixed(asynchronous):
    for rank in (0, 1):
        outcome = asynchronous("racom", "repeated", rank)
        assert_equal(outcome["weights"], outcome["again"]["weights"])
        assert outcome["arrival"] == "fixed"
        assert outcome["warmup"] == 3  # 15 % of its 20 steps


@pytest.mark.parametrize("scenario", RESUMED)
def test_a_run_that_is_resumed_between_windows_ends_as_the_uninterrupted_one(asynchronous, scenario):
    for rank in (0, 1):
        outcome = asynchronous("fixed", scenario, rank)
        assert_equal(outcome["whole"]["weights"], outcome["second"]["weights"])


def test_a_search_for_the_learning_rate_leaves_nothing_behind(asynchronous):
    for rank in (0, 1):
        outcome = asynchronous("racom", "learning_rate_found", rank)
        assert all(map(torch.equal, outcome["begun"], asynchronous("racom", "learning_rate_found", 0)["own"]))


@pytest.mark.parametrize(("strategy", "advice"), [("lockstep", "let ranks step by themselves"), ("racom", "bfloat16")])
def test_a_slow_network_is_named_by_the_monitor(outcomes, asynchronous, strategy, advice):
    started = outcomes if strategy == "lockstep" else asynchronous
    for rank in (0, 1):
        outcome = started(strategy, "slow_network", rank)
        assert outcome["diagnosis"].bottleneck == "network"
        assert advice in outcome["diagnosis"].advice
        assert outcome["summary"].exchange_wait > 0.05
    assert (started.folder / f"{strategy}-2" / "slow_network" / "mqgnn-timeline.json").exists()


@pytest.mark.parametrize(
    ("strategy", "advice"), [("lockstep", "let ranks step by themselves"), ("racom", "give rank 1 the processors")]
)
def test_a_slow_rank_is_named_by_the_monitor(outcomes, asynchronous, strategy, advice):
    started = outcomes if strategy == "lockstep" else asynchronous
    diagnosis = started(strategy, "slow_rank", 0)["diagnosis"]
    assert diagnosis.bottleneck == "straggler"
    assert advice in diagnosis.advice
    assert started(strategy, "slow_rank", 1)["diagnosis"].bottleneck == "compute"  # it waits for nobody


# Which nodes are visited


@pytest.mark.parametrize("strategy", ["lockstep", "ddp"])
@pytest.mark.parametrize(("scenario", "trained", "validated"), [("uneven_nodes", 41, 21), ("shards_of_9_and_8", 17, 3)])
def test_every_node_is_visited_exactly_once_per_epoch(outcomes, strategy, scenario, trained, validated):
    ranks = [outcomes(strategy, scenario, rank) for rank in (0, 1)]
    for epoch in range(3):
        for kind, size in (("trained", trained), ("validated", validated)):
            assert sorted(ranks[0][kind][epoch] + ranks[1][kind][epoch]) == list(range(size)), (kind, epoch)
    assert len({tuple(ranks[0]["trained"][epoch]) for epoch in range(3)}) == 3  # in a new order each time


@pytest.mark.parametrize("strategy", ["lockstep", "ddp"])
def test_a_run_that_is_started_again_sees_the_same_batches(outcomes, strategy):
    for rank in (0, 1):
        once, again = (outcomes(strategy, scenario, rank) for scenario in ("uneven_nodes", "uneven_nodes_again"))
        assert once["trained"] == again["trained"]
        assert once["validated"] == again["validated"]


@pytest.mark.parametrize("strategy", ["lockstep", "ddp"])
def test_validation_within_an_epoch_does_not_disturb_it(outcomes, strategy):
    ranks = [outcomes(strategy, "validation_within_an_epoch", rank) for rank in (0, 1)]
    for rank in (0, 1):
        assert ranks[rank]["trained"] == outcomes(strategy, "uneven_nodes", rank)["trained"]
    for epoch in range(3):
        assert sorted(ranks[0]["validated"][epoch] + ranks[1]["validated"][epoch]) == sorted(2 * list(range(21)))


def test_the_epoch_that_a_run_is_stopped_in_ends_at_once(outcomes):
    for rank in (0, 1):
        stopped, whole = (outcomes("lockstep", name, rank) for name in ("stopped_within_an_epoch", "plain_sgd"))
        assert stopped["trained"] == {0: whole["trained"][0], 1: whole["trained"][1][:60]}


@pytest.mark.parametrize("strategy", ["lockstep", "ddp"])
def test_a_plain_dataloader_is_shared_among_the_ranks(outcomes, strategy):
    one, other = (outcomes(strategy, "plain_dataloader", rank)["trained"] for rank in (0, 1))
    for epoch in range(3):
        assert sorted(one[epoch] + other[epoch]) == list(range(40))


def test_limits_cut_epochs_without_a_trace(outcomes):
    for rank in (0, 1):
        limited = outcomes("lockstep", "limited_batches", rank)
        whole = outcomes("lockstep", "uneven_nodes", rank)
        assert limited["trained"] == {epoch: seen[:10] for epoch, seen in whole["trained"].items()}
        assert limited["validated"] == {epoch: seen[:5] for epoch, seen in whole["validated"].items()}
        assert limited["threads"] == whole["threads"] == []
        dev_run = outcomes("lockstep", "a_fast_dev_run", rank)
        assert dev_run["trained"] == {0: whole["trained"][0][:10]}
        two_batches = 10 if rank == 0 else 9  # rank 1 has a seed less, and as many batches
        assert dev_run["validated"] == {0: whole["validated"][0][:two_batches]}


def test_overfitting_repeats_the_same_batches(outcomes):
    trained = outcomes("lockstep", "overfitting", 0)["trained"]
    assert trained[0] == trained[1] == trained[2]
    assert len(trained[0]) == 10


def test_the_test_after_a_fit_visits_every_node_once(outcomes):
    visited = [node for rank in (0, 1) for node in outcomes("lockstep", "fit_then_test", rank)["validated"][0]]
    assert len(visited) == len(set(visited)) == 80


def test_ranks_of_a_machine_share_one_copy_of_the_graph(outcomes):
    ranks = [outcomes("lockstep", "one_copy", rank) for rank in (0, 1)]
    assert len(list((outcomes.folder / "lockstep-2").glob("loaded-by-*"))) == 1
    for outcome in ranks:
        assert outcome["private"] < outcome["features"] / 10


# Failures


@pytest.mark.parametrize(("scenario", "frame"), FAILING.items())
def test_an_exception_reaches_the_user_and_leaves_no_thread(outcomes, scenario, frame):
    for rank in (0, 1):
        outcome = outcomes("lockstep", scenario, rank)
        if outcome["error"] != "PeerError":  # a rank that is half a second late hears of the other's
            assert outcome["error"] == "Planted"
            assert frame in outcome["traceback"]
        assert outcome["threads"] == []
    assert "Planted" in {outcomes("lockstep", scenario, rank)["error"] for rank in (0, 1)}


def test_a_transform_runs_and_fails_in_a_thread_of_the_prepare_stage(outcomes):
    assert outcomes("lockstep", "failing_transform", 0)["message"] == "mqgnn-prepare-0"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    started = Outcomes(tmp_path_factory.mktemp("alone"))
    return started.run("lockstep", 1, ["one_device", "interrupted_training_step"])


def test_one_device_needs_no_exchange(alone):
    outcome = alone("lockstep", "one_device", 0, 1)
    assert_equal(outcome["weights"], outcome["auto"])
    assert outcome["exchanges"] == 0


def test_ctrl_c_leaves_no_thread(alone):
    outcome = alone("lockstep", "interrupted_training_step", 0, 1)
    assert outcome["error"] == "SystemExit"  # Lightning's answer to KeyboardInterrupt
    assert outcome["threads"] == []


def test_sync_batchnorm_on_the_cpu_is_refused_with_the_remedy(outcomes):
    assert "needs CUDA devices: remove it" in outcomes("lockstep", "sync_batchnorm_on_the_cpu", 0)["error"]


# Names and arguments


@pytest.mark.parametrize("name", ["mqgnn", "mqgnn_spawn", "mqgnn_fork", "mqgnn_notebook"])
def test_the_strategy_is_known_by_its_names(name):
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, MQGNNStrategy)


def test_options_of_the_ddp_wrapper_are_refused():
    with pytest.raises(TypeError, match="find_unused_parameters"):
        MQGNNStrategy(find_unused_parameters=True)
