"""The exchange over torch.distributed alone, between real processes."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import BatchNorm1d, Linear, Parameter

from lightning_mqgnn import GradientExchange
from lightning_mqgnn.racom import average_buffers, broadcast_state


def run_ranks(world_size, function, tmp_path):
    """Run `function(rank)` in processes of one group and return what each saved."""
    mp.get_context("forkserver").set_forkserver_preload(["lightning_mqgnn"])  # imported once for all tests
    arguments = (world_size, function, str(tmp_path))
    mp.start_processes(in_group, arguments, nprocs=world_size, start_method="forkserver")
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]


def in_group(rank, world_size, function, folder):
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.save(function(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def with_gradient(value, shape=(2, 3), dtype=torch.float32):
    parameter = Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = None if value is None else torch.full(shape, float(value), dtype=dtype)
    return parameter


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
    for _ in range(4):
        exchange(parameters)  # the mean of means
    return {
        "grads": after_one,
        "again": [None if p.grad is None else p.grad.clone() for p in parameters],
        "exchanges": exchange.exchanges,
        "bytes": exchange.bytes,
        "layouts": len(exchange._layouts),
        "seconds": exchange.seconds,
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_the_mean_gradient(tmp_path, world_size):
    for outcome in run_ranks(world_size, exchange_many, tmp_path):
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
        # float32: 6 + 4 + 5 + 1 gradients and 4 flags; float64: 3 and 1; bfloat16: 3 and 1
        assert outcome["bytes"] == 5 * (20 * 4 + 4 * 8 + 4 * 2)
        assert outcome["seconds"] > 0
        assert outcome["again"][2] is None
        assert torch.equal(outcome["again"][0], outcome["grads"][0])


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


def exchange_alone(rank):
    parameter = with_gradient(3)
    exchange = GradientExchange()
    exchange([parameter])
    return exchange.exchanges, parameter.grad


def test_one_rank_has_nothing_to_exchange(tmp_path):
    ((exchanges, grad),) = run_ranks(1, exchange_alone, tmp_path)
    assert exchanges == 0
    assert torch.equal(grad, torch.full((2, 3), 3.0))


def share_state(rank):
    torch.manual_seed(rank)
    module = torch.nn.Sequential(Linear(3, 4), BatchNorm1d(4))
    broadcast_state(module)
    first = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.randn(8, 3) + rank)
    if rank == 1:
        module(torch.randn(8, 3))
    own = module[1].running_mean.clone()
    average_buffers(module)
    return {"first": first, "own": own, "averaged": module[1].running_mean, "count": module[1].num_batches_tracked}


def test_ranks_begin_with_the_state_of_rank_0_and_average_their_buffers(tmp_path):
    one, other = run_ranks(2, share_state, tmp_path)
    torch.manual_seed(0)
    expected = Linear(3, 4)
    for outcome in (one, other):
        assert torch.equal(outcome["first"]["0.weight"], expected.weight)
        assert torch.allclose(outcome["averaged"], (one["own"] + other["own"]) / 2)
        assert outcome["count"] == 1  # rank 0's
    assert torch.equal(one["averaged"], other["averaged"])
