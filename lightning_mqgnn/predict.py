"""predict_all: the model's output at every node, from all neighbours, with the messages of a few edges at a time."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing, Sequential
from tqdm import tqdm

from lightning_mqgnn.graph import GraphStore


def predict_all(
    model: nn.Module,
    data: Data | GraphStore,
    *,
    edge_chunk: int = 2**14,
    progress: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute `model(x, edge_index)` for the whole graph, without ever holding the messages of all its edges.

    `model.forward` runs once, on all nodes. Meanwhile each convolution (PyG's `MessagePassing`) goes through its target
    nodes in pieces of about `edge_chunk` incoming edges, and makes and aggregates the messages of one piece before
    those of the next. No neighbour is left out and no node is computed twice in a layer, so the result is that of the
    plain call, but for the rounding of sums. A graph's `edge_weight` and `edge_attr` are passed on if `forward` has an
    argument of that name; of the nodes' attributes only `x` is.

    Memory: the graph, what the model keeps per node, (nodes, channels) for each tensor, what convolutions keep per edge
    (attention coefficients, normalised weights), and the messages of one piece. A piece has one node at least, however
    many edges come into it. On CPUs small pieces are also faster, as they stay in the cache.

    Ranks: if `torch.distributed` is initialised, or a `group` is given, all its ranks must call this at once, with
    the same weights and graph. In each convolution a rank computes a contiguous share of the target nodes, chosen so
    that all have about as many edges, and gets the rows of the others; every rank returns all rows. Only messages are
    divided: layers that work on nodes one by one (`Linear`, norms, those inside of a convolution too) are computed by
    each rank for all nodes. If one rank alone fails, the others wait for it until the group's time limit.

    The model is in evaluation mode meanwhile, without gradients, and on its own device, to which the graph is
    copied. Afterwards, and after an exception, each module has its former mode and its own methods.

    What a convolution does in `message`, `aggregate`, `update` and `edge_update` must depend on a node and its incoming
    edges alone. These methods, and hooks on them or on `propagate`, see one piece: its targets are numbered from 0, its
    sources as in the graph, and tensors with as many rows as there are edges (in `update`: nodes) are cut to the piece.
    What they leave behind in attributes is that of the last piece, e.g. the attention weights that `TransformerConv`
    can return. `decomposed_layers`, which saves the same memory, is 1 meanwhile. Modules that aggregate by other means
    than `MessagePassing.propagate` run as they are.

    Args:
        model: A module whose `forward` takes `x` and `edge_index` first and returns a row per node; a LightningModule
            is one.
        data: A homogeneous graph with `x` (nodes, ...), of any dtype the model takes. `edge_index` (2, edges) is given
            to the model as int64, ordered by target.
        edge_chunk: Number of edges whose messages exist at a time, on each rank.
        progress: Show a bar on standard error, on rank 0, of target nodes times the convolutions called so far.
        group: The ranks that share the work; all by default.

    Returns:
        (nodes, ...) the model's output in node order, on the model's device, the same on all ranks.

    Raises:
        TypeError: `data` is no homogeneous graph; the model returns something else than a tensor; or a convolution is
            given a sparse matrix in place of `edge_index`, or returns something else than a tensor.
        ValueError: `x` is missing, an edge or a shape is wrong, `edge_chunk` is below 1, this rank isn't in `group`,
            the model's output has not one row per node, or a convolution can't be computed in pieces: it is in PyG's
            explain mode, its `message` takes `x` beside `x_i` or `x_j`, its results don't have a row per target, or it
            overrides `propagate` and gives it pairs of features with `flow="target_to_source"`.
    """
    if edge_chunk < 1:
        raise ValueError(f"edge_chunk={edge_chunk}: give the number of edges to compute at a time, 1 or more")
    ranks, rank = 1, 0
    if group is not None or (dist.is_available() and dist.is_initialized()):
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError("group does not contain this rank: call predict_all on the ranks of the group alone")
    x, edge_index, edge_attrs = _inputs(model, data)
    with (
        torch.no_grad(),
        _evaluating(model),
        tqdm(desc=type(model).__name__, total=0, unit="node", unit_scale=True, disable=not progress or rank > 0) as bar,
        _InPieces(edge_chunk, ranks, rank, group, bar).installed(model),
    ):
        out = model(x, edge_index, **edge_attrs)
    if not isinstance(out, Tensor):
        raise TypeError(f"model returned a {type(out).__name__}: its forward must return a tensor with a row per node")
    if out.dim() == 0 or len(out) != len(x):
        raise ValueError(
            f"model returned shape {tuple(out.shape)} for a graph of {len(x)} nodes: its forward must return a row per "
            "node, without pooling"
        )
    return out


