"""How queues and threads are sized: a pure function of what was measured.

`decide` takes readings of one interval and the state that it returned before, and gives new sizes with reasons. It
looks at no clock and keeps nothing, so a run's decisions can be tested, and repeated from its log (`replay`).

The published text of MQ-GNN (arXiv:2601.04707) names adaptive queue sizes and gives no formula; this is our own:

1. Memory first, counted as if all queues were full. Above 90 % of a limit the last queue gives up as many items as
   bring it below 80 %, at once, then the one before it. Growing must leave it below 80 %, and below 60 % for a queue
   that had to shrink before.
2. A queue between two stages is too short where the one behind it ran dry and the one before it had no room, both
   within a few intervals: a longer one would have evened that out. It doubles.
3. Where the consumer ran dry and a queue would not help, the busiest stage gets one more thread, if the budget has one
   or another stage can do with one less. If the rate has not risen by then, the thread goes back, for good.

Sizes only grow without pressure, and each step must be earned by a measured lack; so under a steady load nothing
changes any more.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

LACKING = 0.01  # share of an interval that a wait must take to count
_HIGH, _LOW, _AGAIN = 0.9, 0.8, 0.6  # of a limit
_LATELY = 8  # intervals
_BUSY = 0.7  # share of its threads' time in which a stage works, for it to be what the others wait for
_IDLE = 0.5  # so busy would the threads that stay have to be at most, for one to leave
_GAIN = 1.05  # the rate that another thread must bring


@dataclass(frozen=True)
class StageReading:
    """A stage in one interval, and the queue behind it.

    Attributes:
        name: Of the stage.
        threads: That work in it.
        capacity: Items that its queue holds.
        busy: Share of the threads' time that went into work.
        starved: Share of the threads' time in which they waited for the stage before.
        blocked: Share of the threads' time in which they waited for room in the queue.
        item_bytes: Size of the largest item in the queue, as far as known.
        depth: Items in its queue at the end of the interval.
        memory: Where its items lie, a key of `Readings.memory`.
        serial: It can't have more than one thread.
    """

    name: str
    threads: int
    capacity: int
    busy: float
    starved: float
    blocked: float
    item_bytes: int = 0
    depth: int = 0
    memory: str = "host"
    serial: bool = False


@dataclass(frozen=True)
class Readings:
    """What was measured in one interval.

    Attributes:
        stages: Those with threads, in order.
        starved: Share of the interval in which the consumer waited for the last queue.
        items: That the consumer took.
        seconds: Length of the interval.
        memory: Bytes used and the limit, by place.
    """

    stages: tuple[StageReading, ...]
    starved: float
    items: int
    seconds: float
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)

    def committed(self, place: str) -> int:
        """Bytes that would be used there if all queues were full."""
        room = sum((stage.capacity - stage.depth) * stage.item_bytes for stage in self.stages if stage.memory == place)
        return self.memory[place][0] + max(room, 0)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Readings":
        """Undo `dataclasses.asdict`, also after a way through JSON."""
        stages = tuple(StageReading(**stage) for stage in fields["stages"])
        memory = {place: (used, limit) for place, (used, limit) in fields["memory"].items()}
        return cls(**{**fields, "stages": stages, "memory": memory})


@dataclass(frozen=True)
class Limits:
    """Between what `decide` may choose.

    Attributes:
        min: Smallest capacity of a queue.
        max: Largest capacity of a queue.
        threads: That all stages may have together.
    """

    min: int = 1
    max: int = 16
    threads: int = 2


@dataclass(frozen=True)
class Trial:
    """A thread on probation: who got it, from whom (None: the budget), and the rate before."""

    stage: str
    donor: str | None
    rate: float


@dataclass(frozen=True)
class State:
    """What `decide` remembers."""

    trial: Trial | None = None
    settled: frozenset[str] = frozenset()  # stages that another thread did not help
    shrunk: frozenset[str] = frozenset()  # queues that had to
    dry: dict[str, int] = field(default_factory=dict)  # by queue: intervals since what it feeds waited for it
    full: dict[str, int] = field(default_factory=dict)  # intervals since what fills it had no room


@dataclass(frozen=True)
class Change:
    """A new size of a stage's queue or another number of its threads, and why."""

    stage: str
    what: str  # "capacity" or "threads"
    before: int
    after: int
    reason: str


def decide(readings: Readings, state: State, limits: Limits) -> tuple[list[Change], State]:
    """Return what to change now, and the state for the next call.

    Raises:
        ValueError: A single item is larger than the limit.
    """
    for stage in readings.stages:
        _, limit = readings.memory.get(stage.memory, (0, 0))
        if limit and stage.item_bytes > limit:
            raise ValueError(
                f"memory_limit={limit}: one item behind stage {stage.name!r} has {stage.item_bytes} bytes; raise the "
                "limit, or lower batch_size or num_neighbors"
            )
    shrinking = _relieve(readings, limits)
    if shrinking:
        return shrinking, replace(state, shrunk=state.shrunk | {change.stage for change in shrinking})
    state = _remember(readings, state)
    changes = _lengthen(readings, state, limits)
    state = replace(state, dry={**state.dry, **{change.stage: _LATELY for change in changes}})
    more, state = _move_threads(readings, state, limits, is_settling=bool(changes))
    return [*changes, *more], state


