"""CacheSettings: what a datamodule keeps, and how much memory that may take."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lightning_mqgnn.cache.budget import num_bytes
from lightning_mqgnn.cache.features import POLICIES

_LARGEST_GROUP = 16  # batches; more do nothing for the speed of sampling


class SubgraphBudget(NamedTuple):
    """Bytes per rank for sampled subgraphs."""

    training_ahead: int
    evaluation_ahead: int
    kept: int


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the caches; the fields are arguments of `MQGNNDataModule`, which says what they mean.

    Raises:
        TypeError: A field has a wrong type.
        ValueError: A field is out of range.
    """

    resample_every: int = 1
    subgraph_cache: int | float | str = 0.1
    spill_path: str | Path | None = None
    feature_cache: int | float | str = 0
    feature_policy: str = "optimal"
    cache_bias: float = 1.0
    redraw_every: int = 1

    def __post_init__(self) -> None:
        for name in ("subgraph_cache", "feature_cache"):
            num_bytes(name, getattr(self, name), 0)
        if self.feature_policy not in POLICIES:
            raise ValueError(f"feature_policy={self.feature_policy!r}: give one of {', '.join(POLICIES)}")
        if isinstance(self.cache_bias, bool) or not isinstance(self.cache_bias, int | float):
            raise TypeError(f"cache_bias={self.cache_bias!r}: give a number, 1 for no preference")
        if not 1 <= self.cache_bias < float("inf"):
            raise ValueError(f"cache_bias={self.cache_bias}: give a number of at least 1, which means no preference")
        if self.is_biased and self.feature_policy != "degree":
            raise ValueError(
                f"cache_bias={self.cache_bias} with feature_policy={self.feature_policy!r}: sampling prefers nodes "
                "that stay in the cache, so give feature_policy='degree'"
            )
        if self.is_biased and not self.feature_bytes(1 << 40, 1):
            raise ValueError(
                f"cache_bias={self.cache_bias} with feature_cache={self.feature_cache!r}: there are no cached nodes to "
                "prefer, so give feature_cache a size"
            )

    @property
    def is_biased(self) -> bool:
        """Whether sampling prefers cached nodes."""
        return self.cache_bias > 1

    @property
    def plans_super_batches(self) -> bool:
        """Whether the feature cache wants to know what is read again, and so as many batches ahead as fit."""
        return self.feature_policy == "optimal" and self.feature_bytes(1 << 40, 1) > 0

    def subgraph_budget(self, store_bytes: int, ranks_here: int) -> SubgraphBudget:
        """Divide the budget among the ranks of this machine, and a rank's among what it is for.

        Where training samples each epoch anew, it keeps nothing, so it may be further ahead.
        """
        budget = num_bytes("subgraph_cache", self.subgraph_cache, store_bytes) // ranks_here
        training_ahead = budget // 2 if self.resample_every == 1 else budget // 8
        return SubgraphBudget(training_ahead, budget // 8, budget - training_ahead - budget // 8)

    def feature_bytes(self, store_bytes: int, ranks_here: int) -> int:
        """Bytes per rank for feature rows."""
        return num_bytes("feature_cache", self.feature_cache, store_bytes) // ranks_here

    def group(self, ahead: int, threads: int, subgraph_bytes: int, num_batches: int) -> int:
        """Batches to sample at a time, so that those in the threads' hands and in the queue fit into `ahead` bytes."""
        fitting = ahead // max((threads + 1) * subgraph_bytes, 1)
        most = num_batches if self.plans_super_batches else min(_LARGEST_GROUP, num_batches // 4)
        return max(min(fitting, most), 1)
