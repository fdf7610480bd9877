"""RaCoMExchange: what a training loop calls; lock-step first, then windows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from lightning_mqgnn.racom.arrivals import Arrivals
from lightning_mqgnn.racom.gradients import GradientExchange
from lightning_mqgnn.racom.period import PeriodController
from lightning_mqgnn.racom.settings import RaCoM
from lightning_mqgnn.racom.windows import ExchangeStatistics, ProgressExchange


class RaCoMExchange:
    """Keeps the replicas of a model together while every rank trains by itself.

        exchange = RaCoMExchange([optimizer], RaCoM(warmup=100), dist.new_group())
        for batch in batches:
            optimizer.zero_grad()
            loss(batch).backward()
            exchange.average_gradients([optimizer])
            exchange.before_step()
            optimizer.step()
            exchange.after_step()
        exchange.drain()  # before validation, before saving, at the end
        exchange.close()

    All ranks must begin with the same parameters, and take the same number of optimizer steps between drains.

    Args:
        optimizers: All that step; their parameters are shared. Parameter groups may be added later, on all ranks before
            the same step.
        settings: See `RaCoM`; the attribute of that name has a `momentum` of None resolved.
        group: A process group of its own: no other collective may use it.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], settings: RaCoM, group: dist.ProcessGroup | None = None
    ) -> None:
        world_size = dist.get_world_size(group)
        if settings.momentum is None:
            linear = all(isinstance(optimizer, SGD) for optimizer in optimizers)
            settings = replace(settings, momentum=0.0 if linear else 1 - world_size**-0.5)
        self.settings = settings
        self.gradients = GradientExchange(group)
        self._optimizers = list(optimizers)
        self._group = group
        self._alone = world_size == 1
        self._steps = 0
        self._windows: ProgressExchange | None = None
        self._listed = 0  # parameters in the optimizers' groups
        self._num_discarded = 0
        self._momentum: dict[Parameter, Tensor] = {}
        self._controller = PeriodController(settings)
        self.statistics = ExchangeStatistics()

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._steps

    @property
    def lockstep(self) -> bool:
        """Whether the next step is one with mean gradients."""
        return self.settings.synchronous or self._steps < (self.settings.warmup or 0)

    @property
    def period(self) -> int:
        """Optimizer steps in the open window; 1 in lock-step."""
        if self.lockstep:
            return 1
        return self.settings.period if self._windows is None else self._windows.period

    @property
    def seconds(self) -> float:
        """Time that the training thread spent waiting for other ranks."""
        return self.gradients.seconds + self.statistics.wait_seconds

    @property
    def arrivals(self) -> Arrivals:
        """How much of `seconds` went into waiting for the last rank, and which one that was."""
        return self.gradients.arrivals

    @property
    def bytes(self) -> int:
        """What this rank gave to collectives."""
        return self.gradients.bytes + self.statistics.bytes

    def average_gradients(self, optimizers: Sequence[Optimizer]) -> None:
        """In lock-step, replace the gradients of the optimizers' parameters by their mean over all ranks."""
        if self.lockstep:
            self.gradients([parameter for parameter in _parameters(optimizers) if parameter.requires_grad])

    def before_step(self) -> None:
        """Before the parameters move: begin with windows, or begin anew if there are other parameters now."""
        if self._alone or self.lockstep:
            return
        listed = sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)
        if self._windows is None or listed != self._listed:
            self._listed = listed
            self._retire()
            parameters = _parameters(self._optimizers)
            windows = ProgressExchange(
                parameters, self.settings, self._controller, self.statistics, self.arrivals, self._group
            )
            windows.load_momentum([self._momentum.get(parameter) for parameter in parameters])
            self._windows = windows

    def after_step(self) -> None:
        """Count an optimizer step; one that a gradient scaler skipped is a step that moved nothing.

        Raises:
            RuntimeError: The exchange failed, for example since another rank has gone.
        """
        self._steps += 1
        if self._windows is not None:
            self._windows.after_step()
            self._forget_what_is_not_finite()

    def drain(self, force: bool = False) -> None:
        """Complete all windows: afterwards the parameters of all ranks are equal, bit by bit.

        All ranks must call it after the same step.

        Args:
            force: Take the plain mean of the parameters as they are, for parameters that something else has moved.
        """
        if self._windows is not None:
            self._windows.drain(force)
            self._forget_what_is_not_finite()

    def discard(self) -> None:
        """Before something else sets the parameters, on all ranks: complete all windows, forget the outer momentum."""
        self._retire()
        self._momentum.clear()

    def abort(self, error: BaseException) -> None:
        """Let the training thread raise `error` when it next waits or steps; may be called by any thread."""
        if self._windows is not None:
            self._windows.abort(error)

    def close(self) -> None:
        """End the thread and free the buffers. `drain` before, unless something failed."""
        if self._windows is not None:
            self._windows.close()
            self._windows = None
        self.gradients.release()

    def state_dict(self) -> dict[str, Any]:
        """Step count, outer momentum and period, in plain containers, the same on all ranks; only after a `drain`."""
        self._keep_momentum()
        return {
            "steps": self._steps,
            "momentum": {
                i: self._momentum[parameter].cpu()
                for i, parameter in enumerate(_parameters(self._optimizers))
                if parameter in self._momentum
            },
            "controller": self._controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the number of ranks may be another one."""
        self.discard()
        parameters = _parameters(self._optimizers)
        self._steps = state["steps"]
        self._momentum = {parameters[i]: value for i, value in state["momentum"].items()}
        self._controller.load_state_dict(state["controller"])

    def _retire(self) -> None:
        if self._windows is not None:
            self._windows.drain()
            self._keep_momentum()
            self._windows.close()
            self._windows = None

    def _keep_momentum(self) -> None:
        if self._windows is not None:
            self._momentum = dict(zip(self._windows.parameters, self._windows.momentum(), strict=True))

    def _forget_what_is_not_finite(self) -> None:
        """A rank whose progress was discarded would go on with, say, Adam's moments that are not finite either."""
        if self.statistics.discarded == self._num_discarded:
            return
        self._num_discarded = self.statistics.discarded
        for optimizer in self._optimizers:
            for parameter, state in [*optimizer.state.items()]:
                tensors = [value for value in state.values() if isinstance(value, Tensor)]
                if not all(bool(torch.isfinite(value).all()) for value in tensors):
                    del optimizer.state[parameter]


def _parameters(optimizers: Sequence[Optimizer]) -> list[Parameter]:
    """The parameters of the optimizers' groups, each once. Frozen ones too: they may be unfrozen at any time."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list(dict.fromkeys(parameter for group in groups for parameter in group["params"]))
