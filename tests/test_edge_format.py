"""`edge_format="csc"`: the same batches with their edges as a sparse matrix, and the same results."""

import lightning as L
import pytest
import torch
from graphs import make_graph, random_graph
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, GraphConv, SAGEConv
from torch_geometric.utils import to_edge_index
from torch_geometric.utils.sparse import set_sparse_value

from lightning_mqgnn import MQGNNDataModule, transfer, trim_adj


def weighted_graph(**arguments) -> Data:
    data = random_graph(**arguments)
    data.edge_weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    return data


def odd_graph() -> Data:
    """Nodes 6 to 9 are isolated, 0 has a self-loop and two edges from 1, and 5 has no edge into it."""
    data = make_graph(10, [(1, 0), (0, 0), (1, 0), (5, 0), (2, 1), (3, 1), (3, 1), (4, 2), (4, 4), (0, 5), (5, 3)])
    data.edge_weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    data.train_mask = data.val_mask = data.test_mask = torch.ones(10, dtype=torch.bool)
    return data


def edgeless_graph() -> Data:
    data = make_graph(4, [])
    data.train_mask = torch.ones(4, dtype=torch.bool)
    return data


def module(data: Data, edge_format: str = "csc", **arguments) -> MQGNNDataModule:
    return MQGNNDataModule(data, **{"num_neighbors": [4, 3], "batch_size": 32, "edge_format": edge_format, **arguments})


def in_both_formats(data: Data, **arguments) -> list[tuple[Data, Data]]:
    loaders = (module(data, edge_format, **arguments).train_dataloader() for edge_format in ("coo", "csc"))
    return list(zip(*loaders, strict=True))


