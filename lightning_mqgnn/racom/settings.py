"""RaCoM: the settings of the consistency model."""

from dataclasses import dataclass
from typing import Literal

import torch

# Of the warm-up in lock-step. Measured: docs/consistency.md
_WARMUP_EPOCHS = 0.25
_WARMUP_WINDOWS = 3
_WARMUP_SHARE = 0.15  # of all optimizer steps
_MOST_WARMUP = 500  # optimizer steps


@dataclass(frozen=True)
class RaCoM:
    """How ranks share what they learn. Every rank must have the same settings.

    Each rank steps by itself. After `period` steps its progress, the sum of its updates, goes to the other ranks; the
    mean of all comes back some steps later and replaces its own, with an outer heavy-ball momentum. This is delayed
    averaging of local steps (overlapped local SGD; DiLoCo with eager updates, arXiv:2502.12996), the role of RaCoM in
    MQ-GNN (arXiv:2601.04707), whose text gives no formula for it.

    `RaCoM(period=1, max_staleness=0)` is the synchronous mode: mean gradients in each step, as `ddp` does.

    Args:
        period: Optimizer steps in a window, whose progress is exchanged at once. `adaptive` goes below it only where
            replicas disagree.
        max_staleness: How many optimizer steps a rank goes on before the progress of a closed window must have come
            back; then it waits.
        momentum: Of the outer step, 0 <= momentum < 1. None: 1 - 1/sqrt(ranks), so that progress counts sqrt(ranks)
            times: as much as mean gradients, less noisy than those of one rank, lengthen the steps of Adam and other
            optimizers that divide by the size of gradients. 0 if all optimizers are `torch.optim.SGD`, whose steps are
            linear in the gradients.
        outer_lr: Learning rate of the outer step; 1 takes the mean progress as it is.
        warmup: Optimizer steps in lock-step (mean gradients) before the first window. None: under a Trainer what
            `warmup_steps` says; none elsewhere.
        adaptive: Lengthen the period, up to `max_period`, until the exchange is hidden behind computation, and shorten
            it while the replicas are further apart than `divergence_bound`.
        max_period: The longest period that `adaptive` may choose.
        divergence_bound: Largest wanted distance of the replicas' progress from its mean, over the length of the
            parameter vector: sqrt(mean |u_i|^2 - |u|^2) / |theta|.
        arrival: `eager` applies a window's mean as soon as it is there, which differs from run to run; `fixed` applies
            it when the next window has as many steps as it had, or after `max_staleness` steps if those are fewer, so
            that runs repeat bit by bit. `adaptive` then heeds `divergence_bound` alone.
        exchange_dtype: What progress is sent as: `torch.float32` or `torch.bfloat16`. What rounding takes away from a
            rank's progress stays in it and is sent with the next window (error feedback); the sum over ranks is
            rounded too, and that is not made up for. Drains send all that is left with full precision.
        drain_each_epoch: Complete all windows at the end of each epoch too, not only where a model is validated or
            saved.
    """

    period: int = 8
    max_staleness: int = 64
    momentum: float | None = None
    outer_lr: float = 1.0
    warmup: int | None = None
    adaptive: bool = True
    max_period: int = 64
    divergence_bound: float = 0.15
    arrival: Literal["eager", "fixed"] = "eager"
    exchange_dtype: torch.dtype = torch.float32
    drain_each_epoch: bool = False

    def __post_init__(self) -> None:
        _check("period", self.period, self.period >= 1, "1 or more optimizer steps")
        _check("max_staleness", self.max_staleness, self.max_staleness >= 0, "0 or more optimizer steps")
        _check("momentum", self.momentum, self.momentum is None or 0 <= self.momentum < 1, "from 0 to below 1, or None")
        _check("outer_lr", self.outer_lr, self.outer_lr > 0, "above 0; 1 is the plain mean")
        _check("warmup", self.warmup, self.warmup is None or self.warmup >= 0, "0 or more optimizer steps, or None")
        _check("max_period", self.max_period, self.max_period >= 1, "1 or more optimizer steps")
        _check("divergence_bound", self.divergence_bound, self.divergence_bound > 0, "above 0; inf is no bound")
        _check("arrival", self.arrival, self.arrival in ("eager", "fixed"), "'eager' or 'fixed'")
        _check(
            "exchange_dtype",
            self.exchange_dtype,
            self.exchange_dtype in (torch.float32, torch.bfloat16),
            "torch.float32 or torch.bfloat16",
        )

    @property
    def synchronous(self) -> bool:
        """Whether all steps are in lock-step."""
        return self.period == 1 and self.max_staleness == 0

    def warmup_steps(self, steps_per_epoch: float, total_steps: float) -> int:
        """`warmup`; if None, a quarter of an epoch or three windows, at most 500 steps and 15 % of `total_steps`.

        Both may be infinite: then 500, or what the other one says.
        """
        if self.warmup is not None:
            return self.warmup
        wanted = max(_WARMUP_EPOCHS * steps_per_epoch, _WARMUP_WINDOWS * self.period)
        return round(min(wanted, _WARMUP_SHARE * total_steps, _MOST_WARMUP))


def _check(name: str, value: object, valid: bool, wanted: str) -> None:
    if not valid:
        raise ValueError(f"{name}={value!r}: must be {wanted}")
