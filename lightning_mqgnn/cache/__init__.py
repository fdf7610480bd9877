"""What is kept for later: sampled subgraphs, and rows of the feature matrix."""

from lightning_mqgnn.cache.features import FeatureCache
from lightning_mqgnn.cache.subgraphs import SubgraphCache

__all__ = ["FeatureCache", "SubgraphCache"]
