"""The transfer stage: copies batches to the device on a stream of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor
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
    stream = torch.cuda.current_stream(device_of(batch))
    for tensor in _dense_tensors(batch):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def device_of(batch: Data) -> torch.device:
    """Where the edges of `batch` are, and with them the rest of it."""
    edges: Tensor = batch.adj_t if "adj_t" in batch else batch.edge_index
    return edges.device


def _dense_tensors(batch: Data) -> Iterator[Tensor]:
    """The tensors of `batch`; those that a sparse matrix is made of in its place, since it has no memory of its own."""
    for value in batch.to_dict().values():
        if isinstance(value, Tensor) and value.layout == torch.sparse_csr:
            yield from (value.crow_indices(), value.col_indices(), value.values())
        elif isinstance(value, Tensor):
            yield value
