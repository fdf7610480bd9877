import errno
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs import make_graph, random_graph
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore


def incoming(store: GraphStore) -> list[list[int]]:
    return [store.row[store.colptr[v] : store.colptr[v + 1]].tolist() for v in range(store.num_nodes)]


def assert_same(one: GraphStore, other: GraphStore) -> None:
    arrays, others = dict(one._arrays()), dict(other._arrays())
    assert list(arrays) == list(others)
    for name, tensor in arrays.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))))
def test_edges_are_grouped_by_destination_in_the_order_given(graph):
    num_nodes, edges = graph  # self-loops, duplicates and isolated nodes among them
    store = GraphStore.from_data(make_graph(num_nodes, edges))
    assert incoming(store) == [[source for source, into in edges if into == v] for v in range(num_nodes)]
    destinations = [into for _, into in edges]
    assert (store.edge_id is None) == (destinations == sorted(destinations))
    places = range(len(edges)) if store.edge_id is None else store.edge_id.tolist()
    assert [edges[place][0] for place in places] == store.row.tolist()
    assert (store.num_nodes, store.num_edges) == (num_nodes, len(edges))


def test_ids_take_four_bytes_where_they_fit():
    store = GraphStore.from_data(random_graph())
    assert {store.colptr.dtype, store.row.dtype, store.edge_id.dtype} == {torch.int32}


def test_edges_that_come_sorted_need_no_edge_ids():
    assert GraphStore.from_data(make_graph(3, [(2, 0), (1, 0), (0, 2)])).edge_id is None


def test_attributes_are_told_apart_by_what_they_belong_to():
    data = random_graph()
    data.name = "random"
    data.scale = torch.tensor(2.0)
    store = GraphStore.from_data(data)
    assert list(store.node_attrs) == ["x", "y", "train_mask", "val_mask", "test_mask"]
    assert list(store.edge_attrs) == ["edge_attr"]
    assert store.graph_attrs == {"name": "random", "scale": torch.tensor(2.0)}
    assert torch.equal(store.edge_attrs["edge_attr"], data.edge_attr)  # in the order of edge_index


def test_edge_attributes_are_known_by_name_when_there_are_as_many_edges_as_nodes():
    data = make_graph(3, [(0, 1), (1, 2), (2, 0)])
    data.edge_attr = torch.ones(3, 1)
    store = GraphStore.from_data(data)
    assert list(store.node_attrs) == ["x", "y"]
    assert list(store.edge_attrs) == ["edge_attr"]


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_graphs_without_edges_are_graphs(num_nodes):
    store = GraphStore.from_data(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=num_nodes))
    assert incoming(store) == [[]] * num_nodes


@pytest.fixture
def rich_store() -> GraphStore:
    data = random_graph()
    for name, dtype in {"half": torch.float16, "brain": torch.bfloat16, "double": torch.float64}.items():
        data[name] = torch.randn(400, 3).to(dtype)
    data.small = torch.randint(0, 9, (400, 2, 2), dtype=torch.int8)
    data.num_classes = 4
    data.names = ["a", "b"]
    data.scale = torch.tensor([2.0, 3.0])
    return GraphStore.from_data(data)


def test_a_saved_graph_comes_back(rich_store, tmp_path):
    rich_store.save(tmp_path / "graph")
    opened = GraphStore.open(tmp_path / "graph")
    assert_same(rich_store, opened)
    assert opened.graph_attrs["num_classes"] == 4
    assert opened.graph_attrs["names"] == ["a", "b"]
    assert torch.equal(opened.graph_attrs["scale"], torch.tensor([2.0, 3.0]))


DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64"


