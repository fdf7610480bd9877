"""What a run says of itself: `recording` -> `report` and `timeline`, put before the user by `callback`."""

from lightning_mqgnn.monitor.callback import PipelineMonitor

__all__ = ["PipelineMonitor"]
