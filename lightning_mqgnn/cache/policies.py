"""Which rows a feature cache holds: the book-keeping of its policies, without the rows.

A batch is one step: it hits what was held when it began. After it, a policy decides which of its rows to take in, and
in whose place. Each access costs a few random entries of small tables; lists of slots are doubly linked, so that moving
one costs the same however many there are.
"""

import numpy as np

from lightning_mqgnn.compiled import kernel, prefetch

NEVER = 2**31 - 1  # the next use of what is not known to be read again
_AHEAD = 16  # accesses between a prefetch and its use
_NO = -1


class Directory:
    """Where the held rows are; this one holds what it was loaded with.

    Args:
        num_rows: Rows that may be held.
        num_nodes: Nodes of the graph.
    """

    slot_bytes = 4

    def __init__(self, num_rows: int, num_nodes: int) -> None:
        self.slot_of = np.full(num_nodes, _NO, np.int32)
        self.node_in = np.full(num_rows, _NO, np.int32 if num_nodes <= NEVER else np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, np.ndarray))

    def look_up(self, node: np.ndarray) -> np.ndarray:
        """The slots of the nodes that are held, -1 for the others: (nodes,) int32."""
        slot = np.empty(len(node), np.int32)
        look_up(node, self.slot_of, slot)
        return slot

    def step(
        self, node: np.ndarray, next_use: np.ndarray | None, opening: tuple[np.ndarray, np.ndarray, int] | None
    ) -> np.ndarray:
        """Go on by a batch, see `Access`, and return the slots that its nodes had before it."""
        if opening is not None:
            self.open(*opening)
        slot = self.look_up(node)
        self.take_in(node, slot, next_use)
        return slot

    def open(self, node: np.ndarray, first_use: np.ndarray, num_batches: int) -> None:
        """Be told, before a super-batch, how long it is and which of its batches reads each node first."""

    def take_in(self, node: np.ndarray, slot: np.ndarray, next_use: np.ndarray | None) -> None:
        """Be told of a batch's nodes, their slots before it, and the batches that read them next."""

    def load(self, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hold these nodes from now on; return those that were not held and the slots that they got."""
        stays = np.zeros(len(self.node_in), np.bool_)
        slot = self.look_up(node)
        stays[slot[slot >= 0]] = True
        leaving = self.node_in[~stays]
        self.slot_of[leaving[leaving >= 0]] = _NO
        self.node_in[~stays] = _NO
        new = node[slot < 0]
        slots = np.flatnonzero(~stays)[: len(new)]
        self.slot_of[new] = slots
        self.node_in[slots] = new
        return new, slots


class LeastRecentlyUsed(Directory):
    """Takes in every row, in place of the one that was not read for longest."""

    slot_bytes = 4 + 8

    def __init__(self, num_rows: int, num_nodes: int) -> None:
        super().__init__(num_rows, num_nodes)
        self._before = np.full(num_rows, _NO, np.int32)
        self._after = np.full(num_rows, _NO, np.int32)
        self._ends = np.full((1, 2), _NO, np.int32)
        self._used = np.zeros(1, np.int64)

    def take_in(self, node: np.ndarray, slot: np.ndarray, next_use: np.ndarray | None) -> None:
        """Make the batch's rows the most recent ones."""
        take_in_recent(node, self.slot_of, self.node_in, self._before, self._after, self._ends, self._used)


class Belady(Directory):
    """Holds the rows that are read again soonest (Belady, 1966), as far as that is known.

    After a batch it keeps, of what it held and what the batch read, the rows whose next use comes first; a row that
    another one would have to leave for is not taken in. Of rows with no known next use, those that were not read for
    longest leave first. What is known ends with the super-batch (Park et al., "Ginex", VLDB 2022); at the next one's
    opening the held rows get their next uses anew.
    """

    slot_bytes = 4 + 16

    def __init__(self, num_rows: int, num_nodes: int) -> None:
        super().__init__(num_rows, num_nodes)
        self._before = np.full(num_rows, _NO, np.int32)
        self._after = np.full(num_rows, _NO, np.int32)
        self._list = np.zeros(num_rows, np.int32)  # the list that each slot is in
        self._touched = np.zeros(num_rows, np.int32)
        self._ends = np.full((2, 2), _NO, np.int32)  # per list its first and last slot: never, batch 0, batch 1, ...
        self._state = np.zeros(3, np.int64)  # slots used, the last list that may hold any, steps

    def open(self, node: np.ndarray, first_use: np.ndarray, num_batches: int) -> None:
        """Give the held rows their next uses in the super-batch that begins."""
        self._forget()
        if num_batches + 1 > len(self._ends):
            more = np.full((num_batches + 1 - len(self._ends), 2), _NO, np.int32)
            self._ends = np.concatenate([self._ends, more])
        note_next_uses(node, first_use, self.slot_of, self._before, self._after, self._list, self._ends, self._state)

    def take_in(self, node: np.ndarray, slot: np.ndarray, next_use: np.ndarray | None) -> None:
        """Keep the rows that are read again soonest."""
        if next_use is None:
            next_use = np.full(len(node), NEVER, np.int32)
        take_in_soonest(
            node,
            slot,
            next_use,
            self.slot_of,
            self.node_in,
            self._before,
            self._after,
            self._list,
            self._touched,
            self._ends,
            self._state,
        )

    def _forget(self) -> None:
        """Let no row have a next use: a super-batch that was cut off has left some."""
        for name in range(1, int(self._state[1]) + 1):
            while self._ends[name, 0] != _NO:
                slot = self._ends[name, 0]
                move(slot, name, 0, self._before, self._after, self._ends)
                self._list[slot] = 0
        self._state[1] = 0


@kernel
def look_up(node: np.ndarray, slot_of: np.ndarray, slot: np.ndarray) -> None:
    """`slot[i] = slot_of[node[i]]`."""
    for i in range(len(node)):
        if i + _AHEAD < len(node):
            prefetch(slot_of, np.uint64(node[i + _AHEAD]))
        slot[i] = slot_of[np.uint64(node[i])]


@kernel
def _unlink(slot: int, name: int, before: np.ndarray, after: np.ndarray, ends: np.ndarray) -> None:
    if before[slot] == _NO:
        ends[name, 0] = after[slot]
    else:
        after[before[slot]] = after[slot]
    if after[slot] == _NO:
        ends[name, 1] = before[slot]
    else:
        before[after[slot]] = before[slot]


@kernel
def _append(slot: int, name: int, before: np.ndarray, after: np.ndarray, ends: np.ndarray) -> None:
    before[slot] = ends[name, 1]
    after[slot] = _NO
    if ends[name, 1] == _NO:
        ends[name, 0] = slot
    else:
        after[ends[name, 1]] = slot
    ends[name, 1] = slot


@kernel
def move(slot: int, source: int, target: int, before: np.ndarray, after: np.ndarray, ends: np.ndarray) -> None:
    """Take a slot out of a list and put it at the end of another."""
    _unlink(slot, source, before, after, ends)
    _append(slot, target, before, after, ends)


@kernel
def take_in_recent(
    node: np.ndarray,
    slot_of: np.ndarray,
    node_in: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    ends: np.ndarray,
    used: np.ndarray,
) -> None:
    """Make each node the most recent one, in order; the list begins with the least recent."""
    if len(node_in) == 0:
        return
    for i in range(len(node)):
        slot = slot_of[np.uint64(node[i])]
        if slot == _NO:
            if used[0] < len(node_in):
                slot = np.int32(used[0])
                used[0] += 1
            else:
                slot = ends[0, 0]
                slot_of[node_in[slot]] = _NO
                _unlink(slot, 0, before, after, ends)
            slot_of[np.uint64(node[i])] = slot
            node_in[slot] = node[i]
        else:
            _unlink(slot, 0, before, after, ends)
        _append(slot, 0, before, after, ends)


@kernel
def _list_for(next_use: int) -> int:
    return 0 if next_use == NEVER else next_use + 1


@kernel
def note_next_uses(
    node: np.ndarray,
    first_use: np.ndarray,
    slot_of: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    list_of: np.ndarray,
    ends: np.ndarray,
    state: np.ndarray,
) -> None:
    """Move the slots of held nodes to the lists of their first uses."""
    for i in range(len(node)):
        if i + _AHEAD < len(node):
            prefetch(slot_of, np.uint64(node[i + _AHEAD]))
        slot = slot_of[np.uint64(node[i])]
        if slot != _NO:
            name = _list_for(first_use[i])
            move(slot, 0, name, before, after, ends)
            list_of[slot] = name
            state[1] = max(state[1], name)


@kernel
def take_in_soonest(
    node: np.ndarray,
    slot: np.ndarray,
    next_use: np.ndarray,
    slot_of: np.ndarray,
    node_in: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    list_of: np.ndarray,
    touched: np.ndarray,
    ends: np.ndarray,
    state: np.ndarray,
) -> None:
    """Keep the rows whose next use comes first; see `Belady`."""
    if len(node_in) == 0:
        return
    state[2] += 1
    step = np.int32(state[2])
    for i in range(len(node)):  # first all that are held: where they go decides who may come in
        if slot[i] == _NO:
            continue
        name = _list_for(next_use[i])
        move(slot[i], list_of[slot[i]], name, before, after, ends)
        list_of[slot[i]] = name
        touched[slot[i]] = step
        state[1] = max(state[1], name)
    for i in range(len(node)):
        if slot[i] != _NO:
            continue
        name = _list_for(next_use[i])
        if state[0] < len(node_in):
            into = np.int32(state[0])
            state[0] += 1
        else:
            oldest = ends[0, 0]
            if oldest != _NO and (name > 0 or touched[oldest] != step):
                into = oldest
                _unlink(into, 0, before, after, ends)
            elif name == 0:
                continue
            else:
                while state[1] > 0 and ends[state[1], 0] == _NO:
                    state[1] -= 1
                if state[1] <= name:
                    continue
                into = ends[state[1], 0]
                _unlink(into, state[1], before, after, ends)
            slot_of[node_in[into]] = _NO
        slot_of[np.uint64(node[i])] = into
        node_in[into] = node[i]
        list_of[into] = name
        touched[into] = step
        _append(into, name, before, after, ends)
        state[1] = max(state[1], name)


@kernel
def find_next_uses(node: np.ndarray, number: int, table: np.ndarray, next_use: np.ndarray) -> None:
    """Going backwards through a super-batch: write when each node is read next, and note that this batch reads it."""
    for i in range(len(node)):
        if i + _AHEAD < len(node):
            prefetch(table, np.uint64(node[i + _AHEAD]))
        next_use[i] = table[np.uint64(node[i])]
        table[np.uint64(node[i])] = number


@kernel
def find_first_uses(
    node: np.ndarray, number: int, table: np.ndarray, out_node: np.ndarray, out_number: np.ndarray, begin: int
) -> int:
    """Going forwards: append the nodes that batch `number` is the first to read, and empty the table."""
    for i in range(len(node)):
        if i + _AHEAD < len(node):
            prefetch(table, np.uint64(node[i + _AHEAD]))
        if table[np.uint64(node[i])] == number:
            out_node[begin] = node[i]
            out_number[begin] = number
            begin += 1
            table[np.uint64(node[i])] = NEVER
    return begin
