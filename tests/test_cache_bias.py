"""Sampling that prefers cached nodes: preferred they are, and means over neighbours keep their expectation."""

import threading

import numpy as np
import pytest
import torch
from graphs import random_graph
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv

from lightning_mqgnn import CacheBias, GraphStore, NeighborSampler, synthetic_graph
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.prepare import Prepare
from lightning_mqgnn.sampling import kernels
from lightning_mqgnn.sampling.bias import CachedSet

KEYS = 4000


def star(degree):
    """Node 0 has incoming edges from the nodes 1 to `degree`."""
    edge_index = torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.int64)])
    x = torch.randn(degree + 1, 1, generator=torch.Generator().manual_seed(0)) + 2
    return GraphStore.from_data(Data(x=x, edge_index=edge_index))


def chosen_bias(store, nodes, bias):
    """A bias with a set that is given."""
    preference = CacheBias(store, len(nodes), bias)
    flags = np.zeros(store.num_nodes, np.bool_)
    flags[nodes] = True
    colptr, row = store.colptr.numpy(), store.row.numpy()
    ptr, position = np.empty(len(colptr), colptr.dtype), np.empty(flags[row].sum(), colptr.dtype)
    kernels.find_edges_from(flags, colptr, row, ptr, position)
    preference._sets[0, 0] = CachedSet(np.asarray(nodes), ptr, position)
    return preference


def draws(degree, num_cached, count, bias, replace):
    """Sources and weights of many draws: (keys, count) each. The cached ones are spread over the column."""
    store = star(degree)
    cached = np.arange(1, degree + 1)[:: max(degree // max(num_cached, 1), 1)][:num_cached]
    sampler = NeighborSampler(store, [count], replace, chosen_bias(store, cached, bias))
    source, weight = [], []
    for key in range(KEYS):
        subgraph = sampler.sample(np.array([0]), key * 7919)
        source.append(subgraph.node[subgraph.row])
        weight.append(subgraph.edge_weight)
    return store, cached, np.array(source), np.array(weight)


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("degree", "num_cached", "count", "bias"),
    [
        (10, 3, 4, 5.0),
        (10, 3, 9, 5.0),
        (10, 0, 4, 5.0),
        (10, 10, 4, 5.0),
        (10, 1, 4, 1000.0),
        (10, 9, 4, 1.0),
        (40, 35, 8, 3.0),
        (300, 20, 10, 20.0),
        (300, 290, 10, 2.0),
        (70, 30, 60, 4.0),
    ],
)
def test_means_keep_their_expectation_and_inclusion_is_as_said(degree, num_cached, count, bias, replace):
    store, cached, source, weight = draws(degree, num_cached, count, bias, replace)
    h = store.node_attrs["x"].numpy()[:, 0]
    means = (weight * h[source]).mean(1)
    error = means.std() / KEYS**0.5
    assert abs(means.mean() - h[1:].mean()) < 4.5 * error + 1e-6
    ones = weight.mean(1)  # the weights themselves average to one
    assert abs(ones.mean() - 1) < 4.5 * ones.std() / KEYS**0.5 + 1e-6
    assert source.shape == (KEYS, count)
    if bias == 1 or num_cached in (0, degree):
        assert np.allclose(weight, 1)
    if not replace:
        assert all(len(set(row)) == count for row in source)
    is_cached = np.isin(source, cached)
    per_draw = bias * num_cached / (bias * num_cached + degree - num_cached)
    expected = count * per_draw
    if not replace:
        expected = max(min(expected, num_cached), count - (degree - num_cached))
    spread = is_cached.sum(1).std() / KEYS**0.5
    assert abs(is_cached.sum(1).mean() - expected) < 4.5 * spread + 1e-6
    frequency = np.bincount(source.ravel(), minlength=degree + 1)[1:] / KEYS
    share = expected / max(num_cached, 1)
    for node in cached:
        assert abs(frequency[node - 1] - share) < 5.5 * (share / KEYS) ** 0.5 + 1e-6


def test_pairs_of_a_part_are_equally_likely():
    _, cached, source, _ = draws(12, 6, 4, 1.0, False)  # two draws from either part
    for part in (cached, np.setdiff1d(np.arange(1, 13), cached)):
        pairs = np.zeros((13, 13))
        for row in source:
            chosen = [node for node in row if node in part]
            for a in chosen:
                for b in chosen:
                    pairs[a, b] += a < b
        counts = np.array([pairs[a, b] for a in part for b in part if a < b])
        expected = counts.mean()
        assert ((counts - expected) ** 2 / expected).sum() < 45  # 14 degrees of freedom: one in 25,000


def test_a_layer_with_the_weights_has_the_mean_of_the_whole_neighbourhood():
    torch.manual_seed(0)
    data = random_graph(num_nodes=60, num_edges=1500)
    store = GraphStore.from_data(data)
    layer = GraphConv(8, 3, aggr="mean").double()
    whole = layer(data.x.double(), data.edge_index)[:10]
    sampler = NeighborSampler(store, [6], bias=CacheBias(store, 12, 4.0))
    prepare = Prepare(store, BufferPool())
    results = []
    for key in range(1500):
        batch = prepare(sampler.sample(np.arange(10), key))
        results.append(layer(batch.x.double(), batch.edge_index, batch.edge_weight.double())[:10].detach())
    results = torch.stack(results)
    error = results.std(0) / len(results) ** 0.5
    assert bool(((results.mean(0) - whole).abs() < 4.5 * error).all())
    assert bool((error > 0).any())


@given(
    num_edges=st.integers(0, 3000),
    num_cached=st.integers(0, 50),
    bias=st.sampled_from([1.0, 2.5, 1e6]),
    fanouts=st.lists(st.sampled_from([-1, 0, 1, 7, 40]), min_size=1, max_size=2),
    replace=st.booleans(),
    key=st.integers(0, 2**64 - 1),
)
def test_blocks_are_sound_and_depend_on_key_hop_and_node_alone(num_edges, num_cached, bias, fanouts, replace, key):
    store = GraphStore.from_data(random_graph(num_nodes=50, num_edges=num_edges))
    sampler = NeighborSampler(store, fanouts, replace, CacheBias(store, num_cached, bias))
    block = sampler.sample(np.arange(20), key)
    colptr, row = store.colptr.numpy(), store.row.numpy()
    for i, node in enumerate(block.node[: len(block.colptr) - 1]):
        positions = block.position[block.colptr[i] : block.colptr[i + 1]]
        assert bool(((positions >= colptr[node]) & (positions < colptr[node + 1])).all())
        if not replace:
            assert len(set(positions)) == len(positions)
    assert np.array_equal(row[block.position], block.node[block.row])
    assert bool((block.edge_weight > 0).all())
    if bias == 1:
        assert bool((block.edge_weight == 1).all())
    alone = sampler.sample(np.arange(7, 8), key)
    assert np.array_equal(
        alone.position[: alone.num_sampled_edges[0]], block.position[block.colptr[7] : block.colptr[8]]
    )


def test_cached_nodes_are_preferred_the_more_the_larger_the_bias():
    store = GraphStore.from_data(synthetic_graph(num_nodes=20_000, num_edges=300_000))
    shares = []
    for bias in (1, 3, 10, 100):
        preference = CacheBias(store, 2000, bias)
        sampler = NeighborSampler(store, [10, 10], bias=preference)
        node = sampler.sample(np.arange(500), 3).node
        shares.append(np.isin(node, preference.nodes(0)).mean())
    assert shares == sorted(shares)
    assert shares[-1] > 1.5 * shares[0]


def test_sets_are_a_pure_function_and_drawn_anew_every_few_epochs():
    store = GraphStore.from_data(random_graph())
    one, other = (CacheBias(store, 50, 2.0, seed=3, redraw_every=3) for _ in range(2))
    sets = [one.nodes(epoch).tolist() for epoch in range(9)]
    assert sets == [other.nodes(epoch).tolist() for epoch in range(9)]
    assert sets[0] == sets[2] != sets[3] == sets[5] != sets[6]
    assert all(len(set(drawn)) == 50 and drawn == sorted(drawn) for drawn in sets)
    assert CacheBias(store, 50, 2.0, seed=4).nodes(0).tolist() != sets[0]


def test_nodes_are_drawn_in_proportion_to_their_outgoing_edges():
    sources = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 2, 4, 0]))
    store = GraphStore.from_data(Data(edge_index=torch.stack([sources, torch.zeros_like(sources)]), num_nodes=4))
    drawn = np.concatenate([CacheBias(store, 1, 2.0, seed=seed).nodes(0) for seed in range(4000)])
    counts = np.bincount(drawn, minlength=4)
    expected = 4000 * np.array([1, 2, 4]) / 7
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 20
    assert counts[3] == 0
    assert CacheBias(store, 3, 2.0).nodes(0).tolist() == [0, 1, 2]


