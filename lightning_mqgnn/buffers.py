"""BufferPool: memory for batches that is used again when nobody refers to it any more."""

import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_mqgnn.compiled import CACHE_LINE

_HEADROOM = 1.125  # batches vary in size: a buffer made a little larger serves the next ones too


class BufferPool:
    """Lends tensors out and takes their memory back when the last reference to it is gone.

    A new buffer costs more than what is copied into it: the kernel clears each page at its first touch. What counts as
    a reference is the tensor, every view of it, a NumPy array made from it or a graph of autograd that saved it: the
    memory goes back when torch frees the tensor's storage, not earlier. So a batch may be kept for as long as one
    likes. Each attribute of a batch has buffers of its own: keeping `y` does not hold on to `x`.

    Args:
        keep: How many free buffers of a name to keep; more are given back to the system.
        pin_memory: Page-lock the buffers, for copies to a CUDA device that run in the background.
    """

    def __init__(self, keep: int = 4, pin_memory: bool = False) -> None:
        self._pin_memory = pin_memory
        self._free: dict[str, _Free] = {}
        self._keep = keep
        self.allocations = 0

    @property
    def keep(self) -> int:
        """How many free buffers of a name are kept. A smaller number gives back those that are too many at once."""
        return self._keep

    @keep.setter
    def keep(self, keep: int) -> None:
        self._keep = keep
        for free in list(self._free.values()):
            free.keep = keep
            free.trim()

    def lend(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous tensor out of the buffers of `name`."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        free = self._free.setdefault(name, _Free(self._keep))
        try:
            buffer = free.buffers.pop()
        except IndexError:
            buffer = None
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._allocate(int(nbytes * _HEADROOM))
        # The tensor's storage holds this very array object and drops it when it is freed itself.
        loan = buffer[:nbytes]
        weakref.finalize(loan, free.take_back, buffer).atexit = False
        return torch.from_numpy(loan).view(dtype).view(shape)

    def _allocate(self, nbytes: int) -> np.ndarray:
        self.allocations += 1
        if self._pin_memory:
            pinned: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        memory = np.empty(nbytes + CACHE_LINE, np.uint8)  # NumPy asks for huge pages
        begin = -memory.ctypes.data % CACHE_LINE  # so that rows can be written past the caches
        return memory[begin : begin + nbytes]


class _Free:
    """The free buffers of one name. Loans refer to it and not to the pool, which may be gone before them."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.buffers: deque[np.ndarray] = deque()

    def take_back(self, buffer: np.ndarray) -> None:
        if len(self.buffers) < self.keep:
            self.buffers.append(buffer)

    def trim(self) -> None:
        with suppress(IndexError):  # another thread may take them at the same time
            while len(self.buffers) > self.keep:
                self.buffers.popleft()


def num_bytes_of(batch: Data) -> int:
    """Bytes of the tensors of a batch."""
    return sum(_nbytes(value) for store in batch.stores for value in store.values() if isinstance(value, Tensor))


def _nbytes(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_csr:
        return sum(part.nbytes for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values()))
    return tensor.nbytes


def as_words(tensor: Tensor) -> np.ndarray:
    """The rows of a contiguous tensor as a matrix of the widest unsigned words that divide them."""
    row_bytes = tensor.shape[1:].numel() * tensor.itemsize
    word = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    rows = tensor.reshape(len(tensor), tensor.shape[1:].numel())
    if tensor.dtype in (torch.bool, torch.bfloat16):
        rows = rows.view(torch.uint8)
    words: np.ndarray = rows.numpy().view(f"u{word}")
    return words
