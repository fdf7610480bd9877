"""Windows of progress between real processes: the arithmetic, the bound, drains, and what must not be lost."""

import math
import os
import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.nn import Parameter

from lightning_mqgnn import RaCoM, RaCoMExchange
from lightning_mqgnn.racom import ExchangeStatistics
from lightning_mqgnn.racom.arrivals import Arrivals
from lightning_mqgnn.racom.period import PERIODS, PeriodController, needed_slot
from lightning_mqgnn.racom.windows import ProgressExchange

SIZE = 7
PLAIN = RaCoM(momentum=0.0, adaptive=False)


def update(seed, rank, step):
    """What a local step adds to the parameters."""
    generator = torch.Generator().manual_seed(hash((seed, rank, step)) % 2**31)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def reference(settings, world_size, num_steps, seed):
    """The algorithm written down slowly: after each step, the parameters of each rank; in double precision.

    Windows come back after a fixed lag.
    """
    theta = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(world_size)]
    progress = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(world_size)]
    anchor, velocity = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(SIZE, dtype=torch.float64)
    in_flight, history = [], []
    lag = min(settings.period, settings.max_staleness)
    for step in range(1, num_steps + 1):
        for rank in range(world_size):
            theta[rank] = theta[rank] + update(seed, rank, step)
            progress[rank] = progress[rank] + update(seed, rank, step)
        if step % settings.period == 0:
            in_flight.append((step, progress))
            progress = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(world_size)]
        while in_flight and step - in_flight[0][0] >= lag:
            _, own = in_flight.pop(0)
            mean = sum(own) / world_size
            velocity = settings.momentum * velocity + mean
            outer = settings.outer_lr * velocity
            anchor = anchor + outer
            theta = [theta[rank] + outer - own[rank] for rank in range(world_size)]
        history.append([*theta])
        for rank in range(world_size):  # the invariant of the design
            opened = sum((own[rank] for _, own in in_flight), progress[rank])
            assert torch.allclose(theta[rank] - anchor, opened, atol=1e-9)
    for _, own in in_flight:  # a drain
        mean = sum(own) / world_size
        velocity = settings.momentum * velocity + mean
        anchor = anchor + settings.outer_lr * velocity
    share = num_steps % settings.period / settings.period
    if share:  # what is left, with its part of the momentum
        mean = sum(progress) / world_size
        if num_steps < settings.period:  # the only window
            share, velocity = 1.0, velocity + mean
        released = settings.momentum * (1 - settings.momentum**share) / (1 - settings.momentum)
        anchor = anchor + settings.outer_lr * (mean + released * velocity)
    return history, anchor


def take_step(parameter, seed, step, exchange):
    exchange.before_step()
    with torch.no_grad():
        parameter += update(seed, dist.get_rank(), step).to(parameter.dtype)
    exchange.after_step()


def started(settings, dtype=torch.float64):
    parameter = Parameter(torch.zeros(SIZE, dtype=dtype))
    return parameter, RaCoMExchange([torch.optim.SGD([parameter], 1.0)], settings)


def draw_settings(generator, **fixed):
    settings = RaCoM(
        period=generator.randint(1, 9),
        max_staleness=generator.randint(1, 20),
        momentum=generator.choice([0.0, 0.5, 0.9]),
        outer_lr=generator.choice([1.0, 0.7]),
        adaptive=False,
        arrival="fixed",
    )
    return replace(settings, **fixed)


# The arithmetic