@pytest.mark.parametrize("dtype", DTYPES.split())
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 0)])
def test_attributes_of_every_dtype_come_back(dtype, shape, tmp_path):
    data = make_graph(4, [(0, 1)])
    data.q = torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))
    data.scale = torch.tensor(3).to(data.q.dtype)
    GraphStore.from_data(data).save(tmp_path / "graph")
    opened = GraphStore.open(tmp_path / "graph")
    for value, expected in ((opened.node_attrs["q"], data.q), (opened.graph_attrs["scale"], data.scale)):
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape)
        assert torch.equal(value, expected)


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_saved_graphs_without_edges_come_back(num_nodes, tmp_path):
    store = GraphStore.from_data(Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=num_nodes))
    store.save(tmp_path / "graph")
    assert_same(store, GraphStore.open(tmp_path / "graph"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of mapped files from /proc")
def test_an_opened_graph_is_mapped_from_its_files(rich_store, tmp_path):
    rich_store.save(tmp_path / "graph")
    opened = GraphStore.open(tmp_path / "graph")
    mapped = Path("/proc/self/maps").read_text()
    for name, _ in opened._arrays():
        assert str((tmp_path / "graph" / f"{name}.npy").resolve()) in mapped


def test_writing_to_an_opened_graph_does_not_change_the_files(rich_store, tmp_path):
    rich_store.save(tmp_path / "graph")
    GraphStore.open(tmp_path / "graph").node_attrs["x"].zero_()
    assert_same(rich_store, GraphStore.open(tmp_path / "graph"))


def test_an_opened_graph_is_pickled_as_its_path(rich_store, tmp_path):
    rich_store.save(tmp_path / "graph")
    pickled = pickle.dumps(GraphStore.open(tmp_path / "graph"))
    assert len(pickled) < 1000
    assert_same(pickle.loads(pickled), rich_store)
    assert_same(pickle.loads(pickle.dumps(rich_store)), rich_store)


def test_an_existing_path_is_not_overwritten(rich_store, tmp_path):
    with pytest.raises(FileExistsError, match="remove it or save the graph elsewhere"):
        rich_store.save(tmp_path)


def test_attributes_that_cannot_be_saved_are_named(tmp_path):
    data = random_graph()
    data.thing = object()
    with pytest.raises(TypeError, match="'thing' of type object can't be saved: remove it"):
        GraphStore.from_data(data).save(tmp_path / "graph")
    assert not (tmp_path / "graph").exists()


def test_what_a_killed_process_left_behind_does_not_matter(rich_store, tmp_path):
    (tmp_path / "graph.unfinished").mkdir()
    (tmp_path / "graph.unfinished" / "node.old.npy").write_bytes(b"old")
    with pytest.raises(FileNotFoundError, match="is no graph store"):
        GraphStore.open(tmp_path / "graph")
    rich_store.save(tmp_path / "graph")
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]
    assert not (tmp_path / "graph" / "node.old.npy").exists()
    assert_same(rich_store, GraphStore.open(tmp_path / "graph"))


@pytest.mark.parametrize("failing_call", [1, 4, 14])  # the first, one in between, and the last
def test_a_full_disk_leaves_nothing_that_opens(failing_call, rich_store, tmp_path, monkeypatch):
    save, calls = np.save, []

    def save_until_full(*arguments):
        calls.append(1)
        if len(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(np, "save", save_until_full)
    with pytest.raises(OSError, match="No space left"):
        rich_store.save(tmp_path / "graph")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError, match=r"no graph store: it holds no graph\.json"):
        GraphStore.open(tmp_path / "graph")


def truncate(folder):
    file = folder / "node.x.npy"
    file.write_bytes(file.read_bytes()[:-100])


def empty(folder):
    (folder / "row.npy").write_bytes(b"")


def remove(folder):
    (folder / "colptr.npy").unlink()


def other_shape(folder):
    np.save(folder / "node.y.npy", np.zeros(3, np.int64))


def change_description(folder, change):
    file = folder / "graph.json"
    description = json.loads(file.read_text())
    change(description)
    file.write_text(json.dumps(description))


def other_version(folder):
    change_description(folder, lambda description: description.update(version=99))


def no_description(folder):
    (folder / "graph.json").unlink()


def half_a_description(folder):
    file = folder / "graph.json"
    file.write_text(file.read_text()[:50])


def description_without_colptr(folder):
    change_description(folder, lambda description: description["arrays"].pop("colptr"))


def header_only(folder):
    file = folder / "row.npy"
    file.write_bytes(file.read_bytes()[:20])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"node\.x\.npy' can't be read .*: save the graph again"),
        (empty, r"row\.npy' can't be read .*: save the graph again"),
        (header_only, r"row\.npy' can't be read .*: save the graph again"),
        (no_description, r"is no graph store: it holds no graph\.json"),
        (half_a_description, r"graph\.json.*[Ss]ave the graph again"),
        (description_without_colptr, r"colptr.*[Ss]ave the graph again"),
        (remove, r"colptr\.npy' is missing: the graph store is damaged, save the graph again"),
        (other_shape, r"node\.y\.npy' holds torch\.int64 \(3,\) where graph\.json says int64 \(400,\)"),
        (other_version, r"version 99; this release reads .* version 1\. Save the graph again with this release"),
    ],
)
def test_a_damaged_store_is_refused_with_the_remedy(rich_store, tmp_path, damage, message):
    rich_store.save(tmp_path / "graph")
    damage(tmp_path / "graph")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        GraphStore.open(tmp_path / "graph")
