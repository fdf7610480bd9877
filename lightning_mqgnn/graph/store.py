"""GraphStore: a graph's topology, features, labels and masks, in memory or memory-mapped from a folder."""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_mqgnn.graph.files import as_array, describe, first_row, id_dtype, new_folder, read_folder, write_array
from lightning_mqgnn.graph.mapped import MappedFiles
from lightning_mqgnn.graph.memory import use_huge_pages
from lightning_mqgnn.graph.splice import changed_columns, copy_of, extended, next_edge_id, splice_edges
from lightning_mqgnn.graph.update import Changes, check_edge_rows, check_edges, check_features, union


class Topology(NamedTuple):
    """The edges at one version of a graph, by destination: `colptr` (nodes + 1,), `row` and `edge_id` (edges,)."""

    colptr: Tensor
    row: Tensor
    edge_id: Tensor | None
    version: int


class GraphStore:
    """A graph in the form that sampling reads: incoming edges of each node side by side (CSC by destination).

    The sources of the edges into node `v` are `row[colptr[v]:colptr[v + 1]]`, in the order in which the edges were
    given. Ids are int32 where they fit. All arrays are CPU tensors and must not be written to: `update` changes them.

    Build one with `from_data` or `open`; the constructor takes arrays that are already in this form.

    Args:
        colptr: (nodes + 1,) int32 or int64.
        row: (edges,) int32 or int64, ids of the sources.
        edge_id: (edges,) where the edge stood in the `edge_index` it came from; None if at the same place.
        node_attrs: Tensors with one row per node (`x`, `y`, `train_mask`, ...).
        edge_attrs: Tensors whose row `i` is that of the edge with the id `i`, i.e. in the order of `edge_index`
            (`edge_attr`, `edge_weight`, ...).
        graph_attrs: Anything else; handed on to every batch as it is.
    """

    def __init__(
        self,
        colptr: Tensor,
        row: Tensor,
        edge_id: Tensor | None = None,
        *,
        node_attrs: Mapping[str, Tensor] | None = None,
        edge_attrs: Mapping[str, Tensor] | None = None,
        graph_attrs: Mapping[str, Any] | None = None,
    ) -> None:
        self.topology = Topology(colptr, row, edge_id, 0)  # replaced as a whole, so that threads never see half of it
        self.node_attrs = dict(node_attrs or {})
        self.edge_attrs = dict(edge_attrs or {})
        self.graph_attrs = dict(graph_attrs or {})
        self._path: Path | None = None
        self._mapped: MappedFiles | None = None
        self._log: list[Changes] = []  # at [v] what changed from version v to the next
        self._own: dict[str, Tensor] = {}  # node attributes that can be written to: nobody else sees it
        self._room: dict[str, Tensor] = {}  # edge attributes with unused rows at their ends
        self._num_edge_ids = 0  # that edges ever had; 0 if the arrays tell

    @property
    def colptr(self) -> Tensor:
        """(nodes + 1,) int32 or int64."""
        return self.topology.colptr

    @property
    def row(self) -> Tensor:
        """(edges,) int32 or int64, ids of the sources."""
        return self.topology.row

    @property
    def edge_id(self) -> Tensor | None:
        """(edges,) where each edge stood in the `edge_index` it came from; None if at the same place.

        Edges that came by `update` are numbered on from there.
        """
        return self.topology.edge_id

    @property
    def version(self) -> int:
        """How often the graph was changed."""
        return self.topology.version

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.colptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""
        return len(self.row)

    @property
    def nbytes(self) -> int:
        """Bytes of topology, node and edge attributes."""
        return sum(tensor.nbytes for _, tensor in self._arrays())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_nodes={self.num_nodes}, num_edges={self.num_edges}, "
            f"attributes={[*self.node_attrs, *self.edge_attrs, *self.graph_attrs]}, {self.nbytes / 2**20:.1f} MiB)"
        )

    @classmethod
    def from_data(cls, data: Data, *, check_finite: bool = False) -> "GraphStore":
        """Build the store of a homogeneous PyG graph.

        Args:
            data: The graph; tensors on an accelerator are copied to the CPU.
            check_finite: Also look for NaN and infinity in floating-point attributes (reads them once).

        Raises:
            TypeError: `data` is not a homogeneous `Data`, or `edge_index` is not an integer tensor.
            ValueError: A shape, a length or an edge is wrong, or, with `check_finite`, a value is not finite.
        """
        edge_index = _check_edge_index(data)
        num_nodes = int(data.num_nodes or 0)
        num_edges = edge_index.shape[1]
        _check_range(edge_index, num_nodes)
        node_attrs, edge_attrs, graph_attrs = {}, {}, {}
        for name, value in data.to_dict().items():
            if name in ("edge_index", "num_nodes"):
                continue
            _check_attribute(name, value, num_nodes, num_edges)
            if isinstance(value, Tensor):
                value = value.detach().cpu()
            if isinstance(value, Tensor) and data.is_node_attr(name):
                node_attrs[name] = value.contiguous()
            elif isinstance(value, Tensor) and data.is_edge_attr(name):
                edge_attrs[name] = value.contiguous()
            else:
                graph_attrs[name] = value
        for name, tensor in {**node_attrs, **edge_attrs}.items():
            if check_finite and not bool(torch.isfinite(tensor).all()):
                first = int((~torch.isfinite(tensor)).flatten(1 if tensor.dim() > 1 else 0).nonzero()[0, 0])
                raise ValueError(f"data.{name} holds NaN or infinity, first in row {first}: replace it before training")

        source, destination = edge_index.to(id_dtype(num_nodes))
        colptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
        torch.cumsum(torch.bincount(destination, minlength=num_nodes), 0, out=colptr[1:])
        colptr = colptr.to(id_dtype(num_edges))
        row, edge_id = source.clone(), None
        if not bool((destination[1:] >= destination[:-1]).all()):
            order = torch.sort(destination, stable=True).indices
            row, edge_id = source[order], order.to(id_dtype(num_edges))
        store = cls(colptr, row, edge_id, node_attrs=node_attrs, edge_attrs=edge_attrs, graph_attrs=graph_attrs)
        for _, tensor in store._arrays():
            use_huge_pages(tensor)
        return store

    def save(self, path: str | Path) -> None:
        """Write the store to the folder `path`, one `.npy` file per array.

        The folder appears under its name only when it is complete.

        Raises:
            FileExistsError: `path` exists.
            TypeError: A graph-level attribute is neither a tensor nor representable in JSON.
            ValueError: The name of an attribute can't be that of a file.
        """
        path = Path(path)
        for name in (*self.node_attrs, *self.edge_attrs, *self.graph_attrs):
            if "/" in name:
                raise ValueError(f"attribute {name!r} can't be the name of a file: rename it")
        tensors = {f"graph.{name}": value for name, value in self.graph_attrs.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in self.graph_attrs.items() if not isinstance(value, Tensor)}
        for name, value in plain.items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise TypeError(
                    f"graph-level attribute {name!r} of type {type(value).__name__} can't be saved: "
                    "remove it, or make it a tensor, number, string or a list or dict of these"
                ) from error
        arrays = {**dict(self._arrays()), **tensors}
        with new_folder(path) as folder:
            for name, tensor in arrays.items():
                write_array(folder, name, tensor)
            shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in arrays.items()}
            describe(folder, shapes, plain, self._num_edge_ids)

    @classmethod
    def open(cls, path: str | Path) -> "GraphStore":
        """Map the store in the folder `path` into memory: processes that open the same folder share one copy.

        Raises:
            FileNotFoundError: There is no store at `path`, or a file of it is missing.
            ValueError: The store has another version, or a file is not what its description says.
        """
        path = Path(path)
        loaded, graph_attrs, num_edge_ids = read_folder(path)

        def group(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): loaded[name] for name in loaded if name.startswith(prefix)}

        store = cls(
            loaded["colptr"],
            loaded["row"],
            loaded.get("edge_id"),
            node_attrs=group("node."),
            edge_attrs=group("edge."),
            graph_attrs={**group("graph."), **graph_attrs},
        )
        store._path = path.resolve()
        store._mapped = MappedFiles(store._path, loaded)
        store._own = dict(store.node_attrs)  # mapped copy-on-write
        store._num_edge_ids = num_edge_ids
        return store

    def update(
        self,
        edges_added: Tensor | np.ndarray | None = None,
        edges_removed: Tensor | np.ndarray | None = None,
        features: Mapping[str, tuple[Any, Any]] | None = None,
        edge_attrs: Mapping[str, Any] | None = None,
    ) -> None:
        """Change edges and rows of attributes, in place, which makes the next `version`.

        Edges are removed before others are added. Each column keeps the order of the edges that stay, and new ones come
        behind them in the order given, as if the graph was built anew. Ids of edges stay as they are; new edges get the
        next ones after the largest that any edge ever had.

        The cost is that of copying the topology once, and of what changes. Neither the tensors that the graph was made
        from nor mapped files are written to: an attribute is copied at its first change, but for node attributes that
        are mapped from a file, of which only the pages that change become private to this process.

        To be called between epochs, and not from two threads at once. Reading meanwhile is safe, but may see new rows
        in the old version. An update that raises an error leaves the graph as it was.

        Args:
            edges_added: (2, k) integers, sources first.
            edges_removed: (2, k) pairs (source, destination); all parallel edges between the two are removed.
            features: Node ids (m,) and rows (m, ...), by the name of a node attribute (`x`, `y`, a mask, ...).
            edge_attrs: Rows (k, ...) of the new edges, by the name of each edge attribute of the graph.

        Raises:
            TypeError: Ids are not integers, or rows are of another kind than the attribute (float into int).
            ValueError: A node is out of range or comes twice, a shape or a name is wrong, there is no edge between a
                pair of `edges_removed`, or ids no longer fit their dtype.
        """
        topology = self.topology
        removed = check_edges("edges_removed", edges_removed, self.num_nodes)
        added = check_edges("edges_added", edges_added, self.num_nodes)
        rows = check_features(features or {}, self.node_attrs)
        edge_rows = check_edge_rows(edge_attrs or {}, self.edge_attrs, added.shape[1])
        columns = changed_columns(removed, added)
        first_id = end_id = self._num_edge_ids
        if len(columns):
            first_id = first_id or next_edge_id(self.num_edges, self.edge_id, self.edge_attrs)
            end_id = first_id + added.shape[1]
            topology = Topology(*splice_edges(*topology[:3], removed, added, first_id), topology.version)
        room = extended(self.edge_attrs, edge_rows, self._room, first_id)
        own = {name: self._owned(name) for name in rows}

        # Nothing fails from here on. The version comes last: what is read before may be new, but never old after it.
        for name, (nodes, new) in rows.items():
            as_array(own[name])[nodes] = as_array(new)
        self._own.update(own)
        self.node_attrs.update(own)
        self._room.update(room)
        self.edge_attrs.update({name: buffer[:end_id] for name, buffer in room.items()})
        self._num_edge_ids = end_id
        self._log.append(Changes(columns, {name: np.sort(nodes) for name, (nodes, _) in rows.items()}))
        self.topology = topology._replace(version=topology.version + 1)

    def reading(self) -> AbstractContextManager[None]:
        """A section of a thread in which a mapped file that can't be read any more raises an error.

        Elsewhere, to touch a part that is missing, since the file was cut short or its disk fails, ends the process by
        SIGBUS. Within, it gives zeros, and the end of the section raises an OSError that names the file, as does that
        of each later one. Batches are sampled and prepared in such sections. On Linux, x86-64 and arm64.
        """
        return nullcontext() if self._mapped is None else self._mapped.reading()

    def changes(self, since: int) -> Changes:
        """What was changed after version `since`.

        Raises:
            ValueError: There is no such version.
        """
        if not 0 <= since <= self.version:
            raise ValueError(f"since={since}: give a version from 0 to {self.version}, the present one")
        return union(self._log[since : self.version])

    def node_file(self, name: str) -> tuple[Path, int] | None:
        """The file that holds the rows of a node attribute, and the byte at which the first row begins.

        None where there is none: the graph was not opened from a folder, or `update` has changed the attribute since,
        or it is empty.

        Raises:
            ValueError: There is no such attribute.
        """
        if name not in self.node_attrs:
            raise ValueError(f"name={name!r} is no node attribute: give one of {list(self.node_attrs)}")
        tensor = self.node_attrs[name]
        changed = any(name in change.rows for change in self._log)
        if self._path is None or changed or tensor is not self._own.get(name) or not tensor.numel():
            return None
        return first_row(self._path, f"node.{name}")

    def __reduce__(self) -> Any:
        if self._path is not None and not self.version:  # another process maps the files instead of getting a copy
            return GraphStore.open, (self._path,)
        return super().__reduce__()

    def __getstate__(self) -> dict[str, Any]:
        # Another process has no such mappings, and may share the memory of this one's tensors.
        return {**self.__dict__, "_path": None, "_mapped": None, "_own": {}, "_room": {}}

    def _owned(self, name: str) -> Tensor:
        """The node attribute `name`, or a copy of it, which can be written to."""
        tensor = self.node_attrs[name]
        return tensor if self._own.get(name) is tensor else copy_of(tensor)

    def _arrays(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("colptr", "row", "edge_id"):
            tensor = getattr(self.topology, name)
            if tensor is not None:
                yield name, tensor
        for name, tensor in self.node_attrs.items():
            yield f"node.{name}", tensor
        for name, tensor in self.edge_attrs.items():
            yield f"edge.{name}", tensor


def _check_edge_index(data: Data) -> Tensor:
    if isinstance(data, HeteroData):
        raise TypeError("data is a HeteroData: only homogeneous graphs are supported; data.to_homogeneous() makes one")
    if not isinstance(data, Data):
        raise TypeError(f"data is a {type(data).__name__}: give a torch_geometric.data.Data")
    edge_index = data.edge_index
    if edge_index is None:
        raise ValueError("data.edge_index is missing: give a (2, edges) integer tensor of sources and destinations")
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"data.edge_index is a {type(edge_index).__name__}: give a (2, edges) integer tensor")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"data.edge_index has shape {tuple(edge_index.shape)}: it must be (2, edges)")
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"data.edge_index has dtype {edge_index.dtype}: convert it with edge_index.long()")
    return edge_index.detach().cpu().as_subclass(Tensor)


