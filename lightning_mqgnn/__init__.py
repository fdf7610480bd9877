"""Train graph neural networks with PyTorch Lightning: `Trainer(strategy="mqgnn")` and `MQGNNDataModule`.

The way of the data: `plan` -> `sample` -> `fetch` -> `prepare` -> `transfer`, run by `pipeline` through `queues`, put
together in `loader` and `datamodule`. The way of what is learnt: `strategy` -> `racom`. What watches a run: `sizing` ->
`adaptive` resizes queues, `monitor` reports. A trained model predicts through `predict` (all nodes) or `serving` (on
request).
"""

from lightning_mqgnn.adaptive import AdaptiveQueueCallback
from lightning_mqgnn.adjacency import trim_adj
from lightning_mqgnn.cache import FeatureCache, SubgraphCache
from lightning_mqgnn.datamodule import MQGNNDataModule
from lightning_mqgnn.graph import GraphStore, build_store
from lightning_mqgnn.monitor import PipelineMonitor
from lightning_mqgnn.pipeline import Pipeline, Stage
from lightning_mqgnn.plan import EpochPlan
from lightning_mqgnn.predict import predict_all
from lightning_mqgnn.queues import StageQueue
from lightning_mqgnn.racom import GradientExchange, RaCoM, RaCoMExchange
from lightning_mqgnn.sampling import CacheBias, NeighborSampler, SampledSubgraph
from lightning_mqgnn.serving import InferencePipeline, Overloaded
from lightning_mqgnn.strategy import MQGNNStrategy
from lightning_mqgnn.synthetic import synthetic_graph

__all__ = [
    "AdaptiveQueueCallback",
    "CacheBias",
    "EpochPlan",
    "FeatureCache",
    "GradientExchange",
    "GraphStore",
    "InferencePipeline",
    "MQGNNDataModule",
    "MQGNNStrategy",
    "NeighborSampler",
    "Overloaded",
    "Pipeline",
    "PipelineMonitor",
    "RaCoM",
    "RaCoMExchange",
    "SampledSubgraph",
    "Stage",
    "StageQueue",
    "SubgraphCache",
    "build_store",
    "predict_all",
    "synthetic_graph",
    "trim_adj",
]
