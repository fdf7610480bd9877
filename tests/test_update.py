import os
import pickle
import shutil
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from graphs import make_graph, random_graph
from hypothesis import example, given
from hypothesis import strategies as st
from test_graph import DTYPES, assert_same, incoming
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore, NeighborSampler
from lightning_mqgnn.graph import build_store


def pairs(*edges: tuple[int, int]) -> torch.Tensor:
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t()


def one_row(value: float) -> dict[str, torch.Tensor]:
    """The attributes of a new edge of the random graph."""
    return {"edge_attr": torch.full((1, 2), float(value))}


def first_edge(store: GraphStore) -> tuple[int, int]:
    """Source and destination."""
    return int(store.row[0]), int((store.colptr[1:] > 0).nonzero()[0, 0])


def ids(store: GraphStore) -> list[list[int]]:
    """The ids of the edges into each node."""
    edge_id = torch.arange(store.num_edges) if store.edge_id is None else store.edge_id
    return [edge_id[store.colptr[v] : store.colptr[v + 1]].tolist() for v in range(store.num_nodes)]


def with_edge_attr(num_nodes: int, edges: list[tuple[int, int]]) -> Data:
    """A graph whose edges have their own ids as an attribute."""
    data = make_graph(num_nodes, edges)
    data.edge_attr = torch.arange(len(edges), dtype=torch.float64)
    return data


def sample(store: GraphStore, seeds, fanouts=(3, 2), key=7):
    return NeighborSampler(store, list(fanouts)).sample(np.asarray(seeds), key)


