"""Arrivals: how much of the waiting for an all-reduce is waiting for the rank that joins it last."""

import math
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor


class Arrivals:
    """Tells a slow network from a slow rank.

    The rank that joins an all-reduce last waits only for the exchange itself; the others also wait for that rank. So
    each rank sends along, in a place of its own, how long its last all-reduce took: the least of them is what the
    exchange takes, and whose it is came last. On a GPU it is the device that waits, unseen from here: there nothing is
    sent along and nothing counted.

    Attributes:
        own_seconds: That the last all-reduce took on this rank; 0 before the first.
        late_seconds: That the training thread waited until the last rank had joined.
        last: How often each rank of the group was the last to join.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.own_seconds = 0.0
        self.late_seconds = 0.0
        self.last: Counter[int] = Counter()

    def num_times(self, device: torch.device) -> int:
        """How many numbers ride along in a buffer on `device`."""
        return self._num_ranks if device.type == "cpu" else 0

    def write(self, times: Tensor) -> None:
        """Put this rank's time into its place of what will be summed: floating point, (`num_times`,)."""
        if len(times):
            times.zero_()
            times[self._rank] = self.own_seconds

    def read(self, times: Tensor) -> float:
        """Take in the sum of all ranks' `times`, and return what an exchange itself takes: seconds, inf if unknown."""
        seconds: list[float] = times.tolist()
        least = min(seconds, default=0.0)
        if least == 0:  # of a rank that has not measured yet
            return math.inf
        self.last[seconds.index(least)] += 1
        return least

    def count_wait(self, seconds: float, exchange_seconds: float) -> None:
        """Count that the training thread waited for an exchange which itself took `exchange_seconds`."""
        self.late_seconds += max(seconds - exchange_seconds, 0.0)
