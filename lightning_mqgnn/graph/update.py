"""What an update changes: the checks of what is given, and what is remembered."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_mqgnn.graph.splice import distinct


class Changes(NamedTuple):
    """What became of a graph in one or more updates; the arrays must not be written to.

    Attributes:
        columns: (n,) int64, ascending: the nodes whose incoming edges changed.
        rows: By the name of a node attribute, (m,) int64, ascending: the nodes whose rows of it changed.
    """

    columns: np.ndarray
    rows: dict[str, np.ndarray]


def union(changes: Sequence[Changes]) -> Changes:
    """Put the changes of several updates together."""
    names = dict.fromkeys(name for change in changes for name in change.rows)
    return Changes(
        _union([change.columns for change in changes]),
        {name: _union([change.rows[name] for change in changes if name in change.rows]) for name in names},
    )


def _union(ids: Sequence[np.ndarray]) -> np.ndarray:
    if len(ids) == 1:
        return ids[0]
    return distinct(np.sort(np.concatenate([np.zeros(0, np.int64), *ids]), kind="stable"))  # merges, for they ascend


def check_edges(argument: str, edges: Tensor | np.ndarray | None, num_nodes: int) -> np.ndarray:
    """Return `edges` as (2, k) int64; none if left out."""
    if edges is None:
        return np.zeros((2, 0), np.int64)
    ids = _integers(argument, edges)
    if ids.ndim != 2 or len(ids) != 2:
        raise ValueError(f"{argument} has shape {ids.shape}: it must be (2, edges), sources first")
    bad = np.flatnonzero(((ids < 0) | (ids >= num_nodes)).any(0))
    if len(bad):
        raise ValueError(
            f"{argument}[:, {bad[0]}] = ({ids[0, bad[0]]}, {ids[1, bad[0]]}) is outside of the {num_nodes} nodes "
            f"(0 to {num_nodes - 1}): fix the edge, or build the graph anew to have other nodes"
        )
    return ids


def check_features(
    features: Mapping[str, tuple[Any, Any]], node_attrs: Mapping[str, Tensor]
) -> dict[str, tuple[np.ndarray, Tensor]]:
    """Return node ids (m,) int64 and rows (m, ...) in the attribute's dtype, by the attributes that get new ones."""
    checked = {}
    for name, given in features.items():
        if name not in node_attrs:
            raise ValueError(f"features holds {name!r}, which is no node attribute: give some of {list(node_attrs)}")
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise TypeError(f"features[{name!r}] is not a pair: give (node ids, rows)")
        nodes, rows = _integers(f"features[{name!r}][0]", given[0]), given[1]
        if nodes.ndim != 1:
            raise ValueError(f"features[{name!r}][0] has shape {nodes.shape}: give a list of node ids")
        num_nodes = len(node_attrs[name])
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < num_nodes:
            bad = nodes[(nodes < 0) | (nodes >= num_nodes)][0]
            raise ValueError(
                f"features[{name!r}][0] holds node {bad}: ids go from 0 to {num_nodes - 1}, "
                "build the graph anew to have other nodes"
            )
        ascending = np.sort(nodes)
        twice = ascending[1:][ascending[1:] == ascending[:-1]]
        if len(twice):
            raise ValueError(f"features[{name!r}][0] holds node {twice[0]} more than once: give one row per node")
        checked[name] = nodes, _rows(f"features[{name!r}][1]", rows, node_attrs[name], len(nodes))
    return {name: pair for name, pair in checked.items() if len(pair[0])}


def check_edge_rows(rows: Mapping[str, Any], edge_attrs: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the rows of `count` new edges in the dtypes of the attributes; none if there is no new edge."""
    for name in rows:
        if name not in edge_attrs:
            raise ValueError(f"edge_attrs holds {name!r}, which is no edge attribute: give some of {list(edge_attrs)}")
    for name in edge_attrs:
        if count and name not in rows:
            raise ValueError(f"edge_attrs lacks {name!r}: give its rows for the {count} new edges")
    checked = {name: _rows(f"edge_attrs[{name!r}]", given, edge_attrs[name], count) for name, given in rows.items()}
    return checked if count else {}


def _integers(what: str, value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        value = value.detach().cpu().as_subclass(Tensor)
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{what} has dtype {array.dtype}: give integers")
    return array.astype(np.int64)


def _rows(what: str, rows: Any, like: Tensor, count: int) -> Tensor:
    """Return `rows` as a copy in the dtype of the attribute `like`, if that loses no kind and no integer."""
    given = (rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))).detach().cpu()
    if given.shape != (count, *like.shape[1:]):
        raise ValueError(f"{what} has shape {tuple(given.shape)}: it must be {(count, *like.shape[1:])}")
    if not count:
        return like[:0]
    if not torch.can_cast(given.dtype, like.dtype):
        raise TypeError(f"{what} has dtype {given.dtype} where the attribute has {like.dtype}: convert it")
    cast = given.to(like.dtype, copy=True)
    if not (cast.is_floating_point() or cast.is_complex()):
        changed = given.numpy()[cast.numpy() != given.numpy()]
        if len(changed):
            raise ValueError(
                f"{what} holds {changed[0]}, which is no {like.dtype}: build the graph anew with a wider one"
            )
    return cast
