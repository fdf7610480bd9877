"""Training in lock-step, with what users do to gradients, parameters and buffers."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from lightning_mqgnn import MQGNNStrategy, RaCoM
from scenarios.training import Sage, TwoOptimizers, adamw, datamodule, fit, lbfgs, make_trainer, result, scenario, sgd


@scenario
def plain_sgd(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy)


@scenario
def plain_adamw(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy)


@scenario
def plain_lbfgs(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(lbfgs), strategy)


@scenario
def accumulation_and_clipping(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy, accumulate_grad_batches=3, gradient_clip_val=0.05, max_epochs=10)


@scenario
def clipping_by_value(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy, gradient_clip_val=1e-3, gradient_clip_algorithm="value")


@scenario
def bf16_mixed(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy, precision="bf16-mixed")


@scenario
def bf16_true(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy, precision="bf16-true")


@scenario
def float64_true(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw), strategy, precision="64-true")


@scenario
def fp16_with_a_scaler(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), strategy, plugins=[MixedPrecision("16-mixed", "cpu")])


@scenario
def fp16_overflow_on_one_rank(strategy: str, folder: Path) -> dict[str, Any]:
    class Overflowing(Sage):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * 1e38 if (self.global_rank, self.global_step) == (1, 3) else loss

    scaling = MixedPrecision("16-mixed", "cpu")
    return {**fit(Overflowing(sgd), strategy, plugins=[scaling]), "scale": scaling.scaler.get_scale()}


@scenario
def two_optimizers(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(TwoOptimizers(), strategy, max_steps=40)


@scenario
def two_optimizers_and_accumulation(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(TwoOptimizers(accumulate=2), strategy, max_steps=30)


@scenario
def batch_norm(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw, batch_norm=True), strategy)


@scenario
def unused_on_one_rank(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw, use_extra=lambda rank, step: rank == 1 and step % 2 == 0), strategy)


@scenario
def unused_on_all_ranks(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(adamw, use_extra=lambda rank, step: step % 3 == 0), strategy)


@scenario
def frozen_parameters(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(lambda _: adamw(module.parameters()))  # the optimizer has them too
    module.first.requires_grad_(False)
    return fit(module, strategy)


class LayerByLayer(L.Callback):
    """Trains the second layer first, and the whole from epoch 2 on."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.first.requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            pl_module.first.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": pl_module.first.parameters()})


@scenario
def unfreezing(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(lambda _: sgd(module.second.parameters()))
    before = module.first.lin_l.weight.detach().clone()
    return {**fit(module, strategy, callbacks=[LayerByLayer()]), "before": before}


@scenario
def ranks_begin_alike(strategy: str, folder: Path) -> dict[str, Any]:
    class Watching(Sage):
        def on_train_start(self) -> None:
            self.settings["begun"] = self.first.lin_l.weight.detach().clone()

    torch.manual_seed(100 + int(os.environ.get("LOCAL_RANK", 0)))
    module = Watching(sgd)
    own = module.first.lin_l.weight.detach().clone()
    return {**fit(module, strategy), "own": own, "begun": module.settings["begun"]}


@scenario
def weight_averaging(strategy: str, folder: Path) -> dict[str, Any]:
    module = Sage(sgd, batch_norm=True)
    return fit(module, strategy, max_epochs=6, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=3)])


@scenario
def plain_dataloader(strategy: str, folder: Path) -> dict[str, Any]:
    class Linear(Sage):
        def __init__(self) -> None:
            super().__init__(sgd)
            self.first, self.second = torch.nn.Linear(4, 16), torch.nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.trained.setdefault(self.current_epoch, []).extend(batch[1].tolist())
            return F.cross_entropy(self.second(self.first(batch[0]).relu()), batch[1] % 4)

    module = Linear()
    trainer = make_trainer(strategy, max_epochs=3)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(40)), 5, shuffle=True))
    return result(module)


@scenario
def validation_averages_buffers(strategy: str, folder: Path) -> dict[str, Any]:
    class Watching(Sage):
        def on_validation_epoch_start(self) -> None:
            self.settings.setdefault("means", []).append(self.norm.running_mean.clone())

    module = Watching(sgd, batch_norm=True)
    outcome = fit(module, strategy, limit_val_batches=1.0, max_epochs=3, num_sanity_val_steps=0)
    return {**outcome, "means": module.settings["means"]}


@scenario
def checkpoint_averages_buffers(strategy: str, folder: Path) -> dict[str, Any]:
    class Noting(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 6:
                pl_module.settings["own"] = pl_module.norm.running_mean.clone()

    saving = ModelCheckpoint(folder / "buffers", "{step}", every_n_train_steps=6, save_top_k=-1)
    module = Sage(sgd, batch_norm=True)
    outcome = fit(module, strategy, max_epochs=2, callbacks=[Noting(), saving], enable_checkpointing=True)
    saved = torch.load(folder / "buffers" / "step=6.ckpt", weights_only=True)["state_dict"]["norm.running_mean"]
    return {**outcome, "own": module.settings["own"], "saved": saved}


@scenario
def strategy_as_object(strategy: str, folder: Path) -> dict[str, Any]:
    return fit(Sage(sgd), MQGNNStrategy(RaCoM(period=1, max_staleness=0)))


@scenario
def one_device(strategy: str, folder: Path) -> dict[str, Any]:
    """Run both here, as one start is enough for one process."""
    outcome = fit(Sage(sgd), strategy)
    L.seed_everything(1, verbose=False)
    return {**outcome, "auto": fit(Sage(sgd), "auto")["weights"]}


@scenario
def fit_then_test(strategy: str, folder: Path) -> dict[str, Any]:
    class Tested(Sage):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validated.setdefault(0, []).extend(batch.input_id.tolist())

    module, data = Tested(sgd), datamodule()
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    return result(module)
