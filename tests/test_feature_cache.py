"""Feature rows by way of a cache: always those of the store, with as few reads as each policy promises."""

import contextlib
import itertools
import os
import threading
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from conftest import our_threads
from graphs import assert_same_batch, module, random_graph
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

from lightning_mqgnn import FeatureCache, GraphStore
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.cache.features import POLICIES, Access, AccessPlanner, DeviceRows
from lightning_mqgnn.cache.policies import NEVER

NUM_NODES = 12


def small_store(rows=None, dtype=torch.float32, width=(3,)):
    x = torch.arange(NUM_NODES * int(np.prod(width))).reshape(NUM_NODES, *width).to(dtype) if rows is None else rows
    edges = torch.tensor([[a, b] for a in range(NUM_NODES) for b in range(a)]).t()
    return GraphStore.from_data(Data(x=x, edge_index=edges, num_nodes=NUM_NODES))


batches_of_nodes = st.lists(st.lists(st.integers(0, NUM_NODES - 1), max_size=6, unique=True), max_size=10)


def accesses(batches, super_batch=None, epochs=None):
    """The accesses of some batches, planned in super-batches of the given length."""
    plain = [Access(np.array(nodes, np.int32), 0 if epochs is None else epochs[i]) for i, nodes in enumerate(batches)]
    size = super_batch or max(len(plain), 1)
    planner = AccessPlanner(NUM_NODES)
    return [access for begin in range(0, len(plain), size) for access in planner.plan(plain[begin : begin + size])]


def hits(cache, planned):
    for access in planned:
        cache.rows(access, BufferPool())
    return cache.report().hits


@given(batches_of_nodes, st.integers(1, 10))
def test_next_uses_and_openings_are_those_of_the_super_batch(batches, super_batch):
    planned = accesses(batches, super_batch)
    for begin in range(0, len(batches), super_batch):
        part = batches[begin : begin + super_batch]
        for i, nodes in enumerate(part):
            following = [next((j for j in range(i + 1, len(part)) if n in part[j]), NEVER) for n in nodes]
            assert planned[begin + i].next_use.tolist() == following
            assert (planned[begin + i].opening is not None) == (i == 0)
        first = {n: j for j in reversed(range(len(part))) for n in part[j]}
        nodes, first_use, num_batches = planned[begin].opening
        assert num_batches == len(part)
        assert dict(zip(nodes.tolist(), first_use.tolist(), strict=True)) == first


@given(
    batches=batches_of_nodes,
    policy=st.sampled_from(POLICIES),
    num_rows=st.integers(0, NUM_NODES + 3),
    super_batch=st.integers(1, 10),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64]),
    width=st.sampled_from([(), (1,), (3,), (100,), (2, 5), (0,)]),
    planned=st.booleans(),
)
def test_rows_are_those_of_the_store_with_every_policy_and_size(
    batches, policy, num_rows, super_batch, dtype, width, planned
):
    store = small_store(dtype=dtype, width=width)
    cache = FeatureCache(store, num_rows, policy, measure_best=True)
    pool = BufferPool()
    plan = accesses(batches, super_batch, epochs=[i // 3 for i in range(len(batches))])
    for access in plan if planned else [Access(access.node, access.epoch) for access in plan]:
        rows = cache.rows(access, pool)
        assert rows.dtype == dtype
        assert torch.equal(rows, store.node_attrs["x"][torch.from_numpy(access.node).long()])
    report = cache.report()
    assert report.accesses == sum(map(len, batches))
    assert 0 <= report.hits <= report.accesses
    assert report.bytes_moved >= (report.accesses - report.hits) * int(np.prod(width)) * dtype.itemsize


def best_possible(batches, num_rows):
    """By trying everything: after each batch, any set of rows out of what was held and what was read."""
    states = {frozenset(): 0}
    for nodes in batches:
        following = {}
        for held, count in states.items():
            count += len(held & set(nodes))
            candidates = held | set(nodes)
            for kept in itertools.combinations(sorted(candidates), min(num_rows, len(candidates))):
                key = frozenset(kept)
                following[key] = max(following.get(key, 0), count)
        states = following
    return max(states.values())


@given(st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), max_size=7), st.integers(0, 4))
def test_optimal_is_the_best_that_is_possible(batches, num_rows):
    cache = FeatureCache(small_store(), num_rows, "optimal")
    assert hits(cache, accesses(batches)) == best_possible(batches, num_rows)
    other = FeatureCache(small_store(), num_rows, "lru", measure_best=True)
    assert hits(other, accesses(batches)) <= other.report().best_hits == cache.report().best_hits