def assert_same_block(one, other):
    for name in ("node", "row", "colptr"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


# Against a graph that is built anew


@st.composite
def histories(draw):
    """A graph, and updates: picks among the edges to remove, edges to add, nodes that get new rows."""
    num_nodes = draw(st.integers(1, 8))
    node = st.integers(0, num_nodes - 1)
    edges = st.lists(st.tuples(node, node), max_size=25)
    picks = st.one_of(st.just("all"), st.lists(st.integers(0, 1000), max_size=8))
    steps = st.tuples(picks, edges, st.lists(node, unique=True))
    return (
        num_nodes,
        draw(edges),
        draw(st.lists(steps, min_size=1, max_size=5)),
        draw(st.sampled_from(["int32", "int64"])),
    )


@given(histories())
@example((3, [], [([], [(0, 2), (1, 0), (0, 2), (1, 1)], [])], "int32"))  # edges for a graph without any
@example((2, [(0, 1), (0, 1), (1, 1)], [([1], [(0, 1)], [1]), ("all", [], []), ([], [(1, 0)], [])], "int64"))
def test_updates_give_the_graph_that_would_be_built_anew(history):
    num_nodes, edges, steps, dtype = history
    store = GraphStore.from_data(with_edge_attr(num_nodes, edges))
    dtype = getattr(torch, dtype)
    edge_id = None if store.edge_id is None else store.edge_id.to(dtype)
    attributes = {"node_attrs": store.node_attrs, "edge_attrs": store.edge_attrs}
    store = GraphStore(store.colptr.to(dtype), store.row.to(dtype), edge_id, **attributes)
    expected = [(*edge, number) for number, edge in enumerate(edges)]  # source, destination, id
    y = store.node_attrs["y"].tolist()
    num_ids, history = len(edges), []
    for version, (picks, added, nodes) in enumerate(steps):
        removed = {
            expected[i % len(expected)][:2] for i in (range(len(expected)) if picks == "all" else picks) if expected
        }
        rows = [100 * version + node for node in nodes]
        store.update(
            pairs(*added),
            pairs(*removed),
            {"y": (torch.tensor(nodes, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64))},
            {"edge_attr": torch.arange(num_ids, num_ids + len(added))},
        )
        expected = [edge for edge in expected if edge[:2] not in removed]
        expected += [(*edge, num_ids + i) for i, edge in enumerate(added)]
        num_ids += len(added)
        for node, row in zip(nodes, rows, strict=True):
            y[node] = row
        history.append(({into for _, into in [*removed, *added]}, set(nodes)))

        assert ids(store) == [[number for _, into, number in expected if into == v] for v in range(num_nodes)]
        assert {store.colptr.dtype, store.row.dtype} == {dtype}
        assert store.edge_id is None or store.edge_id.dtype == dtype
        assert store.edge_attrs["edge_attr"].tolist() == list(range(num_ids))
        assert store.node_attrs["y"].tolist() == y
        anew = GraphStore.from_data(make_graph(num_nodes, [edge[:2] for edge in expected]))
        assert torch.equal(store.colptr, anew.colptr)
        assert torch.equal(store.row, anew.row)
        assert_same_block(sample(store, range(num_nodes)), sample(anew, range(num_nodes)))

        assert store.version == version + 1
        for since in range(version + 2):
            changes = store.changes(since)
            assert changes.columns.tolist() == sorted(set().union(*(columns for columns, _ in history[since:])))
            changed = sorted(set().union(*(nodes for _, nodes in history[since:])))
            assert {name: rows.tolist() for name, rows in changes.rows.items()} == ({"y": changed} if changed else {})
            assert {array.dtype for array in (changes.columns, *changes.rows.values())} == {np.dtype(np.int64)}


# Edges and their ids


def test_new_edges_come_behind_the_old_ones_and_are_numbered_on():
    store = GraphStore.from_data(make_graph(3, [(2, 0), (1, 0), (0, 2)]))
    store.update(pairs((1, 2), (0, 1), (0, 0)))
    assert incoming(store) == [[2, 1, 0], [0], [0, 1]]
    assert ids(store) == [[0, 1, 5], [4], [2, 3]]


def test_a_pair_is_all_its_parallel_edges_and_may_come_twice():
    store = GraphStore.from_data(make_graph(3, [(2, 0), (1, 0), (2, 0), (0, 2), (1, 1)]))
    store.update(edges_removed=pairs((2, 0), (1, 1), (2, 0)))
    assert incoming(store) == [[1], [], [0]]
    assert ids(store) == [[1], [], [3]]


def test_edges_are_removed_before_others_are_added():
    store = GraphStore.from_data(make_graph(2, [(1, 0), (0, 0)]))
    store.update(pairs((1, 0), (1, 1)), pairs((1, 0)))
    assert incoming(store) == [[0, 1], [1]]
    assert ids(store) == [[1, 2], [3]]


def test_ids_are_not_used_again(tmp_path):
    store = GraphStore.from_data(make_graph(2, [(1, 0), (0, 1)]))
    store.update(edges_removed=pairs((0, 1)))
    store.save(tmp_path / "graph")
    for of in (store, GraphStore.open(tmp_path / "graph"), pickle.loads(pickle.dumps(store))):
        of.update(pairs((1, 1)))
        assert ids(of) == [[0], [2]]


def test_ids_begin_behind_those_that_a_graph_came_with():
    store = GraphStore(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([40, 7]))
    store.update(pairs((0, 0)))
    assert ids(store) == [[40, 41], [7]]
    edge_attrs = {"edge_attr": torch.zeros(50)}
    store = GraphStore(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([40, 7]), edge_attrs=edge_attrs)
    store.update(pairs((0, 0)), edge_attrs={"edge_attr": [1]})
    assert ids(store) == [[40, 50], [7]]


@pytest.mark.parametrize(
    "convert", [np.asarray, lambda edges: edges.numpy().astype(np.uint8), lambda edges: edges.int()]
)
def test_edges_may_be_arrays_or_tensors_of_any_integer_type(convert):
    store = GraphStore.from_data(make_graph(2, [(1, 0)]))
    store.update(convert(pairs((0, 1))), convert(pairs((1, 0))))
    assert incoming(store) == [[], [0]]


def test_edge_attributes_keep_their_rows_and_are_seldom_copied():
    data = random_graph()
    store = GraphStore.from_data(data)
    copies = set()
    for i in range(20):
        store.update(pairs((i, 0)), edge_attrs=one_row(i))
        copies.add(store.edge_attrs["edge_attr"].data_ptr())
    assert torch.equal(store.edge_attrs["edge_attr"][:4000], data.edge_attr)
    assert store.edge_attrs["edge_attr"][4000:, 0].tolist() == list(range(20))
    assert len(copies) == 1


def test_a_hub_loses_and_wins_edges():
    store = GraphStore.from_data(make_graph(2000, [(i % 1000, 5) for i in range(3000)] + [(1, 6)]))
    removed = torch.arange(1, 1000, 2)
    store.update(pairs(*[(i, 5) for i in range(1000, 1500)]), torch.stack([removed.flip(0), torch.full((500,), 5)]))
    assert incoming(store)[5] == 3 * list(range(0, 1000, 2)) + list(range(1000, 1500))
    assert incoming(store)[6] == [1]


# What stays as it is


def test_nothing_to_do_is_a_version_too():
    store = GraphStore.from_data(make_graph(3, [(1, 0), (2, 1)]))
    before = store.topology
    store.update(pairs(), pairs(), {"y": ([], [])})
    assert store.version == 1
    assert store.topology[:3] == before[:3]
    assert store.edge_id is None
    assert store.changes(0).columns.tolist() == []
    assert store.changes(0).rows == {}


def test_new_rows_leave_the_edges_alone():
    store = GraphStore.from_data(make_graph(3, [(1, 0), (2, 1)]))
    before = store.topology
    store.update(features={"x": ([2, 0], torch.ones(2, 3))})
    assert store.topology[:3] == before[:3]
    assert store.node_attrs["x"][:, 0].tolist() == [1, 1, 1]
    assert store.changes(0).rows["x"].tolist() == [0, 2]


def test_a_sample_is_the_same_if_its_frontier_did_not_change():
    store = GraphStore.from_data(random_graph())
    before, edge_id = sample(store, range(10)), store.edge_id.clone()
    frontier = before.node[: len(before.colptr) - 1]
    others = np.setdiff1d(np.arange(400), frontier)
    gone = np.array([(incoming(store)[node][0], node) for node in others if incoming(store)[node]]).T
    store.update(np.stack([others, others]), gone, edge_attrs={"edge_attr": torch.zeros(len(others), 2)})
    after = sample(store, range(10))
    assert_same_block(before, after)
    assert not np.array_equal(before.position, after.position)
    assert edge_id[before.position].tolist() == store.edge_id[after.position].tolist()


def test_those_who_still_read_the_old_version_see_it_whole():
    store = GraphStore.from_data(random_graph())
    held, copy = store.topology, [tensor.clone() for tensor in store.topology[:3]]
    attribute = store.edge_attrs["edge_attr"]
    attributes = attribute.clone()
    for _ in range(2):
        store.update(pairs((1, 2)), pairs(first_edge(store)), edge_attrs=one_row(1))
    assert all(torch.equal(now, then) for now, then in zip(held[:3], copy, strict=True))
    assert torch.equal(attribute, attributes)


def change_everything(store: GraphStore) -> None:
    nodes = torch.arange(0, 400, 3)
    features = {name: (nodes, torch.ones_like(tensor[nodes])) for name, tensor in store.node_attrs.items()}
    gone = pairs(first_edge(store))
    for _ in range(2):
        store.update(pairs((3, 4), (3, 4)), gone, features, {"edge_attr": torch.ones(2, 2)})
        gone = pairs((3, 4))


def test_the_tensors_of_the_user_are_not_written_to():
    data = random_graph()
    data.edge_index = data.edge_index[:, data.edge_index[1].argsort()].contiguous()
    before = data.clone()
    change_everything(GraphStore.from_data(data))
    for name, value in before.to_dict().items():
        assert torch.equal(data[name], value), name


def test_an_attribute_is_copied_once():
    store = GraphStore.from_data(random_graph())
    places = []
    for i in range(3):
        store.update(features={"x": ([i], torch.zeros(1, 8))})
        places.append(store.node_attrs["x"].data_ptr())
    assert len(set(places)) == 1


def test_an_attribute_that_was_replaced_is_copied_again():
    store = GraphStore.from_data(random_graph())
    store.update(pairs((0, 0)), features={"x": ([0], torch.zeros(1, 8))}, edge_attrs=one_row(0))
    x, edge_attr = torch.ones(400, 8), torch.ones(4001, 2)
    store.node_attrs["x"], store.edge_attrs["edge_attr"] = x, edge_attr
    store.update(pairs((0, 0)), features={"x": ([0], torch.zeros(1, 8))}, edge_attrs=one_row(0))
    assert bool((x == 1).all())
    assert store.node_attrs["x"].sum() == 399 * 8
    assert torch.equal(store.edge_attrs["edge_attr"][:4001], edge_attr)


def test_files_are_not_written_to_and_features_not_copied(tmp_path):
    GraphStore.from_data(random_graph()).save(tmp_path / "graph")
    before = {file.name: file.read_bytes() for file in (tmp_path / "graph").iterdir()}
    store, other = GraphStore.open(tmp_path / "graph"), GraphStore.open(tmp_path / "graph")
    places = {name: tensor.data_ptr() for name, tensor in store.node_attrs.items()}
    change_everything(store)
    assert {file.name: file.read_bytes() for file in (tmp_path / "graph").iterdir()} == before
    assert {name: tensor.data_ptr() for name, tensor in store.node_attrs.items()} == places
    assert_same(other, GraphStore.open(tmp_path / "graph"))


def test_ranks_that_mapped_one_graph_change_it_alike(tmp_path):
    GraphStore.from_data(random_graph()).save(tmp_path / "graph")
    one, other = GraphStore.open(tmp_path / "graph"), GraphStore.open(tmp_path / "graph")
    change_everything(one)
    change_everything(other)
    assert_same(one, other)


# Rows


@pytest.mark.parametrize("dtype", [*DTYPES.split(), "uint16"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0,)])
def test_rows_of_every_dtype(dtype, shape):
    dtype = getattr(torch, dtype)
    data = make_graph(4, [(0, 1)])
    data.q = torch.zeros(4, *shape).to(dtype)
    store = GraphStore.from_data(data)
    rows = torch.ones(2, *shape).to(dtype)
    store.update(features={"q": (torch.tensor([3, 1]), rows)})
    expected = torch.zeros(4, *shape)
    expected[[3, 1]] = 1
    assert store.node_attrs["q"].dtype == dtype
    assert torch.equal(store.node_attrs["q"].to(torch.complex64), expected.to(torch.complex64))
    assert not data.q.to(torch.complex64).any()