def run_fixed(rank):
    generator = random.Random(0)
    outcomes = []
    for seed in range(20):
        settings, num_steps = draw_settings(generator, arrival="fixed"), generator.randint(1, 40)
        parameter, exchange = started(settings)
        history = []
        for step in range(1, num_steps + 1):
            take_step(parameter, seed, step, exchange)
            history.append(parameter.detach().clone())
        exchange.drain()
        exchange.close()
        outcomes.append((settings, seed, num_steps, history, parameter.detach()))
    return [(vars(settings), *rest) for settings, *rest in outcomes]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_step_is_that_of_the_reference(tmp_path, world_size):
    ranks = run_ranks(world_size, run_fixed, tmp_path)
    for rank, outcomes in enumerate(ranks):
        for fields, seed, num_steps, history, final in outcomes:
            expected, drained = reference(RaCoM(**fields), world_size, num_steps, seed)
            for ours, theirs in zip(history, expected, strict=True):
                assert torch.allclose(ours, theirs[rank], atol=1e-5), (fields, seed)
            assert torch.allclose(final, drained, atol=1e-5), (fields, seed)


def run_eager_with_delays(rank):
    generator, delays = random.Random(1), random.Random(100 + rank)
    outcomes = []
    for seed in range(12):
        settings, num_steps = draw_settings(generator, arrival="eager"), generator.randint(10, 40)
        parameter, exchange = started(settings)
        slow = seed % 3 == rank
        for step in range(1, num_steps + 1):
            time.sleep(delays.random() * (0.01 if slow else 0.001))
            take_step(parameter, seed, step, exchange)
        exchange.drain()
        exchange.close()
        late = max(exchange.statistics.staleness)
        outcomes.append((vars(settings), seed, num_steps, parameter.detach(), late))
    return outcomes


def test_planted_delays_change_neither_the_result_nor_the_bound(tmp_path):
    """Updates do not depend on parameters here, so what ranks agree on depends on no arrival either."""
    ranks = run_ranks(2, run_eager_with_delays, tmp_path)
    for one, other in zip(*ranks, strict=True):
        fields, seed, num_steps, final, _ = one
        _, drained = reference(RaCoM(**fields), 2, num_steps, seed)
        assert torch.equal(final, other[3])
        assert torch.allclose(final, drained, atol=1e-5), (fields, seed)
        assert max(one[4], other[4]) <= fields["max_staleness"]


def run_period_one(rank):
    parameter = Parameter(torch.zeros(SIZE, dtype=torch.float64))
    settings = replace(PLAIN, period=1, max_staleness=0)
    exchange = ProgressExchange([parameter], settings, PeriodController(settings), ExchangeStatistics(), Arrivals())
    history = []
    for step in range(1, 6):
        with torch.no_grad():
            parameter += update(0, rank, step)
        exchange.after_step()
        history.append(parameter.detach().clone())
    exchange.close()
    return history


def test_windows_of_one_step_without_lateness_average_each_step(tmp_path):
    ranks = run_ranks(3, run_period_one, tmp_path)
    expected = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(1, 6):
        expected = expected + sum(update(0, rank, step) for rank in range(3)) / 3
        for history in ranks:
            assert torch.allclose(history[step - 1], expected, atol=1e-6)


def run_drained_at(rank):
    settings = RaCoM(period=4, momentum=0.6, adaptive=False)
    generator, outcomes = random.Random(3), []
    for frequency in (0.0, 0.1, 0.5, 1.0):
        parameter, exchange = started(settings)
        for step in range(1, 31):
            take_step(parameter, 0, step, exchange)
            if generator.random() < frequency:
                exchange.drain()
        exchange.drain()
        outcomes.append((parameter.detach().clone(), exchange.state_dict()["momentum"][0]))
        exchange.close()
    return outcomes


def test_drains_neither_add_nor_lose_momentum(tmp_path):
    """What was given and what momentum still has to give are all progress times 1 / (1 - mu), whenever drained."""
    momentum = 0.6
    progress = sum(update(0, rank, step) for rank in range(2) for step in range(1, 31)) / 2
    for outcomes in run_ranks(2, run_drained_at, tmp_path):
        for parameter, velocity in outcomes:
            to_come = velocity * momentum / (1 - momentum)
            assert torch.allclose(parameter + to_come, progress / (1 - momentum), atol=1e-5)


