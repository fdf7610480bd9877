"""Gathering feature rows: batches small enough for the caches, and larger ones, which are written past them."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore, MQGNNDataModule
from lightning_mqgnn.sampling.kernels import gather_rows


@pytest.mark.parametrize("mebibytes", [0.1, 4.1, 9])
@pytest.mark.parametrize(
    ("dtype", "width"), [("float32", 100), ("float32", 33), ("float16", 7), ("uint8", 5), ("float64", 1)]
)
def test_batches_hold_the_rows_of_their_nodes(dtype, width, mebibytes):
    num_nodes = int(mebibytes * 2**20 / (np.dtype(dtype).itemsize * width)) + 5
    x = torch.randint(0, 256, (num_nodes, width)).to(getattr(torch, dtype))
    edge_index = torch.randint(num_nodes, (2, num_nodes))
    store = GraphStore.from_data(Data(x=x, edge_index=edge_index))
    datamodule = MQGNNDataModule(
        store, input_train_nodes=torch.arange(num_nodes), num_neighbors=[2], batch_size=num_nodes
    )
    datamodule.setup("fit")
    (batch,) = datamodule.train_dataloader()
    assert len(batch.n_id) == num_nodes
    assert torch.equal(batch.x, x[batch.n_id])


@pytest.mark.parametrize("offset", [0, 8, 56])
def test_memory_that_does_not_begin_at_a_cache_line_is_filled_too(offset):
    source = np.random.default_rng(0).integers(2**63, size=(5000, 100), dtype=np.uint64)
    index = np.random.default_rng(1).integers(5000, size=7003).astype(np.int32)
    memory = np.empty(index.size * 800 + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    out = memory[begin : begin + index.size * 800].view(np.uint64).reshape(-1, 100)
    gather_rows(source, index, out)
    assert np.array_equal(out, source[index])