def test_rows_are_cast_where_no_kind_is_lost():
    store = GraphStore.from_data(random_graph())
    store.update(
        features={"x": ([3], np.full((1, 8), 2)), "y": ([3], np.array([1], np.int8)), "train_mask": ([3], [True])}
    )
    assert store.node_attrs["x"][3].tolist() == [2.0] * 8
    assert (store.node_attrs["x"].dtype, store.node_attrs["y"].dtype) == (torch.float32, torch.int64)
    assert int(store.node_attrs["y"][3]) == 1
    assert bool(store.node_attrs["train_mask"][3])


def test_rows_may_be_taken_from_the_graph_itself():
    data = random_graph()
    data.z = -data.x
    store = GraphStore.from_data(data)
    for _ in range(2):  # the second time, the attributes are written in place
        x, z = store.node_attrs["x"], store.node_attrs["z"]
        expected = {"x": torch.cat([x[:1], z[:4], x[5:]]), "z": torch.cat([x[1:5], z[4:]])}
        store.update(features={"x": (torch.arange(1, 5), z[:4]), "z": (torch.arange(4), x[1:5])})
        assert torch.equal(store.node_attrs["x"], expected["x"])
        assert torch.equal(store.node_attrs["z"], expected["z"])


# What is refused


def small_store() -> GraphStore:
    """Five nodes; y, a mask and edge attributes."""
    data = with_edge_attr(5, [(0, 1), (2, 3)])
    data.train_mask = torch.zeros(5, dtype=torch.bool)
    return GraphStore.from_data(data)


