"""What a hand-over through a queue costs: StageQueue beside the queues of the standard library.

python benchmarks/stage_queue.py
"""

import queue
import sys
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

from lightning_mqgnn import StageQueue, queues

_ITEMS = 100_000
_ROUNDS = 7


def without_waiting(put: Callable[[int], object], get: Callable[[], object]) -> float:
    """Nanoseconds for one put and one get in one thread, with room and an item always there."""
    began = time.perf_counter_ns()
    for number in range(_ITEMS):
        put(number)
        get()
    return (time.perf_counter_ns() - began) / _ITEMS


def between_threads(put: Callable[[int], object], get: Callable[[], object]) -> float:
    """Nanoseconds per item from one thread to another, each waiting for the other at times."""

    def produce() -> None:
        for number in range(_ITEMS):
            put(number)

    producer = threading.Thread(target=produce)
    began = time.perf_counter_ns()
    producer.start()
    for _ in range(_ITEMS):
        get()
    producer.join()
    return (time.perf_counter_ns() - began) / _ITEMS


def stage_queue() -> tuple[Callable[[int], object], Callable[[], object]]:
    """Ours: bounded, ordered, resizable."""
    ours: StageQueue[None] = StageQueue(8)
    return lambda number: ours.put(number, None), ours.get


def standard_queue() -> tuple[Callable[[int], object], Callable[[], object]]:
    """`queue.Queue`: bounded; one lock and two conditions."""
    bounded: queue.Queue[int] = queue.Queue(8)
    return bounded.put, bounded.get


def simple_queue() -> tuple[Callable[[int], object], Callable[[], object]]:
    """`queue.SimpleQueue`: written in C, unbounded, so it can't stop a producer."""
    unbounded: queue.SimpleQueue[int] = queue.SimpleQueue()
    return unbounded.put, unbounded.get


def locks_made() -> int:
    """How many locks StageQueue makes for puts and gets that need not wait."""
    with patch.object(queues, "allocate_lock", wraps=allocate_lock) as made:
        without_waiting(*stage_queue())
    return made.call_count


def main() -> None:
    """Measure in turns and print medians."""
    kinds = {"StageQueue": stage_queue, "queue.Queue": standard_queue, "queue.SimpleQueue": simple_queue}
    figures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kinds}
    for _ in range(_ROUNDS):
        for name, make in kinds.items():
            figures[name][0].append(without_waiting(*make()))
            figures[name][1].append(between_threads(*make()))
    print(f"Python {sys.version.split()[0]}, median of {_ROUNDS} rounds of {_ITEMS} items, ns per put and get")
    print(f"{'':<20}{'nobody waits':>14}{'two threads':>14}")
    for name, (alone, together) in figures.items():
        print(f"{name:<20}{median(alone):>14.0f}{median(together):>14.0f}")
    print(f"locks made by StageQueue for {_ITEMS} puts and gets that need not wait: {locks_made()}")


if __name__ == "__main__":
    main()
