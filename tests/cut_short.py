"""Cuts files of mapped graphs short while batches are made of them, in a process that this may end.

python tests/cut_short.py FOLDER within|drawing|outside
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from graphs import module, random_graph

from lightning_mqgnn import CacheBias, GraphStore, NeighborSampler

NUM_NODES = 20_000
FILES = ("colptr", "row", "edge_id", "node.x", "node.y", "edge.edge_attr")


def make_graph() -> GraphStore:
    return GraphStore.from_data(random_graph(NUM_NODES, num_edges=300_000, num_features=16))


def loader_of(store: GraphStore, **arguments):
    everywhere = {"input_train_nodes": torch.arange(NUM_NODES), "num_neighbors": [-1, 5], "batch_size": 200}
    datamodule = module(store, **everywhere, **arguments)
    datamodule.setup("fit")
    return datamodule.train_dataloader()


def cut_while_training(folder: Path) -> None:
    """Print a line for each error: the file, threads, which pass, batches before the error, and what it says."""
    graph = make_graph()
    for name in FILES:
        for threads in (0, 1):
            path = folder / f"{name}-{threads}"
            graph.save(path)
            loader = loader_of(GraphStore.open(path), sampling_threads=threads, prepare_threads=threads)
            for number in (1, 2):
                taken = 0
                try:
                    for _ in loader:
                        taken += 1
                        if (number, taken) == (1, 3):
                            os.truncate(path / f"{name}.npy", 4096)
                except OSError as error:
                    print(name, threads, number, taken, error, sep="|")
    graph.save(folder / "other")
    batches = sum(1 for _ in loader_of(GraphStore.open(folder / "other")))
    print("other", 1, 1, batches, "whole", sep="|")


def cut_before_a_draw(folder: Path) -> None:
    """Print an error for each later epoch, whose set of preferred nodes is drawn from less than there was."""
    graph = make_graph()
    for name in ("colptr", "row"):
        graph.save(folder / name)
        store = GraphStore.open(folder / name)
        sampler = NeighborSampler(store, [-1, 5], bias=CacheBias(store, NUM_NODES // 2, 4.0))
        sampler.sample(np.arange(200), key=0)
        os.truncate(folder / name / f"{name}.npy", 4096)
        for epoch in range(1, 7):
            try:
                sampler.sample(np.arange(200), key=0, epoch=epoch)
            except OSError as error:
                print(name, epoch, error, sep="|")


def cut_and_read(folder: Path) -> None:
    """Read a lost page outside of any section."""
    make_graph().save(folder / "graph")
    store = GraphStore.open(folder / "graph")
    os.truncate(folder / "graph" / "node.x.npy", 4096)
    print("read", store.node_attrs["x"].numpy().sum())


if __name__ == "__main__":
    scenarios = {"within": cut_while_training, "drawing": cut_before_a_draw, "outside": cut_and_read}
    scenarios[sys.argv[2]](Path(sys.argv[1]))
