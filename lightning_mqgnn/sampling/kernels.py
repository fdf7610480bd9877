"""The loops that touch the graph, compiled by numba; they release the GIL, so threads run them side by side.

Each is bound by cache misses, not by arithmetic: a random entry of a large array costs some 80 ns when it is asked
for at the moment of use and a few ns when it was prefetched a dozen entries earlier. So the loops work in passes and
prefetch what the next pass, or a later turn of the same pass, reads.

Indices that come from arrays are made unsigned: numba would look at each signed one whether it counts from the end.

Compiled code is kept on disk beside this file (numba's cache), once per machine and combination of dtypes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_BLOCK = 64  # frontier nodes handled per pass: their edges stay in the L1 cache between the passes
_AHEAD = 16  # rows between a prefetch and its use
_ENTRIES_AHEAD = 32  # the same for single entries
_CACHE_LINE = 64  # bytes


def _kernel(function: Callable[..., Any]) -> Any:
    return numba.njit(nogil=True, cache=True, error_model="numpy")(function)


def _compile_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of `array[index]` (one-dimensional, contiguous) without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        offset = context.cast(builder, arguments[1], signature.args[1], types.intp)
        byte_pointer = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32]), "llvm.prefetch.p0"
        )
        address = builder.bitcast(builder.gep(data, [offset]), byte_pointer)
        # To the L2 cache: a core has many more misses under way to there than to L1.
        builder.call(function, [address, int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


_prefetch: Any = intrinsic(_compile_prefetch)


@_kernel
def mix64(value: np.uint64) -> np.uint64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits that scatters near inputs."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scattered: np.uint64 = value ^ (value >> np.uint64(31))
    return scattered


@_kernel
def _below(state: np.uint64, bound: np.int64) -> np.int64:
    """A uniform integer in [0, bound) from a random state; the bias is below bound / 2**32."""
    scaled: np.int64 = np.int64(((mix64(state) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))
    return scaled


@_kernel
def _draw(
    state: np.uint64, start: np.int64, degree: np.int64, count: np.int64, replace: bool, out: np.ndarray, at: np.int64
) -> None:
    """Write `count` positions out of [start, start + degree) to `out[at:]`.

    Without replacement every subset is equally likely (Floyd's algorithm, Bentley and Floyd 1987), with a bit mask for
    degrees up to 64 and a scan of what was drawn above; where the scan would cost more than a pass over the
    neighbours, one pass selects them in order instead (Knuth, TAOCP 2, algorithm S).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    if replace:
        for i in range(count):
            state += golden
            out[at + i] = start + _below(state, degree)
    elif degree <= 64:
        taken = np.uint64(0)
        for i in range(count):
            last = degree - count + i
            state += golden
            pick = _below(state, last + 1)
            if (taken >> np.uint64(pick)) & np.uint64(1):
                pick = last
            taken |= np.uint64(1) << np.uint64(pick)
            out[at + i] = start + pick
    elif count * count < 8 * degree:
        for i in range(count):
            last = degree - count + i
            state += golden
            pick = start + _below(state, last + 1)
            for j in range(at, at + i):
                if out[j] == pick:
                    pick = start + last
                    break
            out[at + i] = pick
    else:
        found = 0
        for i in range(degree):
            state += golden
            if _below(state, degree - i) < count - found:
                out[at + found] = start + i
                found += 1


@_kernel
def sample_neighbors(
    colptr: np.ndarray,
    row: np.ndarray,
    fanouts: np.ndarray,
    replace: bool,
    key: np.uint64,
    num_seeds: int,
    tag: int,
    table: np.ndarray,
    node: np.ndarray,
    neighbor: np.ndarray,
    out_colptr: np.ndarray,
    out_row: np.ndarray,
    out_position: np.ndarray,
    hop_nodes: np.ndarray,
    hop_edges: np.ndarray,
) -> bool:
    """Sample the message-flow block of the seeds in `node[:num_seeds]`, hop by hop.

    The nodes found are appended to `node` in order of discovery; `out_row` gets the local id of each edge's source and
    `out_position` its place in `row`; `out_colptr[i]` is the first edge into local node `i`. `hop_nodes` (hops + 1)
    and `hop_edges` (hops) get the counts per hop.

    `table` has an entry per node of the graph: the tag of the batch that last saw the node in the upper half, its local
    id there in the lower half. A new tag empties it at no cost.

    The draws for a node depend on `key`, the hop and the node's id alone.

    Cost per edge: one random entry each of `row` and `table`; per frontier node two neighbouring ones of `colptr`.

    Returns:
        Whether the output arrays were long enough; if not, their content is void.
    """
    mask = np.int64(0xFFFFFFFF)
    stamp = np.int64(tag) << np.int64(32)
    room = len(out_row)
    for i in range(num_seeds):  # a seed that comes twice keeps its place; edges refer to the first
        seed = node[i]
        if table[seed] >> np.int64(32) != tag:
            table[seed] = stamp | np.int64(i)
    hop_nodes[0] = num_seeds
    num_nodes = num_seeds
    num_edges = 0
    begin = 0
    for hop in range(len(fanouts)):
        fanout = fanouts[hop]
        end = num_nodes
        edges_before = num_edges
        hop_key = mix64(key + np.uint64(hop + 1) * np.uint64(0xD1B54A32D192ED03))
        for block in range(begin, end, _BLOCK):
            block_end = min(block + _BLOCK, end)
            first = num_edges
            for i in range(block, block_end):
                if i + _AHEAD < end:
                    _prefetch(colptr, node[i + _AHEAD])
                start = np.int64(colptr[np.uint64(node[i])])
                degree = np.int64(colptr[np.uint64(node[i]) + np.uint64(1)]) - start
                out_colptr[i] = num_edges
                take_all = fanout < 0 or (degree <= fanout and not replace)
                count = degree if take_all else (fanout if degree > 0 else 0)
                if num_edges + count > room or num_nodes + (num_edges - first) + count >= len(node):
                    return False
                if take_all:
                    for j in range(count):
                        out_position[num_edges + j] = start + j
                else:
                    state = mix64(hop_key ^ np.uint64(node[i]))
                    _draw(state, start, degree, count, replace, out_position, num_edges)
                for j in range(num_edges, num_edges + count):
                    _prefetch(row, out_position[j])
                num_edges += count
            first_edge = np.uint64(first)
            for j in range(first_edge, np.uint64(num_edges)):
                source = row[np.uint64(out_position[j])]
                neighbor[j - first_edge] = source
                _prefetch(table, source)
            for j in range(first_edge, np.uint64(num_edges)):
                source = neighbor[j - first_edge]
                entry = table[np.uint64(source)]
                known = entry >> np.int64(32) == tag
                local = entry & mask if known else np.int64(num_nodes)
                table[np.uint64(source)] = stamp | local
                node[np.uint64(num_nodes)] = source  # overwritten by the next new node if this one is known
                num_nodes += 0 if known else 1
                out_row[j] = local
        begin = end
        hop_nodes[hop + 1] = num_nodes - end
        hop_edges[hop] = num_edges - edges_before
    out_colptr[begin] = num_edges
    return True


@_kernel
def gather_rows(source: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """`out[i] = source[index[i]]` for two-dimensional, contiguous arrays; rows are prefetched ahead of their use.

    Cost: one random row of `source` and one streamed row of `out` per index.
    """
    width = np.uint64(source.shape[1])
    step = np.uint64(max(1, _CACHE_LINE // source.itemsize))
    from_flat = source.reshape(-1)
    to_flat = out.reshape(-1)
    num_rows = np.uint64(len(index))
    for i in range(num_rows):
        if i + np.uint64(_AHEAD) < num_rows:
            ahead = np.uint64(index[i + np.uint64(_AHEAD)]) * width
            for j in range(np.uint64(0), width, step):
                _prefetch(from_flat, ahead + j)
        begin = np.uint64(index[i]) * width
        into = np.uint64(i) * width
        for j in range(width):
            to_flat[into + j] = from_flat[begin + j]


@_kernel
def gather_entries(source: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """`out[i] = source[index[i]]` for one-dimensional arrays, widened to the dtype of `out`."""
    num_entries = np.uint64(len(index))
    for i in range(num_entries):
        if i + np.uint64(_ENTRIES_AHEAD) < num_entries:
            _prefetch(source, np.uint64(index[i + np.uint64(_ENTRIES_AHEAD)]))
        out[i] = source[np.uint64(index[i])]


@_kernel
def expand_edges(colptr: np.ndarray, row: np.ndarray, out: np.ndarray) -> None:
    """Write a block's edges as `out[0]` (source) and `out[1]` (destination) from its `colptr` and `row`."""
    for i in range(len(colptr) - 1):
        for j in range(colptr[i], colptr[i + 1]):
            out[0, j] = row[j]
            out[1, j] = i


def compiled_before(kernel: Any) -> bool:
    """Whether the disk cache holds code for `kernel` that is newer than this file."""
    folder = Path(kernel.stats.cache_path)
    written = [path.stat().st_mtime for path in folder.glob(f"{Path(__file__).stem}.{kernel.py_func.__name__}-*.nbi")]
    return bool(written) and max(written) >= Path(__file__).stat().st_mtime
