"""MQGNNStrategy: trains one replica of the model per process, and lets them share what they learn."""

import atexit
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from itertools import count
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch names it in no __all__
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.optim import Optimizer

from lightning_mqgnn.peers import PeerWatch
from lightning_mqgnn.racom import RaCoM, RaCoMExchange, average_buffers, average_optimizer_state, broadcast_state

_log = logging.getLogger(__name__)

_NAMES: dict[str, Literal["popen", "spawn", "fork"]] = {
    "mqgnn": "popen",
    "mqgnn_spawn": "spawn",
    "mqgnn_fork": "fork",
    "mqgnn_notebook": "fork",
}
_STATE = "mqgnn"  # its key in checkpoints
_watches = count()


class MQGNNStrategy(DDPStrategy):
    """Data-parallel training in which every rank steps by itself, and progress is exchanged while it goes on.

    Importing `lightning_mqgnn` registers it as `mqgnn` (the script is started once per rank), `mqgnn_spawn`,
    `mqgnn_fork` and `mqgnn_notebook`.

    After a warm-up in lock-step each optimizer step is local; the progress of some steps at a time is exchanged as
    `RaCoM` describes, with a bounded staleness. Replicas are made equal, bit by bit, and floating-point buffers
    (BatchNorm's statistics) averaged, before each validation, for each checkpoint and at the end of fit; optimizers'
    state is averaged for checkpoints too.

    `MQGNNStrategy(period=1, max_staleness=0)` keeps all steps in lock-step: the mean gradient of all ranks, after the
    backward pass and before clipping and the optimizer. On two ranks the weights are those of `ddp` to the last bit; on
    more they are but for the order of additions. Parameters without a gradient need no option.

    If a rank fails or dies, the others end with a `PeerError` that names it.

    Args:
        racom: Settings of the exchange.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer, if not given.
        checkpoint_io: Set by the Trainer, if not given.
        precision_plugin: Set by the Trainer, if not given.
        process_group_backend: `gloo` or `nccl`; by default what fits the device.
        timeout: How long a collective may wait for another rank.
        start_method: How the processes of this machine are started.
        settings: Fields of `RaCoM`, in place of `racom` or on top of it.

    Raises:
        TypeError: A keyword is no field of `RaCoM`.
        ValueError: A setting is out of range.
    """

    def __init__(
        self,
        racom: RaCoM | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: Any,
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
        known = [field.name for field in fields(RaCoM)]
        for name, value in settings.items():
            if name not in known:
                raise TypeError(
                    f"{name}={value!r} is no argument of MQGNNStrategy: nothing wraps the model, so options of "
                    f"DistributedDataParallel are not needed; settings of the exchange are {', '.join(known)}"
                )
        self.racom = replace(racom or RaCoM(), **settings)
        self.exchange: RaCoMExchange | None = None
        self._group: dist.ProcessGroup | None = None
        self._watch: PeerWatch | None = None
        self._backward_sync = True

    def setup_environment(self) -> None:
        """Join the process group, and make one more for the exchange."""
        if self.root_device.type == "mps":
            raise MisconfigurationException("strategy='mqgnn' runs on CPUs and CUDA devices: use accelerator='cpu'")
        super().setup_environment()
        if self._group is None:
            self._group = dist.new_group(timeout=self._timeout)
            atexit.register(_leave_process_group)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Put the model on the device and make all replicas equal."""
        if self._layer_sync is not None and self.root_device.type == "cpu":
            raise MisconfigurationException(
                "Trainer(sync_batchnorm=True) needs CUDA devices: remove it. BatchNorm's statistics are averaged over "
                "the ranks for validation and checkpoints"
            )
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            deterministic = torch.are_deterministic_algorithms_enabled()
            settings = replace(self.racom, arrival="fixed") if deterministic else self.racom
            self.exchange = RaCoMExchange(self.optimizers, settings, self._group)
            if self.world_size > 1:
                self._unlock(trainer)

    def configure_ddp(self) -> None:
        """Called by `DDPStrategy.setup` to wrap the model for training; here it stays as it is."""
        assert self.model is not None
        broadcast_state(self.model)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        """Step; in lock-step with the exchange between the backward pass and whatever Lightning does with gradients."""
        module, exchange = self._training_module(), self._racom_exchange()
        # Weight averaging runs steps without a backward pass, to renew BatchNorm's statistics.
        if module.trainer.fit_loop._skip_backward:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if exchange.settings.warmup is None:
            exchange.settings = replace(exchange.settings, warmup=self._warmup())

        def closure_with_exchange() -> Any:
            result = closure()
            if module.automatic_optimization:
                self._blaming_peers(lambda: exchange.average_gradients([optimizer]))
            return result

        self._blaming_peers(exchange.before_step)
        result = super().optimizer_step(optimizer, closure_with_exchange, model, **kwargs)
        self._blaming_peers(exchange.after_step)
        if self._ends_epoch():
            self._drain()
        return result

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Exchange at the end of `manual_backward`: the user may look at the gradients before the step."""
        super().post_backward(closure_loss)
        if not self._training_module().automatic_optimization and self._backward_sync:
            self._blaming_peers(lambda: self._racom_exchange().average_gradients(self.optimizers))

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
        self._at("validation")
        self._make_replicas_equal()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Leave the same model on all ranks, also where a callback has set its parameters at the end."""
        self._make_replicas_equal(force=True)
        if self._watch is not None:
            self._watch.stop()
        super().on_train_end()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state for a checkpoint, the same on all ranks."""
        self._at("saving a checkpoint")
        self._make_replicas_equal()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state for a checkpoint, made the same on all ranks."""
        if self._ranks_train_together() and not self.racom.synchronous:
            self._blaming_peers(lambda: average_optimizer_state(optimizer, self._group))
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save, with the state of the exchange where the optimizers' is saved."""
        if self.exchange is not None and "optimizer_states" in checkpoint:
            checkpoint[_STATE] = self.exchange.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self._at("training")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model, and forget what was on its way before."""
        if self.exchange is not None:
            self.exchange.discard()
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, and the state of the exchange, which a checkpoint of another strategy lacks."""
        super().load_optimizer_state_dict(checkpoint)
        if _STATE in checkpoint:
            self._racom_exchange().load_state_dict(checkpoint[_STATE])

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; not after an exception, when they are elsewhere."""
        module = self.lightning_module
        if module is None or module._trainer is None or module.trainer.state.status != TrainerStatus.INTERRUPTED:
            super().barrier(name)

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks."""
        if self._watch is not None:
            self._watch.fail(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Stop the threads, free the device and leave the process group's environment."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self.exchange is not None:
            self.exchange.close()
        self._lock_again()
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

    def _racom_exchange(self) -> RaCoMExchange:
        assert self.exchange is not None
        return self.exchange

    def _warmup(self) -> int:
        trainer = self._training_module().trainer
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        return self.racom.warmup_steps(per_epoch, trainer.estimated_stepping_batches)

    def _ranks_train_together(self) -> bool:
        """Whether the other ranks are at the same place, to meet in a collective: not so after an exception."""
        state = self._training_module().trainer.state
        return state.fn == TrainerFn.FITTING and state.status != TrainerStatus.INTERRUPTED

    def _ends_epoch(self) -> bool:
        """Whether windows must be completed here: callbacks read the model at the end of the last epoch."""
        trainer = self._training_module().trainer
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return False
        return self.racom.drain_each_epoch or trainer.current_epoch + 1 == trainer.max_epochs

    def _drain(self, force: bool = False) -> None:
        self._blaming_peers(lambda: self._racom_exchange().drain(force))

    def _make_replicas_equal(self, force: bool = False) -> None:
        if not self._ranks_train_together():
            return
        self._drain(force)
        self._blaming_peers(lambda: average_buffers(self._training_module(), self._group))
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and self.world_size > 1 and not self.racom.synchronous:
            state = [scaler.state_dict()]
            dist.broadcast_object_list(state, src=0, group=self._group)
            scaler.load_state_dict(state[0])

    # Lightning locks ranks together at each batch, by a broadcast that tells all of a SIGTERM; a signal handler does
    # the same at once, and waits for ranks that are elsewhere. Here ranks hear of each other through `PeerWatch`.

    def _unlock(self, trainer: "pl.Trainer") -> None:
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        if hasattr(loop, "_broadcast_sigterm_tensor"):
            loop._broadcast_sigterm_tensor = self._begin_batch  # type: ignore[method-assign]  # of this object alone
        if hasattr(connector, "_sigterm_notifier_fn"):
            connector._sigterm_notifier_fn = self._note_sigterm  # type: ignore[method-assign]
        store = PrefixStore(f"mqgnn/{next(_watches)}", dist.distributed_c10d._get_default_store())
        self._watch = PeerWatch(store, self.global_rank, self.world_size, self._racom_exchange().abort)

    def _lock_again(self) -> None:
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            module.trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
            module.trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)

    def _begin_batch(self) -> None:
        self._at("training")
        if self._watch is not None:
            self._watch.check()

    def _note_sigterm(self, signum: int, _: Any) -> None:
        connector = self._training_module().trainer._signal_connector
        if not connector.received_sigterm and self.launcher is not None:
            self.launcher.kill(signum)
        connector.received_sigterm = True

    def _at(self, phase: str) -> None:
        if self._watch is not None:
            self._watch.at(phase, self._racom_exchange().steps)

    def _blaming_peers(self, exchange: Callable[[], None]) -> None:
        """Run `exchange`; if it fails since another rank did, say which."""
        try:
            exchange()
        except RuntimeError as error:
            if self._watch is None:
                raise
            raise self._watch.explain(error) from error


def _leave_process_group() -> None:
    """At exit: a gloo group that is still there is taken apart too late, which aborts one process in some dozens."""
    if dist.is_initialized():
        dist.destroy_process_group()


MQGNNStrategy.register_strategies(StrategyRegistry)
