"""The loops that touch the graph, compiled by numba; they release the GIL, so threads run them side by side.

Each is bound by cache misses, not by arithmetic: a random entry of a large array costs some 80 ns when it is asked
for at the moment of use and a few ns when it was prefetched a dozen entries earlier. So the loops work in passes and
prefetch what the next pass, or a later turn of the same pass, reads.

Indices that come from arrays are made unsigned: numba would look at each signed one whether it counts from the end.

Compiled code is kept on disk beside this file (numba's cache), once per machine and combination of dtypes.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lightning_mqgnn.compiled import CACHE_LINE, kernel, prefetch, stream_line, streamed

_BLOCK = 64  # frontier nodes handled per pass: their edges stay in the L1 cache between the passes
_AHEAD = 16  # rows between a prefetch and its use
_ENTRIES_AHEAD = 32  # the same for single entries
_STREAMED = 4 * 2**20  # bytes: what is smaller is still in a cache when it is used


@kernel
def mix64(value: np.uint64) -> np.uint64:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits that scatters near inputs."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scattered: np.uint64 = value ^ (value >> np.uint64(31))
    return scattered


@kernel
def _below(state: np.uint64, bound: np.int64) -> np.int64:
    """A uniform integer in [0, bound) from a random state; the bias is below bound / 2**32."""
    scaled: np.int64 = np.int64(((mix64(state) >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))
    return scaled


@kernel
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


@kernel
def _chance(state: np.uint64, probability: float) -> np.int64:
    """1 with `probability`, else 0, from a random state."""
    happens: np.int64 = np.int64(np.float64(mix64(state) >> np.uint64(11)) * 2.0**-53 < probability)
    return happens


@kernel
def _skip(position: np.ndarray, first: np.int64, length: np.int64, start: np.int64, rank: np.int64) -> np.int64:
    """The `rank`-th number from `start` on that is not among the ascending `position[first : first + length]`.

    A bisection without branches: which way it goes is random, so a processor would guess half of them wrong.
    """
    passed = np.int64(0)  # how many of `position` lie before the number
    while length > 0:
        half = length >> 1
        before = np.int64(position[np.uint64(first + passed + half)]) - start - passed - half <= rank
        passed = passed + half + 1 if before else passed
        length = length - half - 1 if before else half
    skipped: np.int64 = start + rank + passed
    return skipped


@kernel
def _draw_biased(
    state: np.uint64,
    start: np.int64,
    degree: np.int64,
    count: np.int64,
    replace: bool,
    bias: float,
    cached_position: np.ndarray,
    first_cached: np.int64,
    num_cached: np.int64,
    out: np.ndarray,
    out_weight: np.ndarray,
    at: np.int64,
) -> None:
    """Like `_draw`, but a cached neighbour, one in `cached_position`, is `bias` times as likely as another.

    How many draws are expected from either part follows from `bias` and from the sizes of the parts. Without
    replacement, that is rounded up or down at random, so that it holds exactly, and within a part every subset is
    equally likely. A neighbour is then drawn (expected / size of its part) times on average, and its weight is
    `count / degree` over that: the mean of weight * h over the draws has the expectation of the mean of h over all
    neighbours (Horvitz and Thompson, 1952).

    Cost above that of `_draw`: for a draw from the cached ones an entry of `cached_position`, else a bisection.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    num_rest = degree - num_cached
    weighed_rest = num_rest / bias
    cached = count * num_cached / (num_cached + weighed_rest)  # how many draws are expected from either part
    rest = count * weighed_rest / (num_cached + weighed_rest)
    from_rest = np.int64(0)
    if replace:
        for _ in range(count):
            state += golden
            from_rest += _chance(state, rest / count)
    else:
        cached = min(cached, np.float64(num_cached))
        rest = max(rest, np.float64(count - num_cached))
        # At most num_rest, as bias >= 1 and count < degree, so each part holds what either rounding asks of it.
        from_rest += np.int64(rest)
        from_rest += _chance(state, rest - from_rest)
    middle = at + count - from_rest
    end = at + count
    _draw(mix64(state + np.uint64(1)), 0, num_cached, count - from_rest, replace, out, at)
    _draw(mix64(state + np.uint64(2)), 0, num_rest, from_rest, replace, out, middle)
    for i in range(at, middle):
        out[i] = cached_position[np.uint64(first_cached + out[i])]
        out_weight[i] = count * num_cached / (degree * cached)
    for i in range(middle, end):
        out[i] = _skip(cached_position, first_cached, num_cached, start, out[i])
        out_weight[i] = count * num_rest / (degree * rest)


