"""Prediction at all nodes in pieces: equal to the plain call, with few messages at a time, by one rank or several."""

import contextlib
import copy
import inspect
import io

import lightning as L
import pytest
import torch
import torch.distributed as dist
from graphs import make_graph, random_graph
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, MessagePassing, SAGEConv
from tqdm import tqdm

from lightning_mqgnn import GraphStore, predict_all

IN, HIDDEN, OUT = 8, 6, 4
DEGREES = torch.tensor([5, 9, 7, 4, 2, 1])
REVERSED = {"flow": "target_to_source"}


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


class OldStyle(MessagePassing):
    """Takes node features in `update` beside messages, a node's number there too, and an edge's number in both."""

    def __init__(self):
        super().__init__(aggr="mean")

    def forward(self, x, edge_index):
        scale = torch.arange(len(x), dtype=x.dtype)
        return self.propagate(edge_index, x=x, scale=scale, weight=edge_index.sum(0).to(x.dtype) % 3)

    def message(self, x_j, weight):
        return x_j * weight[:, None]

    def update(self, out, x, scale):
        return out + x * scale[:, None]


class Decomposed(nn.Module):
    """Feature decomposition, and nodes along the second of three dimensions."""

    def __init__(self):
        super().__init__()
        self.conv = GCNConv(IN, OUT, decomposed_layers=2)

    def forward(self, x, edge_index):
        return self.conv(torch.stack([x, x.flip(1)]), edge_index).sum(0)


