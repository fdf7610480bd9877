"""MQGNNStrategy: trains one replica of the model per process, and exchanges what they learn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_mqgnn.racom import GradientExchange, average_buffers, broadcast_state

_NAMES: dict[str, Literal["popen", "spawn", "fork"]] = {
    "mqgnn": "popen",
    "mqgnn_spawn": "spawn",
    "mqgnn_fork": "fork",
    "mqgnn_notebook": "fork",
}


class MQGNNStrategy(DDPStrategy):
    """Data-parallel training in which the exchange between ranks is ours, and the model is not wrapped.

    Importing `lightning_mqgnn` registers it as `mqgnn` (the script is started once per rank), `mqgnn_spawn`,
    `mqgnn_fork` and `mqgnn_notebook`.

    The exchange is synchronous: the mean gradient of all ranks, after the backward pass and before clipping and the
    optimizer. On two ranks the weights are those of `ddp` to the last bit; on more they are but for the order of
    additions. Parameters without a gradient need no option. All ranks begin with rank 0's parameters and buffers.
    Floating-point buffers (BatchNorm's statistics) differ between ranks while they train and are averaged for
    validation, checkpoints and the end of fit; `ddp` takes rank 0's instead.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, if not given.
        checkpoint_io: Set by the Trainer, if not given.
        precision_plugin: Set by the Trainer, if not given.
        process_group_backend: `gloo` or `nccl`; by default what fits the device.
        timeout: How long a collective may wait for another rank.
        start_method: How the processes of this machine are started.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.exchange: GradientExchange | None = None
        self._backward_sync = True

    def setup_environment(self) -> None:
        """Join the process group."""
        if self.root_device.type == "mps":
            raise MisconfigurationException("strategy='mqgnn' runs on CPUs and CUDA devices: use accelerator='cpu'")
        super().setup_environment()

    def setup(self, trainer: "pl.Trainer") -> None:
        """Put the model on the device and make all replicas equal."""
        if self._layer_sync is not None and self.root_device.type == "cpu":
            raise MisconfigurationException(
                "Trainer(sync_batchnorm=True) needs CUDA devices: remove it. BatchNorm's statistics are averaged over "
                "the ranks for validation and checkpoints"
            )
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Called by `DDPStrategy.setup` to wrap the model for training; here it stays as it is."""
        assert self.model is not None
        broadcast_state(self.model)
        self.exchange = GradientExchange()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Step, with the exchange between the backward pass and whatever Lightning does with gradients after it."""
        module = self._training_module()

        def closure_with_exchange() -> Any:
            result = closure()
            # Weight averaging runs steps without a backward pass, to renew BatchNorm's statistics.
            if module.automatic_optimization and not module.trainer.fit_loop._skip_backward:
                self._exchange([optimizer])
            return result

        return super().optimizer_step(optimizer, closure_with_exchange, model, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Exchange at the end of `manual_backward`: the user may look at the gradients before the step."""
        super().post_backward(closure_loss)
        if not self._training_module().automatic_optimization and self._backward_sync:
            self._exchange(self.optimizers)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in the backward passes inside, without an exchange."""
        self._backward_sync = False
        try:
            yield
        finally:
            self._backward_sync = True

    def on_validation_start(self) -> None:
        """Let all ranks validate the same model."""
        self._average_buffers()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Leave the same model on all ranks."""
        self._average_buffers()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state for a checkpoint, the same on all ranks."""
        self._average_buffers()
        return super().lightning_module_state_dict()

    def teardown(self) -> None:
        """Free the device and leave the process group's environment."""
        if self.exchange is not None:
            self.exchange.release()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy under its names."""
        for name, start_method in _NAMES.items():
            strategy_registry.register(
                name, cls, description=f"MQ-GNN, started by {start_method}", override=True, start_method=start_method
            )

    def _training_module(self) -> "pl.LightningModule":
        assert self.lightning_module is not None
        return self.lightning_module

    def _exchange(self, optimizers: list[Optimizer]) -> None:
        assert self.exchange is not None
        parameters: dict[int, Parameter] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters.update((id(parameter), parameter) for parameter in group["params"])
        self.exchange([parameter for parameter in parameters.values() if parameter.requires_grad])

    def _average_buffers(self) -> None:
        module = self._training_module()
        state = module.trainer.state
        # After an exception the other ranks are elsewhere and would not answer.
        if state.fn == TrainerFn.FITTING and state.status != TrainerStatus.INTERRUPTED:
            average_buffers(module)


MQGNNStrategy.register_strategies(StrategyRegistry)