def belady_by_hand(batches, num_rows, super_batch):
    """The rule as it is written down, for many super-batches."""
    held, count = {}, 0  # node -> [next use, last read]
    for i, nodes in enumerate(batches):
        begin = i - i % super_batch
        part = batches[begin : begin + super_batch]

        def next_use(node, after, part=part):
            return next((j for j in range(after, len(part)) if node in part[j]), NEVER)

        if i == begin:
            held = {node: [next_use(node, 0), last] for node, (_, last) in held.items()}
        hit = [node for node in nodes if node in held]
        count += len(hit)
        for node in hit:
            held[node] = [next_use(node, i - begin + 1), i]
        for node in nodes:
            if node in hit:
                continue
            held[node] = [next_use(node, i - begin + 1), i]
        known = sorted((n for n in held if held[n][0] != NEVER), key=lambda n: held[n][0])
        unknown = sorted((n for n in held if held[n][0] == NEVER), key=lambda n: -held[n][1])
        held = {n: held[n] for n in (known + unknown)[:num_rows]}
    return count


@given(batches_of_nodes, st.integers(1, 4))
def test_belady_keeps_what_it_has_room_for_across_super_batches(batches, super_batch):
    distinct = {node for nodes in batches for node in nodes}
    cache = FeatureCache(small_store(), len(distinct), "optimal")
    assert hits(cache, accesses(batches, super_batch)) == sum(map(len, batches)) - len(distinct)


@given(st.lists(st.integers(0, NUM_NODES - 1), max_size=40), st.integers(1, NUM_NODES), st.integers(1, 6))
def test_belady_follows_the_rule_with_one_node_a_batch(reads, num_rows, super_batch):
    batches = [[node] for node in reads]
    cache = FeatureCache(small_store(), num_rows, "optimal")
    assert hits(cache, accesses(batches, super_batch)) == belady_by_hand(batches, num_rows, super_batch)


@given(batches_of_nodes, st.integers(0, NUM_NODES))
def test_lru_is_lru(batches, num_rows):
    held, count = OrderedDict(), 0
    for nodes in batches:
        count += sum(node in held for node in nodes)
        for node in nodes:
            held[node] = None
            held.move_to_end(node)
            if len(held) > num_rows:
                held.popitem(last=False)
    assert hits(FeatureCache(small_store(), num_rows, "lru"), accesses(batches)) == count


@given(batches_of_nodes, st.integers(0, NUM_NODES))
def test_frequency_is_the_best_static_choice_for_an_epoch_like_the_one_before(batches, num_rows):
    cache = FeatureCache(small_store(), num_rows, "frequency")
    hits(cache, accesses(batches, epochs=[0] * len(batches)))
    before = cache.report().hits
    counts = Counter(node for nodes in batches for node in nodes)
    best = sum(count for _, count in counts.most_common(num_rows))
    assert hits(cache, accesses(batches, epochs=[1] * len(batches))) - before == best


def test_degree_holds_the_nodes_with_most_outgoing_edges():
    cache = FeatureCache(small_store(), 4, "degree")  # node i has i of them
    assert hits(cache, accesses([[11, 0], [10, 9, 8], [7]])) == 4


def test_a_super_batch_that_is_cut_off_does_no_harm():
    cache = FeatureCache(small_store(), 3, "optimal")
    first = accesses([[0, 1, 2], [3], [0, 1, 2]])
    hits(cache, first[:1])
    store_x = small_store().node_attrs["x"]
    for access in accesses([[4, 5], [0, 1], [4, 5]]):
        assert torch.equal(cache.rows(access, BufferPool()), store_x[torch.from_numpy(access.node).long()])
    assert cache.report().hits == 3  # 0 and 1 stay for their use, and one of 4 and 5


