"""A pipeline in simulated time: stages with threads, queues of a capacity that may change, a consumer."""

import heapq
import itertools
from collections.abc import Callable

from lightning_mqgnn.sizing import Readings, StageReading, State, decide


class SimulatedStage:
    """`duration(number)` is how long item `number` takes, in seconds."""

    def __init__(
        self,
        name: str,
        duration: Callable[[int], float],
        capacity: int = 2,
        threads: int = 1,
        item_bytes=0,
        serial=False,
    ):
        self.name, self.duration, self.capacity, self.threads = name, duration, capacity, threads
        self.item_bytes, self.serial = item_bytes, serial
        self.begun = self.taken = 0  # items that threads began, and that the stage behind has taken
        self.working: set[int] = set()
        self.finished: dict[int, float] = {}  # and not yet in the queue, since there is no room
        self.queue: set[int] = set()
        self.busy = self.starved = self.blocked = 0.0


class Simulation:
    """Runs until the consumer has taken `num_items`; calls `decide` every `interval` seconds if there are `limits`."""

    def __init__(self, stages, consume, num_items, limits=None, interval=2.0, other_memory=None, memory_limit=0):
        self.stages, self.consume, self.num_items = stages, consume, num_items
        self.limits, self.interval = limits, interval
        self.other_memory, self.memory_limit = other_memory or (lambda now: 0), memory_limit
        self.now = self.idle = 0.0
        self.consumed = 0
        self.changes = []
        self.idle_at, self.most_memory = [], 0

    def memory(self):
        items = sum(stage.item_bytes * (len(stage.queue) + len(stage.finished)) for stage in self.stages)
        return items + self.other_memory(self.now)

    def run(self):
        order = itertools.count()
        events = [(self.interval, next(order), "decide", None, None)] if self.limits else []
        consuming, state = False, State()
        marks = (0.0, 0)
        while self.consumed < self.num_items:
            moved = True
            while moved:  # everything that can begin now
                moved = False
                for i, stage in enumerate(self.stages):
                    for number in sorted(stage.finished):
                        if number < stage.taken + stage.capacity:
                            del stage.finished[number]
                            stage.queue.add(number)
                            moved = True
                    source = self.stages[i - 1] if i else None
                    ready = source is None or stage.begun in source.queue
                    if ready and len(stage.working) + len(stage.finished) < stage.threads:
                        number, stage.begun = stage.begun, stage.begun + 1
                        if source is not None:
                            source.queue.remove(number)
                            source.taken = number + 1
                        stage.working.add(number)
                        heapq.heappush(events, (self.now + stage.duration(number), next(order), "done", stage, number))
                        moved = True
                final = self.stages[-1]
                if not consuming and final.taken in final.queue:
                    final.queue.remove(final.taken)
                    heapq.heappush(events, (self.now + self.consume(final.taken), next(order), "consumed", None, None))
                    final.taken += 1
                    consuming = moved = True
                self.most_memory = max(self.most_memory, self.memory())
            time, _, what, stage, number = heapq.heappop(events)
            passed, self.now = time - self.now, time
            self.idle += passed * (not consuming)
            for each in self.stages:
                each.busy += passed * len(each.working)
                each.blocked += passed * len(each.finished)
                each.starved += passed * max(each.threads - len(each.working) - len(each.finished), 0)
            self.most_memory = max(self.most_memory, self.memory())
            if what == "done":
                stage.working.remove(number)
                stage.finished[number] = self.now
            elif what == "consumed":
                consuming = False
                self.consumed += 1
            else:
                readings = self.readings(self.idle - marks[0], self.consumed - marks[1])
                marks = self.idle, self.consumed
                changes, state = decide(readings, state, self.limits)
                for change in changes:
                    setattr(next(s for s in self.stages if s.name == change.stage), change.what, change.after)
                    self.changes.append((self.now, change))
                heapq.heappush(events, (self.now + self.interval, next(order), "decide", None, None))
                self.idle_at.append((self.now, self.idle))
        return self

    def readings(self, idle, consumed):
        stages = []
        for stage in self.stages:
            whole = stage.threads * self.interval
            stages.append(
                StageReading(
                    stage.name,
                    stage.threads,
                    stage.capacity,
                    min(stage.busy / whole, 1.0),
                    stage.starved / whole,
                    stage.blocked / whole,
                    stage.item_bytes,
                    len(stage.queue),
                    serial=stage.serial,
                )
            )
            stage.busy = stage.starved = stage.blocked = 0.0
        memory = {"host": (self.memory(), self.memory_limit)} if self.memory_limit else {}
        return Readings(tuple(stages), idle / self.interval, consumed, self.interval, memory)