@kernel
def sample_neighbors(
    colptr: np.ndarray,
    row: np.ndarray,
    fanouts: np.ndarray,
    replace: bool,
    bias: float | None,
    cached_ptr: np.ndarray | None,
    cached_position: np.ndarray | None,
    key: np.uint64,
    num_seeds: int,
    tag: int,
    table: np.ndarray,
    node: np.ndarray,
    neighbor: np.ndarray,
    out_colptr: np.ndarray,
    out_row: np.ndarray,
    out_position: np.ndarray,
    out_weight: np.ndarray | None,
    hop_nodes: np.ndarray,
    hop_edges: np.ndarray,
) -> bool:
    """Sample the message-flow block of the seeds in `node[:num_seeds]`, hop by hop.

    The nodes found are appended to `node` in order of discovery; `out_row` gets the local id of each edge's source and
    `out_position` its place in `row`; `out_colptr[i]` is the first edge into local node `i`. `hop_nodes` (hops + 1)
    and `hop_edges` (hops) get the counts per hop.

    `table` has an entry per node of the graph: the tag of the batch that last saw the node in the upper half, its local
    id there in the lower half. A new tag empties it at no cost.

    The draws for a node depend on `key`, the hop and the node's id alone, and with `bias` on the cached edges. These
    are, for node `v`, `cached_position[cached_ptr[v] : cached_ptr[v + 1]]`; `out_weight` gets the importance weights.
    Without bias all four are None, and the code for them is not compiled.

    Cost per edge: one random entry each of `row` and `table`; per frontier node two neighbouring ones of `colptr`. With
    bias also, per frontier node, two of `cached_ptr`, and per edge one of `cached_position` or a bisection in it.

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
                    prefetch(colptr, node[i + _AHEAD])
                    if cached_ptr is not None:
                        prefetch(cached_ptr, node[i + _AHEAD])
                if cached_ptr is not None and i + _AHEAD // 2 < end:  # by now its entry of cached_ptr is here
                    prefetch(cached_position, cached_ptr[np.uint64(node[i + _AHEAD // 2])])
                start = np.int64(colptr[np.uint64(node[i])])
                # Below 0 only where a part of a mapped file was lost: then nothing may be written out of place.
                degree = max(np.int64(colptr[np.uint64(node[i]) + np.uint64(1)]) - start, 0)
                out_colptr[i] = num_edges
                take_all = fanout < 0 or (degree <= fanout and not replace)
                count = degree if take_all else (fanout if degree > 0 else 0)
                if num_edges + count > room or num_nodes + (num_edges - first) + count >= len(node):
                    return False
                if take_all:
                    for j in range(count):
                        out_position[num_edges + j] = start + j
                    if out_weight is not None:
                        for j in range(count):
                            out_weight[num_edges + j] = 1
                else:
                    state = mix64(hop_key ^ np.uint64(node[i]))
                    if cached_ptr is None:
                        _draw(state, start, degree, count, replace, out_position, num_edges)
                    else:
                        first_cached = np.int64(cached_ptr[np.uint64(node[i])])
                        num_cached = np.int64(cached_ptr[np.uint64(node[i]) + np.uint64(1)]) - first_cached
                        _draw_biased(
                            state,
                            start,
                            degree,
                            count,
                            replace,
                            bias,
                            cached_position,
                            first_cached,
                            num_cached,
                            out_position,
                            out_weight,
                            num_edges,
                        )
                for j in range(num_edges, num_edges + count):
                    prefetch(row, out_position[j])
                num_edges += count
            first_edge = np.uint64(first)
            for j in range(first_edge, np.uint64(num_edges)):
                source = row[np.uint64(out_position[j])]
                neighbor[j - first_edge] = source
                prefetch(table, source)
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


@kernel
def count_sources(row: np.ndarray, out: np.ndarray) -> None:
    """Add to `out[u]` how often node `u` is the source of an edge. Cost: a random entry of `out` per edge."""
    num_edges = np.uint64(len(row))
    for i in range(num_edges):
        if i + np.uint64(_ENTRIES_AHEAD) < num_edges:
            prefetch(out, np.uint64(row[i + np.uint64(_ENTRIES_AHEAD)]))
        out[np.uint64(row[i])] += 1


@kernel
def find_edges_from(
    chosen: np.ndarray, colptr: np.ndarray, row: np.ndarray, out_ptr: np.ndarray, out_position: np.ndarray
) -> None:
    """Write the places of the edges from `chosen` nodes (a flag per node) to `out_position`, by destination.

    Those into node `v` are `out_position[out_ptr[v] : out_ptr[v + 1]]`, in ascending order.

    Cost per edge: one random byte of `chosen`, beside a pass over `row`.
    """
    num_edges = len(row)
    room = np.uint64(len(out_position))  # too little only where a part of a mapped file was lost
    found = np.uint64(0)
    for node in range(len(colptr) - 1):
        out_ptr[node] = found
        for i in range(colptr[node], colptr[node + 1]):
            if i + _ENTRIES_AHEAD < num_edges:
                prefetch(chosen, np.uint64(row[i + _ENTRIES_AHEAD]))
            if chosen[np.uint64(row[i])] and found < room:
                out_position[found] = i
                found += np.uint64(1)
    out_ptr[len(colptr) - 1] = found


@kernel
def gather_rows(source: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """`out[i] = source[index[i]]` for two-dimensional, contiguous arrays; rows are prefetched ahead of their use.

    A large `out` is written past the caches, if it begins at a cache line: some rows are put side by side in the L1
    cache, as many as fill whole lines, and go to memory line by line.

    Cost: one random row of `source` and one streamed row of `out` per index.
    """
    width = np.uint64(source.shape[1])
    in_line = np.uint64(max(1, CACHE_LINE // source.itemsize))
    from_flat = source.reshape(-1)
    to_flat = out.reshape(-1)
    num_rows = np.uint64(len(index))
    streams = out.nbytes >= _STREAMED and out.ctypes.data % CACHE_LINE == 0
    group = in_line if streams else max(num_rows, np.uint64(1))
    target = np.empty(group * width, out.dtype) if streams else to_flat
    for first in range(np.uint64(0), num_rows, group):
        last = min(first + group, num_rows)
        for i in range(first, last):
            if i + np.uint64(_AHEAD) < num_rows:
                ahead = np.uint64(index[i + np.uint64(_AHEAD)]) * width
                for j in range(np.uint64(0), width, in_line):
                    prefetch(from_flat, ahead + j)
            begin = np.uint64(index[i]) * width
            into = (i - first) * width
            for j in range(width):
                target[into + j] = from_flat[begin + j]
        if streams:
            into = first * width
            rest = (last - first) * width
            lines = rest // in_line * in_line
            for j in range(np.uint64(0), lines, in_line):
                stream_line(target, j, to_flat, into + j)
            for j in range(lines, rest):
                to_flat[into + j] = target[j]
    if streams:
        streamed()


@kernel
def copy_rows(source: np.ndarray, index: np.ndarray, out: np.ndarray, into: np.ndarray) -> None:
    """`out[into[i]] = source[index[i]]` for two-dimensional, contiguous arrays, prefetched like `gather_rows`."""
    width = np.uint64(source.shape[1])
    step = np.uint64(max(1, CACHE_LINE // source.itemsize))
    from_flat = source.reshape(-1)
    to_flat = out.reshape(-1)
    num_rows = np.uint64(len(index))
    for i in range(num_rows):
        if i + np.uint64(_AHEAD) < num_rows:
            ahead = np.uint64(index[i + np.uint64(_AHEAD)]) * width
            for j in range(np.uint64(0), width, step):
                prefetch(from_flat, ahead + j)
        begin = np.uint64(index[i]) * width
        to = np.uint64(into[i]) * width
        for j in range(width):
            to_flat[to + j] = from_flat[begin + j]


@kernel
def gather_entries(source: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """`out[i] = source[index[i]]` for one-dimensional arrays, widened to the dtype of `out`."""
    num_entries = np.uint64(len(index))
    for i in range(num_entries):
        if i + np.uint64(_ENTRIES_AHEAD) < num_entries:
            prefetch(source, np.uint64(index[i + np.uint64(_ENTRIES_AHEAD)]))
        out[i] = source[np.uint64(index[i])]


@kernel
def expand_edges(colptr: np.ndarray, row: np.ndarray, out: np.ndarray) -> None:
    """Write a block's edges as `out[0]` (source) and `out[1]` (destination) from its `colptr` and `row`."""
    for i in range(len(colptr) - 1):
        for j in range(colptr[i], colptr[i + 1]):
            out[0, j] = row[j]
            out[1, j] = i


def compiled_before(loop: Any) -> bool:
    """Whether the disk cache holds code for `loop` that is newer than this file."""
    folder = Path(loop.stats.cache_path)
    written = [path.stat().st_mtime for path in folder.glob(f"{Path(__file__).stem}.{loop.py_func.__name__}-*.nbi")]
    return bool(written) and max(written) >= Path(__file__).stat().st_mtime
