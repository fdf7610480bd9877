"""What watching costs: a training step with and without PipelineMonitor and AdaptiveQueueCallback.

python benchmarks/monitor.py

The compute stage multiplies matrices for some 5 ms, in a Trainer's loop with a logger. Runs take turns. Counted is CPU
time outside of that stage: a hundredth of a step is less than its own time is exact to.
"""

import argparse
import logging
import tempfile
import time
import warnings
from statistics import median
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore, MQGNNDataModule, PipelineMonitor, synthetic_graph

_SKIPPED = 20  # steps until the queues are full
_PRODUCTS = 2  # of matrices, in a step
SETTINGS: dict[str, tuple[int | Literal["auto"], bool]] = {  # queue_size, and whether there is a monitor
    "nothing": (2, False),
    '`queue_size="auto"`': ("auto", False),
    "`PipelineMonitor()`": (2, True),
    "both": ("auto", True),
}


class StandIn(L.LightningModule):
    """Computes nothing of use for some milliseconds."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.marks: list[tuple[float, float]] = []
        self._steps = steps
        self._done = 0
        self._computed = 0.0
        self._matrix = torch.full((512, 512), 1 / 512)

    def training_step(self, batch: Data, batch_idx: int) -> None:
        """Compute; after the first steps and at the last one, note the CPU time of this thread and of all."""
        began = time.thread_time()
        for _ in range(_PRODUCTS):
            self._matrix = self._matrix @ self._matrix
        self._computed += time.thread_time() - began
        self._done += 1
        if self._done in (_SKIPPED, self._steps):
            self.marks.append((time.thread_time() - self._computed, time.process_time() - self._computed))

    def configure_optimizers(self) -> Any:
        """There is nothing to optimise."""
        return None


def run(store: GraphStore, steps: int, queue_size: int | Literal["auto"], watched: bool) -> tuple[float, float]:
    """Microseconds of CPU time per step, of the training thread and of all threads."""
    datamodule = MQGNNDataModule(
        store, input_train_nodes=range(64 * steps), num_neighbors=[5, 5], batch_size=64, queue_size=queue_size
    )
    with tempfile.TemporaryDirectory() as folder:
        module = StandIn(steps)
        L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=CSVLogger(folder),
            callbacks=[PipelineMonitor(report=False)] if watched else [],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
        ).fit(module, datamodule=datamodule)
    (thread, process), (thread_at_end, process_at_end) = module.marks
    per_step = 1e6 / (steps - _SKIPPED)
    return (thread_at_end - thread) * per_step, (process_at_end - process) * per_step


def main() -> None:
    """Run all settings in turn, and print what each adds to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    store = GraphStore.from_data(synthetic_graph(50_000, 1_000_000, num_features=32))
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    run(store, 2 * _SKIPPED, *SETTINGS["both"])  # the first run of a process pays for imports
    for _ in range(arguments.rounds):
        for name, setting in SETTINGS.items():
            measured[name].append(run(store, arguments.steps, *setting))
    print("| watched by | training thread, µs per step | all threads | more than nothing | of 5 ms |\n|" + " --- |" * 5)
    for name, runs in measured.items():
        thread, process = (median(figures) for figures in zip(*runs, strict=True))
        more = median(one - without for (one, _), (without, _) in zip(runs, measured["nothing"], strict=True))
        print(f"| {name} | {thread:.0f} | {process:.0f} | {more:.0f} | {more / 50:.1f} % |")


if __name__ == "__main__":
    main()
