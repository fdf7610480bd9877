import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
import torch
from graphs import make_graph, random_graph
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency, chisquare
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

from lightning_mqgnn import GraphStore, NeighborSampler, SampledSubgraph
from lightning_mqgnn.sampling import neighbor


def sampler(num_nodes, edges, fanouts, replace=False):
    return NeighborSampler(GraphStore.from_data(make_graph(num_nodes, edges)), fanouts, replace)


def star(degree, fanout, replace=False):
    """Node 0 with edges from 1 ... degree."""
    return sampler(degree + 1, [(source, 0) for source in range(1, degree + 1)], [fanout], replace)


def sample(of: NeighborSampler, seeds, key=0) -> SampledSubgraph:
    return of.sample(np.asarray(seeds), key)


def assert_same(one: SampledSubgraph, other: SampledSubgraph) -> None:
    for name in ("node", "colptr", "row", "position"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.num_sampled_nodes == other.num_sampled_nodes
    assert one.num_sampled_edges == other.num_sampled_edges


def check(block: SampledSubgraph, store: GraphStore, seeds, fanouts, replace) -> None:
    """The definition of neighbour sampling, node by node and edge by edge, in plain Python."""
    colptr, row = store.colptr.tolist(), store.row.tolist()
    assert block.node[: len(seeds)].tolist() == list(seeds)
    assert len(set(block.node.tolist())) == len(block.node)
    assert block.num_sampled_nodes[0] == len(seeds)
    known = set(seeds)
    begin, end, edge = 0, len(seeds), 0
    for hop, fanout in enumerate(fanouts):
        found = []
        for local in range(begin, end):
            node = block.node[local]
            degree = colptr[node + 1] - colptr[node]
            everything = fanout == -1 or (degree <= fanout and not replace)
            expected = degree if everything else fanout * bool(degree)
            assert (block.colptr[local], block.colptr[local + 1]) == (edge, edge + expected)
            positions = block.position[edge : edge + expected].tolist()
            assert all(colptr[node] <= position < colptr[node + 1] for position in positions)
            assert replace or len(set(positions)) == len(positions)
            for position, source in zip(positions, block.row[edge : edge + expected], strict=True):
                assert block.node[source] == row[position]
                if row[position] not in known:
                    known.add(row[position])
                    found.append(row[position])
            edge += expected
        assert block.node[end : end + len(found)].tolist() == found
        assert block.num_sampled_nodes[hop + 1] == len(found)
        assert block.num_sampled_edges[hop] == edge - sum(block.num_sampled_edges[:hop])
        begin, end = end, end + len(found)
    assert (len(block.node), len(block.row), len(block.colptr)) == (end, edge, begin + 1)


@st.composite
def problems(draw):
    num_nodes = draw(st.integers(1, 40))
    ends = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(ends, ends), max_size=150))
    edges += [(draw(ends), 0)] * draw(st.sampled_from([0, 0, 70, 200]))  # a hub, with duplicates
    fanouts = draw(st.lists(st.sampled_from([-1, 0, 1, 2, 3, 10, 60, 90]), min_size=1, max_size=3))
    seeds = draw(st.lists(ends, unique=True, max_size=num_nodes))
    return num_nodes, edges, fanouts, seeds, draw(st.booleans()), draw(st.integers(0, 2**64 - 1))


@given(problems())
def test_a_block_is_what_the_definition_says(problem):
    num_nodes, edges, fanouts, seeds, replace, key = problem
    store = GraphStore.from_data(make_graph(num_nodes, edges))
    of = NeighborSampler(store, fanouts, replace)
    for _ in range(2):  # with fresh scratch memory, and with used one
        check(sample(of, seeds, key), store, seeds, fanouts, replace)


def test_isolated_nodes_self_loops_and_duplicate_edges():
    of = sampler(4, [(1, 1), (2, 1), (2, 1), (3, 3)], [-1, -1])
    block = sample(of, [0, 1])
    assert block.node.tolist() == [0, 1, 2]
    assert block.row.tolist() == [1, 2, 2]  # 1 -> 1, and 2 -> 1 twice
    assert block.num_sampled_edges == [3, 0]
    assert sample(of, [3]).row.tolist() == [0]
    assert len(sample(of, [0]).row) == 0