def _inputs(model: nn.Module, data: Data | GraphStore) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`x`, `edge_index` by target, and those of the edges' attributes that the model takes; on the model's device."""
    store = data if isinstance(data, GraphStore) else GraphStore.from_data(data)
    if "x" not in store.node_attrs:
        raise ValueError(f"data.x is missing among the node attributes {list(store.node_attrs)}: give one row per node")
    x = store.node_attrs["x"]
    device = next((parameter.device for parameter in model.parameters()), x.device)
    targets = torch.repeat_interleave(store.colptr.long().diff())
    takes = model.signature.param_dict if isinstance(model, Sequential) else inspect.signature(model.forward).parameters
    edge_attrs: dict[str, Tensor] = {}
    for name in ("edge_weight", "edge_attr"):
        if name in store.edge_attrs and name in takes:
            values = store.edge_attrs[name]
            edge_attrs[name] = (values if store.edge_id is None else values[store.edge_id]).to(device)
    return x.to(device), torch.stack([store.row.long(), targets]).to(device), edge_attrs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # one by one: frozen parts may have been in another mode than the model
            module.training = mode


@contextmanager
def _replaced(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Give the instance other attributes for a while."""
    former = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in former:
                setattr(module, name, former[name])
            else:
                delattr(module, name)


class _Method(NamedTuple):
    """`propagate` or `edge_updater` of one convolution: the method itself, and which arguments its parts take."""

    conv: Any
    name: str  # of the convolution in the model
    call: Callable[..., Any]
    per_edge: frozenset[str]  # arguments of the parts that work on messages
    per_node: frozenset[str]  # arguments of the parts that work on what was aggregated
    returns_edges: bool

    def lifted(self, argument: str) -> tuple[bool, bool]:
        """Whether sources' and targets' rows of the argument are taken for each edge."""
        takes = self.per_edge | self.per_node
        return f"{argument}_j" in takes, f"{argument}_i" in takes

    def axis(self, tensor: Tensor) -> int:
        """The dimension along which the nodes are."""
        node_dim: int = self.conv.node_dim
        return node_dim if node_dim >= 0 else max(tensor.dim() + node_dim, 0)

    def narrow(self, tensor: Tensor, begin: int, end: int) -> Tensor:
        """The rows of the nodes `begin` to `end`."""
        return tensor.narrow(self.axis(tensor), begin, end - begin)

    def check(self, edge_index: Any, arguments: dict[str, Any]) -> None:
        """Raise if the call can't be divided."""
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            layout = f" of layout {edge_index.layout}" if isinstance(edge_index, Tensor) else ""
            raise TypeError(
                f"convolution {self.name!r} was given a {type(edge_index).__name__}{layout} as its edge_index: only "
                "(2, edges) integer tensors can be taken in pieces, so don't convert the edges in the model's forward"
            )
        # PyG's compiled methods take pairs as (sources, targets) in either flow, its general ones in the order of the
        # rows of edge_index.
        compiled = self.call.__module__.startswith(f"{type(self.conv).__module__}_{type(self.conv).__name__}")
        paired_by_row = self.conv.flow == "target_to_source" and not compiled
        for name, value in arguments.items():
            if not any(self.lifted(name)):
                continue
            if name in self.per_edge:
                raise ValueError(
                    f"convolution {self.name!r} takes {name!r} for each edge and as a whole: let its message and "
                    f"aggregate take {name}_i and {name}_j only, or pass it to propagate under a second name"
                )
            if paired_by_row and isinstance(value, (tuple, list)) and value[0] is not value[1]:
                raise ValueError(
                    f"convolution {self.name!r} has flow='target_to_source', a pair of tensors as {name!r} and its own "
                    "propagate: use flow='source_to_target', and edge_index.flip(0) in the model's forward"
                )

    def num_nodes(self, size: Any, arguments: dict[str, Any]) -> tuple[int, int]:
        """Number of sources and targets, as PyG finds them."""
        found: list[int | None] = list(size) if size is not None else [None, None]
        if self.conv.flow == "target_to_source":
            found.reverse()
        for name, value in arguments.items():
            lifted = self.lifted(name)
            if not any(lifted):
                continue
            pair = value if isinstance(value, (tuple, list)) else [value if takes else None for takes in lifted]
            for side, tensor in enumerate(pair):
                if isinstance(tensor, Tensor):
                    rows = tensor.size(self.axis(tensor))
                    if found[side] not in (None, rows):
                        raise ValueError(
                            f"convolution {self.name!r} got {name!r} of shape {tuple(tensor.shape)} for "
                            f"{found[side]} nodes: give one row per node"
                        )
                    found[side] = rows
        sources, targets = found
        sources, targets = targets if sources is None else sources, sources if targets is None else targets
        if sources is None or targets is None:
            raise ValueError(f"convolution {self.name!r} leaves open how many nodes there are: give propagate a size")
        return sources, targets

    def piece_of(
        self, arguments: dict[str, Any], begin: int, end: int, targets: int, edges: "slice | Tensor", num_edges: int
    ) -> dict[str, Any]:
        """The arguments for the targets `begin` to `end` and their incoming edges."""
        piece = dict(arguments)
        for name, value in arguments.items():
            from_sources, from_targets = self.lifted(name)
            if from_sources or from_targets:
                pair = value
                if not isinstance(value, (tuple, list)):
                    pair = (value if from_sources else None, value if from_targets else None)
                own = self.narrow(pair[1], begin, end) if isinstance(pair[1], Tensor) else pair[1]
                piece[name] = (pair[0], own)
            elif not isinstance(value, Tensor) or value.dim() == 0:
                continue
            elif name in self.per_edge and len(value) == num_edges:
                piece[name] = value[edges]
            elif name in self.per_node and value.size(self.axis(value)) == targets:
                piece[name] = self.narrow(value, begin, end)
        return piece

    def result_axis(self, part: Any, count: int) -> int:
        """The dimension of a piece's result along which its `count` nodes or edges are."""
        if not isinstance(part, Tensor):
            raise TypeError(f"convolution {self.name!r} returned a {type(part).__name__}: let it return a tensor")
        axis = 0 if self.returns_edges else self.axis(part)
        if axis >= part.dim() or part.size(axis) != count:
            raise ValueError(
                f"convolution {self.name!r} returned shape {tuple(part.shape)} for {count} "
                f"{'edges' if self.returns_edges else 'nodes'}: let it return a row for each, along dimension {axis}"
            )
        return axis


