"""Make what ranks hold beside their gradients alike: parameters, buffers, the optimizers' state."""

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


def broadcast_state(module: Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), src=0, group=group)


def average_buffers(module: Module, group: dist.ProcessGroup | None = None) -> None:
    """Make the buffers of all ranks equal: the mean of floating-point ones (BatchNorm), rank 0's of the others."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    for buffer in module.buffers():
        if buffer.is_floating_point():
            # In double precision, so that a buffer that is equal on all ranks (class weights) stays as it is.
            total = buffer.double()
            dist.all_reduce(total, group=group)
            buffer.copy_(total.div_(world_size))
        else:
            dist.broadcast(buffer, src=0, group=group)


@torch.no_grad()
def average_optimizer_state(optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the same state of `optimizer`, so that one rank's checkpoint serves all.

    What is shaped like its parameter (momentum, Adam's moments) becomes the mean over the ranks that have it; of the
    rest (step counts, LBFGS's history) every rank gets that of the first rank that has it. Learning rates are left
    alone.
    """
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return
    parameters = [parameter for param_group in optimizer.param_groups for parameter in param_group["params"]]
    own: dict[_Key, Any] = {
        (index, name): value
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    }
    moments = {key: value.dtype for key, value in own.items() if _like_parameter(value, parameters[key[0]])}
    rest = {key: value for key, value in own.items() if key not in moments}
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, (moments, _packed(rest)), group=group)

    held: dict[_Key, int] = {}
    dtypes: dict[_Key, torch.dtype] = {}
    for theirs, packed in reversed(everyone):  # the first rank has the last word
        for (index, name), value in _unpacked(packed, parameters[0].device).items():
            optimizer.state[parameters[index]][name] = value
        for key, dtype in theirs.items():
            held[key] = held.get(key, 0) + 1
            dtypes[key] = dtype
    for key in sorted(held):
        index, name = key
        if key not in moments:
            optimizer.state[parameters[index]][name] = torch.zeros_like(parameters[index], dtype=dtypes[key])
        moment = optimizer.state[parameters[index]][name].div_(held[key])
        dist.all_reduce(moment, group=group)


_Key = tuple[int, str]  # number of the parameter, name of the state


def _like_parameter(value: Any, parameter: Tensor) -> bool:
    # Step counts are tensors of no dimension, as moments of scalar parameters are: those are not averaged.
    return (
        isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape and value.dim() > 0
    )


def _packed(state: dict[_Key, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes, device: torch.device) -> dict[_Key, Any]:
    """What was on a rank's device comes to this rank's."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.cuda(device.index)

    state: dict[_Key, Any] = torch.load(io.BytesIO(packed), map_location=place, weights_only=False)
    return state