def nodes(name, ids, rows):
    return {"features": {name: (ids, rows)}}


def added(*edges, **rows):
    return {"edges_added": pairs(*edges), "edge_attrs": rows}


REFUSED = {
    "source too large": (
        added((0, 1), (5, 3), edge_attr=[0, 0]),
        r"edges_added\[:, 1\] = \(5, 3\) is outside of the 5 nodes \(0 to 4\): fix the edge, or build the graph anew",
    ),
    "destination negative": (added((0, -1)), r"edges_added\[:, 0\] = \(0, -1\) is outside of the 5 nodes"),
    "removed out of range": ({"edges_removed": pairs((0, 5))}, r"edges_removed\[:, 0\] = \(0, 5\) is outside"),
    "edges transposed": (
        {"edges_added": np.zeros((5, 2), np.int64)},
        r"edges_added has shape \(5, 2\): it must be \(2, edges\)",
    ),
    "edges are floats": ({"edges_added": torch.zeros(2, 5)}, "edges_added has dtype float32: give integers"),
    "edges are a mask": ({"edges_removed": torch.ones(2, 2).bool()}, "edges_removed has dtype bool: give integers"),
    "no such edge": (
        {"edges_removed": pairs((0, 1), (3, 3))},
        r"edges_removed holds \(3, 3\), but there is no edge from node 3 to node 3: leave the pair out",
    ),
    "only the other way round": (
        {"edges_removed": pairs((1, 0))},
        r"edges_removed holds \(1, 0\), but there is no edge",
    ),
    "no rows for new edges": (added((0, 1)), "edge_attrs lacks 'edge_attr': give its rows for the 1 new edges"),
    "rows for too few edges": (
        added((0, 1), (1, 2), edge_attr=[0]),
        r"edge_attrs\['edge_attr'\] has shape \(1,\): it must be \(2,\)",
    ),
    "rows without edges": (added(edge_attr=[0]), r"edge_attrs\['edge_attr'\] has shape \(1,\): it must be \(0,\)"),
    "unknown edge attribute": (
        added((0, 1), edge_attr=[0], w=[0]),
        r"edge_attrs holds 'w', which is no edge attribute: give some of \['edge_attr'\]",
    ),
    "edge rows are complex": (
        added((0, 1), edge_attr=[1j]),
        r"edge_attrs\['edge_attr'\] has dtype torch.complex128 where the attribute has torch.float64: convert it",
    ),
    "unknown attribute": (
        nodes("z", [0], [0]),
        r"features holds 'z', which is no node attribute: give some of \['x', 'y', 'train_mask'\]",
    ),
    "not a pair": ({"features": {"y": torch.ones(2, 1)}}, r"features\['y'\] is not a pair: give \(node ids, rows\)"),
    "node too large": (
        nodes("y", [3, 5], [0, 0]),
        r"features\['y'\]\[0\] holds node 5: ids go from 0 to 4, build the graph anew",
    ),
    "node negative": (nodes("y", [-1], [0]), r"features\['y'\]\[0\] holds node -1: ids go from 0 to 4"),
    "node twice": (nodes("y", [4, 3, 4], [0, 0, 0]), r"features\['y'\]\[0\] holds node 4 more than once: give one row"),
    "a mask for ids": (nodes("y", [True] * 5, [0] * 5), r"features\['y'\]\[0\] has dtype bool: give integers"),
    "ids of two dimensions": (nodes("y", [[3]], [0]), r"features\['y'\]\[0\] has shape \(1, 1\): give a list of node"),
    "rows too short": (nodes("x", [3, 4], [[0] * 3]), r"features\['x'\]\[1\] has shape \(1, 3\): it must be \(2, 3\)"),
    "rows too narrow": (nodes("x", [3], [[0]]), r"features\['x'\]\[1\] has shape \(1, 1\): it must be \(1, 3\)"),
    "floats for labels": (
        nodes("y", [3], [0.5]),
        r"features\['y'\]\[1\] has dtype torch.float64 where the attribute has torch.int64: convert it",
    ),
    "numbers for a mask": (nodes("train_mask", [3], [1]), "dtype torch.int64 where the attribute has torch.bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_update_that_is_refused_changes_nothing(name):
    arguments, message = REFUSED[name]
    store = small_store()
    fine = {"x": ([0], torch.zeros(1, 3)), "train_mask": ([1], [True])}
    store.update(pairs((2, 4)), None, fine, {"edge_attr": [2]})
    before, topology, tensors = pickle.loads(pickle.dumps(store)), store.topology, list(store.node_attrs.values())
    arguments = {**arguments, "features": {**fine, **arguments.get("features", {})}}  # some that are fine come first
    with pytest.raises((ValueError, TypeError), match=message):
        store.update(**arguments)
    assert_same(store, before)
    assert store.topology is topology
    assert all(now is then for now, then in zip(store.node_attrs.values(), tensors, strict=True))
    assert store.changes(0).columns.tolist() == [4]
    store.update(pairs((2, 4)), edge_attrs={"edge_attr": [3]})
    assert ids(store)[4] == [2, 3]  # no id was lost


def test_integers_that_do_not_fit_are_refused():
    data = make_graph(2, [])
    data.q = torch.zeros(2, dtype=torch.int8)
    store = GraphStore.from_data(data)
    with pytest.raises(
        ValueError, match=r"features\['q'\]\[1\] holds 300, which is no torch.int8: build the graph anew"
    ):
        store.update(features={"q": ([0, 1], [3, 300])})
    assert store.node_attrs["q"].tolist() == [0, 0]


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        (GraphStore(int32(0, 2), int32(0, 0), int32(0, 2**31 - 1)), "the largest edge id would be 2147483648"),
        (GraphStore(int32(0, 2**31 - 1), int32(0).expand(2**31 - 1)), "the number of edges would be 2147483648"),
    ],
)
def test_ids_that_no_longer_fit_are_refused(store, message):
    with pytest.raises(ValueError, match=f"{message}, too large for torch.int32: build the graph anew"):
        store.update(pairs((0, 0)))
    assert store.version == 0


