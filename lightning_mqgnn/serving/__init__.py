"""Predictions on request: `inference` -> `server` -> `pipeline`, with `requests`, `service_time` and `hops`."""

from lightning_mqgnn.serving.inference import InferencePipeline
from lightning_mqgnn.serving.server import Overloaded, ServingReport

__all__ = ["InferencePipeline", "Overloaded", "ServingReport"]