def _check_range(edge_index: Tensor, num_nodes: int) -> None:
    if edge_index.numel() == 0 or (int(edge_index.min()) >= 0 and int(edge_index.max()) < num_nodes):
        return
    bad = int(((edge_index < 0) | (edge_index >= num_nodes)).any(0).nonzero()[0, 0])
    source, destination = edge_index[:, bad].tolist()
    raise ValueError(
        f"data.edge_index[:, {bad}] = ({source}, {destination}) is outside of the {num_nodes} nodes (0 to "
        f"{num_nodes - 1}): fix the edge, or set data.num_nodes if the graph has more nodes"
    )


def _check_attribute(name: str, value: Any, num_nodes: int, num_edges: int) -> None:
    """Refuse what can't be gathered, and what must have a row per node or edge, by its name, and has not."""
    if name in ("x", "y") or name.endswith("_mask"):
        rows, what = num_nodes, "nodes"
    elif name in ("edge_attr", "edge_weight"):
        rows, what = num_edges, "edges"
    else:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"data.{name} is a {type(value).__name__}: give a tensor")
    if value.layout != torch.strided:
        raise TypeError(f"data.{name} is sparse ({value.layout}): make it dense, data.{name}.to_dense()")
    if value.dim() == 0 or len(value) != rows:
        counts = f"{num_nodes} nodes" if what == "nodes" else f"{num_nodes} nodes and {num_edges} edges"
        raise ValueError(
            f"data.{name} has shape {tuple(value.shape)} in a graph of {counts}: its first dimension must be {rows}"
        )
