"""What ranks hold beside their gradients is made alike."""

import pytest
import torch
from ranks import run_ranks

from lightning_mqgnn.racom import average_buffers, average_optimizer_state, broadcast_state


def run_adam(rank):
    """Both ranks step the first parameter, rank 1 alone the second; the third has no state at all."""
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters, 0.1 + rank)
    for step in range(2 + rank):
        parameters[0].grad = torch.full((3,), 1.0 + rank + step)
        if rank == 1:
            parameters[1].grad = torch.full((3,), 5.0)
        optimizer.step()
    before = {i: {**optimizer.state[p]} for i, p in enumerate(parameters) if p in optimizer.state}
    before = {i: {name: value.clone() for name, value in state.items()} for i, state in before.items()}
    average_optimizer_state(optimizer)
    after = {i: {**optimizer.state[p]} for i, p in enumerate(parameters) if p in optimizer.state}
    return {"before": before, "after": after, "lr": optimizer.param_groups[0]["lr"]}


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


def run_norm(rank):
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean += rank
    norm.num_batches_tracked += 5 * rank
    average_buffers(norm)
    buffers = {name: value.clone() for name, value in norm.named_buffers()}
    with torch.no_grad():
        norm.weight += rank
    norm.running_mean += rank
    broadcast_state(norm)
    return {"buffers": buffers, "weight": norm.weight.detach(), "mean": norm.running_mean}


def test_buffers_are_averaged_and_counts_and_parameters_are_those_of_rank_0(tmp_path):
    for outcome in run_ranks(2, run_norm, tmp_path):
        assert outcome["buffers"]["running_mean"].tolist() == [0.5, 0.5]
        assert outcome["buffers"]["num_batches_tracked"] == 0
        assert outcome["weight"].tolist() == [1.0, 1.0]
        assert outcome["mean"].tolist() == [0.5, 0.5]
