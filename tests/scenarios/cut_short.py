"""Cuts files of mapped graphs short while batches are made of them, in a process that this may end.

python tests/scenarios/cut_short.py FOLDER within|outside
"""

import os
import sys
from pathlib import Path

import torch
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore, MQGNNDataModule

NUM_NODES, NUM_EDGES = 20_000, 300_000
FILES = ("colptr", "row", "edge_id", "node.x", "node.y", "edge.edge_attr")


def make_graph() -> GraphStore:
    return GraphStore.from_data(
        Data(
            x=torch.randn(NUM_NODES, 16),
            y=torch.arange(NUM_NODES),
            edge_index=torch.randint(NUM_NODES, (2, NUM_EDGES)),
            edge_attr=torch.randn(NUM_EDGES, 2),
        )
    )


def open_loader(graph: GraphStore, path: Path, threads: int):
    graph.save(path)
    datamodule = MQGNNDataModule(
        GraphStore.open(path),
        input_train_nodes=torch.arange(NUM_NODES),
        num_neighbors=[-1, 5],
        batch_size=200,
        sampling_threads=threads,
        prepare_threads=threads,
    )
    datamodule.setup("fit")
    return datamodule.train_dataloader()


def cut_while_training(folder: Path) -> None:
    """Print a line for each error: the file, threads, which pass, batches before the error, and what it says."""
    graph = make_graph()
    for name in FILES:
        for threads in (0, 1):
            path = folder / f"{name}-{threads}"
            loader = open_loader(graph, path, threads)
            for number in (1, 2):
                taken = 0
                try:
                    for _ in loader:
                        taken += 1
                        if (number, taken) == (1, 3):
                            os.truncate(path / f"{name}.npy", 4096)
                except OSError as error:
                    print(name, threads, number, taken, error, sep="|")
    batches = sum(1 for _ in open_loader(graph, folder / "other", 1))
    print("other", 1, 1, batches, "whole", sep="|")


def cut_and_read(folder: Path) -> None:
    """Read a lost page outside of any section."""
    make_graph().save(folder / "graph")
    store = GraphStore.open(folder / "graph")
    os.truncate(folder / "graph" / "node.x.npy", 4096)
    print("read", store.node_attrs["x"].numpy().sum())


if __name__ == "__main__":
    {"within": cut_while_training, "outside": cut_and_read}[sys.argv[2]](Path(sys.argv[1]))
