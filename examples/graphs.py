"""Graphs for the examples, by name or by path."""

from pathlib import Path

import numpy as np
import torch
from torch_geometric import datasets
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from lightning_mqgnn import GraphStore, synthetic_graph

_SPLITS = ("train", "val", "test")


def load_graph(name: str, root: str = "data") -> Data | GraphStore:
    """Return a graph with `x`, `y` and masks of a split.

    Args:
        name: `synthetic`; the path of an `.npz` file (see `load_npz`) or of a folder written by `GraphStore.save`; an
            OGB name (`ogbn-arxiv`, needs the extra `ogb`); or a PyG dataset as `Class` or `Class/name` (`Reddit`,
            `Planetoid/Cora`). The last two are downloaded.
        root: Where downloads go.

    Raises:
        ValueError: There is no such graph.
    """
    if name == "synthetic":
        return synthetic_graph()
    if Path(name).is_dir():
        return GraphStore.open(name)
    if Path(name).is_file():
        return load_npz(Path(name))
    if name.startswith("ogbn-"):
        return _load_ogb(name, root)
    kind, _, of = name.partition("/")
    if hasattr(datasets, kind):
        dataset = getattr(datasets, kind)(f"{root}/{name}", *([of] if of else []))
        return _first_split(dataset[0])
    raise ValueError(f"dataset {name!r} is no file, no folder, no OGB name and no dataset of PyG")


def load_npz(path: Path) -> Data:
    """Read `edge_index` (2, edges), `y`, a mask per split, and `x` or its CSR form `x_shape`/`x_indptr`/`x_indices`."""
    with np.load(path) as file:
        if "x" in file:
            x = file["x"].astype(np.float32)
        else:
            x = np.zeros(file["x_shape"], np.float32)
            x[np.repeat(np.arange(len(x)), np.diff(file["x_indptr"])), file["x_indices"]] = file["x_data"]
        data = Data(
            x=torch.from_numpy(x),
            y=torch.from_numpy(file["y"].astype(np.int64)),
            edge_index=torch.from_numpy(file["edge_index"].astype(np.int64)),
        )
        for split in _SPLITS:
            data[f"{split}_mask"] = torch.from_numpy(file[f"{split}_mask"])
    return data


def _load_ogb(name: str, root: str) -> Data:
    from ogb.nodeproppred import PygNodePropPredDataset

    dataset = PygNodePropPredDataset(name, root)
    data = dataset[0]
    data.y = data.y.flatten()
    for split, index in zip(_SPLITS, dataset.get_idx_split().values(), strict=True):
        data[f"{split}_mask"] = index_to_mask(index, data.num_nodes)
    return data


def _first_split(data: Data) -> Data:
    """Some datasets have several splits, as the columns of the masks."""
    for split in _SPLITS:
        mask = data[f"{split}_mask"]
        data[f"{split}_mask"] = mask if mask.dim() == 1 else mask[:, 0]
    return data