def test_edge_attributes_of_another_length_are_refused():
    store = GraphStore.from_data(random_graph())
    store.update(pairs((0, 0)), edge_attrs=one_row(0))
    store.edge_attrs["edge_attr"] = torch.zeros(4000, 2)
    with pytest.raises(ValueError, match="'edge_attr' has 4000 rows for edge ids 0 to 4000: give it all rows"):
        store.update(pairs((0, 0)), edge_attrs=one_row(0))


@pytest.mark.parametrize("since", [-1, 2])
def test_versions_that_do_not_exist_are_refused(since):
    store = GraphStore.from_data(random_graph())
    store.update()
    with pytest.raises(ValueError, match=f"since={since}: give a version from 0 to 1, the present one"):
        store.changes(since)


# Files and other processes


@pytest.fixture
def updated(tmp_path) -> GraphStore:
    """Opened from a folder, and changed since."""
    data = random_graph()
    data.brain = torch.randn(400, 3).bfloat16()
    GraphStore.from_data(data).save(tmp_path / "graph")
    store = GraphStore.open(tmp_path / "graph")
    store.update(
        pairs((1, 2), (3, 2)),
        pairs(first_edge(store)),
        {"x": ([5], torch.ones(1, 8)), "brain": ([5], torch.ones(1, 3))},
        {"edge_attr": torch.ones(2, 2)},
    )
    return store