@pytest.mark.parametrize(("degree", "drawn"), [(2, 2), (3, 3), (4, 3)])
def test_degree_below_equal_and_above_the_fan_out(degree, drawn):
    block = sample(star(degree, 3), [0])
    assert len(block.row) == drawn
    assert len(set(block.node.tolist())) == drawn + 1


WAYS_OF_DRAWING = [
    (64, 1),  # a bit mask
    (64, 63),
    (65, 1),  # a scan of what was drawn
    (65, 22),
    (72, 23),
    (65, 23),  # one pass over the neighbours
    (72, 24),
    (66, 65),
]


@pytest.mark.parametrize(("degree", "fanout"), WAYS_OF_DRAWING)
@pytest.mark.parametrize("replace", [False, True])
def test_every_way_of_drawing_keeps_to_the_definition(degree, fanout, replace):
    edges = [(source, node) for node in (0, 1) for source in range(2, degree + 2)]
    store = GraphStore.from_data(make_graph(degree + 2, edges))
    of = NeighborSampler(store, [fanout], replace)
    for key in range(200):
        check(sample(of, [1, 0], key), store, [1, 0], [fanout], replace)


@pytest.mark.parametrize("replace", [False, True])
def test_a_graph_of_one_node(replace):
    alone = sample(sampler(1, [], [2, 2], replace), [0])
    assert (alone.node.tolist(), alone.num_sampled_nodes, alone.num_sampled_edges) == ([0], [1, 0, 0], [0, 0])
    loop = sample(sampler(1, [(0, 0)], [2, 2], replace), [0])
    assert loop.row.tolist() == [0] * (2 if replace else 1)
    assert (loop.num_sampled_nodes, loop.num_sampled_edges[1]) == ([1, 0, 0], 0)


def test_a_graph_without_nodes():
    block = sample(sampler(0, [], [2, -1]), np.zeros(0, np.int64))
    assert (len(block.node), len(block.row), block.num_sampled_nodes) == (0, 0, [0, 0, 0])


def test_a_fan_out_of_0_ends_the_block():
    block = sample(sampler(3, [(1, 0), (2, 1)], [0, -1]), [0])
    assert (block.node.tolist(), block.num_sampled_edges) == ([0], [0, 0])


def test_no_seeds_give_an_empty_block():
    block = sample(star(3, 2), [])
    assert (len(block.node), len(block.row), block.num_sampled_nodes) == (0, 0, [0, 0])


# What is drawn is random, and independent

DRAWS = 6000


@pytest.mark.parametrize(
    ("degree", "fanout", "replace"),
    [
        (10, 3, False),  # the bit mask
        (64, 10, False),  # its largest degree
        (65, 5, False),  # the scan of what was drawn
        (300, 12, False),
        (100, 40, False),  # one pass over the neighbours
        (80, 40, False),
        (7, 5, True),
        (100, 9, True),
    ],
)
def test_every_neighbour_is_equally_likely(degree, fanout, replace):
    of = star(degree, fanout, replace)
    drawn = np.concatenate([sample(of, [0], key).position for key in range(DRAWS)])
    assert len(drawn) == DRAWS * fanout
    counts = np.bincount(drawn, minlength=degree)
    # Draws without replacement vary less than independent ones: put the statistic to the right scale.
    scale = 1.0 if replace else (degree - fanout) / (degree - 1)
    assert chisquare(counts).statistic / scale < chi_square_limit(degree - 1)


def chi_square_limit(freedom):
    return chi2.isf(1e-5, freedom)


@pytest.mark.parametrize(("degree", "fanout"), [(5, 2), (6, 3), (4, 1), (5, 4), (64, 63), (65, 1), (66, 65)])
def test_every_subset_is_equally_likely(degree, fanout):
    of = star(degree, fanout)
    subsets = dict.fromkeys(combinations(range(degree), fanout), 0)
    for key in range(DRAWS):
        subsets[tuple(sorted(sample(of, [0], key).position.tolist()))] += 1
    assert chisquare(list(subsets.values())).pvalue > 1e-5


