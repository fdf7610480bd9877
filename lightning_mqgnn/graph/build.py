"""Builds a saved graph from edge lists and feature files that need not fit into memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from tqdm import tqdm

from lightning_mqgnn.compiled import kernel
from lightning_mqgnn.graph.files import describe, id_dtype, new_folder
from lightning_mqgnn.graph.store import GraphStore

_CHUNK = 2**20  # edges, or bytes times 8 of a row-wise array, that are read at a time


def build_store(
    path: str | Path,
    edges: Sequence[str | Path],
    *,
    num_nodes: int | None = None,
    node_attrs: Mapping[str, str | Path] | None = None,
    edge_attrs: Mapping[str, str | Path] | None = None,
    dtypes: Mapping[str, str] | None = None,
    memory_bytes: int = 2**30,
    progress: bool = False,
) -> GraphStore:
    """Build the graph in the folder `path` and open it.

    The edges are read once to count in-degrees, which gives `colptr`, and then once per window of consecutive
    destinations whose edges fit into `memory_bytes`: their sources are put where `colptr` says, and the window is
    written out. So the memory needed is that of a window and 16 bytes per node; attributes are copied in pieces.

    The folder appears under its name only when it is complete. A build that was interrupted leaves nothing that opens
    and is simply run again.

    Args:
        path: The folder to make.
        edges: Files that hold the edges, in order: `.npy` (2, edges) of any integer dtype, sources first; or text
            with a source and a destination per line, separated by a comma or white space, lines with `#` skipped.
        num_nodes: Number of nodes; by default the length of the first node attribute.
        node_attrs: `.npy` files with a row per node, by the name of the attribute (`x`, `y`, `train_mask`, ...).
        edge_attrs: `.npy` files with a row per edge, in the order of the edges.
        dtypes: Dtypes in which attributes are stored, if not their own (`{"x": "float16"}`).
        memory_bytes: Memory for a window.
        progress: Show progress bars.

    Raises:
        FileExistsError: `path` exists.
        ValueError: A shape or an edge is wrong; names the file.
    """
    path = Path(path)
    nodes = {name: _map(file) for name, file in (node_attrs or {}).items()}
    per_edge = {name: _map(file) for name, file in (edge_attrs or {}).items()}
    if num_nodes is None:
        if not nodes:
            raise ValueError("num_nodes=None without node_attrs: give the number of nodes")
        num_nodes = len(next(iter(nodes.values())))
    with new_folder(path) as folder, ExitStack() as scratch:
        pieces = [_edge_piece(Path(file), folder / f"edges-{i}.tmp", scratch) for i, file in enumerate(edges)]
        num_edges = sum(piece.shape[1] for piece in pieces)
        for attributes, count, what in ((nodes, num_nodes, "nodes"), (per_edge, num_edges, "edges")):
            for name, array in attributes.items():
                if len(array) != count:
                    raise ValueError(f"attribute {name!r} has {len(array)} rows for {count} {what}")
        arrays: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}

        def column(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> "_Column":
            arrays[name] = getattr(torch, dtype.name), shape
            return scratch.enter_context(_Column(folder / f"{name}.npy", dtype, shape))

        colptr, in_order = _count(pieces, num_nodes, num_edges, progress)
        position_dtype = _numpy_dtype(id_dtype(num_edges))
        column("colptr", position_dtype, (num_nodes + 1,)).write(colptr)
        row = column("row", _numpy_dtype(id_dtype(num_nodes)), (num_edges,))
        if in_order:
            with _edge_bar("copying edges", num_edges, progress) as bar:
                for _, source, _ in _chunks(pieces, bar):
                    row.write(source)
        else:
            edge_id = column("edge_id", position_dtype, (num_edges,))
            _place(pieces, colptr, row, edge_id, memory_bytes, progress)
        for group, attributes in (("node", nodes), ("edge", per_edge)):
            for name, array in attributes.items():
                dtype = np.dtype((dtypes or {}).get(name, array.dtype))
                target = column(f"{group}.{name}", dtype, array.shape)
                rows = max(8 * _CHUNK // max(array[:1].nbytes, 1), 1)
                for begin in tqdm(range(0, len(array), rows), f"copying {name}", disable=not progress, unit="piece"):
                    target.write(array[begin : begin + rows])
        scratch.close()  # a full disk may show only now
        describe(folder, arrays, {})
    return GraphStore.open(path)


class _Column:
    """An `.npy` file that is written from its beginning to its end."""

    def __init__(self, file: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self._file: BinaryIO = file.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(self._file, header)

    def write(self, rows: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(rows, self.dtype).data)

    def __enter__(self) -> "_Column":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def _map(file: str | Path) -> np.ndarray:
    array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def _edge_piece(file: Path, copy: Path, scratch: ExitStack) -> np.ndarray:
    if file.suffix != ".npy":
        return _read_text(file, copy, scratch)
    edges = _map(file)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise ValueError(f"{str(file)!r} holds {edges.dtype} {edges.shape}: edges are (2, edges) of an integer dtype")
    return edges


def _read_text(file: Path, copy: Path, scratch: ExitStack) -> np.ndarray:
    """Copy the edges of a text file to a binary one, which is removed at the end."""
    scratch.callback(copy.unlink, missing_ok=True)
    with file.open() as lines, copy.open("wb") as target:
        pairs = (line.partition("#")[0].replace(",", " ") for line in lines)
        while chunk := list(islice(pairs, _CHUNK)):
            try:
                ids = np.array("".join(chunk).split(), np.int64)
            except ValueError as error:
                raise ValueError(f"{str(file)!r} can't be read as edges ({error}): give two ids per line") from error
            if len(ids) % 2:
                raise ValueError(f"{str(file)!r} holds an odd number of ids: give two per line")
            target.write(ids.data)
    if not copy.stat().st_size:
        return np.zeros((2, 0), np.int64)
    edges: np.ndarray = np.memmap(copy, np.int64, "r").reshape(-1, 2).T
    return edges


def _edge_bar(what: str, num_edges: int, progress: bool) -> "tqdm[Any]":
    return tqdm(total=num_edges, desc=what, disable=not progress, unit="edge", unit_scale=True)


def _chunks(pieces: Sequence[np.ndarray], bar: "tqdm[Any]") -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The number of the first edge, sources and destinations of each chunk."""
    first = 0
    for piece in pieces:
        for begin in range(0, piece.shape[1], _CHUNK):
            source, destination = np.ascontiguousarray(piece[:, begin : begin + _CHUNK], np.int64)
            yield first, source, destination
            first += len(source)
            bar.update(len(source))


