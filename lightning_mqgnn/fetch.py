"""The fetch stage: the feature rows that a sampled subgraph needs, from the feature cache or from where they lie."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.cache.features import Access, AccessPlanner, FeatureCache
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.sample import Sample, Task
from lightning_mqgnn.sampling import CacheBias, SampledSubgraph


class Announced(NamedTuple):
    """A subgraph whose rows are to be fetched, and what the cache is told of them."""

    subgraph: SampledSubgraph
    access: Access
    sampled_in: int


class Fetched(NamedTuple):
    """A subgraph with the feature rows of its nodes."""

    subgraph: SampledSubgraph
    rows: Tensor


class Fetch:
    """Samples with an eye to the feature cache, and fetches rows by way of it.

    `announce` takes the place of the sample stage's work, `plan` sees a whole group of sampled batches (a super-batch)
    and notes what of it is read again and when, and calling the object is the fetch stage's work, in the order of the
    batches.

    Args:
        sample: Samples a batch.
        cache: Holds rows of `x`.
        pool: Where the memory of the rows comes from.
        store: The graph.
        bias: The cache holds the set of nodes that sampling prefers, and changes with it; None if it sees to itself.
    """

    def __init__(
        self, sample: Sample, cache: FeatureCache, pool: BufferPool, store: GraphStore, bias: CacheBias | None = None
    ) -> None:
        self._sample = sample
        self._cache = cache
        self._pool = pool
        self._store = store
        self._bias = bias
        self._planner = AccessPlanner(store.num_nodes)
        self._version = store.version
        self._held: np.ndarray | None = None

    def announce(self, task: Task) -> Announced:
        """Sample a batch."""
        subgraph = self._sample(task)
        return Announced(subgraph, Access(subgraph.node, task.epoch), task.sampled_in)

    def plan(self, group: list[Announced]) -> list[Announced]:
        """Note for each batch of a group when its nodes are read again."""
        accesses = self._planner.plan([announced.access for announced in group])
        return [announced._replace(access=access) for announced, access in zip(group, accesses, strict=True)]

    def __call__(self, announced: Announced) -> Fetched:
        """Fetch the rows of a batch."""
        with self._store.reading():
            return self._fetch(announced)

    def _fetch(self, announced: Announced) -> Fetched:
        if self._store.version != self._version:
            changed = self._store.changes(self._version).rows.get("x")
            self._version = self._store.version
            if changed is not None:
                self._cache.invalidate(changed)
        if self._bias is not None:
            nodes = self._bias.nodes(announced.sampled_in)
            if nodes is not self._held:
                self._cache.load(nodes)
                self._held = nodes
        return Fetched(announced.subgraph, self._cache.rows(announced.access, self._pool))