def test_large_degrees_draw_pairs_uniformly_too():
    """Pairs of neighbours out of 80, by the scan: put into 16 cells by the quarter that each belongs to."""
    of = star(80, 2)
    cells = np.zeros((4, 4))
    for key in range(DRAWS):
        one, other = sorted(sample(of, [0], key).position // 20)
        cells[one, other] += 1
    upper = np.triu_indices(4)
    within, across = 20 * 19 / 2, 20 * 20
    expected = np.where(upper[0] == upper[1], within, across) / (80 * 79 / 2) * DRAWS
    assert chisquare(cells[upper], expected).pvalue > 1e-5


def test_two_nodes_of_a_batch_draw_independently():
    edges = [(2 + i, node) for node in (0, 1) for i in range(4)]
    of = sampler(6, edges, [1])
    table = np.zeros((4, 4))
    for key in range(DRAWS):
        first, second = sample(of, [0, 1], key).position
        table[first, second - 4] += 1
    assert chisquare(table.ravel()).pvalue > 1e-5


def test_hops_draw_independently():
    """0 <- 1 <- {2 ... 5} and 1 again as a seed's neighbour at the second hop: the draws for 1 differ."""
    edges = [(1, 0), *[(source, 1) for source in range(2, 6)]]
    of = sampler(6, edges, [1, 1])
    table = np.zeros((4, 4))
    for key in range(DRAWS):
        as_seed, as_neighbour = sample(of, [1], key).position[0], sample(of, [0], key).position[1]
        table[as_seed - 1, as_neighbour - 1] += 1  # edge 0 leads into node 0
    assert chisquare(table.ravel()).pvalue > 1e-5


def test_near_keys_draw_independently():
    of = star(4, 1)
    drawn = np.array([int(sample(of, [0], key).position[0]) for key in range(DRAWS + 1)])
    table = np.bincount(4 * drawn[:-1] + drawn[1:], minlength=16)
    assert chi2_contingency(table.reshape(4, 4)).pvalue > 1e-5


def test_draws_with_replacement_are_independent_of_each_other():
    of = star(4, 2, replace=True)
    table = np.zeros((4, 4))
    for key in range(DRAWS):
        table[tuple(sample(of, [0], key).position)] += 1
    assert chisquare(table.ravel()).pvalue > 1e-5


# What is drawn depends on the key, the hop and the node alone


@pytest.fixture
def store():
    return GraphStore.from_data(random_graph(num_nodes=300, num_edges=6000))


def test_the_same_key_gives_the_same_block_and_another_one_another(store):
    of = NeighborSampler(store, [5, 5])
    assert_same(sample(of, [3, 4, 5], 7), sample(NeighborSampler(store, [5, 5]), [3, 4, 5], 7))
    assert not np.array_equal(sample(of, [3], 7).position, sample(of, [3], 8).position)


def test_a_node_draws_the_same_whatever_else_is_in_the_batch(store):
    of = NeighborSampler(store, [5])
    alone = sample(of, [42], 7)
    together = sample(of, [9, 42, 17], 7)
    begin, end = together.colptr[1:3]
    assert np.array_equal(together.position[begin:end], alone.position)


def test_many_threads_sample_what_one_does(store):
    of = NeighborSampler(store, [5, 4, 3])
    batches = [np.random.default_rng(i).choice(300, 30, replace=False) for i in range(200)]
    alone = [sample(of, batch, i) for i, batch in enumerate(batches)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda i: sample(of, batches[i], i), range(200)))
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


def test_blocks_larger_than_the_scratch_memory_are_complete(store):
    small_first = NeighborSampler(store, [-1, -1, -1])
    sample(small_first, [0])
    check(sample(small_first, range(300)), store, range(300), [-1, -1, -1], False)


@pytest.mark.parametrize("num_seeds", [500, 511, 512, 513, 1000])
def test_seeds_and_their_neighbours_outgrow_the_scratch_memory_that_their_edges_fit_into(num_seeds):
    """Memory is made for 1024 edges and as many nodes at first."""
    edges = [(num_seeds + seed, seed) for seed in range(num_seeds)]
    store = GraphStore.from_data(make_graph(2 * num_seeds, edges))
    check(sample(NeighborSampler(store, [2]), range(num_seeds)), store, range(num_seeds), [2], False)


def test_memory_that_grew_gives_what_memory_of_the_right_size_gives(store):
    of = NeighborSampler(store, [30, 30, 30])
    sample(of, [0])
    grown = sample(of, range(300), 7)  # too large for what the first call allocated
    assert_same(grown, sample(of, range(300), 7))


