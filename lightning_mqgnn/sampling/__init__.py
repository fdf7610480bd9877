"""Samplers: seed nodes and a random key in, a message-flow block out."""

from lightning_mqgnn.sampling.bias import CacheBias
from lightning_mqgnn.sampling.neighbor import NeighborSampler
from lightning_mqgnn.sampling.subgraph import SampledSubgraph

__all__ = ["CacheBias", "NeighborSampler", "SampledSubgraph"]