class Bipartite(nn.Module):
    """Nodes to fewer groups and back, by pairs of features and a `size`."""

    def __init__(self):
        super().__init__()
        self.there, self.back = SAGEConv((IN, IN), HIDDEN), GATConv((HIDDEN, IN), OUT, heads=2, add_self_loops=False)

    def forward(self, x, edge_index):
        groups = (len(x) + 2) // 3
        source, target = edge_index
        grouped = self.there((x, x[:groups]), torch.stack([source, target // 3]), size=(len(x), groups))
        return self.back((grouped, x), torch.stack([source // 3, target]))


class ToGroups(MessagePassing):
    """Edges against the flow, to fewer targets than there are sources."""

    def __init__(self):
        super().__init__(**REVERSED)

    def forward(self, x, edge_index):
        source, target = edge_index
        groups = (len(x) + 2) // 3
        grouped = self.propagate(torch.stack([target // 3, source]), x=x, size=(groups, len(x)))
        return grouped.repeat_interleave(3, 0)[: len(x)]


class Stack(nn.Module):
    def __init__(self, first, norm, second):
        super().__init__()
        self.first, self.norm, self.second = first, norm, second

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(IN, HIDDEN), GCNConv(HIDDEN, OUT)

    def forward(self, x, edge_index, edge_weight=None):
        return self.second(self.first(x, edge_index).relu(), edge_index, edge_weight)


MODELS = {
    "SAGEConv": lambda: SAGEConv(IN, OUT),
    "SAGEConv with max": lambda: SAGEConv(IN, OUT, aggr="max", project=True),
    "SAGEConv with several aggregations": lambda: SAGEConv(IN, OUT, aggr=["mean", "std", "softmax"]),
    "GCNConv": lambda: GCNConv(IN, OUT),
    "GCNConv, cached": lambda: GCNConv(IN, OUT, cached=True),
    "GCNConv, reversed": lambda: GCNConv(IN, OUT, **REVERSED),
    "GATConv": lambda: GATConv(IN, OUT, heads=2, edge_dim=2),
    "GATConv, reversed": lambda: GATConv(IN, OUT, heads=2, **REVERSED),
    "GATv2Conv": lambda: GATv2Conv(IN, OUT, heads=2, edge_dim=2),
    "GATv2Conv, reversed": lambda: GATv2Conv(IN, OUT, edge_dim=2, **REVERSED),
    "GINConv": lambda: GINConv(mlp(IN, OUT), train_eps=True),
    "GINEConv": lambda: gnn.GINEConv(mlp(IN, OUT), edge_dim=2),
    "GraphConv": lambda: gnn.GraphConv(IN, OUT),
    "ChebConv": lambda: gnn.ChebConv(IN, OUT, K=4),
    "TAGConv": lambda: gnn.TAGConv(IN, OUT),
    "SGConv": lambda: gnn.SGConv(IN, OUT, K=3),
    "APPNP": lambda: gnn.APPNP(K=5, alpha=0.1),
    "TransformerConv": lambda: gnn.TransformerConv(IN, OUT, heads=2, edge_dim=2, beta=True),
    "TransformerConv, reversed": lambda: gnn.TransformerConv(IN, OUT, edge_dim=2, **REVERSED),
    "PNAConv": lambda: gnn.PNAConv(
        IN, OUT, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], DEGREES, edge_dim=2
    ),
    "ARMAConv": lambda: gnn.ARMAConv(IN, OUT, num_stacks=2, num_layers=2),
    "ResGatedGraphConv": lambda: gnn.ResGatedGraphConv(IN, OUT, edge_dim=2),
    "EGConv": lambda: gnn.EGConv(IN, 8, aggregators=["symnorm", "std"]),
    "NNConv": lambda: gnn.NNConv(IN, OUT, mlp(2, IN * OUT)),
    "HypergraphConv": lambda: gnn.HypergraphConv(IN, OUT),
    "DirGNNConv": lambda: gnn.DirGNNConv(SAGEConv(IN, OUT)),
    "GPSConv": lambda: gnn.GPSConv(IN, GCNConv(IN, IN), heads=2),
    "GraphSAGE": lambda: gnn.GraphSAGE(IN, HIDDEN, 3, OUT, jk="cat", norm="batch"),
    "GCN": lambda: gnn.GCN(IN, HIDDEN, 3, OUT, jk="lstm", norm="graph_norm"),
    "GAT": lambda: gnn.GAT(IN, HIDDEN, 2, OUT, jk="max", norm="layer", heads=2, edge_dim=2),
    "GIN": lambda: gnn.GIN(IN, HIDDEN, 3, OUT, norm="pair_norm"),
    "Sequential": lambda: gnn.Sequential(
        "x, edge_index, edge_attr",
        [
            (GATv2Conv(IN, HIDDEN, edge_dim=2), "x, edge_index, edge_attr -> x"),
            nn.ReLU(),
            (gnn.GraphConv(HIDDEN, OUT), "x, edge_index -> x"),
        ],
    ),
    "a stack": lambda: Stack(gnn.ChebConv(IN, HIDDEN, K=2), nn.BatchNorm1d(HIDDEN), gnn.SGConv(HIDDEN, OUT, K=2)),
    "a LightningModule": Lit,
    "a pair of node sets": Bipartite,
    "a smaller node set, reversed": ToGroups,
    "update with node features": OldStyle,
    "decomposed features": Decomposed,
}


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():  # a bias of zero would hide that it is missing
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5)
    return model


def with_attributes(data):
    generator = torch.Generator().manual_seed(1)
    data.edge_attr = torch.randn(data.num_edges, 2, generator=generator)
    data.edge_weight = torch.rand(data.num_edges, generator=generator)
    return data


def odd_graph():
    """60 nodes: self-loops, parallel edges, isolated nodes at both ends and between, a hub, edges in any order."""
    data = random_graph(60, 300, IN)
    edge_index = data.edge_index.clamp(4, 50)
    edge_index[:, edge_index[1] % 7 == 0] += 1
    edge_index[1, :80] = 17
    edge_index[:, 80:90] = edge_index[:, 90:100]
    edge_index[0, 100:110] = edge_index[1, 100:110]
    data.edge_index = edge_index[:, torch.randperm(300, generator=torch.Generator().manual_seed(2))]
    return with_attributes(data)


def plain(model, data):
    """The model's own result, by a copy in evaluation mode."""
    model = copy.deepcopy(model).eval()
    takes = (
        model.signature.param_dict if isinstance(model, gnn.Sequential) else inspect.signature(model.forward).parameters
    )
    edge_attrs = {name: data[name] for name in ("edge_attr", "edge_weight") if name in data and name in takes}
    with torch.no_grad():
        return model(data.x, data.edge_index, **edge_attrs)


def assert_close(one, other):
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def message_sizes(model):
    """A list to which the sizes of all messages and edge updates of the model are added."""
    sizes = []
    for conv in model.modules():
        if isinstance(conv, MessagePassing):
            conv.register_message_forward_hook(lambda conv, inputs, out: sizes.append(out.size(conv.node_dim)))
            conv.register_edge_update_forward_hook(lambda conv, inputs, out: sizes.append(len(out)))
    return sizes


@pytest.mark.parametrize("edge_chunk", [1, 7, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_plain_call(name, edge_chunk):
    model, data = make(name), odd_graph()
    expected = plain(model, data)
    assert_close(predict_all(model, data, edge_chunk=edge_chunk, progress=False), expected)
    assert_close(predict_all(model, GraphStore.from_data(data), edge_chunk=edge_chunk, progress=False), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_without_edges_is_computed_too(name):
    model, data = make(name), with_attributes(make_graph(9, [], IN))
    assert_close(predict_all(model, data, edge_chunk=3, progress=False), plain(model, data))


@given(
    num_nodes=st.integers(1, 12),
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=40),
    edge_chunk=st.integers(1, 12),
    name=st.sampled_from(["GCNConv", "GATv2Conv", "PNAConv", "ChebConv", "GAT", "a pair of node sets", "a stack"]),
)
def test_any_graph_gives_what_the_plain_call_gives(num_nodes, pairs, edge_chunk, name):
    edges = [(source % num_nodes, target % num_nodes) for source, target in pairs]
    model, data = make(name), with_attributes(make_graph(num_nodes, edges, IN))
    assert_close(predict_all(model, data, edge_chunk=edge_chunk, progress=False), plain(model, data))


def test_an_updated_store_is_predicted_as_it_is_now():
    data = odd_graph()
    store = GraphStore.from_data(data)
    added, gone = torch.tensor([[3, 58], [59, 59]]), data.edge_index[:, 5]
    rows = {"edge_attr": torch.ones(2, 2), "edge_weight": torch.full((2,), 0.5)}
    store.update(added, gone[:, None], edge_attrs=rows, features={"x": ([3], torch.ones(1, IN))})
    keep = (data.edge_index != gone[:, None]).any(0)
    x = data.x.clone()
    x[3] = 1
    now = {name: torch.cat([data[name][keep], rows[name]]) for name in rows}
    now = Data(x=x, edge_index=torch.cat([data.edge_index[:, keep], added], 1), **now)
    for name in ("GATConv", "GCN"):
        model = make(name)
        assert_close(predict_all(model, store, edge_chunk=9, progress=False), plain(model, now))


def test_features_of_another_dtype_stay_so():
    data = odd_graph()
    data.x = data.x.double()
    model = make("SAGEConv").double()
    assert_close(predict_all(model, data, edge_chunk=9, progress=False), plain(model, data))


@pytest.mark.parametrize("name", ["GraphSAGE", "GCN", "GATv2Conv", "PNAConv", "APPNP", "GATConv, reversed"])
def test_only_the_messages_of_one_piece_exist(name):
    model, data = make(name), with_attributes(random_graph(60, 300, IN))
    sizes = message_sizes(model)
    predict_all(model, data, edge_chunk=30, progress=False)
    assert 15 < max(sizes) <= 30


def test_a_node_with_more_edges_than_a_piece_is_a_piece():
    model, data = make("SAGEConv"), odd_graph()
    sizes = message_sizes(model)
    predict_all(model, data, edge_chunk=10, progress=False)
    large = data.edge_index[1].bincount()
    assert sorted(size for size in sizes if size > 10) == sorted(large[large > 10].tolist())
    assert sum(sizes) == data.num_edges


def loops(data):
    """How many messages GCNConv adds to those of the edges: one per node, in place of its self-loops."""
    source, target = data.edge_index
    return data.num_nodes - int((source == target).sum())


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_model_is_afterwards_as_before(error):
    model, data = Lit(), odd_graph()
    model.second.decomposed_layers = 2
    model.second.eval()  # frozen
    before, sizes = modes(model), message_sizes(model)
    training = []

    def watch(conv, inputs):
        training.append(any(modes(model).values()))
        if error is not None:
            raise error

    handle = model.second.register_message_forward_pre_hook(watch)
    if error is None:
        assert not predict_all(model, data, edge_chunk=50, progress=False).requires_grad
    else:
        with pytest.raises(error):
            predict_all(model, data, edge_chunk=50, progress=False)
    handle.remove()
    assert training
    assert not any(training)
    assert modes(model) == before
    assert model.second.decomposed_layers == 2
    sizes.clear()
    model(data.x, data.edge_index).sum().backward()
    assert sizes == [300, 300 + loops(data), 300 + loops(data)]  # in two halves of the features
    assert model.first.lin_l.weight.grad is not None


def test_a_convolution_that_caches_its_edges_can_be_trained_afterwards():
    model, data = make("GCNConv, cached"), odd_graph()
    predict_all(model, data, progress=False)
    model(data.x, data.edge_index).sum().backward()
    assert model.lin.weight.grad is not None


def test_the_bar_counts_nodes_and_names_the_convolution(capsys):
    model, data = Lit(), odd_graph()
    predict_all(model, data)
    shown = capsys.readouterr().err
    assert "second" in shown
    assert "120/120" in shown
    predict_all(model, data, progress=False)
    assert capsys.readouterr().err == ""


def test_the_bar_is_closed_when_the_model_fails():
    class Failing(Lit):
        def forward(self, x, edge_index):
            super().forward(x, edge_index)
            raise ZeroDivisionError

    before = len(tqdm._instances)
    with pytest.raises(ZeroDivisionError):
        predict_all(Failing(), odd_graph())
    assert len(tqdm._instances) == before


class Changed(nn.Module):
    """A convolution whose output is changed by a function."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = SAGEConv(IN, OUT), function

    def forward(self, x, edge_index):
        return self.function(self.conv(x, edge_index))


class TwiceTheSame(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x, x_j):
        return x_j - x.mean(0)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(IN, OUT)

    def forward(self, x, edge_index):
        ones = torch.ones(edge_index.size(1))
        return self.conv(x, torch.sparse_coo_tensor(edge_index.flip(0), ones, (len(x), len(x))).coalesce())


class PairOfResults(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)[0]

    def update(self, out):
        return out, out


class Pooled(PairOfResults):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def update(self, out):
        return torch.cat([out, out])


def explained():
    model = Lit()
    model.second.explain = True
    return model


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Changed(lambda out: (out, out)), TypeError, "model returned a tuple"),
        (
            lambda: Changed(lambda out: out.mean(0)),
            ValueError,
            r"shape \(4,\) for a graph of 60 nodes.*without pooling",
        ),
        (explained, ValueError, "'second' has explain=True: set it to False"),
        (TwiceTheSame, ValueError, "'TwiceTheSame' takes 'x' for each edge and as a whole.*x_i and x_j"),
        (Sparse, TypeError, "'conv' was given a Tensor of layout torch.sparse_coo.*don't convert the edges"),
        (PairOfResults, TypeError, "'PairOfResults' returned a tuple"),
        (Pooled, ValueError, "'Pooled' returned shape .* return a row for each"),
    ],
)
def test_what_cannot_be_computed_in_pieces_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        predict_all(make(), odd_graph(), progress=False)


def test_bad_input_is_refused():
    model, data = Lit(), odd_graph()
    with pytest.raises(ValueError, match=r"edge_chunk=0: give .* 1 or more"):
        predict_all(model, data, edge_chunk=0)
    with pytest.raises(TypeError, match="HeteroData"):
        predict_all(model, HeteroData())
    with pytest.raises(ValueError, match=r"data\.x is missing"):
        predict_all(model, Data(edge_index=data.edge_index, num_nodes=60))


IN_RANKS = ["GraphSAGE", "GCNConv", "GATv2Conv", "APPNP", "PNAConv", "decomposed features", "a pair of node sets"]


def small_graph():
    """Fewer nodes than ranks, and all edges into one."""
    return with_attributes(make_graph(2, [(0, 1), (1, 1), (0, 1)], IN))


def predict_in_ranks(rank):
    torch.set_num_threads(1)
    messages, results = {}, {}
    for name in IN_RANKS:
        model = make(name)
        messages[name] = message_sizes(model)
        results[name] = predict_all(model, odd_graph(), edge_chunk=20, progress=False)
    small = {name: predict_all(make(name), small_graph(), progress=False) for name in IN_RANKS}
    half = make("GCN").bfloat16()
    data = odd_graph()
    data.x = data.x.bfloat16()
    data.edge_weight = data.edge_weight.bfloat16()
    some = dist.new_group([0, 1])
    if rank < 2:
        grouped = predict_all(make("GCN"), odd_graph(), progress=False, group=some)
    else:
        with pytest.raises(ValueError, match="group does not contain this rank"):
            predict_all(make("GCN"), odd_graph(), progress=False, group=some)
        grouped = None
    dtype = predict_all(half, data, progress=False).dtype
    return {"results": results, "messages": messages, "small": small, "grouped": grouped, "dtype": dtype}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_messages_and_get_all_rows(world_size, tmp_path):
    ranks = run_ranks(world_size, predict_in_ranks, tmp_path)
    for name in IN_RANKS:
        model, data, few = make(name), odd_graph(), small_graph()
        whole = plain(model, data)
        sizes = message_sizes(model)
        expected = predict_all(model, data, edge_chunk=20, progress=False)
        assert_close(expected, whole)
        for outcome in ranks:
            assert_close(outcome["results"][name], expected)
            assert torch.equal(outcome["results"][name], ranks[0]["results"][name])
            assert_close(outcome["small"][name], plain(make(name), few))
            assert sum(outcome["messages"][name]) < 0.8 * sum(sizes)
        assert sum(sum(outcome["messages"][name]) for outcome in ranks) == sum(sizes)
    for outcome in ranks[:2]:
        assert_close(outcome["grouped"], plain(make("GCN"), odd_graph()))
    assert [outcome["dtype"] for outcome in ranks] == [torch.bfloat16] * world_size


def what_is_shown(rank):
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        predict_all(Lit(), odd_graph())
    return shown.getvalue()


def test_only_the_first_rank_shows_a_bar(tmp_path):
    first, second = run_ranks(2, what_is_shown, tmp_path)
    assert "120/120" in first
    assert second == ""
