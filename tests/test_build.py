import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from graphs import random_graph
from hypothesis import given
from hypothesis import strategies as st
from test_graph import assert_same

from lightning_mqgnn import GraphStore, MQGNNDataModule
from lightning_mqgnn.graph import build, build_store

COMMAND = [sys.executable, "-m", "lightning_mqgnn.graph", "build"]


@pytest.fixture
def data():
    return random_graph(num_nodes=300, num_edges=5000)


@pytest.fixture
def files(data, tmp_path):
    """The graph as files, its edges in two pieces."""
    np.save(tmp_path / "edges-0.npy", data.edge_index[:, :3000].numpy())
    np.save(tmp_path / "edges-1.npy", data.edge_index[:, 3000:].numpy().astype(np.int32))
    for name in ("x", "y", "edge_attr", "train_mask", "val_mask", "test_mask"):
        np.save(tmp_path / f"{name}.npy", data[name].numpy())
    return tmp_path


def arguments(files):
    nodes = {name: files / f"{name}.npy" for name in ("x", "y", "train_mask", "val_mask", "test_mask")}
    return {
        "edges": [files / "edges-0.npy", files / "edges-1.npy"],
        "node_attrs": nodes,
        "edge_attrs": {"edge_attr": files / "edge_attr.npy"},
    }


def in_the_order_of(store, expected):
    """Attributes come in the order in which they were given; compare them in that of the other store."""
    store.node_attrs = {name: store.node_attrs[name] for name in expected.node_attrs}
    return store


@pytest.mark.parametrize("memory_bytes", [1, 1000, 2**30])
def test_a_built_graph_is_the_one_made_in_memory(files, data, memory_bytes, monkeypatch):
    monkeypatch.setattr(build, "_CHUNK", 700)
    store = build_store(files / "graph", **arguments(files), memory_bytes=memory_bytes)
    expected = GraphStore.from_data(data)
    assert_same(in_the_order_of(store, expected), expected)


@given(
    st.integers(1, 10).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.tuples(*[st.integers(0, n - 1)] * 2)))),
    st.integers(1, 200),
)
def test_windows_of_any_size_give_the_same_graph(tmp_path_factory, graph, memory_bytes):
    num_nodes, edges = graph
    folder = tmp_path_factory.mktemp("graph")
    edge_index = np.array(edges, np.int64).reshape(-1, 2).T
    np.save(folder / "edges.npy", edge_index)
    store = build_store(folder / "graph", [folder / "edges.npy"], num_nodes=num_nodes, memory_bytes=memory_bytes)
    incoming = [store.row[store.colptr[v] : store.colptr[v + 1]].tolist() for v in range(num_nodes)]
    assert incoming == [[source for source, into in edges if into == v] for v in range(num_nodes)]


def test_edges_that_come_sorted_need_no_edge_ids(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[2, 1], [0, 0]]))
    np.save(tmp_path / "b.npy", np.array([[1, 0], [0, 2]]))
    store = build_store(tmp_path / "graph", [tmp_path / "a.npy", tmp_path / "b.npy"], num_nodes=3)
    assert store.edge_id is None
    assert (store.colptr.tolist(), store.row.tolist()) == ([0, 3, 3, 4], [2, 1, 1, 0])


@pytest.mark.parametrize(
    "text", ["# source destination\n0 1\n2\t1\n\n1 0 # loop\n", "0,1\n2,1\n1,0", "0, 1\n2, 1\n1, 0\n"]
)
def test_edges_may_be_text(tmp_path, text):
    (tmp_path / "edges.txt").write_text(text)
    store = build_store(tmp_path / "graph", [tmp_path / "edges.txt"], num_nodes=3)
    assert (store.colptr.tolist(), store.row.tolist()) == ([0, 1, 3, 3], [1, 0, 2])
    assert sorted(file.name for file in (tmp_path / "graph").iterdir()) == [
        "colptr.npy",
        "edge_id.npy",
        "graph.json",
        "row.npy",
    ]


def test_attributes_may_be_stored_in_another_dtype_and_train(files):
    build_store(files / "graph", **arguments(files), dtypes={"x": "float16"})
    batch = next(iter(MQGNNDataModule(files / "graph", num_neighbors=[3], batch_size=10).train_dataloader()))
    assert batch.x.dtype == torch.float16