def parts(adj_t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return adj_t.crow_indices(), adj_t.col_indices(), adj_t.values()


def assert_same_edges(coo: Data, csc: Data) -> None:
    assert csc.adj_t.layout == torch.sparse_csr
    assert csc.adj_t.shape == (len(coo.n_id), len(coo.n_id))
    assert [part.dtype for part in parts(csc.adj_t)] == [torch.int64, torch.int64, torch.float32]
    (target, source), values = to_edge_index(csc.adj_t)
    assert torch.equal(torch.stack([source, target]), coo.edge_index)
    assert torch.equal(values, coo.edge_weight if "edge_weight" in coo else torch.ones(coo.num_edges))


GRAPHS = {
    "weighted": weighted_graph,
    "unweighted": random_graph,
    "odd": odd_graph,
    "no edges": edgeless_graph,
}


# What is in a batch


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("batch_size", [1, 7, 400])
def test_a_batch_is_that_of_coo_with_another_form_of_the_edges(graph, batch_size):
    for coo, csc in in_both_formats(GRAPHS[graph](), batch_size=batch_size):
        assert_same_edges(coo, csc)
        assert "edge_index" not in csc
        assert "edge_weight" not in csc
        assert (csc.num_nodes, csc.num_edges) == (len(coo.n_id), len(coo.e_id))
        for name, value in coo.to_dict().items():
            if name not in ("edge_index", "edge_weight"):
                assert torch.equal(value, csc[name]) if isinstance(value, torch.Tensor) else value == csc[name], name


def test_coo_is_the_default():
    (batch, *_) = MQGNNDataModule(random_graph(), num_neighbors=[2], batch_size=300).train_dataloader()
    assert "adj_t" not in batch
    assert batch.edge_index.shape == (2, batch.num_edges)


def test_draws_with_replacement_are_entries_of_their_own():
    data = make_graph(3, [(1, 0), (2, 0)])
    (batch,) = module(data, input_train_nodes=torch.tensor([0]), num_neighbors=[5], replace=True).train_dataloader()
    assert batch.adj_t.crow_indices()[1] == 5
    assert torch.sparse.mm(batch.adj_t, torch.ones(batch.num_nodes, 1))[0] == 5


def test_kept_batches_keep_their_matrix():
    for data in (random_graph(), weighted_graph()):
        kept = list(module(data, queue_size=1).train_dataloader())
        for index, batch in enumerate(kept):
            assert_same_edges(module(data, "coo").replay(0, index), batch)


def test_a_kept_view_of_the_matrix_keeps_its_memory():
    loader = module(weighted_graph(), queue_size=1).train_dataloader()
    kept = [trim_adj(1, batch.num_sampled_nodes, batch.num_sampled_edges, batch.adj_t) for batch in loader]
    for _ in loader:
        pass
    for index, adj_t in enumerate(kept):
        batch = module(weighted_graph()).replay(0, index)
        again = trim_adj(1, batch.num_sampled_nodes, batch.num_sampled_edges, batch.adj_t)
        assert all(torch.equal(one, other) for one, other in zip(parts(adj_t), parts(again), strict=True))


def test_memory_of_dropped_matrices_is_used_again():
    datamodule = module(random_graph(), sampling_threads=0, prepare_threads=0)
    for _ in range(10):
        for _ in datamodule.train_dataloader():
            pass
    pool = datamodule.train_dataloader()._stages[1].work._pool
    names = 11  # x, y, three masks, edge_attr, n_id, e_id and the matrix's three parts
    assert pool.allocations <= 3 * names  # 80 batches; at times a larger one


@pytest.mark.parametrize("sampling_threads", [0, 3])
@pytest.mark.parametrize("prepare_threads", [0, 3])
def test_batches_do_not_depend_on_threads(sampling_threads, prepare_threads):
    threads = {"sampling_threads": sampling_threads, "prepare_threads": prepare_threads, "queue_size": 1}
    datamodule = module(weighted_graph(), batch_size=8, **threads)
    for epoch in range(2):
        for index, batch in enumerate(datamodule.train_dataloader()):
            assert_same_edges(module(weighted_graph(), "coo", batch_size=8).replay(epoch, index), batch)


# All loaders


def test_every_split_has_the_format_and_evaluation_may_have_another():
    data = weighted_graph()
    alike, mixed = module(data), module(data, eval_loader_kwargs={"edge_format": "coo"})
    for split in ("val", "test", "predict"):
        for csc, coo in zip(
            getattr(alike, f"{split}_dataloader")(), getattr(mixed, f"{split}_dataloader")(), strict=True
        ):
            assert_same_edges(coo, csc)
    assert "adj_t" in next(iter(mixed.train_dataloader()))
    reverse = module(data, "coo", eval_loader_kwargs={"edge_format": "csc"})
    assert_same_edges(next(iter(mixed.val_dataloader())), next(iter(reverse.val_dataloader())))
    for datamodule in (alike, mixed, reverse):
        datamodule.teardown()


def test_a_pass_may_be_resumed_in_the_other_format():
    before = module(weighted_graph(), "coo")
    iterator = iter(before.train_dataloader())
    for _ in range(3):
        next(iterator)
    resumed = module(weighted_graph())
    resumed.load_state_dict(before.state_dict())
    for coo, csc in zip(iterator, resumed.train_dataloader(), strict=True):
        assert_same_edges(coo, csc)


class LitGCN(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList([GCNConv(8, 16, normalize=False), GCNConv(16, 4, normalize=False)])
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(("edge_index" in batch, batch.x.dtype))
        edges = (batch.edge_index, batch.edge_weight) if "edge_index" in batch else (batch.adj_t,)
        logits = self.convs[1](self.convs[0](batch.x, *edges).relu(), *edges)
        return torch.nn.functional.cross_entropy(logits[: batch.batch_size], batch.y[: batch.batch_size])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=batch.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(edge_format: str, precision: str) -> LitGCN:
    lit = LitGCN()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(lit, datamodule=module(weighted_graph(), edge_format))
    return lit


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_training_under_a_trainer_gives_the_same_model(precision, dtype):
    coo, csc = fit("coo", precision), fit("csc", precision)
    assert set(coo.seen) == {(True, dtype)}
    assert set(csc.seen) == {(False, dtype)}
    for one, other in zip(coo.parameters(), csc.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# The same results


def gin(inputs: int, outputs: int) -> GINConv:
    return GINConv(torch.nn.Linear(inputs, outputs))


def gcn(inputs: int, outputs: int) -> GCNConv:
    return GCNConv(inputs, outputs, normalize=False)


def gat(inputs: int, outputs: int) -> GATConv:
    return GATConv(inputs, outputs, add_self_loops=False)


def run(make, batch: Data, trimmed: bool = False) -> list[torch.Tensor]:
    """Logits of the seed nodes and the gradients by features and parameters, of a model with two layers."""
    torch.manual_seed(0)
    convs = [make(batch.x.shape[1], 16), make(16, 4)]
    h = x = batch.x.clone().requires_grad_()
    for i, conv in enumerate(convs):
        if "edge_index" in batch:
            weighted = isinstance(conv, GCNConv | GraphConv)
            h = conv(h, batch.edge_index, batch.edge_weight) if weighted else conv(h, batch.edge_index)
        elif trimmed:
            adj_t = trim_adj(i, batch.num_sampled_nodes, batch.num_sampled_edges, batch.adj_t)
            h = conv(h if isinstance(conv, GCNConv) else (h, h[: adj_t.size(0)]), adj_t)
        else:
            h = conv(h, batch.adj_t)
        h = h.relu() if i == 0 else h
    logits = h[: batch.batch_size]
    torch.nn.functional.cross_entropy(logits, batch.y[: batch.batch_size]).backward()
    return [logits, x.grad, *(parameter.grad for conv in convs for parameter in conv.parameters())]


@pytest.mark.parametrize("make", [SAGEConv, gcn, gin, GraphConv, gat], ids=lambda make: make.__name__)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("trimmed", [False, True])
def test_outputs_and_gradients_are_those_of_coo(make, graph, batch_size, trimmed):
    data = GRAPHS[graph]()
    if make in (SAGEConv, gin) and "edge_weight" in data:  # these would use the weights only as values of a matrix
        del data.edge_weight
    for coo, csc in in_both_formats(data, batch_size=batch_size)[:4]:
        for one, other in zip(run(make, coo), run(make, csc, trimmed), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_layers_without_weights_take_a_matrix_of_ones():
    """As docs/datamodule.md says: SAGEConv weighs its messages by the values of a matrix."""
    for coo, csc in in_both_formats(weighted_graph()):
        weighted = run(SAGEConv, csc)
        csc.adj_t = set_sparse_value(csc.adj_t, torch.ones_like(csc.adj_t.values()))
        for one, other in zip(run(SAGEConv, coo), run(SAGEConv, csc), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(weighted[0], run(SAGEConv, csc)[0])


def test_trimming_copies_nothing_and_leaves_what_the_layer_needs():
    for batch in module(weighted_graph(), num_neighbors=[4, 3, 2]).train_dataloader():
        nodes, edges = batch.num_sampled_nodes, batch.num_sampled_edges
        trimmed = [trim_adj(layer, nodes, edges, batch.adj_t) for layer in range(3)]
        assert [tuple(adj_t.shape) for adj_t in trimmed] == [(sum(nodes[:k]), sum(nodes[: k + 1])) for k in (3, 2, 1)]
        for layer, adj_t in enumerate(trimmed):
            assert all(
                part.data_ptr() == whole.data_ptr()
                for part, whole in zip(parts(adj_t), parts(batch.adj_t), strict=True)
            )
            source, values = adj_t.col_indices(), adj_t.values()
            assert adj_t.crow_indices()[-1] == len(source) == len(values) == sum(edges[: 3 - layer])
            assert int(source.max()) < adj_t.size(1)


# Bad input


def test_another_format_is_refused():
    remedy = "give 'coo' for batch.edge_index, or 'csc' for batch.adj_t"
    with pytest.raises(ValueError, match=f"edge_format='csr': {remedy}"):
        module(random_graph(), "csr")
    with pytest.raises(ValueError, match=f"edge_format=None: {remedy}"):
        module(random_graph(), eval_loader_kwargs={"edge_format": None})


@pytest.mark.parametrize("arguments", [{}, {"edge_format": "coo", "eval_loader_kwargs": {"edge_format": "csc"}}])
def test_weights_that_cannot_be_the_values_of_a_matrix_are_refused(arguments):
    data = random_graph(num_edges=50)
    data.edge_weight = torch.ones(50, 1)
    with pytest.raises(ValueError, match=r"edge_weight has shape \(50, 1\).*give a number per edge, \(50,\)"):
        module(data, **arguments)
    data.edge_weight = torch.ones(50, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"edge_weight has dtype torch\.int64.*data\.edge_weight\.float\(\)"):
        module(data, **arguments)
    module(data, "coo")


def test_trimming_for_a_layer_without_a_hop_or_twice_is_refused():
    batch = next(iter(module(random_graph()).train_dataloader()))
    sampled = batch.num_sampled_nodes, batch.num_sampled_edges
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer={layer}: the batch has 2 hops, so give 0 to 1"):
            trim_adj(layer, *sampled, batch.adj_t)
    with pytest.raises(ValueError, match=r"adj_t has shape .*: give the batch's own, \d+ nodes in torch.sparse_csr"):
        trim_adj(1, *sampled, trim_adj(0, *sampled, batch.adj_t))
    with pytest.raises(ValueError, match=r"layout torch.strided: give the batch's own"):
        trim_adj(1, *sampled, batch.adj_t.to_dense())


# The copy to a device, as far as it can be seen without one


def test_handing_over_tells_the_allocator_about_the_parts_of_the_matrix(monkeypatch):
    batch = next(iter(module(weighted_graph()).train_dataloader()))
    recorded = []

    def record_stream(tensor, stream):
        recorded.append((tensor.layout, tensor.data_ptr(), stream))

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    transfer.hand_over(batch)
    monkeypatch.undo()
    assert {layout for layout, _, _ in recorded} == {torch.strided}
    assert {stream for _, _, stream in recorded} == {"stream of cpu"}
    of_the_matrix = {part.data_ptr() for part in parts(batch.adj_t)}
    assert of_the_matrix <= {pointer for _, pointer, _ in recorded}
    dense = [value for value in batch.to_dict().values() if isinstance(value, torch.Tensor) and not value.is_sparse_csr]
    assert len(recorded) == len(dense) + 3


def test_a_batch_is_copied_as_a_whole():
    batch = next(iter(module(weighted_graph()).train_dataloader()))
    copy = batch.to("meta")
    assert copy.adj_t.layout == torch.sparse_csr
    assert transfer.device_of(copy).type == copy.x.device.type == "meta"
