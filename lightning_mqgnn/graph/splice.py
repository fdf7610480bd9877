"""Edges spliced into the arrays of a graph, in one pass over them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lightning_mqgnn.compiled import kernel
from lightning_mqgnn.graph.memory import empty_in_huge_pages, use_huge_pages

_SPARE = 8  # room for more edges, as a part of those that are there
_TABLE = 2**13  # bytes: a fraction of the L1 cache


def distinct(ids: np.ndarray) -> np.ndarray:
    """The distinct ones of ids that ascend."""
    new = np.ones(len(ids), bool)
    np.not_equal(ids[1:], ids[:-1], out=new[1:])
    kept: np.ndarray = ids[new]
    return kept


def changed_columns(removed: np.ndarray, added: np.ndarray) -> np.ndarray:
    """The destinations of edges, each once, ascending."""
    return distinct(torch.sort(torch.from_numpy(np.concatenate([removed[1], added[1]]))).values.numpy())


def next_edge_id(num_edges: int, edge_id: Tensor | None, edge_attrs: Mapping[str, Tensor]) -> int:
    """The smallest id above those of all edges, and of all rows of edge attributes."""
    largest = num_edges - 1 if edge_id is None else int(edge_id.max()) if len(edge_id) else -1
    return max([largest + 1, *map(len, edge_attrs.values())])


def splice_edges(
    colptr: Tensor, row: Tensor, edge_id: Tensor | None, removed: np.ndarray, added: np.ndarray, first_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return new arrays without the edges `removed`, and with `added` behind the others of their destinations.

    Columns that keep their edges are copied in runs, so the cost is that of streaming over the arrays, and of reading
    the columns that lose edges.

    Args:
        colptr: (nodes + 1,), left as it is, like the other two.
        row: (edges,).
        edge_id: (edges,), None for 0, 1, 2, ...
        removed: (2, k) int64, pairs of nodes.
        added: (2, k) int64.
        first_id: Id of the first new edge.

    Raises:
        ValueError: There is no edge between a pair of `removed`, or a dtype is too narrow for what comes.
    """
    gone = _places(colptr.numpy(), row.numpy(), removed)
    num_edges = len(row) - len(gone) + added.shape[1]
    ids = colptr if edge_id is None else edge_id
    for what, largest, dtype in (
        ("the number of edges", num_edges, colptr.dtype),
        ("the largest edge id", first_id + added.shape[1] - 1, ids.dtype),
    ):
        if largest > torch.iinfo(dtype).max:
            raise ValueError(f"{what} would be {largest}, too large for {dtype}: build the graph anew")
    order = _order(added[1])
    source, destination = added[:, order]
    before = colptr.numpy()[destination + 1]  # new edges come before the first one of the next column
    if edge_id is None:
        edge_id = torch.arange(len(row), dtype=ids.dtype)
    new_colptr = empty_in_huge_pages((len(colptr),), colptr.dtype)
    new_row = empty_in_huge_pages((num_edges,), row.dtype)
    new_id = empty_in_huge_pages((num_edges,), edge_id.dtype)
    _shift(colptr.numpy(), gone, destination, new_colptr.numpy())
    _splice(row.numpy(), gone, before, source, new_row.numpy())
    _splice(edge_id.numpy(), gone, before, first_id + order, new_id.numpy())
    for tensor in (new_colptr, new_row, new_id):
        use_huge_pages(tensor)
    return new_colptr, new_row, new_id


def copy_of(tensor: Tensor) -> Tensor:
    """A contiguous copy in huge pages."""
    copy = empty_in_huge_pages(tuple(tensor.shape), tensor.dtype).copy_(tensor)
    use_huge_pages(copy)
    return copy