def run_drained_before_a_window_is_full(rank):
    parameter, exchange = started(RaCoM(period=8, momentum=0.5, adaptive=False))
    history = []
    for step in range(1, 6):
        take_step(parameter, 0, step, exchange)
        if step in (3, 5):
            exchange.drain()
            history.append(parameter.detach().clone())
    exchange.close()
    return history


def test_where_no_window_is_ever_full_a_drain_is_a_whole_nesterov_step(tmp_path):
    first, second = (
        sum(update(0, rank, step) for rank in range(2) for step in steps) / 2 for steps in ((1, 2, 3), (4, 5))
    )
    for history in run_ranks(2, run_drained_before_a_window_is_full, tmp_path):
        assert torch.allclose(history[0], 1.5 * first, atol=1e-5)
        assert torch.allclose(history[1], 1.5 * first + second + 0.5 * (0.5 * first + second), atol=1e-5)


def run_moved_by_something_else(rank):
    parameter, exchange = started(RaCoM(period=4, momentum=0.6, adaptive=False))
    for step in range(1, 6):
        take_step(parameter, 0, step, exchange)
    with torch.no_grad():
        parameter.fill_(10.0 + rank)
    exchange.drain(force=True)
    exchange.close()
    return parameter.detach()


def test_a_forced_drain_is_the_plain_mean(tmp_path):
    for parameter in run_ranks(2, run_moved_by_something_else, tmp_path):
        assert torch.allclose(parameter, torch.full_like(parameter, 10.5), atol=1e-5)


@pytest.mark.parametrize(
    ("warmup", "steps_per_epoch", "total_steps", "steps"),
    [
        (None, 100, 1000, 25),  # a quarter of an epoch
        (None, 12, 1000, 24),  # but three windows
        (None, 12, 40, 6),  # but 15 % of the run
        (None, 10_000, 100_000, 500),
        (None, math.inf, math.inf, 500),
        (None, math.inf, 1000, 150),
        (3, 100, 1000, 3),
        (0, 100, 1000, 0),
    ],
)
def test_warm_up_fits_the_epoch_and_the_run(warmup, steps_per_epoch, total_steps, steps):
    assert RaCoM(warmup=warmup).warmup_steps(steps_per_epoch, total_steps) == steps


def run_default_momentum(rank):
    parameter = Parameter(torch.zeros(SIZE))
    sgd, adam = torch.optim.SGD([parameter], 1.0), torch.optim.Adam([Parameter(torch.zeros(1))])
    return [RaCoMExchange(optimizers, RaCoM()).settings.momentum for optimizers in ([sgd], [adam], [sgd, adam])]


def test_momentum_fits_the_number_of_ranks_and_the_optimizers(tmp_path):
    for momenta in run_ranks(4, run_default_momentum, tmp_path):
        assert momenta == [0.0, 0.5, 0.5]


def run_conservation(rank):
    settings = replace(PLAIN, period=3, arrival="fixed")
    parameter, exchange = started(settings)
    corrections = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(1, 14):
        exchange.before_step()
        with torch.no_grad():
            parameter += update(0, rank, step)
        before = parameter.detach().clone()
        exchange.after_step()
        corrections += parameter.detach() - before
    exchange.drain()
    exchange.close()
    return corrections


def test_plain_averaging_moves_nothing_in_the_sum_over_ranks(tmp_path):
    corrections = run_ranks(3, run_conservation, tmp_path)
    assert all(correction.abs().max() > 0.1 for correction in corrections)
    assert torch.allclose(sum(corrections), torch.zeros(SIZE, dtype=torch.float64), atol=1e-5)


def run_lockstep(rank):
    parameter = Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([parameter], 0.1)
    outcomes = {}
    for name, settings in {
        "synchronous": RaCoM(period=1, max_staleness=0),
        "warm-up": RaCoM(period=2, warmup=3, momentum=0.0),
    }.items():
        exchange = RaCoMExchange([optimizer], settings)
        with torch.no_grad():
            parameter.zero_()
        history = []
        for step in range(1, 6):
            parameter.grad = update(0, rank, step).float()
            exchange.average_gradients([optimizer])
            exchange.before_step()
            optimizer.step()
            exchange.after_step()
            history.append(parameter.detach().clone())
        exchange.drain()
        exchange.close()
        outcomes[name] = {
            "history": history,
            "final": parameter.detach().clone(),
            "exchanges": exchange.gradients.exchanges,
        }
        outcomes[name]["windows"] = exchange.statistics.windows
    return outcomes


