"""What ranks hold beside their gradients is made alike."""

import copy

import pytest
import torch
from ranks import run_ranks
from torch.nn import BatchNorm1d, Linear

from lightning_mqgnn.racom import average_buffers, average_optimizer_state, broadcast_state


def share_state(rank):
    torch.manual_seed(rank)
    module = torch.nn.Sequential(Linear(3, 4), BatchNorm1d(4))
    module[1].running_mean += rank
    broadcast_state(module)
    first = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.randn(8, 3) + rank)
    if rank == 1:
        module(torch.randn(8, 3))
    own = module[1].running_mean.clone()
    average_buffers(module)
    return {"first": first, "own": own, "averaged": module[1].running_mean, "count": module[1].num_batches_tracked}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_begin_with_the_state_of_rank_0_and_average_their_buffers(tmp_path, world_size):
    outcomes = run_ranks(world_size, share_state, tmp_path)
    torch.manual_seed(0)
    expected = Linear(3, 4)
    mean = torch.stack([outcome["own"] for outcome in outcomes]).mean(0)
    for outcome in outcomes:
        assert torch.equal(outcome["first"]["0.weight"], expected.weight)
        assert torch.equal(outcome["first"]["1.running_mean"], torch.zeros(4))
        assert torch.allclose(outcome["averaged"], mean)
        assert torch.equal(outcome["averaged"], outcomes[0]["averaged"])
        assert outcome["count"] == 1  # rank 0's


def average_constants(rank):
    module = torch.nn.Module()
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    module.register_buffer("class_weights", weights.clone())
    module.register_buffer("short", weights.bfloat16())
    average_buffers(module)
    return {
        "class_weights": torch.equal(module.class_weights, weights),
        "short": torch.equal(module.short, weights.bfloat16()),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_buffer_that_is_equal_on_all_ranks_stays_as_it_is(tmp_path, world_size):
    for unchanged in run_ranks(world_size, average_constants, tmp_path):
        assert unchanged == {"class_weights": True, "short": True}


def run_adam(rank):
    """Both ranks step the first parameter, rank 1 alone the second; the third has no state at all."""
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters, 0.1 + rank)
    for step in range(2 + rank):
        parameters[0].grad = torch.full((3,), 1.0 + rank + step)
        if rank == 1:
            parameters[1].grad = torch.full((3,), 5.0)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    average_optimizer_state(optimizer)
    return {"before": before, "after": optimizer.state_dict()["state"], "lr": optimizer.param_groups[0]["lr"]}


def test_moments_are_averaged_over_the_ranks_that_have_them_and_counts_are_those_of_the_first(tmp_path):
    one, other = run_ranks(2, run_adam, tmp_path)
    assert one["after"].keys() == other["after"].keys() == {0, 1}
    for i, state in one["after"].items():
        for name, value in state.items():
            assert torch.equal(value, other["after"][i][name]), (i, name)
    for name in ("exp_avg", "exp_avg_sq"):
        mean = (one["before"][0][name] + other["before"][0][name]) / 2
        assert torch.allclose(one["after"][0][name], mean)
        assert torch.equal(one["after"][1][name], other["before"][1][name])
    assert one["after"][0]["step"] == 2
    assert one["after"][1]["step"] == 3
    assert [one["lr"], other["lr"]] == pytest.approx([0.1, 1.1])
