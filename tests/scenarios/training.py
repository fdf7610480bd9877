"""The registry of scenarios, and the models and helpers that they share."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from graphs import random_graph
from torch_geometric.nn import SAGEConv

from lightning_mqgnn import MQGNNDataModule, MQGNNStrategy

SCENARIOS: dict[str, Callable[[str, Path], dict[str, Any]]] = {}
SETTINGS: dict[str, dict[str, Any]] = {
    "lockstep": {"period": 1, "max_staleness": 0},
    "racom": {"period": 3, "max_staleness": 5, "warmup": 2},
    "fixed": {"period": 3, "max_staleness": 2, "warmup": 2, "arrival": "fixed"},
}
DDP_NEEDS_UNUSED = {
    "unused_on_one_rank",
    "unused_on_all_ranks",
    "two_optimizers",
    "two_optimizers_and_accumulation",
    "unfreezing",
}


def scenario(function: Callable[[str, Path], dict[str, Any]]) -> Callable[[str, Path], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


class Sage(L.LightningModule):
    """Two layers; notes which seed nodes it saw, by epoch."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], batch_norm: bool = False, **settings: Any):
        super().__init__()
        self.first, self.second = SAGEConv(8, 16), SAGEConv(16, 4)
        self.norm = torch.nn.BatchNorm1d(16) if batch_norm else torch.nn.Identity()
        self.make_optimizer, self.settings = optimizer, settings
        if "use_extra" in settings:
            self.extra = torch.nn.Linear(4, 4)
        self.trained: dict[int, list[int]] = {}
        self.validated: dict[int, list[int]] = {}

    def forward(self, batch: Any) -> torch.Tensor:
        x = self.norm(self.first(batch.x, batch.edge_index)).relu()
        return self.second(x, batch.edge_index)[: batch.batch_size]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trained.setdefault(self.current_epoch, []).extend(batch.input_id.tolist())
        logits = self(batch)
        if "use_extra" in self.settings and self.settings["use_extra"](self.global_rank, self.global_step):
            logits = self.extra(logits)
        return F.cross_entropy(logits, batch.y[: batch.batch_size])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.setdefault(self.current_epoch, []).extend(batch.input_id.tolist())

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


class TwoOptimizers(Sage):
    """Manual optimisation of the two layers in turn, the second with the gradients of `accumulate` batches."""

    def __init__(self, accumulate: int = 1) -> None:
        super().__init__(sgd)
        self.accumulate = accumulate
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, other = self.optimizers()
        self.toggle_optimizer(one)
        one.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch), batch.y[: batch.batch_size]))
        self.clip_gradients(one, 0.1, "norm")
        one.step()
        self.untoggle_optimizer(one)
        last = (batch_idx + 1) % self.accumulate == 0
        with other.toggle_model(sync_grad=last):
            self.manual_backward(F.cross_entropy(self(batch), batch.y[: batch.batch_size]))
            if last:
                other.step()
                other.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.first.parameters(), 1e-2),
            torch.optim.SGD(self.second.parameters(), 1e-1, momentum=0.9),
        ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, 0.1, max_iter=3)


def datamodule(**arguments: Any) -> MQGNNDataModule:
    return MQGNNDataModule(**{"data": random_graph(), "num_neighbors": [4, 3], "batch_size": 30, **arguments})


def make_trainer(strategy: Any, **arguments: Any) -> L.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": int(sys.argv[3]),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 0,
    }
    if isinstance(strategy, str):
        kind, _, start_method = strategy.partition("_")
        if kind in SETTINGS:
            strategy = MQGNNStrategy(**SETTINGS[kind], start_method=start_method or "popen")
    return L.Trainer(strategy=strategy, **{**defaults, **arguments})


def result(module: Sage, **more: Any) -> dict[str, Any]:
    return {
        "weights": {name: value.detach().clone() for name, value in module.named_parameters()},
        "buffers": {name: value.detach().clone() for name, value in module.named_buffers()},
        "trained": module.trained,
        "validated": module.validated,
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("mqgnn-")],
        **more,
    }


def fit(module: Sage, strategy: Any, data: Any = None, **arguments: Any) -> dict[str, Any]:
    """20 optimizer steps, unless told otherwise."""
    if "max_epochs" not in arguments:
        arguments.setdefault("max_steps", 20)
    trainer = make_trainer(strategy, **arguments)
    trainer.fit(module, datamodule=data or datamodule())
    counted = {}
    if isinstance(trainer.strategy, MQGNNStrategy) and trainer.strategy.exchange is not None:
        exchange = trainer.strategy.exchange
        counted = {
            "exchanges": exchange.gradients.exchanges,
            "bytes": exchange.bytes,
            "windows": exchange.statistics.windows,
            "staleness": dict(exchange.statistics.staleness),
        }
    return result(module, steps=trainer.global_step, **counted)