def test_lockstep_is_the_mean_gradient_in_each_step_and_a_warm_up_begins_with_it(tmp_path):
    one, other = run_ranks(2, run_lockstep, tmp_path)
    expected = torch.zeros(SIZE)
    for step in range(1, 6):
        gradient = (update(0, 0, step).float() / 2 + update(0, 1, step).float() / 2) * 1.0
        expected = expected - 0.1 * gradient
        assert torch.allclose(one["synchronous"]["history"][step - 1], expected, atol=1e-7)
        assert torch.equal(one["synchronous"]["history"][step - 1], other["synchronous"]["history"][step - 1])
        if step <= 3:
            assert torch.equal(one["warm-up"]["history"][step - 1], one["synchronous"]["history"][step - 1])
    assert not torch.equal(one["warm-up"]["history"][3], other["warm-up"]["history"][3])
    assert torch.equal(one["warm-up"]["final"], other["warm-up"]["final"])
    assert torch.allclose(one["warm-up"]["final"], expected, atol=1e-6)
    assert (one["synchronous"]["exchanges"], one["synchronous"]["windows"]) == (5, 0)
    assert (one["warm-up"]["exchanges"], one["warm-up"]["windows"]) == (3, 2)


# The bound


def run_ahead(rank):
    """Rank 1 begins only when rank 0 has taken as many steps as it may."""
    settings = replace(PLAIN, period=4, max_staleness=6)
    parameter, exchange = started(settings)
    store = dist.distributed_c10d._get_default_store()
    exchange.before_step()  # to make the anchor is a collective
    if rank == 1:
        store.wait(["ahead"])
    for step in range(1, 13):
        take_step(parameter, 0, step, exchange)
        if rank == 0 and step == 4 + 6 - 1:
            waited = exchange.statistics.wait_seconds
            store.set("ahead", b"1")
    exchange.drain()
    exchange.close()
    return {"waited": waited if rank == 0 else 0.0, "staleness": dict(exchange.statistics.staleness)}


def test_a_rank_goes_on_alone_until_the_bound_and_not_beyond(tmp_path):
    ahead, _ = run_ranks(2, run_ahead, tmp_path)  # ranks that were locked together would wait for each other for ever
    assert ahead["waited"] == 0
    assert max(ahead["staleness"]) == 6


def run_two_paces(rank):
    settings = replace(PLAIN, period=2, max_staleness=5)
    parameter, exchange = started(settings)
    for step in range(1, 41):
        time.sleep(0.02 * rank)
        take_step(parameter, 0, step, exchange)
    exchange.drain()
    exchange.close()
    statistics = exchange.statistics
    return {"staleness": dict(statistics.staleness), "wait": statistics.wait_seconds, "windows": statistics.windows}


def test_the_faster_rank_waits_and_the_slower_one_does_not(tmp_path):
    fast, slow = run_ranks(2, run_two_paces, tmp_path)
    assert max(fast["staleness"]) == 5
    assert fast["wait"] > slow["wait"]
    assert fast["windows"] == slow["windows"] == sum(fast["staleness"].values()) == 21