def test_changed_rows_are_read_again():
    store = small_store()
    cache = FeatureCache(store, 5, "lru")
    hits(cache, accesses([[1, 2, 3]]))
    store.update(features={"x": (torch.tensor([2, 9]), torch.full((2, 3), -1.0))})
    cache.invalidate(np.array([2, 9]))
    assert cache.rows(Access(np.array([2, 9, 1])), BufferPool())[:, 0].tolist() == [-1, -1, 3]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [0, 500, 3000, 50_000, 10**7])
def test_the_rows_that_fit_a_budget_fit(policy, budget):
    store = GraphStore.from_data(random_graph())
    num_rows = FeatureCache.rows_for(store, budget, policy)
    assert 0 <= num_rows <= store.num_nodes
    if num_rows:
        assert FeatureCache(store, num_rows, policy).nbytes <= budget
        bigger = FeatureCache(store, num_rows + 40, policy)
        assert bigger.nbytes > budget or bigger.num_rows == store.num_nodes


# Files


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("threads", [1, 4])
def test_rows_of_a_file_larger_than_the_cache(tmp_path, policy, threads):
    data = random_graph(num_nodes=5000, num_features=33)
    GraphStore.from_data(data).save(tmp_path / "graph")
    store = GraphStore.open(tmp_path / "graph")
    cache = FeatureCache(store, 500, policy, threads=threads)
    generator = np.random.default_rng(0)
    batches = [generator.permutation(5000)[:1500] for _ in range(6)]
    for access in AccessPlanner(5000).plan([Access(nodes) for nodes in batches]):
        assert torch.equal(cache.rows(access, BufferPool()), data.x[torch.from_numpy(access.node)])
    cache.close()
    assert our_threads() == []


def test_a_file_that_is_cut_short_is_an_error_and_not_the_end_of_the_process(tmp_path):
    GraphStore.from_data(random_graph(num_nodes=5000)).save(tmp_path / "graph")
    cache = FeatureCache(GraphStore.open(tmp_path / "graph"), 10, "lru")
    os.truncate(tmp_path / "graph" / "node.x.npy", 4000)
    with pytest.raises(OSError, match=r"node\.x\.npy.*row 4000 can't be read"):
        cache.rows(Access(np.array([3, 4000])), BufferPool())


def test_an_updated_row_is_not_read_from_the_file(tmp_path):
    GraphStore.from_data(random_graph()).save(tmp_path / "graph")
    store = GraphStore.open(tmp_path / "graph")
    cache = FeatureCache(store, 10, "lru")
    cache.rows(Access(np.array([1])), BufferPool())
    store.update(features={"x": (torch.tensor([1, 2]), torch.ones(2, 8))})
    cache.invalidate(np.array([1, 2]))
    assert bool((cache.rows(Access(np.array([1, 2])), BufferPool()) == 1).all())


def test_threads_may_share_it():
    store = GraphStore.from_data(random_graph())
    cache = FeatureCache(store, 50, "lru")
    wrong = []

    def read(seed):
        generator, pool = np.random.default_rng(seed), BufferPool()
        for _ in range(50):
            node = generator.permutation(400)[:60]
            rows = cache.rows(Access(node), pool)
            if not torch.equal(rows, store.node_attrs["x"][torch.from_numpy(node)]):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.report().accesses == 4 * 50 * 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((5, "best"), "policy='best': give one of"), ((-1,), "num_rows=-1"), ((5, "lru", "z"), "name='z'")],
)
def test_bad_arguments_are_refused(arguments, message):
    num_rows, *rest = arguments
    policy, name = [*rest, *["lru", "x"][len(rest) :]]
    with pytest.raises(ValueError, match=message):
        FeatureCache(small_store(), num_rows, policy, name=name)


# On a device, with the CPU in its place


class FakeEvent:
    def synchronize(self):
        pass


