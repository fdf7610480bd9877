"""The rules by which queues and threads are sized, on simulated stages."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import SimulatedStage, Simulation

from lightning_mqgnn.sizing import Limits, Readings, StageReading, State, decide, log_line, replay

SIZES = (1, 2, 4, 8, 16, 32, 64)


def lognormal(mean, sigma, seed=1):
    """Durations with a mean and a spread."""
    values = np.random.default_rng(seed).lognormal(0, sigma, 20_000)
    values *= mean / values.mean()
    return lambda number: float(values[number % len(values)])


def run(durations, consume=0.02, num_items=12_000, limits=None, **arguments):
    capacity = arguments.pop("capacity", 2)
    stages = [SimulatedStage("prepare", durations, capacity, **arguments.pop("stage", {}))]
    return Simulation(stages, lambda _: consume, num_items, limits, **arguments).run()


@pytest.mark.parametrize(("mean", "sigma"), [(0.019, 1.0), (0.02, 1.0), (0.015, 1.5), (0.03, 0.5), (0.01, 0.2)])
def test_with_jitter_the_consumer_idles_no_longer_than_with_the_best_fixed_size(mean, sigma):
    fixed = {size: run(lognormal(mean, sigma), capacity=size).idle for size in SIZES}
    automatic = run(lognormal(mean, sigma), limits=Limits(max=64, threads=1))
    after = automatic.now - 60  # the first minute is for finding the size
    idle_at_start = next(idle for now, idle in automatic.idle_at if now >= 60)
    best = min(fixed, key=fixed.get)
    assert automatic.idle <= fixed[best] + 0.02 * automatic.now
    assert automatic.idle - idle_at_start <= 1.05 * fixed[best] + 0.005 * after


def test_bursts_of_large_batches_are_evened_out():
    sizes = np.random.default_rng(0).pareto(1.5, 20_000) + 0.2  # what power-law degrees make of batches
    sizes *= 0.016 / sizes.mean()
    durations = lambda number: float(min(sizes[number % 20_000], 0.5))  # noqa: E731
    automatic = run(durations, limits=Limits(max=64, threads=1))
    fixed = {size: run(durations, capacity=size).idle for size in SIZES}
    assert automatic.idle <= 1.05 * min(fixed.values()) + 0.02 * automatic.now
    assert automatic.idle < 0.5 * fixed[2]


@pytest.mark.parametrize("mean", [0.01, 0.0199, 0.0201, 0.05])
def test_a_steady_load_changes_nothing_after_it_settled(mean):
    automatic = run(lognormal(mean, 0.05), limits=Limits(max=64, threads=4))
    assert all(when < 30 for when, _ in automatic.changes)
    capacities = [change.after for _, change in automatic.changes if change.what == "capacity"]
    assert capacities == sorted(capacities)


@pytest.mark.parametrize("item_bytes", [1, 40, 120])
def test_under_rising_memory_pressure_the_queue_shrinks_within_an_interval_and_the_limit_holds(item_bytes):
    limit, began, interval = 4000, 50.0, 2.0

    def others(now):  # rises by 1 % of the limit per interval, as a leak does, up to 92 %
        return min(0.3 * limit + max(now - began, 0) / interval * 0.01 * limit, 0.92 * limit - 8 * item_bytes)

    automatic = run(
        lognormal(0.019, 1.0),
        limits=Limits(max=32, threads=1),
        stage={"item_bytes": item_bytes},
        memory_limit=limit,
        other_memory=others,
        num_items=15_000,
    )
    assert automatic.most_memory <= limit
    shrunk = [(when, change) for when, change in automatic.changes if change.after < change.before]
    if item_bytes > 1:
        assert shrunk
        assert "MiB of host memory are in use or promised" in shrunk[0][1].reason


def test_pressure_at_once_shrinks_the_queue_in_one_interval():
    automatic = run(
        lognormal(0.019, 1.0),
        limits=Limits(max=32, threads=1),
        stage={"item_bytes": 100},
        memory_limit=10_000,
        other_memory=lambda now: 1000 if now < 101 else 6200,
        num_items=10_000,
    )
    first = next((when, change) for when, change in automatic.changes if change.after < change.before)
    assert first[0] == 102  # the next decision after 101
    assert automatic.most_memory <= 10_000


def reading(name="prepare", **fields):
    values = {"threads": 1, "capacity": 4, "busy": 0.5, "starved": 0.0, "blocked": 0.0, "item_bytes": 100, "depth": 4}
    return StageReading(name, **{**values, **fields})


def readings(*stages, starved=0.0, used=0, limit=0, items=100):
    return Readings(stages, starved, items, 2.0, {"host": (used, limit)} if limit else {})


def test_the_last_queue_gives_way_first():
    stages = reading("sample"), reading("prepare")
    changes, _ = decide(readings(*stages, used=930, limit=1000), State(), Limits())
    assert [(change.stage, change.after) for change in changes] == [("prepare", 2)]
    changes, _ = decide(readings(*stages, used=1250, limit=1300), State(), Limits())
    assert [(change.stage, change.after) for change in changes] == [("prepare", 1)]
    changes, _ = decide(readings(*stages, used=2000, limit=2000), State(), Limits())
    assert [(change.stage, change.after) for change in changes] == [("prepare", 1), ("sample", 3)]


def test_a_limit_below_one_batch_is_an_error():
    with pytest.raises(ValueError, match=r"memory_limit=99: one item behind stage 'prepare' has 100 bytes; raise the"):
        decide(readings(reading(), used=10, limit=99), State(), Limits())


def test_a_queue_does_not_grow_into_the_limit():
    lacking = reading(blocked=0.3)
    for used, grows in ((300, True), (450, False)):
        changes, _ = decide(readings(lacking, starved=0.3, used=used, limit=1000), State(), Limits())
        assert bool(changes) == grows


def test_a_queue_that_had_to_shrink_grows_again_when_there_is_plenty():
    _, state = decide(readings(reading(), used=950, limit=1000), State(), Limits())
    lacking = reading(blocked=0.3, capacity=2, depth=2)
    for used, grows in ((390, True), (500, False)):
        changes, _ = decide(readings(lacking, starved=0.3, used=used, limit=1000), state, Limits())
        assert bool(changes) == grows


def test_a_slow_stage_gets_the_threads_that_help_and_no_more():
    def simulate(threads):
        stages = [
            SimulatedStage("sample", lambda _: 0.001),
            SimulatedStage("prepare", lambda _: 0.05),
        ]
        return Simulation(stages, lambda _: 0.02, 3000, Limits(threads=threads)).run()

    assert simulate(8).stages[1].threads == 3  # 50 ms by three are less than 20 ms
    assert simulate(3).stages[1].threads == 2
    assert simulate(2).stages[1].threads == 1
    idle = {threads: simulate(threads).idle for threads in (2, 3, 8)}
    assert idle[8] < 0.2 * idle[3] < 0.1 * idle[2]


def test_a_thread_that_does_not_help_goes_back_for_good():
    stages = [SimulatedStage("prepare", lambda _: 0.05)]
    simulation = Simulation(stages, lambda _: 0.02, 3000, Limits(threads=4))
    stages[0].duration = lambda _: 0.05 * stages[0].threads  # as where all wait for one disk
    simulation.run()
    assert [(change.before, change.after) for _, change in simulation.changes] == [(1, 2), (2, 1)]


def test_a_thread_moves_from_a_stage_that_can_do_without_it():
    busy, idle = reading("prepare", busy=0.95), reading("sample", threads=2, busy=0.1)
    changes, state = decide(readings(idle, busy, starved=0.5), State(), Limits(threads=3))
    assert [(c.stage, c.before, c.after) for c in changes] == [("prepare", 1, 2), ("sample", 2, 1)]
    after = reading("sample", busy=0.2), reading("prepare", threads=2, busy=0.9)
    changes, _ = decide(readings(*after, starved=0.5), state, Limits(threads=3))
    assert [(c.stage, c.before, c.after) for c in changes] == [("prepare", 2, 1), ("sample", 1, 2)]


def test_a_serial_stage_keeps_to_one_thread():
    changes, _ = decide(readings(reading("fetch", busy=1.0, serial=True), starved=0.5), State(), Limits(threads=8))
    assert changes == []


shares = st.floats(0, 1)
stage_readings = st.builds(
    StageReading,
    st.just("prepare"),
    st.integers(1, 4),
    st.integers(1, 64),
    shares,
    shares,
    shares,
    st.integers(0, 500),
    st.just(0),
)


@given(
    sequence=st.lists(
        st.tuples(stage_readings, shares, st.integers(0, 200), st.integers(0, 1500), st.integers(501, 1500)),
        max_size=12,
    )
)
def test_decisions_repeat_from_the_log_and_stay_within_the_limits(sequence):
    limits, state, lines = Limits(2, 32, 3), State(), []
    for stage, starved, items, used, limit in sequence:
        now = readings(stage, starved=starved, items=items, used=used, limit=limit)
        changes, state = decide(now, state, limits)
        lines.append(log_line(now, limits, changes))
        assert Readings.from_dict(json.loads(lines[-1])["readings"]) == now
        for change in changes:
            if change.what == "capacity" and change.after > change.before:
                assert change.after <= 32
                assert used + (change.after - change.before) * stage.item_bytes <= limit
            assert change.after >= min(2 if change.what == "capacity" else 1, change.before)
    assert all(then == now for then, now in replay(lines))