def run_adaptive(rank):
    """Far apart for a while, then close together, at an uneven pace."""
    delays = random.Random(rank)
    settings = RaCoM(period=4, max_period=16, divergence_bound=0.05, momentum=0.0, max_staleness=16)
    parameter = Parameter(torch.full((SIZE,), 10.0))
    exchange = RaCoMExchange([torch.optim.SGD([parameter], 1.0)], settings)
    periods = []
    for step in range(1, 241):
        time.sleep(delays.random() * 0.003)
        exchange.before_step()
        with torch.no_grad():
            parameter += (1.0 if step < 80 else 0.001) * update(0, rank, step).float()
        exchange.after_step()
        periods.append(exchange.period)
    exchange.drain()
    exchange.close()
    return {"periods": periods, "delta": exchange.statistics.delta, "final": parameter.detach()}


def test_all_ranks_decide_on_the_same_periods_at_the_same_steps(tmp_path):
    one, other = run_ranks(2, run_adaptive, tmp_path)
    assert one["periods"] == other["periods"]
    assert one["delta"] == other["delta"]
    assert torch.equal(one["final"], other["final"])
    assert one["periods"][0] == 4
    assert min(one["periods"]) < 4  # too far apart
    assert one["periods"][-1] >= 4  # and back


# What must not be lost


def run_small_updates(rank):
    """The progress of a window is no bfloat16; rank 1 has none, so that the sum over ranks is not rounded."""
    settings = replace(PLAIN, period=5, exchange_dtype=torch.bfloat16)
    parameter, exchange = started(settings, torch.float32)
    for _ in range(100):
        exchange.before_step()
        with torch.no_grad():
            parameter += 1.001 * (1 - rank)
        exchange.after_step()
    exchange.drain()
    exchange.close()
    return {"final": parameter.detach(), "bytes": exchange.bytes}


def test_what_bfloat16_rounds_away_is_sent_later(tmp_path):
    one, other = run_ranks(2, run_small_updates, tmp_path)
    assert torch.equal(one["final"], other["final"])
    assert torch.allclose(one["final"], torch.full((SIZE,), 100.1 / 2), rtol=1e-5)


def run_not_finite(rank):
    parameter = Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([parameter], 1.0, momentum=0.9)
    exchange = RaCoMExchange([optimizer], replace(PLAIN, period=4, max_staleness=2))
    for step in range(1, 21):
        parameter.grad = torch.full((SIZE,), float("nan") if (rank, step) == (1, 6) else -1.0)
        for state in optimizer.state.values():
            if step != 7:  # what a step leaves behind is not finite either, once
                state["momentum_buffer"].zero_()
        exchange.before_step()
        optimizer.step()
        exchange.after_step()
    exchange.drain()
    exchange.close()
    return {"final": parameter.detach(), "discarded": exchange.statistics.discarded, "own": [*optimizer.state.values()]}


def test_progress_that_is_not_finite_is_not_shared(tmp_path):
    one, other = run_ranks(2, run_not_finite, tmp_path)
    assert torch.equal(one["final"], other["final"])
    assert torch.isfinite(one["final"]).all()
    # Rank 0 moves by 20, but what it had in its momentum at step 7; rank 1's second window at least counts for nothing.
    assert 19 <= one["final"].max() <= 22
    assert one["discarded"] == 0
    assert 1 <= other["discarded"] <= 2
    for state in other["own"]:
        assert torch.isfinite(state["momentum_buffer"]).all()


def run_kinds_of_parameters(rank):
    torch.manual_seed(0)
    parameters = [
        Parameter(torch.randn(4, 3)),
        Parameter(torch.randn(3, 5).t()),
        Parameter(torch.randn(())),
        Parameter(torch.randn(0, 2)),
        Parameter(torch.randn(6, dtype=torch.float64)),
        Parameter(torch.randn(6).bfloat16()),
        Parameter(torch.randn(6), requires_grad=False),
    ]
    frozen = parameters[-1].clone()
    exchange = RaCoMExchange([torch.optim.SGD(parameters, 1.0)], RaCoM(period=3, adaptive=False))
    torch.manual_seed(rank)
    for _ in range(20):
        exchange.before_step()
        with torch.no_grad():
            for parameter in parameters[:-1]:
                parameter += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
        exchange.after_step()
    exchange.drain()
    exchange.drain()
    exchange.close()
    return {"final": [p.detach().clone() for p in parameters], "frozen": frozen, "windows": exchange.statistics.windows}