def test_an_updated_graph_is_saved_and_opened(updated, tmp_path):
    updated.save(tmp_path / "next")
    opened = GraphStore.open(tmp_path / "next")
    assert_same(opened, updated)
    assert len(opened.edge_attrs["edge_attr"]) == 4002 > opened.num_edges
    assert opened.version == 0
    assert opened.changes(0).columns.tolist() == []
    for store in (opened, updated):
        store.update(pairs((7, 7)), edge_attrs=one_row(0))
    assert_same(opened, updated)
    assert int(opened.edge_id.max()) == 4002


def test_a_graph_without_edges_left_is_saved_and_opened(tmp_path):
    store = GraphStore.from_data(with_edge_attr(2, [(0, 1)]))
    store.update(edges_removed=pairs((0, 1)))
    store.save(tmp_path / "graph")
    assert_same(GraphStore.open(tmp_path / "graph"), store)


def test_an_opened_graph_that_was_updated_is_pickled_by_value(updated, tmp_path):
    pickled = pickle.dumps(updated)
    shutil.rmtree(tmp_path / "graph")
    copy = pickle.loads(pickled)
    assert_same(copy, updated)
    assert copy.version == 1
    assert copy.changes(0).columns.tolist() == updated.changes(0).columns.tolist()
    assert [copy.node_file(name) for name in copy.node_attrs] == [None] * len(copy.node_attrs)