def _count(pieces: Sequence[np.ndarray], num_nodes: int, num_edges: int, progress: bool) -> tuple[np.ndarray, bool]:
    """Return `colptr` (int64), and whether the edges are in the order of their destinations already."""
    colptr = np.zeros(num_nodes + 1, np.int64)
    in_order, last = True, -1
    with _edge_bar("counting edges", num_edges, progress) as bar:
        for first, source, destination in _chunks(pieces, bar):
            bad = count_edges(source, destination, colptr[1:])
            if bad >= 0:
                raise ValueError(
                    f"edge {first + bad} = ({source[bad]}, {destination[bad]}) is outside of the {num_nodes} nodes "
                    f"(0 to {num_nodes - 1}): fix the edge or num_nodes"
                )
            in_order = in_order and destination[0] >= last and bool((destination[1:] >= destination[:-1]).all())
            last = destination[-1]
    np.cumsum(colptr, out=colptr)
    return colptr, in_order


def _place(
    pieces: Sequence[np.ndarray],
    colptr: np.ndarray,
    row: _Column,
    edge_id: _Column,
    memory_bytes: int,
    progress: bool,
) -> None:
    """Write the sources and numbers of the edges in the order of their destinations, window by window."""
    num_nodes, num_edges = len(colptr) - 1, int(colptr[-1])
    room = max(memory_bytes // (row.dtype.itemsize + edge_id.dtype.itemsize), 1)
    windows = []
    begin = 0
    while begin < num_nodes:
        end = max(int(np.searchsorted(colptr, colptr[begin] + room, side="right")) - 1, begin + 1)
        windows.append((begin, end))
        begin = end
    with _edge_bar("placing edges", num_edges * len(windows), progress) as bar:
        for begin, end in windows:
            base = int(colptr[begin])
            sources = np.empty(int(colptr[end]) - base, row.dtype)
            numbers = np.empty(len(sources), edge_id.dtype)
            cursor = colptr[begin:end] - base
            for first, source, destination in _chunks(pieces, bar):
                place_edges(source, destination, first, begin, cursor, sources, numbers)
            row.write(sources)
            edge_id.write(numbers)


@kernel
def count_edges(source: np.ndarray, destination: np.ndarray, in_degree: np.ndarray) -> int:
    """Add to `in_degree`; return the place of the first edge that is out of range, or -1."""
    num_nodes = len(in_degree)
    for i in range(len(source)):
        if source[i] < 0 or source[i] >= num_nodes or destination[i] < 0 or destination[i] >= num_nodes:
            return i
        in_degree[destination[i]] += 1
    return -1


@kernel
def place_edges(
    source: np.ndarray,
    destination: np.ndarray,
    first: int,
    begin: int,
    cursor: np.ndarray,
    sources: np.ndarray,
    numbers: np.ndarray,
) -> None:
    """Put the edges into the nodes of a window at their cursors, and move these on."""
    for i in range(len(source)):
        node = destination[i] - begin
        if 0 <= node < len(cursor):
            place = cursor[node]
            sources[place] = source[i]
            numbers[place] = first + i
            cursor[node] = place + 1