def test_replicas_are_equal_after_a_drain_whatever_the_parameters_are(tmp_path):
    ranks = run_ranks(3, run_kinds_of_parameters, tmp_path)
    for outcome in ranks:
        assert all(map(torch.equal, outcome["final"], ranks[0]["final"]))
        assert torch.equal(outcome["final"][-1], outcome["frozen"])
        assert outcome["windows"] == 7  # the second drain had nothing to do


def run_grown(rank):
    """Another parameter group, between two windows."""
    first, second = Parameter(torch.zeros(SIZE)), Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([first], 1.0)
    exchange = RaCoMExchange([optimizer], replace(PLAIN, period=4, momentum=0.5))
    for step in range(1, 17):
        if step == 7:
            optimizer.add_param_group({"params": [second]})
        exchange.before_step()
        with torch.no_grad():
            first += rank
            if step >= 7:
                second += 2 * rank
        exchange.after_step()
    exchange.drain()
    exchange.close()
    return {"final": [first.detach(), second.detach()]}


def test_parameters_may_be_added(tmp_path):
    one, other = run_ranks(2, run_grown, tmp_path)
    assert all(map(torch.equal, one["final"], other["final"]))
    assert one["final"][1].min() >= 10  # the mean of 0 and 20, and some momentum


def run_interrupted(folder, rank):
    settings = RaCoM(period=4, momentum=0.5, arrival="fixed")
    whole, exchange = started(settings, torch.float32)
    for step in range(1, 31):
        take_step(whole, 0, step, exchange)
        if step == 14:
            exchange.drain()
            state, saved = exchange.state_dict(), whole.detach().clone()
    exchange.drain()
    exchange.close()
    resumed, exchange = started(settings, torch.float32)
    with torch.no_grad():
        resumed.copy_(saved)
    exchange.load_state_dict(state)
    for step in range(15, 31):
        take_step(resumed, 0, step, exchange)
    exchange.drain()
    exchange.close()
    torch.save(state, folder / f"state.{rank}")
    return {"whole": whole.detach(), "resumed": resumed.detach(), "steps": exchange.steps, "state": state}


def test_a_run_that_continues_from_its_state_is_the_same_to_the_last_bit(tmp_path):
    ranks = run_ranks(2, partial(run_interrupted, tmp_path), tmp_path)
    for outcome in ranks:
        assert torch.equal(outcome["whole"], outcome["resumed"])
        assert outcome["steps"] == 30
        assert outcome["state"]["momentum"][0].abs().max() > 0
        assert torch.equal(outcome["state"]["momentum"][0], ranks[0]["state"]["momentum"][0])
    torch.load(tmp_path / "state.0", weights_only=True)  # as Lightning loads checkpoints


def run_alone(rank):
    parameter, exchange = started(RaCoM(period=2))
    for step in range(1, 6):
        take_step(parameter, 0, step, exchange)
    exchange.drain()
    exchange.close()
    return {"final": parameter.detach(), "windows": exchange.statistics.windows, "bytes": exchange.bytes}


def test_one_rank_has_nothing_to_exchange(tmp_path):
    (outcome,) = run_ranks(1, run_alone, tmp_path)
    assert (outcome["windows"], outcome["bytes"]) == (0, 0)
    assert torch.allclose(outcome["final"], sum(update(0, 0, step) for step in range(1, 6)))


def run_until_the_other_is_gone(rank):
    parameter, exchange = started(replace(PLAIN, period=2, max_staleness=3))
    for step in range(1, 200):
        take_step(parameter, 0, step, exchange)
        if rank == 1 and step == 7:
            os._exit(0)


def catch_the_loss(folder, rank):
    try:
        run_until_the_other_is_gone(rank)
    except RuntimeError as error:
        torch.save(str(error), folder / "error")
        os._exit(0)