def test_threads_get_the_same_blocks():
    store = GraphStore.from_data(random_graph(num_edges=20_000))
    serial = NeighborSampler(store, [5, 5], bias=CacheBias(store, 50, 3.0))
    shared = NeighborSampler(store, [5, 5], bias=CacheBias(store, 50, 3.0))
    results = {}

    def sample(first):
        for key in range(first, 60, 4):
            results[key] = shared.sample(np.arange(30), key, epoch=key % 3)

    threads = [threading.Thread(target=sample, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key, block in results.items():
        expected = serial.sample(np.arange(30), key, epoch=key % 3)
        assert np.array_equal(block.position, expected.position)
        assert np.array_equal(block.edge_weight, expected.edge_weight)
    assert len(results) == 60


def test_a_changed_graph_has_other_sets():
    store = GraphStore.from_data(Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=4))
    bias = CacheBias(store, 2, 2.0)
    assert bias.nodes(0).tolist() == [0, 1]
    store.update(edges_removed=torch.tensor([[1], [2]]), edges_added=torch.tensor([[3], [2]]))
    assert bias.nodes(0).tolist() == [0, 3]
    block = NeighborSampler(store, [1], bias=bias).sample(np.array([2]), 0)
    assert block.version == 1


@pytest.mark.parametrize("edge_format", ["coo", "csc"])
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_get_the_weights_times_the_graphs_own(edge_format, weighted):
    data = random_graph(num_edges=8000)
    if weighted:
        data.edge_weight = torch.rand(8000, generator=torch.Generator().manual_seed(1))
    store = GraphStore.from_data(data)
    block = NeighborSampler(store, [5], bias=CacheBias(store, 80, 3.0)).sample(np.arange(40), 1)
    batch = Prepare(store, BufferPool(), edge_format=edge_format)(block)
    expected = torch.from_numpy(block.edge_weight)
    if weighted:
        expected = expected * data.edge_weight[batch.e_id]
    assert torch.equal(batch.edge_weight if edge_format == "coo" else batch.adj_t.values(), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_cached": -1}, "num_cached=-1: give 0 to 400"),
        ({"num_cached": 401}, "num_cached=401"),
        ({"num_cached": 1.5}, r"num_cached=1\.5: give an integer"),
        ({"bias": 0.5}, r"bias=0\.5: give a finite number of at least 1"),
        ({"bias": float("inf")}, "bias=inf"),
        ({"bias": "2"}, "bias='2': give a number"),
        ({"redraw_every": 0}, "redraw_every=0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        CacheBias(GraphStore.from_data(random_graph()), **{"num_cached": 10, "bias": 2.0, **arguments})
