import numpy as np
import pytest
import torch
from graphs import make_graph, module, random_graph
from torch_geometric.data import Data, HeteroData

from lightning_mqgnn import EpochPlan


def changed(**attributes):
    data = random_graph()
    for name, value in attributes.items():
        if value is None:
            del data[name]
        else:
            data[name] = value
    return data


def with_edge(source, destination, dtype=torch.int64):
    edge_index = random_graph().edge_index
    edge_index[:, 7] = torch.tensor([source, destination])
    return changed(edge_index=edge_index.to(dtype))


def with_nan():
    x = random_graph().x
    x[11, 2] = float("nan")
    return changed(x=x)


def train(data=None, **arguments):
    return module(data, **arguments).train_dataloader()


def random_graph_again():
    return random_graph()


MASK = torch.zeros(400, dtype=torch.bool)

TABLE = {
    # the graph
    "edge too large": (
        lambda: module(with_edge(0, 400)),
        r"edge_index\[:, 7\] = \(0, 400\) is outside of the 400 nodes",
    ),
    "edge negative": (
        lambda: module(with_edge(-1, 3)),
        r"edge_index\[:, 7\] = \(-1, 3\) .*fix the edge, or set data.num",
    ),
    "edges are floats": (
        lambda: module(with_edge(0, 0, torch.float32)),
        r"dtype torch.float32: convert it with .*long",
    ),
    "edges transposed": (
        lambda: module(changed(edge_index=torch.zeros(5, 2).long())),
        r"shape \(5, 2\): it must be \(2,",
    ),
    "no edges given": (lambda: module(Data(x=torch.ones(3, 1))), "edge_index is missing: give a"),
    "edges in a list": (lambda: module(changed(edge_index=[[0], [1]])), "edge_index is a list: give a"),
    "heterogeneous": (lambda: module(HeteroData()), r"HeteroData: only homogeneous .*to_homogeneous\(\) makes one"),
    "not a graph": (lambda: module({"x": 1}), r"data is a dict: give a torch_geometric\.data\.Data"),
    "mask too short": (lambda: module(changed(train_mask=MASK[:399])), r"train_mask has shape \(399,\) .*must be 400"),
    "features too short": (
        lambda: module(changed(x=torch.ones(399, 2), num_nodes=400)),
        r"data.x has shape \(399, 2\) in a graph of 400 nodes",
    ),
    "labels too short": (lambda: module(changed(y=torch.ones(3))), r"data.y has shape \(3,\) in a graph of 400 nodes"),
    "edge features too short": (
        lambda: module(changed(edge_attr=torch.ones(3999, 2))),
        r"data\.edge_attr has shape \(3999, 2\).*4000",
    ),
    "as many edge features as nodes": (
        lambda: module(changed(edge_attr=torch.ones(400, 2))),
        r"data\.edge_attr has shape \(400, 2\).*4000",
    ),
    "features in a NumPy array": (lambda: module(changed(x=np.ones((400, 3)))), r"data\.x is a ndarray: give a tensor"),
    "features in a list": (lambda: module(changed(x=[[1.0]] * 400)), r"data\.x is a list: give a tensor"),
    "features sparse": (lambda: module(changed(x=torch.ones(400, 3).to_sparse())), r"data\.x .*sparse.*to_dense\(\)"),
    "labels a number": (lambda: module(changed(y=torch.tensor(1))), r"data\.y has shape \(\) in a graph of 400 nodes"),
    "infinity": (
        lambda: module(changed(x=torch.full((400, 1), torch.inf)), check_finite=True),
        r"data\.x holds NaN or infinity, first in row 0",
    ),
    "NaN at an edge": (
        lambda: module(changed(edge_attr=torch.full((4000,), torch.nan)), check_finite=True),
        r"data\.edge_attr holds NaN or infinity, first in row 0",
    ),
    "complex NaN": (
        lambda: module(changed(z=torch.full((400,), complex("nan"))), check_finite=True),
        r"data\.z holds NaN or infinity, first in row 0",
    ),
    "NaN": (lambda: module(with_nan(), check_finite=True), "data.x holds NaN or infinity, first in row 11: replace it"),
    "empty split": (lambda: module(changed(train_mask=MASK)), "train_mask selects no node: give at least one seed"),
    "empty validation": (lambda: module(changed(val_mask=MASK)), "val_mask selects no node"),
    "no such path": (lambda: module("nowhere"), r"path='nowhere' is no graph store: it holds no graph\.json"),
    "a function without a folder": (
        lambda: module(random_graph_again),
        "data is a function: give store_path=..., the f",
    ),
    "heterogeneous, to be saved": (lambda: module(HeteroData(), store_path="x"), "HeteroData: only homogeneous graphs"),
    # the seed nodes
    "no training nodes": (lambda: train(changed(train_mask=None)), "no train nodes: give input_train_nodes=..., or a"),
    "seed too large": (
        lambda: module(input_val_nodes=[1, 400]),
        "input_val_nodes holds node 400: ids go from 0 to 399",
    ),
    "seed negative": (lambda: module(input_test_nodes=[-1]), "input_test_nodes holds node -1"),
    "seed twice": (lambda: module(input_train_nodes=[3, 4, 3]), r"more than once: pass input_train_nodes\.unique\(\)"),
    "seeds are floats": (lambda: module(input_train_nodes=[0.5]), "input_train_nodes has dtype torch.float32: give a"),
    "seeds are a matrix": (
        lambda: module(input_train_nodes=[[1], [2]]),
        r"has shape \(2, 1\): give a mask \(400,\) or",
    ),
    "masks of ten splits": (
        lambda: module(changed(train_mask=torch.ones(400, 10).bool())),
        r"train_mask has shape \(400, 10\): give a mask \(400,\) or",
    ),
    "mask of bytes": (  # taken for node ids, it would select nodes 0 and 1
        lambda: module(changed(train_mask=random_graph().train_mask.to(torch.uint8))),
        r"train_mask has dtype torch\.uint8.*bool",
    ),
    "mask of integers": (
        lambda: module(changed(train_mask=random_graph().train_mask.long())),
        r"train_mask has dtype torch\.int64.*bool",
    ),
    "mask of floats": (
        lambda: module(changed(train_mask=random_graph().train_mask.float())),
        r"train_mask has dtype torch\.float32: give a boolean mask",
    ),
    "seeds are words": (lambda: module(input_train_nodes="train"), "input_train_nodes='train': give a boolean mask or"),
    "seed mask too long": (lambda: module(input_train_nodes=torch.ones(401).bool()), "has 401 entries for 400 nodes"),
    "more ranks than seeds": (
        lambda: EpochPlan(3, 1, 4),
        r"3 seed nodes \(train\) can't be shared by 4 ranks.*fewer dev",
    ),
    "plan of no seeds": (lambda: EpochPlan(0, 1), r"0 seed nodes \(train\) can't be shared by 1 ranks"),
    "plan without ranks": (lambda: EpochPlan(10, 2, world_size=0), "world_size=0: give 1 or more"),
    "plan of negative ranks": (lambda: EpochPlan(10, 2, world_size=-1), "world_size=-1: give 1 or more"),
    "plan of empty batches": (lambda: EpochPlan(10, 0), "batch_size=0: give 1 or more"),
    "plan of half seeds": (lambda: EpochPlan(10, 2.5), r"batch_size=2\.5: give an integer"),
    "plan of a rank that is not there": (lambda: EpochPlan(10, 2, 2).batches(0, 5), "rank=5.*0 to 1"),
    # the loaders
    "no hops": (lambda: module(num_neighbors=[]), "num_neighbors=.. has no hop: give one fan-out per layer"),
    "fan-out below -1": (lambda: module(num_neighbors=[5, -2]), r"num_neighbors=\[5, -2\] holds -2: give -1 \(all"),
    "fan-out a number": (lambda: module(num_neighbors=5), "num_neighbors=5 is not a list with one fan-out per hop"),
    "fan-out words": (lambda: module(num_neighbors="15,10"), "num_neighbors='15,10' is not a list with one fan-out"),
    "fan-out a bool": (lambda: module(num_neighbors=[True]), r"num_neighbors=\[True\] holds True: give integers, -1"),
    "fan-out huge": (lambda: module(num_neighbors=[2**70]), f"holds {2**70}: give"),
    "fan-out a float": (lambda: module(num_neighbors=[2.5]), "holds 2.5: give integers"),
    "fan-out per edge type": (lambda: module(num_neighbors={"a": [1]}), "is not a list with one fan-out per hop"),
    "batch size 0": (lambda: module(batch_size=0), "batch_size=0: give 1 or more"),
    "batch size a bool": (lambda: module(batch_size=True), "batch_size=True: give an integer"),
    "seed below 0": (lambda: module(seed=-1), "seed=-1: give 0 or more"),
    "batch size a float": (lambda: module(batch_size=32.0), "batch_size=32.0: give an integer"),
    "no threads": (lambda: module(sampling_threads=-1), "sampling_threads=-1: give 0 or more"),
    "threads a word": (lambda: module(prepare_threads="two"), "prepare_threads='two': give an integer"),
    "queue of nothing": (lambda: module(queue_size=0), "queue_size=0: give 1 or more"),
    "seed of a word": (lambda: module(seed="x"), "seed='x': give an integer"),
    "drop_last of all": (
        lambda: train(batch_size=500, drop_last=True),
        "leaves no batch of the 240 seed .*Use a smaller",
    ),
    "transform not callable": (lambda: module(transform=3), "transform=3 can't be called: give a function"),
    "unknown eval argument": (
        lambda: module(eval_loader_kwargs={"shuffle": 1}),
        "holds 'shuffle': give only num_neighb",
    ),
    "eval arguments in a list": (lambda: module(eval_loader_kwargs=[1]), r"eval_loader_kwargs=\[1\].*give a dict"),
    "eval batch size 0": (lambda: module(eval_loader_kwargs={"batch_size": 0}), "batch_size=0: give 1 or more"),
    "bad eval fan-out": (lambda: module(eval_loader_kwargs={"num_neighbors": [-3]}), "holds -3"),
    "num_workers": (lambda: module(num_workers=4), "num_workers=4 is no argument here: .*see sampling_threads"),
    "shuffle": (lambda: module(shuffle=True), "shuffle=True is no argument here: training is shuffled anew each epoch"),
    "disjoint": (lambda: module(disjoint=True), "disjoint=True is no argument here: it is not supported"),
    "a typing error": (lambda: module(batchsize=3), "batchsize=3 is no argument here: remove it"),
}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_is_refused_with_field_value_and_remedy(case):
    attempt, message = TABLE[case]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        attempt()


def test_a_graph_with_nan_is_accepted_when_nobody_asked_to_look():
    module(with_nan())


def test_the_smallest_graph_is_accepted():
    (batch,) = module(make_graph(1, [(0, 0)]), input_train_nodes=[0]).train_dataloader()
    assert batch.edge_index.tolist() == [[0], [0]]
