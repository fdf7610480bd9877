"""The folder of a saved graph: an `.npy` file per array, and `graph.json`, which says what they are."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mqgnn.graph.memory import expect_random_reads

_FORMAT = "lightning_mqgnn graph"
_VERSION = 1
_DESCRIPTION = "graph.json"
_INT32_LIMIT = 2**31 - 1


def id_dtype(count: int) -> torch.dtype:
    """The narrowest dtype for ids below `count`."""
    return torch.int32 if count <= _INT32_LIMIT else torch.int64


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give out a folder to write to, which gets its name `path` when the block ends well, and is removed if not.

    Raises:
        FileExistsError: `path` exists.
    """
    if path.exists():
        raise FileExistsError(f"path={str(path)!r} exists: remove it or save the graph elsewhere")
    unfinished = path.with_name(path.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a process that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def describe(
    folder: Path,
    arrays: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    graph_attrs: Mapping[str, Any],
    num_edge_ids: int = 0,
) -> None:
    """Write `graph.json`: dtype and shape of each array, and the graph-level attributes that are no tensors.

    `num_edge_ids` is how many edges the graph ever had; 0 if the arrays tell.
    """
    entries = {
        name: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}
        for name, (dtype, shape) in arrays.items()
    }
    description: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "arrays": entries,
        "graph_attrs": dict(graph_attrs),
    }
    if num_edge_ids:
        description["num_edge_ids"] = num_edge_ids
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1))


def write_array(folder: Path, name: str, tensor: Tensor) -> None:
    """Write one array."""
    np.save(folder / f"{name}.npy", as_array(tensor))


def as_array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor as an array; bfloat16, which NumPy does not have, as int16."""
    array: np.ndarray = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def read_folder(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Map the arrays of a saved graph; return them, the other graph-level attributes, and `num_edge_ids`.

    Raises:
        FileNotFoundError: There is no graph at `path`, or a file of it is missing.
        ValueError: The graph has another version, or a file is not what its description says.
    """
    if not (path / _DESCRIPTION).is_file():
        raise FileNotFoundError(f"path={str(path)!r} is no graph store: it holds no {_DESCRIPTION}")
    try:
        description = json.loads((path / _DESCRIPTION).read_text())
    except ValueError as error:
        raise ValueError(f"{str(path / _DESCRIPTION)!r} can't be read ({error}): save the graph again") from error
    if (description.get("format"), description.get("version")) != (_FORMAT, _VERSION):
        raise ValueError(
            f"path={str(path)!r} has format {description.get('format')!r}, version {description.get('version')!r}; "
            f"this release reads {_FORMAT!r}, version {_VERSION}. Save the graph again with this release"
        )
    arrays = {name: _map(path / f"{name}.npy", **entry) for name, entry in description["arrays"].items()}
    for name in ("colptr", "row"):
        if name not in arrays:
            raise ValueError(f"{str(path / _DESCRIPTION)!r} does not list {name}: save the graph again")
    if int(arrays["colptr"][-1]) != len(arrays["row"]):
        raise ValueError(f"path={str(path)!r}: colptr does not end with the number of edges, save the graph again")
    return arrays, description["graph_attrs"], description.get("num_edge_ids", 0)


def first_row(path: Path, name: str) -> tuple[Path, int]:
    """The file of an array of a saved graph that is not empty, and the byte at which its values begin."""
    file = path / f"{name}.npy"
    return file, int(np.load(file, mmap_mode="r").offset)


def _map(file: Path, dtype: str, shape: list[int]) -> Tensor:
    if not file.is_file():
        raise FileNotFoundError(f"{str(file)!r} is missing: the graph store is damaged, save the graph again")
    try:
        # Copy-on-write: pages are shared until somebody writes to them, and the file is never changed.
        array = np.load(file, mmap_mode="c" if 0 not in shape else None, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{str(file)!r} can't be read ({error}): save the graph again") from error
    tensor = torch.from_numpy(array)
    expect_random_reads(tensor)
    if dtype == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    if tensor.dtype != getattr(torch, dtype, None) or list(tensor.shape) != shape:
        raise ValueError(
            f"{str(file)!r} holds {tensor.dtype} {tuple(tensor.shape)} where {_DESCRIPTION} says {dtype} "
            f"{tuple(shape)}: save the graph again"
        )
    return tensor