def test_the_last_tags_are_as_good_as_the_first(store):
    of, fresh = NeighborSampler(store, [5, 5]), NeighborSampler(store, [5, 5])
    sample(of, [9, 8, 7])
    of._idle[0]._tag = neighbor._MAX_TAG - 3
    for key in range(6):
        assert_same(sample(of, [1, 2, 3], key), sample(fresh, [1, 2, 3], key))
    assert of._idle[0]._tag == 3


def test_the_table_is_emptied_when_its_tags_run_out(store, monkeypatch):
    monkeypatch.setattr(neighbor, "_MAX_TAG", 3)
    of = NeighborSampler(store, [5, 5])
    for key in range(10):
        assert_same(sample(of, [1, 2, 3], key), sample(NeighborSampler(store, [5, 5]), [1, 2, 3], key))


# Against PyG

needs_pyg = pytest.mark.skipif(not (WITH_PYG_LIB or WITH_TORCH_SPARSE), reason="PyG's samplers are not installed")


def pyg_loader(data, fanouts, seeds, batch_size, replace=False):
    return NeighborLoader(data, fanouts, torch.tensor(seeds), replace=replace, batch_size=batch_size)


@needs_pyg
def test_all_neighbours_are_those_of_pyg_hop_by_hop():
    data = random_graph(num_nodes=300, num_edges=1500)
    seeds = list(range(0, 300, 7))
    of = NeighborSampler(GraphStore.from_data(data), [-1, -1])
    edge_id = GraphStore.from_data(data).edge_id.numpy()
    for i, batch in enumerate(pyg_loader(data, [-1, -1], seeds, 8)):
        block = sample(of, seeds[8 * i : 8 * i + 8])
        edges = edge_id[block.position]
        for ours, theirs, counts in (
            (block.node, batch.n_id, block.num_sampled_nodes),
            (edges, batch.e_id, block.num_sampled_edges),
        ):
            assert len(ours) == len(theirs)
            begin = 0
            for count in counts:
                assert sorted(ours[begin : begin + count]) == sorted(theirs[begin : begin + count].tolist())
                begin += count
        if WITH_PYG_LIB:  # the other backend does not count
            assert block.num_sampled_nodes == list(batch.num_sampled_nodes)
            assert block.num_sampled_edges == list(batch.num_sampled_edges)


@needs_pyg
def test_neighbours_are_drawn_as_often_as_by_pyg():
    """With replacement; without, the torch-sparse backend draws the last neighbours of a node too rarely."""
    degree, fanout, draws = 12, 2, 3000
    data = make_graph(degree + 1, [(source, 0) for source in range(1, degree + 1)])
    of = star(degree, fanout, replace=True)
    ours = np.bincount(np.concatenate([sample(of, [0], key).position for key in range(draws)]), minlength=degree)
    torch.manual_seed(0)
    loader = pyg_loader(data, [fanout], [0], 1, replace=True)
    theirs = np.bincount(torch.cat([next(iter(loader)).e_id for _ in range(draws)]), minlength=degree)
    assert ours.sum() == theirs.sum() == draws * fanout
    assert chisquare(ours).pvalue > 1e-5
    assert chisquare(theirs).pvalue > 1e-5
    assert chi2_contingency([ours, theirs]).pvalue > 1e-5


# Compiling


def test_compiling_is_announced_and_happens_once_per_machine(tmp_path):
    script = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(levelname)s %(name)s %(message)s')\n"
        "import sys; sys.path.insert(0, 'tests')\n"
        "from graphs import random_graph; from lightning_mqgnn import *\n"
        "NeighborSampler(GraphStore.from_data(random_graph()), [2]).warm_up()"
    )
    message = "INFO lightning_mqgnn.sampling.neighbor Compiling the sampling kernels"
    announced = [message in run_with_cache(script, tmp_path) for _ in range(2)]
    assert announced == [True, False]


def run_with_cache(script, folder):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    return done.stderr


def test_warm_up_leaves_nothing_to_compile(store, caplog):
    of = NeighborSampler(store, [2])
    of.warm_up()
    compiled = len(neighbor.kernels.sample_neighbors.signatures)
    with caplog.at_level(logging.INFO):
        sample(of, [1, 2, 3])
    assert len(neighbor.kernels.sample_neighbors.signatures) == compiled
    assert caplog.text == ""
