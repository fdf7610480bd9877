"""The exchange in lock-step, and what makes replicas alike, between real processes."""

import time

import pytest
import torch
from ranks import run_ranks
from torch.nn import BatchNorm1d, Parameter

from lightning_mqgnn import GradientExchange
from lightning_mqgnn.racom import average_buffers, broadcast_state


def with_gradient(value, shape=(2, 3), dtype=torch.float32):
    parameter = Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = None if value is None else torch.full(shape, float(value), dtype=dtype)
    return parameter


def flat_addresses(exchange):
    return [buffer.flat.data_ptr() for buffers in exchange._layouts.values() for buffer in buffers]


def exchange_many(rank):
    everywhere = with_gradient(rank + 1)
    on_one = with_gradient(6 if rank == 0 else None, (4,))
    nowhere = with_gradient(None, (5,))
    scalar = with_gradient(rank, ())
    double = with_gradient(rank, (3,), torch.float64)
    short = with_gradient(2 * rank, (3,), torch.bfloat16)
    parameters = [everywhere, on_one, nowhere, scalar, double, short]
    exchange = GradientExchange()
    exchange(parameters)
    after_one = [None if p.grad is None else p.grad.clone() for p in parameters]
    addresses = flat_addresses(exchange)
    for _ in range(4):
        exchange(parameters)  # the mean of means
    return {
        "grads": after_one,
        "again": [None if p.grad is None else p.grad.clone() for p in parameters],
        "exchanges": exchange.exchanges,
        "bytes": exchange.bytes,
        "layouts": len(exchange._layouts),
        "same_memory": flat_addresses(exchange) == addresses,
        "seconds": exchange.seconds,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_the_mean_gradient(tmp_path, world_size):
    outcomes = run_ranks(world_size, exchange_many, tmp_path)
    for outcome in outcomes:
        for grad, grad_of_rank_0 in zip(outcome["grads"], outcomes[0]["grads"], strict=True):
            assert (grad is None) == (grad_of_rank_0 is None)
            assert grad is None or torch.equal(grad, grad_of_rank_0)
        everywhere, on_one, nowhere, scalar, double, short = outcome["grads"]
        mean_rank = (world_size - 1) / 2
        assert torch.allclose(everywhere, torch.full((2, 3), mean_rank + 1))
        assert torch.allclose(on_one, torch.full((4,), 6 / world_size))
        assert nowhere is None
        assert torch.allclose(scalar, torch.tensor(mean_rank))
        assert torch.allclose(double, torch.full((3,), mean_rank, dtype=torch.float64))
        assert torch.allclose(short, torch.full((3,), 2 * mean_rank, dtype=torch.bfloat16), rtol=1e-2)


def test_buffers_are_made_once_and_bytes_are_counted(tmp_path):
    for outcome in run_ranks(2, exchange_many, tmp_path):
        assert outcome["exchanges"] == 5
        assert outcome["layouts"] == 1
        assert outcome["same_memory"]
        # float32: 6 + 4 + 5 + 1 gradients, 4 flags and how long each rank waited; float64: 3 and 1; bfloat16: 3 and 1
        assert outcome["bytes"] == 5 * (22 * 4 + 4 * 8 + 4 * 2)
        assert outcome["seconds"] > 0
        assert outcome["again"][2] is None
        assert torch.equal(outcome["again"][0], outcome["grads"][0])


def exchange_with_a_late_rank(rank):
    exchange = GradientExchange()
    for _ in range(10):
        time.sleep(0.05 if rank == 1 else 0)
        exchange([with_gradient(rank)])
    return {"last": dict(exchange.arrivals.last), "late": exchange.arrivals.late_seconds, "all": exchange.seconds}


def test_waiting_for_the_last_rank_is_told_from_the_exchange_itself(tmp_path):
    waiting, late = run_ranks(2, exchange_with_a_late_rank, tmp_path)
    assert waiting["last"] == late["last"] == {1: 9}  # the first exchange has nothing to go by
    assert waiting["late"] > 0.5 * waiting["all"]
    assert late["late"] < 0.1 * waiting["late"]


def exchange_sparse(rank):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([rank])).sum().backward()
    try:
        GradientExchange()(list(embedding.parameters()))
    except TypeError as error:
        return str(error)
    return None


def test_sparse_gradients_are_refused_with_the_remedy(tmp_path):
    for message in run_ranks(2, exchange_sparse, tmp_path):
        assert "shape (5, 2) is sparse" in message
        assert "sparse=False" in message


def exchange_in_turn(rank):
    """Two sets of parameters, like two optimizers."""
    one, other = with_gradient(rank), with_gradient(10 * rank, (3, 2))
    exchange = GradientExchange()
    for _ in range(3):
        exchange([one])
        exchange([other])
    exchange([])
    layouts = len(exchange._layouts)
    exchange.release()
    return {
        "grads": [one.grad, other.grad],
        "exchanges": exchange.exchanges,
        "layouts": [layouts, flat_addresses(exchange)],
    }


def test_each_set_of_parameters_has_buffers_of_its_own_until_they_are_released(tmp_path):
    for outcome in run_ranks(2, exchange_in_turn, tmp_path):
        assert torch.equal(outcome["grads"][0], torch.full((2, 3), 0.5))
        assert torch.equal(outcome["grads"][1], torch.full((3, 2), 5.0))
        assert outcome["exchanges"] == 6  # no parameters, no exchange
        assert outcome["layouts"] == [2, []]


def exchange_less_and_less(rank):
    """All ranks have a gradient, then all but rank 0, then none."""
    parameter = with_gradient(8, (4,))
    exchange = GradientExchange()
    exchange([parameter])
    parameter.grad = None if rank == 0 else torch.full((4,), 6.0)
    exchange([parameter])
    second, parameter.grad = parameter.grad, None
    exchange([parameter])
    return second, parameter.grad


def test_nothing_of_an_earlier_step_is_sent_again(tmp_path):
    for second, third in run_ranks(2, exchange_less_and_less, tmp_path):
        assert torch.equal(second, torch.full((4,), 3.0))
        assert third is None


def exchange_transposed(rank):
    parameter = Parameter(torch.zeros(2, 3).t())
    parameter.grad = torch.arange(6.0).view(3, 2) * (rank + 1)
    GradientExchange()([parameter])
    return parameter.grad


def test_gradients_need_not_lie_in_memory_as_their_parameters_do(tmp_path):
    for grad in run_ranks(2, exchange_transposed, tmp_path):
        assert torch.equal(grad, torch.arange(6.0).view(3, 2) * 1.5)


def exchange_alone(rank):
    parameter = with_gradient(3)
    exchange = GradientExchange()
    exchange([parameter])
    module = BatchNorm1d(4)
    module.running_mean += 0.1
    broadcast_state(module)
    average_buffers(module)
    return exchange.exchanges, parameter.grad, module.running_mean


def test_one_rank_has_nothing_to_exchange(tmp_path):
    ((exchanges, grad, mean),) = run_ranks(1, exchange_alone, tmp_path)
    assert exchanges == 0
    assert torch.equal(grad, torch.full((2, 3), 3.0))
    assert torch.equal(mean, torch.full((4,), 0.1))
