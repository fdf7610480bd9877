"""GradientExchange: the mean gradient of all ranks in each step, the synchronous mode."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn import Parameter

from lightning_mqgnn.racom.arrivals import Arrivals


class GradientExchange:
    """Replaces the gradients of the parameters by their mean over all ranks.

    All gradients of one dtype and device travel in one flat buffer, one all-reduce per step. Each rank divides by the
    number of ranks before the sum, as `DistributedDataParallel` does: on two ranks the result is the same to the last
    bit, on more it is the same but for the order of the additions.

    A parameter that has no gradient on this rank counts as zero; one that has none on any rank keeps none, so that
    optimizers leave it alone (`DistributedDataParallel` needs `find_unused_parameters=True` for that). Which
    parameters had one rides along in the same buffer, as does what `Arrivals` says.

    Attributes:
        seconds: Time spent in exchanges on this rank, with the wait for the slowest.
        bytes: What this rank gave to the all-reduce so far.
        exchanges: How often.
        arrivals: How much of `seconds` went into waiting for the last rank, and which one that was.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.arrivals = Arrivals(group)
        self._layouts: dict[tuple[int, ...], list[_FlatBuffer]] = {}
        self.seconds = 0.0
        self.bytes = 0
        self.exchanges = 0

    def __call__(self, parameters: Sequence[Parameter]) -> None:
        """Exchange the gradients of `parameters`, which must be the same ones in the same order on all ranks.

        Raises:
            TypeError: A gradient is sparse.
        """
        world_size = dist.get_world_size(self._group)
        if world_size == 1 or not parameters:
            return
        began = time.perf_counter()
        layout = tuple(id(parameter) for parameter in parameters)
        if layout not in self._layouts:
            self._layouts[layout] = _flat_buffers(parameters, self.arrivals)
        buffers = self._layouts[layout]
        for buffer in buffers:
            buffer.collect(1.0 / world_size)
        self.arrivals.write(buffers[0].times)
        joined = time.perf_counter()
        works = [dist.all_reduce(buffer.flat, group=self._group, async_op=True) for buffer in buffers]
        for buffer, work in zip(buffers, works, strict=True):
            work.wait()
            self.bytes += buffer.flat.nbytes
        took = time.perf_counter() - joined
        self.arrivals.count_wait(took, self.arrivals.read(buffers[0].times))
        self.arrivals.own_seconds = took
        for buffer in buffers:
            buffer.spread()
        self.exchanges += 1
        self.seconds += time.perf_counter() - began

    def release(self) -> None:
        """Free the flat buffers; the next exchange makes them anew."""
        self._layouts.clear()


class _FlatBuffer:
    """The gradients of some parameters, end to end; behind them a 1 for each that had one, and room for `Arrivals`."""

    def __init__(self, parameters: list[Parameter], num_times: int) -> None:
        self._parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        size = sum(sizes) + len(sizes) + num_times
        self.flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        *views, self._present, self.times = self.flat.split([*sizes, len(sizes), num_times])
        self._views = [view.view_as(parameter) for view, parameter in zip(views, parameters, strict=True)]

    def collect(self, factor: float) -> None:
        """Copy the gradients in, each times `factor`."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise TypeError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: only dense gradients "
                    "are exchanged, use torch.nn.Embedding(..., sparse=False)"
                )
            else:
                view.copy_(parameter.grad)
        self.flat.mul_(factor)
        self._present.copy_(
            torch.tensor([float(parameter.grad is not None) for parameter in self._parameters], dtype=self.flat.dtype)
        )

    def spread(self) -> None:
        """Copy the sums out into the gradients."""
        for i, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(view)
            elif self._present[i] > 0:
                parameter.grad = view.clone()


def _flat_buffers(parameters: Sequence[Parameter], arrivals: Arrivals) -> list[_FlatBuffer]:
    alike: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    num_times = [arrivals.num_times(parameters[0].device), *([0] * len(alike))]
    return [_FlatBuffer(group, number) for group, number in zip(alike.values(), num_times, strict=False)]