def extended(
    edge_attrs: Mapping[str, Tensor], rows: Mapping[str, Tensor], room: Mapping[str, Tensor], first_id: int
) -> dict[str, Tensor]:
    """Return buffers that begin with the attributes and the rows of new edges behind them, and have room for more.

    Those in `room` are used where they begin with the attribute and are long enough, so that few updates copy it.

    Raises:
        ValueError: An attribute does not end where the ids of new edges begin.
    """
    buffers = {}
    for name, new in rows.items():
        old, buffer = edge_attrs[name], room.get(name)
        if len(old) != first_id:
            raise ValueError(
                f"attribute {name!r} has {len(old)} rows for edge ids 0 to {first_id - 1}: give it all rows"
            )
        length = first_id + len(new)
        if buffer is None or buffer.data_ptr() != old.data_ptr() or len(buffer) < length:
            buffer = empty_in_huge_pages((length + length // _SPARE, *old.shape[1:]), old.dtype)
            buffer[:first_id] = old
        buffer[first_id:length] = new
        buffers[name] = buffer
    return buffers


def _order(ids: np.ndarray) -> np.ndarray:
    """What sorts `ids` and leaves equal ones in their order, as `np.argsort` does, seven times as fast."""
    order: np.ndarray = torch.sort(torch.from_numpy(ids), stable=True).indices.numpy()
    return order


def _places(colptr: np.ndarray, row: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """The places of all edges between `pairs`, ascending."""
    order = _order(pairs[0])
    order = order[_order(pairs[1][order])]
    source, destination = pairs[0][order], pairs[1][order]
    columns = distinct(destination)
    places = np.empty(int((colptr[columns + 1] - colptr[columns]).sum()), np.int64)
    found = np.zeros(len(source), bool)
    count = _find(colptr, row, source, destination, found, places)
    if not found.all():
        missing = np.flatnonzero(~found)[0]
        raise ValueError(
            f"edges_removed holds ({source[missing]}, {destination[missing]}), but there is no edge from node "
            f"{source[missing]} to node {destination[missing]}: leave the pair out"
        )
    return places[:count]


@kernel
def _find(
    colptr: np.ndarray,
    row: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    found: np.ndarray,
    places: np.ndarray,
) -> int:
    """Write down where the edges of the pairs are, which come by destination, then source; return how many there are.

    Cost: the columns of the destinations are read once. A table of some bits of the sources tells of most entries that
    they are not looked for; the others are searched among the pairs of their column.
    """
    table = np.zeros(_TABLE, np.bool_)
    bits = np.uint64(_TABLE - 1)
    count = 0
    begin = 0
    while begin < len(source):
        node = destination[begin]
        end = begin
        while end < len(source) and destination[end] == node:
            table[np.uint64(source[end]) & bits] = True
            end += 1
        for place in range(np.uint64(colptr[node]), np.uint64(colptr[node + 1])):
            if table[np.uint64(row[place]) & bits]:
                pair = begin + np.searchsorted(source[begin:end], row[place])
                if pair < end and source[pair] == row[place]:
                    found[pair] = True
                    places[count] = place
                    count += 1
        for pair in range(begin, end):
            table[np.uint64(source[pair]) & bits] = False
            if pair > begin and source[pair] == source[pair - 1]:  # the same pair again
                found[pair] = found[pair - 1]
        begin = end
    return count


@kernel
def _shift(colptr: np.ndarray, gone: np.ndarray, destination: np.ndarray, out: np.ndarray) -> None:
    """Write `colptr` without the edges at the places `gone`, and with edges into `destination`; both ascend."""
    lost = 0
    won = 0
    for node in range(len(colptr)):
        while lost < len(gone) and gone[lost] < colptr[node]:
            lost += 1
        while won < len(destination) and destination[won] < node:
            won += 1
        out[node] = colptr[node] - lost + won


@kernel
def _append(old: np.ndarray, begin: int, stop: int, out: np.ndarray, end: int) -> int:
    """Copy `old[begin:stop]` to `out[end:]` and return where it ends; a slice would cost more than most such runs."""
    shift = np.uint64(end) - np.uint64(begin)
    for i in range(np.uint64(begin), np.uint64(stop)):
        out[i + shift] = old[i]
    return end + stop - begin


@kernel
def _splice(old: np.ndarray, gone: np.ndarray, before: np.ndarray, new: np.ndarray, out: np.ndarray) -> None:
    """Write `old` without the entries at `gone`, and with `new[i]` before the entry at `before[i]`; both ascend.

    Cost: `old` is read and `out` written once, in order.
    """
    begin = 0
    end = 0
    lost = 0
    for i in range(len(new) + 1):
        stop = before[i] if i < len(new) else len(old)
        while lost < len(gone) and gone[lost] < stop:
            end = _append(old, begin, gone[lost], out, end)
            begin = gone[lost] + 1
            lost += 1
        end = _append(old, begin, stop, out, end)
        begin = stop
        if i < len(new):
            out[end] = new[i]
            end += 1