def test_a_rank_that_is_gone_is_an_error_and_no_hang(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"0\.pt"):  # neither rank got as far as to save its result
        run_ranks(2, partial(catch_the_loss, tmp_path), tmp_path)
    assert torch.load(tmp_path / "error")


def run_long(rank):
    parameter, exchange = started(replace(PLAIN, period=2, max_staleness=8), torch.float32)
    addresses = set()
    for step in range(1, 101):
        take_step(parameter, 0, step, exchange)
        addresses |= {w.own.data_ptr() for w in [*exchange._windows._in_flight, *exchange._windows._free]}
    exchange.drain()
    exchange.close()
    return {"buffers": len(addresses), "bytes": exchange.bytes, "windows": exchange.statistics.windows}


def test_buffers_are_made_once(tmp_path):
    for outcome in run_ranks(2, run_long, tmp_path):
        assert outcome["buffers"] <= 9  # 4 in flight, and as many on their way back
        assert outcome["windows"] == 51
        assert outcome["bytes"] == 51 * 4 * (SIZE + 22)


# The controller

READINGS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8, 12, 24, 64, 128]), st.floats(0, 0.4)), min_size=1, max_size=60
)


@given(READINGS)
def test_the_period_stays_within_its_limits(readings):
    settings = RaCoM(period=8, max_period=32, divergence_bound=0.1)
    controller, again = PeriodController(settings), PeriodController(settings)
    for needed, delta in readings:
        period = controller.period
        controller.update(period, needed, delta)
        again.update(period, needed, delta)
        assert controller.period == again.period
        assert 1 <= controller.period <= 32
        if delta > 0.1:
            assert controller.period <= max(1, period // 2)  # agreement wins
        else:
            assert controller.period >= min(period, 8)
        saved = PeriodController(settings)
        saved.load_state_dict(controller.state_dict())
        assert vars(saved) == vars(controller)


def test_the_period_follows_what_the_exchange_needs_and_does_not_swing():
    controller = PeriodController(RaCoM(period=8, max_period=64))
    periods = []
    for needed in [1, 1, 24, 24, 12, 24, 12, 24, 1, 24, 1, 1, 1, 1, 1, 1]:
        controller.update(controller.period, needed, 0.0)
        periods.append(controller.period)
    assert periods == [8, 8, *[24] * 11, *[8] * 3]
    controller.update(8, 512, 0.0)
    assert controller.period == 64


def test_a_period_that_led_apart_is_not_tried_again_at_once():
    controller = PeriodController(RaCoM(period=8, max_period=64, divergence_bound=0.1))
    controller.update(8, 64, 0.05)
    controller.update(64, 64, 0.2)
    assert controller.period == 32
    for _ in range(7):
        controller.update(32, 64, 0.04)
    assert controller.period == 32
    controller.update(32, 64, 0.04)
    assert controller.period == 64


@pytest.mark.parametrize(
    ("exchange", "own", "step", "period"),
    [
        (0.0, 0.0, 0.01, 1),
        (0.05, 0.0, 0.01, 8),
        (1.0, 0.0, 0.01, 128),
        (1e9, 0.0, 1.0, 512),
        (0.0, 0.0008, 0.005, 16),
        (0.05, 0.0006, 0.01, 8),
        (0.2, 0.0008, 0.01, 32),
    ],
)
def test_the_needed_period_hides_the_exchange_and_makes_its_own_cost_small(exchange, own, step, period):
    assert PERIODS[needed_slot(exchange, own, step)] == period


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("period", 0),
        ("max_staleness", -1),
        ("momentum", 1.0),
        ("outer_lr", 0.0),
        ("warmup", -1),
        ("max_period", 0),
        ("divergence_bound", 0.0),
        ("arrival", "late"),
        ("exchange_dtype", torch.float16),
    ],
)
def test_settings_out_of_range_are_refused_with_the_remedy(field, value):
    with pytest.raises(ValueError, match=rf"{field}=.*must be"):
        RaCoM(**{field: value})