def test_a_process_that_shares_its_memory_is_not_written_to(updated):
    updated.update(pairs((7, 7)), features={"y": ([0], [3])}, edge_attrs=one_row(0))
    child = ForkingPickler.loads(ForkingPickler.dumps(updated))  # as torch.multiprocessing.spawn does
    before = pickle.loads(pickle.dumps(updated))
    child.update(pairs((8, 8)), features={"x": ([6], torch.ones(1, 8)), "y": ([1], [3])}, edge_attrs=one_row(1))
    updated.update(pairs((9, 9)), edge_attrs=one_row(2))
    for name, tensor in before.node_attrs.items():
        assert torch.equal(updated.node_attrs[name], tensor), name
    assert [int(store.edge_attrs["edge_attr"][-1, 0]) for store in (child, updated)] == [1, 2]


def read_row(file, offset, row, tensor):
    """A row of a file, as bytes."""
    row_bytes = tensor[:1].nbytes
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.pread(descriptor, row_bytes, offset + row * row_bytes)
    finally:
        os.close(descriptor)


def test_files_of_attributes_that_did_not_change(updated):
    assert [name for name in updated.node_attrs if updated.node_file(name) is None] == ["x", "brain"]
    for name in ("y", "train_mask"):
        tensor = updated.node_attrs[name]
        file, offset = updated.node_file(name)
        for row in (0, 17, 399):
            assert read_row(file, offset, row, tensor) == tensor[row : row + 1].numpy().tobytes()


def test_files_of_a_graph_that_was_opened_or_built(tmp_path):
    np.save(tmp_path / "edges.npy", np.zeros((2, 3), np.int64))
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((6, 4), np.float32))
    np.save(tmp_path / "empty.npy", np.zeros((6, 0), np.float32))
    attributes = {"x": tmp_path / "x.npy", "empty": tmp_path / "empty.npy"}
    store = build_store(tmp_path / "built", [tmp_path / "edges.npy"], node_attrs=attributes)
    store.save(tmp_path / "saved")
    for opened in (store, GraphStore.open(tmp_path / "saved")):
        x = opened.node_attrs["x"]
        assert read_row(*opened.node_file("x"), 5, x) == x[5:].numpy().tobytes()
        assert opened.node_file("empty") is None  # there is no row
        opened.update(pairs((1, 1)))
        assert opened.node_file("x") is not None
        opened.node_attrs["x"] = torch.zeros(6, 4)
        assert opened.node_file("x") is None


def test_graphs_in_memory_have_no_files():
    store = GraphStore.from_data(random_graph())
    assert store.node_file("x") is None
    with pytest.raises(ValueError, match=r"name='z' is no node attribute: give one of \['x', 'y'"):
        store.node_file("z")
