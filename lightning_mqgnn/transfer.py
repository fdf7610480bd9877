"""The transfer stage: copies batches to the device on a stream of its own."""

import torch
from torch_geometric.data import Data


class CUDATransfer:
    """Copies a batch from page-locked memory to a CUDA device, beside whatever the device computes.

    The call returns when the copy is complete: it runs in the transfer stage's thread, which has nothing else to do,
    and the batch behind it is the real thing, while the host buffer is free for the next one.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Data) -> Data:
        """Return a copy of `batch` on the device."""
        with torch.cuda.stream(self._stream):
            copy = batch.to(self._device, non_blocking=True)
            copied = self._stream.record_event()
        copied.synchronize()
        return copy


def hand_over(batch: Data) -> None:
    """Tell CUDA's allocator that the current stream uses `batch`, which was allocated on another one.

    Without this its memory could be given to the next copy while kernels that read it are still queued.
    """
    stream = torch.cuda.current_stream(batch.edge_index.device)
    for value in batch.to_dict().values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(stream)