def test_the_command_builds_and_says_what(files, data):
    nodes = [f"{name}={files}/{name}.npy" for name in ("x", "y", "train_mask", "val_mask", "test_mask")]
    edges = [f"{files}/edges-0.npy", f"{files}/edges-1.npy"]
    command = [*COMMAND, f"{files}/graph", "--edges", *edges, "--node", *nodes]
    command += ["--edge", f"edge_attr={files}/edge_attr.npy", "--dtype", "x=float16", "--memory", "16KiB"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "num_nodes=300, num_edges=5000" in done.stdout
    assert "placing edges: 100%" in done.stderr
    expected = GraphStore.from_data(data)
    expected.node_attrs["x"] = expected.node_attrs["x"].half()
    assert_same(in_the_order_of(GraphStore.open(files / "graph"), expected), expected)


BAD_EDGES = {
    "out of range": (np.array([[0, 1], [0, 300]]), r"edge 1 = \(1, 300\) is outside of the 300 nodes"),
    "negative": (np.array([[0, -1], [0, 3]]), r"edge 1 = \(-1, 3\) is outside of the 300 nodes"),
    "floats": (np.zeros((2, 3)), r"float64 \(2, 3\): edges are \(2, edges\) of an integer dtype"),
    "transposed": (np.zeros((3, 2), np.int64), r"int64 \(3, 2\): edges are \(2, edges\)"),
}


@pytest.mark.parametrize("case", BAD_EDGES)
def test_bad_edges_are_refused_and_leave_nothing(tmp_path, case):
    edges, message = BAD_EDGES[case]
    np.save(tmp_path / "edges.npy", edges)
    with pytest.raises(ValueError, match=message):
        build_store(tmp_path / "graph", [tmp_path / "edges.npy"], num_nodes=300)
    assert [file.name for file in tmp_path.iterdir()] == ["edges.npy"]


def test_bad_text_and_lengths_are_refused(files):
    (files / "edges.txt").write_text("0 1\n2 x\n")
    with pytest.raises(ValueError, match=r"edges\.txt' can't be read as edges .*: give two ids per line"):
        build_store(files / "graph", [files / "edges.txt"], num_nodes=3)
    (files / "edges.txt").write_text("0 1\n2\n")
    with pytest.raises(ValueError, match="holds an odd number of ids"):
        build_store(files / "graph", [files / "edges.txt"], num_nodes=3)
    with pytest.raises(ValueError, match="attribute 'x' has 300 rows for 299 nodes"):
        build_store(files / "graph", **arguments(files), num_nodes=299)
    with pytest.raises(ValueError, match="num_nodes=None without node_attrs: give the number of nodes"):
        build_store(files / "graph", [files / "edges-0.npy"])
    done = subprocess.run([*COMMAND, "x", "--edges", "nowhere.npy"], capture_output=True, text=True, cwd=files)
    assert (done.returncode, "error:" in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_a_full_disk_leaves_nothing_and_the_build_can_be_run_again(files, data, monkeypatch):
    write = build._Column.write

    def write_until_full(self, rows):
        if rows.dtype == np.float32:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(build._Column, "write", write_until_full)
        with pytest.raises(OSError, match="No space left"):
            build_store(files / "graph", **arguments(files))
    assert not [file for file in files.iterdir() if file.name.startswith("graph")]
    build_store(files / "graph", **arguments(files))


KILLED = """
import os, signal, sys
from lightning_mqgnn.graph import build
write = build._Column.write
def write_and_die(self, rows):
    write(self, rows)
    if self._file.name.endswith("row.npy"):
        os.kill(os.getpid(), signal.SIGKILL)
build._Column.write = write_and_die
build.build_store(sys.argv[1], [sys.argv[2]], num_nodes=300)
"""


def test_a_build_that_is_killed_leaves_nothing_that_opens_and_can_be_run_again(files):
    edges = files / "edges-0.npy"
    died = subprocess.run([sys.executable, "-c", KILLED, str(files / "graph"), str(edges)], capture_output=True)
    assert died.returncode == -signal.SIGKILL
    assert os.path.exists(files / "graph.unfinished")
    for name in ("graph", "graph.unfinished"):
        with pytest.raises(FileNotFoundError, match=r"holds no graph\.json"):
            GraphStore.open(files / name)
    assert build_store(files / "graph", [edges], num_nodes=300).num_edges == 3000
    assert not os.path.exists(files / "graph.unfinished")