def _methods(name: str, conv: Any) -> dict[str, _Method]:
    def takes(*parts: str) -> frozenset[str]:
        return frozenset(conv.inspector.get_flat_param_names(list(parts)))

    name = name or type(conv).__name__
    methods = {
        "propagate": _Method(
            conv, name, conv.propagate, takes("message", "aggregate"), takes("aggregate", "update"), False
        )
    }
    if conv.inspector.implements("edge_update"):
        methods["edge_updater"] = _Method(conv, name, conv.edge_updater, takes("edge_update"), frozenset(), True)
    return methods


class _Incoming:
    """The edges of an `edge_index` by their targets: those into `v` stand at `colptr[v]` to `colptr[v + 1]`."""

    def __init__(self, target: Tensor, num_targets: int) -> None:
        degree = torch.bincount(target, minlength=num_targets)
        if len(degree) > num_targets:
            raise ValueError(
                f"edge_index has an edge into node {len(degree) - 1}, but there are {num_targets} nodes: give "
                "convolutions ids below the number of nodes"
            )
        self.colptr = np.zeros(num_targets + 1, np.int64)
        np.cumsum(degree.cpu().numpy(), out=self.colptr[1:])
        ordered = bool((target[1:] >= target[:-1]).all())
        self.order = None if ordered else torch.argsort(target, stable=True)

    def edges(self, begin: int, end: int) -> "slice | Tensor":
        """Where in `edge_index` the edges into the nodes `begin` to `end` are."""
        place = slice(int(self.colptr[begin]), int(self.colptr[end]))
        return place if self.order is None else self.order[place]

    def shares(self, ranks: int) -> list[int]:
        """Where the ranks' shares of the nodes begin and end; nodes weigh as their edges, and one more."""
        weight = self.colptr + np.arange(len(self.colptr))
        bounds: list[int] = np.searchsorted(weight, np.arange(ranks + 1) * weight[-1] // ranks).tolist()
        return bounds

    def pieces(self, begin: int, end: int, edge_chunk: int) -> Iterator[tuple[int, int]]:
        """Divide the nodes `begin` to `end` in runs of at most `edge_chunk` edges, or of one node that has any."""
        while begin < end:
            # Nodes without edges go with others: some aggregations can't do without any message.
            behind_next = min(int(np.searchsorted(self.colptr, self.colptr[begin], side="right")), end)
            limit = max(self.colptr[begin] + edge_chunk, self.colptr[behind_next])
            middle = min(int(np.searchsorted(self.colptr, limit, side="right")) - 1, end)
            yield begin, middle
            begin = middle


class _InPieces:
    """What convolutions do meanwhile."""

    def __init__(
        self, edge_chunk: int, ranks: int, rank: int, group: dist.ProcessGroup | None, bar: "tqdm[Any]"
    ) -> None:
        self._edge_chunk = edge_chunk
        self._ranks, self._rank, self._group = ranks, rank, group
        self._bar = bar
        # Only the last one is kept: some layers make new edges at each call, and all those would stay in memory. The
        # tensor is kept too, or another could get its id.
        self._last: tuple[Tensor, int, int, _Incoming] | None = None

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Let all convolutions of the model run in pieces."""
        with ExitStack() as stack:
            for name, conv in model.named_modules():
                if not isinstance(conv, MessagePassing):
                    continue
                if conv.explain:
                    raise ValueError(f"convolution {name!r} has explain=True: set it to False before predict_all")
                stack.callback(setattr, conv, "decomposed_layers", conv.decomposed_layers)
                conv.decomposed_layers = 1
                methods = _methods(name, conv)
                stack.enter_context(
                    _replaced(conv, **{which: partial(self._run, method) for which, method in methods.items()})
                )
            yield

    def _run(self, method: _Method, edge_index: Any, size: Any = None, **arguments: Any) -> Tensor:
        method.check(edge_index, arguments)
        sources, targets = method.num_nodes(size, arguments)
        i = 1 if method.conv.flow == "source_to_target" else 0
        incoming = self._incoming(edge_index, i, targets)
        if isinstance(edge_index, EdgeIndex):
            edge_index = edge_index.as_tensor()
        bounds = incoming.shares(self._ranks)
        first, last = bounds[self._rank : self._rank + 2]
        self._bar.set_description(method.name, refresh=False)
        self._bar.total += targets

        # Where a node's rows in the result are: of nodes, at their numbers; of edges, by target until the end.
        place = incoming.colptr if method.returns_edges else np.arange(targets + 1)
        rows, axis = None, 0
        # A rank without nodes computes one of another's, only to learn the shape of the results.
        for begin, end in list(incoming.pieces(first, last, self._edge_chunk)) or [(0, min(1, targets))]:
            edges = incoming.edges(begin, end)
            local = torch.stack([edge_index[1 - i, edges], edge_index[i, edges] - begin])
            piece = method.piece_of(arguments, begin, end, targets, edges, edge_index.size(1))
            with _replaced(method.conv, flow="source_to_target", **self._update_of(method, arguments, begin, end)):
                part = method.call(local, size=(sources, end - begin), **piece)
            axis = method.result_axis(part, int(place[end] - place[begin]))
            part = part.movedim(axis, 0)
            if rows is None:
                rows = part.new_empty(int(place[-1]), *part.shape[1:])
            rows[place[begin] : place[end]] = part
            self._bar.update(min(end, last) - min(begin, last))
        assert rows is not None
        if self._ranks > 1:
            self._gather(rows, place[bounds].tolist())
            self._bar.update(targets - (last - first))
        if method.returns_edges and incoming.order is not None:
            by_target, rows = rows, torch.empty_like(rows)
            rows[incoming.order] = by_target
        return rows.movedim(0, axis).contiguous()

    def _update_of(self, method: _Method, arguments: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
        """`update` for a piece, if it takes what is also taken for each edge, of which it would get a pair."""
        own = {
            name: method.narrow(value, begin, end)
            for name, value in arguments.items()
            if name in method.per_node and any(method.lifted(name)) and isinstance(value, Tensor)
        }
        update = method.conv.update
        return {"update": lambda out, **others: update(out, **{**others, **own})} if own else {}

    def _incoming(self, edge_index: Tensor, i: int, targets: int) -> _Incoming:
        if self._last is None or self._last[0] is not edge_index or self._last[1:3] != (i, targets):
            plain = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
            self._last = edge_index, i, targets, _Incoming(plain[i], targets)
        return self._last[3]

    def _gather(self, rows: Tensor, bounds: list[int]) -> None:
        # Shares differ in size, which not every backend's all_gather takes, and so come one after the other.
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            if end > begin:
                dist.broadcast(rows[begin:end], group=self._group, group_src=rank)
