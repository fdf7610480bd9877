"""The sample stage: a batch's place in an epoch in, its message-flow block out, from the cache or the sampler."""

from typing import NamedTuple

import numpy as np

from lightning_mqgnn.cache import SubgraphCache
from lightning_mqgnn.plan import EpochPlan
from lightning_mqgnn.sampling import NeighborSampler, SampledSubgraph


class Task(NamedTuple):
    """A batch to be made.

    Attributes:
        epoch: The epoch that it is part of.
        chosen: (seeds,) positions of its seeds in the list of seed nodes.
        sampled_in: The epoch whose batch it is; an earlier one where batches are used again.
        global_batch: Its number there, counted over all ranks.
        recurs: Whether it may come again under these numbers.
    """

    epoch: int
    chosen: np.ndarray
    sampled_in: int
    global_batch: int
    recurs: bool = True


def tasks_of(plan: EpochPlan, rank: int, epoch: int) -> list[Task]:
    """The batches of `rank` in `epoch`."""
    sampled_in = plan.sampled_in(epoch)
    numbers = plan.order(epoch, rank) * plan.world_size + rank
    return [
        Task(epoch, chosen, sampled_in, number)
        for chosen, number in zip(plan.batches(epoch, rank), numbers.tolist(), strict=True)
    ]


class Sample:
    """Samples the batches of a split, or finds them in a cache.

    Args:
        plan: The split's plan.
        seeds: (seeds,) node ids of all ranks.
        input_id: (seeds,) what batches call them.
        sampler: Draws the neighbours.
        cache: Keeps the subgraphs of batches that come again; None if none does.
    """

    def __init__(
        self,
        plan: EpochPlan,
        seeds: np.ndarray,
        input_id: np.ndarray,
        sampler: NeighborSampler,
        cache: SubgraphCache | None = None,
    ) -> None:
        self._plan = plan
        self._seeds = seeds
        self._input_id = input_id
        self._sampler = sampler
        self._cache = cache

    def __call__(self, task: Task) -> SampledSubgraph:
        """Return the subgraph of a batch."""
        place = self._plan.stream, task.sampled_in, task.global_batch
        cache = self._cache if task.recurs else None
        kept = None if cache is None else cache.get(*place)
        if kept is not None:
            return kept
        subgraph = self.draw(task)
        if cache is not None:
            cache.put(*place, subgraph)
        return subgraph

    def draw(self, task: Task) -> SampledSubgraph:
        """Sample the subgraph of a batch, and leave the cache alone."""
        return self._sampler.sample(
            self._seeds[task.chosen],
            self._plan.key(task.sampled_in, task.global_batch),
            self._input_id[task.chosen],
            task.sampled_in,
        )