class FakeStream:
    def __init__(self, device=None):
        pass

    def record_event(self):
        return FakeEvent()


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_rows_on_a_device_are_those_of_the_store_and_only_misses_cross(monkeypatch, policy):
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    store = GraphStore.from_data(random_graph())
    rows = DeviceRows(store, "x", 60, torch.device("cpu"))
    cache = FeatureCache(store, 60, policy)
    cache._rows = rows
    crossed = []

    class Pool(BufferPool):
        def lend(self, name, shape, dtype):
            crossed.append(shape[0])
            return super().lend(name, shape, dtype)

    generator, pool = np.random.default_rng(0), Pool()
    batches = [generator.permutation(400)[:100] for _ in range(8)]
    for access in AccessPlanner(400).plan([Access(nodes, i // 3) for i, nodes in enumerate(batches)]):
        assert torch.equal(cache.rows(access, pool), store.node_attrs["x"][torch.from_numpy(access.node)])
    report = cache.report()
    assert sum(crossed) == report.accesses - report.hits
    assert report.hits > 0


# In the DataModule


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("threads", [(0, 0), (1, 1), (2, 3)])
@pytest.mark.parametrize("saved", [False, True])
def test_batches_do_not_depend_on_the_feature_cache(tmp_path, policy, threads, saved):
    if saved:
        GraphStore.from_data(random_graph()).save(tmp_path / "graph")
    data = tmp_path / "graph" if saved else None
    plain = module(sampling_threads=0, prepare_threads=0)
    cached = module(
        data,
        sampling_threads=threads[0] or int(policy == "optimal"),
        prepare_threads=threads[1],
        feature_cache=12_000,
        feature_policy=policy,
        subgraph_cache="1MiB",
        resample_every=1,
    )
    for _ in range(3):
        for one, other in zip(plain.train_dataloader(), cached.train_dataloader(), strict=True):
            assert_same_batch(one, other)
    for one, other in zip(plain.val_dataloader(), cached.val_dataloader(), strict=True):
        assert_same_batch(one, other)
    assert_same_batch(plain.replay(2, 3), cached.replay(2, 3))
    report = cached.feature_report()
    if policy == "none":
        assert report is None
    else:
        assert report.accesses > 0
        assert report.hits > 0
    cached.teardown()
    assert our_threads() == []


def test_updated_features_reach_the_batches_by_way_of_the_cache():
    datamodule = module(feature_cache="1MiB", feature_policy="lru")
    list(datamodule.train_dataloader())
    datamodule.store.update(features={"x": (torch.arange(400), torch.full((400, 8), 3.0))})
    assert all(bool((batch.x == 3).all()) for batch in datamodule.train_dataloader())


@pytest.mark.parametrize("resample_every", [1, 2])
def test_cache_bias_prefers_cached_nodes_and_weighs_edges(resample_every):
    data = random_graph(num_nodes=2000, num_edges=60_000)
    arguments = {"feature_cache": 47_000, "feature_policy": "degree", "num_neighbors": [5], "redraw_every": 2}
    rates = []
    for bias in (1.0, 10.0):
        datamodule = module(data, cache_bias=bias, resample_every=resample_every, **arguments)
        serial = module(data, cache_bias=bias, resample_every=resample_every, sampling_threads=0, **arguments)
        for epoch in range(3):
            for i, batch in enumerate(datamodule.train_dataloader()):
                assert torch.equal(batch.x, data.x[batch.n_id])
                assert ("edge_weight" in batch) == (bias > 1)
                if i == 1:
                    assert_same_batch(batch, serial.replay(epoch, 1))
        rates.append(datamodule.feature_report().hit_rate)
    assert rates[1] > 1.3 * rates[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"feature_policy": "best"}, "feature_policy='best': give one of none, degree"),
        ({"feature_cache": "much"}, "feature_cache='much': give bytes"),
        ({"cache_bias": 0.5, "feature_policy": "degree"}, "cache_bias=0.5: give a number of at least 1"),
        ({"cache_bias": 5.0}, "cache_bias=5.0 with feature_policy='optimal'.*feature_policy='degree'"),
        ({"redraw_every": 0}, "redraw_every=0: give 1"),
        ({"cache_bias": 5.0, "feature_policy": "degree"}, "cache_bias=5.0 with feature_cache=0"),
        ({"feature_cache": 1000, "sampling_threads": 0}, "feature_policy='optimal'.*sampling_threads=0"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        module(**arguments)
