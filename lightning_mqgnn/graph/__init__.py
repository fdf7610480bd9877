"""The graph: `GraphStore`, its files, and how one is built that does not fit into memory."""

from lightning_mqgnn.graph.build import build_store
from lightning_mqgnn.graph.store import GraphStore
from lightning_mqgnn.graph.update import Changes

__all__ = ["Changes", "GraphStore", "build_store"]
