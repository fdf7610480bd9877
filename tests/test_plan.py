import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import chisquare

from lightning_mqgnn import EpochPlan


@st.composite
def plans(draw, drop_last=False):
    world_size = draw(st.integers(1, 5))
    num_seeds = draw(st.integers(world_size, 200))
    batch_size = draw(st.integers(1, 40))
    assume(not drop_last or batch_size <= num_seeds // world_size)
    return EpochPlan(num_seeds, batch_size, world_size, draw(st.integers(0, 9)), drop_last=drop_last)


def all_batches(plan, epoch):
    return [plan.batches(epoch, rank) for rank in range(plan.world_size)]


@given(plans(), st.integers(0, 100))
def test_every_seed_is_visited_exactly_once_per_epoch(plan, epoch):
    visited = np.concatenate([batch for batches in all_batches(plan, epoch) for batch in batches])
    assert sorted(visited) == list(range(plan.num_seeds))


@given(plans(), st.integers(0, 100))
def test_all_ranks_have_the_same_number_of_batches_and_none_is_empty(plan, epoch):
    per_rank = all_batches(plan, epoch)
    assert {len(batches) for batches in per_rank} == {plan.num_batches}
    most = plan.batch_size if plan.batch_size > 1 else 2
    assert all(1 <= len(batch) <= most for batches in per_rank for batch in batches)


@given(plans(), st.integers(0, 100))
def test_shards_differ_by_at_most_one_seed_and_batches_are_full_up_to_the_last_two(plan, epoch):
    sizes = [len(plan.shard(epoch, rank)) for rank in range(plan.world_size)]
    assert max(sizes) - min(sizes) <= 1
    for batches in all_batches(plan, epoch):
        assert all(len(batch) == plan.batch_size for batch in batches[:-2])
        assert len(batches) < 2 or len(batches[-2]) >= plan.batch_size - 1


@given(plans(drop_last=True), st.integers(0, 100))
def test_drop_last_leaves_full_batches_only_and_as_many_as_each_rank_can_fill(plan, epoch):
    batches = [batch for batches in all_batches(plan, epoch) for batch in batches]
    assert {len(batch) for batch in batches} == {plan.batch_size}
    visited = np.concatenate(batches)
    assert len(set(visited)) == len(visited)
    assert plan.num_batches == plan.num_seeds // plan.world_size // plan.batch_size
    assert len(visited) == plan.world_size * plan.num_batches * plan.batch_size


@given(plans(), st.integers(0, 100), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_other_numbers_of_ranks_finish_an_epoch_and_visit_every_seed_once(
    plan, epoch, resample_every, world_sizes, data
):
    plan = replace(plan, resample_every=resample_every)
    before, visited = [], []
    for world_size in (plan.world_size, *world_sizes):
        assume(world_size <= plan.num_seeds)
        plan = replace(plan, world_size=world_size)
        parts = [plan.rest(epoch, rank, before) for rank in range(world_size)]
        (count,) = {len(batches) for batches in parts}
        assert count <= plan.num_batches
        if not before:
            assert np.array_equal(np.concatenate(parts[0]), np.concatenate(plan.batches(epoch, 0)))
        taken = data.draw(st.integers(0, count)) if len(before) < len(world_sizes) else count
        visited += [seed for batches in parts for batch in batches[:taken] for seed in batch]
        before.append([world_size, taken])
        if taken == count:
            break
    assert len(visited) == len(set(visited))
    assert plan.num_seeds - world_size < len(visited) <= plan.num_seeds
    if world_size == 1:
        assert len(visited) == plan.num_seeds


@given(plans(drop_last=True), st.integers(0, 100), st.integers(1, 5), st.data())
def test_what_other_ranks_finish_is_full_batches_too_where_that_is_asked_for(plan, epoch, world_size, data):
    assume(plan.batch_size <= plan.num_seeds // world_size)
    taken = data.draw(st.integers(0, plan.num_batches))
    visited = [seed for batches in all_batches(plan, epoch) for batch in batches[:taken] for seed in batch]
    other = replace(plan, world_size=world_size)
    parts = [other.rest(epoch, rank, [[plan.world_size, taken]]) for rank in range(world_size)]
    assert len({len(batches) for batches in parts}) == 1
    assert {len(batch) for batches in parts for batch in batches} <= {plan.batch_size}
    visited += [seed for batches in parts for batch in batches for seed in batch]
    assert len(visited) == len(set(visited))


@pytest.mark.parametrize(
    ("num_seeds", "batch_size", "world_size", "sizes"),
    [
        (17, 8, 2, [[8, 1], [7, 1]]),  # the smaller shard would be a batch short
        (16, 8, 2, [[8], [8]]),
        (21, 8, 1, [[8, 8, 5]]),
        (5, 4, 2, [[3], [2]]),
        (3, 1, 2, [[2], [1]]),  # the larger shard would be a batch too long
        (2, 100, 2, [[1], [1]]),
    ],
)
def test_batch_sizes(num_seeds, batch_size, world_size, sizes):
    plan = EpochPlan(num_seeds, batch_size, world_size)
    assert [[len(batch) for batch in batches] for batches in all_batches(plan, 0)] == sizes


def test_the_order_is_new_in_each_epoch_and_for_each_seed():
    orders = [EpochPlan(50, 8, seed=seed).shard(epoch, 0) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6


def test_every_order_is_equally_likely():
    orders = [tuple(EpochPlan(4, 2).shard(epoch, 0)) for epoch in range(2400)]
    assert len(set(orders)) == 24
    assert chisquare([orders.count(order) for order in set(orders)]).pvalue > 1e-4


def test_training_and_validation_have_orders_of_their_own():
    train, val = (EpochPlan(50, 8, stream=stream).shard(0, 0).tolist() for stream in ("train", "val"))
    assert train != val


def test_a_plan_has_no_memory():
    plan = EpochPlan(50, 8, 2)
    first = plan.shard(3, 1)
    plan.batches(0, 0), plan.shard(7, 1), plan.key(1, 2)
    assert np.array_equal(plan.shard(3, 1), first)
    assert np.array_equal(np.concatenate(plan.batches(3, 1)), first)


def test_numbers_of_numpy_name_the_same_batch():
    plan, same = EpochPlan(50, 8, seed=3), EpochPlan(50, 8, seed=np.int64(3))
    assert plan.key(2, 5) == plan.key(np.int64(2), np.int64(5)) == same.key(2, 5)
    assert plan.shard(2, 0).tolist() == plan.shard(np.int64(2), 0).tolist() == same.shard(2, 0).tolist()


def test_without_shuffle_ranks_get_consecutive_seeds_in_order():
    plan = EpochPlan(5, 2, world_size=2, shuffle=False)
    for epoch in (0, 1):
        assert [plan.shard(epoch, rank).tolist() for rank in (0, 1)] == [[0, 1, 2], [3, 4]]


def test_another_process_makes_the_same_plan():
    script = "from lightning_mqgnn import *; p = EpochPlan(50, 8, 2, 3); print([*p.shard(4, 1)], p.key(4, 9))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # hash() of a string differs between processes
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    plan = EpochPlan(50, 8, 2, 3)
    assert done.stdout.strip() == f"{[*plan.shard(4, 1)]} {plan.key(4, 9)}"


def test_every_batch_has_a_key_of_its_own():
    plans = [EpochPlan(50, 8, seed=seed, stream=stream) for seed in (0, 1) for stream in ("train", "val")]
    keys = [plan.key(epoch, batch) for plan in plans for epoch in range(30) for batch in range(30)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


@given(plans(), st.integers(2, 5), st.integers(0, 30))
def test_epochs_that_share_batches_have_them_in_another_order_on_the_same_rank(plan, resample_every, epoch):
    plan = replace(plan, resample_every=resample_every)
    first = plan.sampled_in(epoch)
    assert first <= epoch < first + resample_every
    assert first % resample_every == 0
    for rank in range(plan.world_size):
        sampled = replace(plan, resample_every=1).batches(first, rank)
        order = plan.order(epoch, rank)
        assert sorted(order) == list(range(plan.num_batches))
        for batch, number in zip(plan.batches(epoch, rank), order, strict=True):
            assert np.array_equal(batch, sampled[number])


def test_the_order_of_shared_batches_differs_between_epochs_and_ranks():
    plan = EpochPlan(400, 10, 2, resample_every=3)
    orders = [tuple(plan.order(epoch, rank)) for epoch in range(6) for rank in range(2)]
    assert len(set(orders)) == 9  # epochs 0 and 3 have their batches as sampled, on both ranks


def test_batches_that_are_not_shuffled_stay_in_order():
    plan = EpochPlan(40, 10, shuffle=False, resample_every=3)
    assert list(plan.order(1, 0)) == [0, 1, 2, 3]
