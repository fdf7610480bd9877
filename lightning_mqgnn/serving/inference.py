"""InferencePipeline: predictions for requests that come one by one, several of them to a batch."""

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch_geometric.data import Data

from lightning_mqgnn.adjacency import check_edge_format, check_edge_weight
from lightning_mqgnn.arguments import check_int
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.pipeline import Stage
from lightning_mqgnn.prepare import Prepare
from lightning_mqgnn.sampling import SampledSubgraph
from lightning_mqgnn.sampling.neighbor import check_num_neighbors
from lightning_mqgnn.serving.hops import HopSampler
from lightning_mqgnn.serving.requests import Batch, carry
from lightning_mqgnn.serving.server import Server, ServingReport
from lightning_mqgnn.transfer import CUDATransfer, hand_over


class InferencePipeline:
    """Predicts for nodes, as requests come, by the stages that training has: sample, prepare, transfer, model.

    Requests may come from any number of threads and are answered in the order in which they came. Whenever the first
    stage is free, it takes all that wait, as far as the batch's time in the pipeline is expected to stay within
    `latency_target`: a lone request is served at once, and under load batches grow. See `ServiceTime`.

    A node's prediction is the same whatever it is batched with, but for rounding, and in every run with the same
    `seed`: its neighbours are drawn anew at each hop that reaches it, from the seed, the hop and the node alone. So a
    node that is reached in several hops stands in the batch once for each of them; else the batch is one as
    `MQGNNDataModule` yields it. Models that look at their batch as a whole, say to normalise over it, are excepted.

    Threads start with the first request. They end with `close`; when the object is dropped, once all requests are
    answered; and at the interpreter's exit, where requests that no batch was begun for are cancelled.

    Args:
        model: Called with a batch (a LightningModule's `predict_step` with it and the number of the batch) in inference
            mode, from one thread. Returns a tensor with a row for each of the batch's nodes (the seeds come first), of
            its seeds, or, as after `trim_to_layer`, of its first hops. A module is put into eval mode.
        data: A homogeneous graph, a `GraphStore`, or the path of a saved one.
        num_neighbors: Fan-out per hop, one per layer of the model; -1 takes all neighbours.
        latency_target: Seconds that a batch may spend in the pipeline; `math.inf` for the largest batches.
        max_batch_size: Seeds in a batch. Requests for more are split and joined again.
        max_pending: Seeds that may wait for their batch, of all requests together; an empty request counts as one.
        edge_format: "coo" for batches with `edge_index` or "csc" for batches with `adj_t`, see `MQGNNDataModule`.
        transform: Called with each batch, in the prepare stage's thread; what it returns goes to the model.
        device: Where the model runs, and is moved to; by default where its parameters are.
        seed: Seed of sampling.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A value is out of range, or the graph is inconsistent.
    """

    def __init__(
        self,
        model: Callable[[Data], Tensor],
        data: Data | GraphStore | str | Path,
        *,
        num_neighbors: Sequence[int],
        latency_target: float = 0.05,
        max_batch_size: int = 1024,
        max_pending: int = 4096,
        edge_format: str = "coo",
        transform: Callable[[Data], Data] | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        for name, function in (("model", model), ("transform", transform)):
            if not callable(function) and (name, function) != ("transform", None):
                raise TypeError(f"{name}={function!r} can't be called: give a function or a module that takes a batch")
        check_num_neighbors(num_neighbors)
        check_edge_format(edge_format)
        _check_seconds("latency_target", latency_target)
        check_int("max_batch_size", max_batch_size, least=1)
        check_int("max_pending", max_pending, least=1)
        check_int("seed", seed, least=0)
        if isinstance(data, str | Path):
            data = GraphStore.open(data)
        store = data if isinstance(data, GraphStore) else GraphStore.from_data(data)
        if edge_format == "csc":
            check_edge_weight(store)
        self._num_nodes = store.num_nodes

        predict = _Predict(model, None if device is None else torch.device(device))
        sample = HopSampler(store, num_neighbors, seed)
        prepare = Prepare(store, BufferPool(pin_memory=predict.device.type == "cuda"), transform, edge_format)
        prepare.warm_up()

        def draw(batch: Batch) -> SampledSubgraph:
            subgraph = sample(batch.find_seeds())
            batch.num_sampled_nodes = subgraph.num_sampled_nodes
            return subgraph

        stages = [
            Stage("sample", carry(draw), 1, 1),
            Stage("prepare", carry(lambda batch: prepare(batch.item)), 1, 1),
            Stage("model", carry(predict)),
        ]
        if predict.device.type == "cuda":
            copy = CUDATransfer(predict.device)
            stages.insert(2, Stage("transfer", carry(lambda batch: copy(batch.item)), 1, 1))
        # Its threads know the server but not this object, so that dropping it ends them.
        self._server = Server(stages, latency_target, max_batch_size, max_pending)
        weakref.finalize(self, self._server.close).atexit = False  # the server sees to that itself

    def submit(self, nodes: Tensor | np.ndarray | Sequence[int]) -> "Future[Tensor]":
        """Ask for the predictions of `nodes`, and don't wait for them.

        Args:
            nodes: (k,) integer node ids; may be empty, and hold a node more than once.

        Returns:
            A future of (k, ...), the model's rows for `nodes`, in their order and on the CPU. What the model, the
            transform or a stage raises is raised by the futures of the requests in that batch. `cancel` works until
            the request's batch is made.

        Raises:
            TypeError: `nodes` are not integers.
            ValueError: They are not one-dimensional, or hold an id that is no node of the graph.
            Overloaded: Too many seeds wait.
            RuntimeError: The pipeline is closed.
        """
        return self._server.submit(_node_ids(nodes, self._num_nodes))

    def predict(self, nodes: Tensor | np.ndarray | Sequence[int]) -> Tensor:
        """Return the predictions of `nodes`, (k, ...), once they are there; see `submit`."""
        return self.submit(nodes).result()

    def report(self) -> ServingReport:
        """How many requests were answered so far, and how fast."""
        return self._server.report()

    def close(self, wait: bool = True) -> None:
        """Take no more requests, and end the threads. May be called from any thread, and again.

        Args:
            wait: Wait until all requests are answered and the threads have ended. Otherwise requests that no batch was
                begun for are cancelled, and the threads end by themselves with the batches that they have in hand.
        """
        self._server.close(cancel=not wait)
        if wait:
            self._server.join()

    def __enter__(self) -> "InferencePipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Predict:
    """The model's stage: takes the batch's `Data`, leaves a row on the CPU for each of its seeds."""

    def __init__(self, model: Callable[[Data], Tensor], device: torch.device | None) -> None:
        if isinstance(model, torch.nn.Module):
            model = model.eval() if device is None else model.to(device).eval()
            device = next((parameter.device for parameter in model.parameters()), device)
        self.device = device or torch.device("cpu")
        self._model = model

    def __call__(self, batch: Batch) -> Tensor:
        """Return a row for each seed of a batch whose `item` is a `Data`."""
        data = batch.item
        if self.device.type == "cuda":
            hand_over(data)
        elif self.device.type != "cpu":
            data = data.to(self.device)
        with torch.inference_mode():
            if isinstance(self._model, LightningModule):
                result = self._model.predict_step(data, batch.number)
            else:
                result = self._model(data)
        if not isinstance(result, Tensor):
            raise TypeError(f"the model returned a {type(result).__name__}: return a tensor with a row per node")
        num_seeds, *_, num_nodes = counts = list(accumulate(batch.num_sampled_nodes))
        if not result.dim() or len(result) not in counts:  # those between are of models that trim their batch by hop
            raise ValueError(
                f"the model returned a tensor of shape {tuple(result.shape)} for a batch of {num_nodes} nodes, "
                f"{num_seeds} of them seeds: return a row per node, or a row per seed"
            )
        return result[:num_seeds].cpu()


def _node_ids(nodes: Tensor | np.ndarray | Sequence[int], num_nodes: int) -> np.ndarray:
    """Return `nodes` as an int64 array that nobody else will change."""
    try:
        ids = nodes.detach().cpu().numpy() if isinstance(nodes, Tensor) else np.asarray(nodes)
    except (TypeError, ValueError) as error:
        raise TypeError(f"nodes={nodes!r}: give a list of node ids") from error
    if ids.ndim != 1:
        raise ValueError(f"nodes have shape {ids.shape}: give a list of node ids, (k,)")
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"nodes have dtype {ids.dtype}: give integer node ids (of a mask: mask.nonzero().flatten())")
    if ids.size and not 0 <= ids.min() <= ids.max() < num_nodes:
        bad = ids[(ids < 0) | (ids >= num_nodes)][0]
        raise ValueError(f"nodes hold {bad}: ids go from 0 to {num_nodes - 1}")
    return np.array(ids, np.int64)


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: give seconds, such as 0.05")
    if not value > 0:
        raise ValueError(f"{name}={value}: give seconds, more than 0")