def _relieve(readings: Readings, limits: Limits) -> list[Change]:
    """Shorten queues, from the last one on, until the memory that they may take is enough below the limit."""
    changes = []
    for place, (_, limit) in readings.memory.items():
        used = readings.committed(place)
        excess = used - _LOW * limit
        if used <= _HIGH * limit:
            continue
        for stage in reversed(readings.stages):
            if stage.memory != place or stage.capacity <= limits.min or excess <= 0 or not stage.item_bytes:
                continue
            items = min(int(-(-excess // stage.item_bytes)), stage.capacity - limits.min)
            excess -= items * stage.item_bytes
            reason = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB of {place} memory are in use or promised"
            changes.append(Change(stage.name, "capacity", stage.capacity, stage.capacity - items, reason))
    return changes


def _remember(readings: Readings, state: State) -> State:
    """Count the intervals since queues were dry, and full."""
    behind = [*(stage.starved for stage in readings.stages[1:]), readings.starved]
    dry, full = {}, {}
    for stage, starved in zip(readings.stages, behind, strict=True):
        dry[stage.name] = 0 if starved > LACKING else state.dry.get(stage.name, _LATELY) + 1
        full[stage.name] = 0 if stage.blocked > LACKING else state.full.get(stage.name, _LATELY) + 1
    return replace(state, dry=dry, full=full)


def _lengthen(readings: Readings, state: State, limits: Limits) -> list[Change]:
    """Double the queues that were both dry and full lately, dry just now."""
    changes = []
    committed = {place: readings.committed(place) for place in readings.memory}
    for stage in readings.stages:
        dry, full = state.dry[stage.name], state.full[stage.name]
        capacity = min(2 * stage.capacity, limits.max)
        needed = (capacity - stage.capacity) * stage.item_bytes
        lacks = dry == 0 and full < _LATELY
        used, limit = committed.get(stage.memory, 0) + needed, readings.memory.get(stage.memory, (0, 0))[1]
        fits = not limit or used <= (_AGAIN if stage.name in state.shrunk else _LOW) * limit
        if lacks and fits and capacity > stage.capacity:
            committed[stage.memory] = used
            reason = f"what it feeds waited for it, and {full} intervals before it was full"
            changes.append(Change(stage.name, "capacity", stage.capacity, capacity, reason))
    return changes


def _move_threads(readings: Readings, state: State, limits: Limits, is_settling: bool) -> tuple[list[Change], State]:
    """Judge the thread on probation, or give one to the stage that the others wait for."""
    by_name = {stage.name: stage for stage in readings.stages}
    rate = readings.items / readings.seconds if readings.seconds else 0.0
    trial = state.trial
    if trial is not None:
        state = replace(state, trial=None)
        if rate >= _GAIN * trial.rate or trial.stage not in by_name:
            return [], state
        stage = by_name[trial.stage]
        reason = f"it brought {rate:.1f} items/s where there were {trial.rate:.1f}"
        changes = [Change(stage.name, "threads", stage.threads, max(stage.threads - 1, 1), reason)]
        if trial.donor in by_name:
            lender = by_name[trial.donor]
            changes.append(Change(lender.name, "threads", lender.threads, lender.threads + 1, reason))
        return changes, replace(state, settled=state.settled | {stage.name})
    if is_settling or readings.starved <= LACKING or not readings.stages or not readings.items:
        return [], state
    slowest = max(readings.stages, key=lambda stage: stage.busy)
    if slowest.serial or slowest.busy < _BUSY or slowest.name in state.settled:
        return [], state
    donor = None
    if sum(stage.threads for stage in readings.stages) >= limits.threads:
        donor = _donor(readings, slowest)
        if donor is None:
            return [], state
    reason = f"it is busy {slowest.busy:.0%} of the time, and training waits {readings.starved:.0%} of it"
    changes = [Change(slowest.name, "threads", slowest.threads, slowest.threads + 1, reason)]
    if donor is not None:
        changes.append(Change(donor.name, "threads", donor.threads, donor.threads - 1, reason))
    return changes, replace(state, trial=Trial(slowest.name, None if donor is None else donor.name, rate))


def _donor(readings: Readings, slowest: StageReading) -> StageReading | None:
    """The stage that is least busy and would still be idle half of the time with a thread less."""
    willing = [
        stage
        for stage in readings.stages
        if stage.name != slowest.name
        and stage.threads > 1
        and stage.busy * stage.threads / (stage.threads - 1) <= _IDLE
    ]
    return min(willing, key=lambda stage: stage.busy, default=None)


def log_line(readings: Readings, limits: Limits, changes: Iterable[Change]) -> str:
    """One line of JSON for a log that `replay` reads."""
    return json.dumps(
        {"readings": asdict(readings), "limits": asdict(limits), "changes": [asdict(change) for change in changes]}
    )


def replay(lines: Iterable[str]) -> Iterator[tuple[list[Change], list[Change]]]:
    """Decide again from the lines of a log; yields what was changed then, and what would be changed now."""
    state = State()
    for line in lines:
        entry = json.loads(line)
        changes, state = decide(Readings.from_dict(entry["readings"]), state, Limits(**entry["limits"]))
        yield [Change(**change) for change in entry["changes"]], changes
