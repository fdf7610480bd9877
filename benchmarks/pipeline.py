"""How much of the time the consumer waits for batches, for compute stages of 1 to 100 ms.

python benchmarks/pipeline.py

The compute stage is a sleep, like an accelerator that leaves the CPU alone, in a Trainer's loop. The best
that a pipeline can do is the slower of two: what the training thread does with a batch, or what the loader alone needs
for one. Epochs are short, so that a bubble at their border would show.
"""

import argparse
import time
from statistics import median
from typing import Any

import lightning as L
import torch
from torch_geometric.data import Data

from lightning_mqgnn import GraphStore, MQGNNDataModule, synthetic_graph

_SKIPPED = 20  # batches until the queues are full


class StandIn(L.LightningModule):
    """Computes nothing for a fixed time."""

    def __init__(self, seconds: float, datamodule: MQGNNDataModule) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._seconds = seconds
        self._datamodule = datamodule
        self._batches = 0
        self.marks: list[tuple[float, float]] = []

    def training_step(self, batch: Data, batch_idx: int) -> None:
        """Sleep; at the end of the first batches and of the last one, note the time and the waiting so far."""
        if self._seconds:
            time.sleep(self._seconds)
        self._batches += 1
        if self._batches in (_SKIPPED, int(self.trainer.estimated_stepping_batches)):
            self.marks.append((time.perf_counter(), self._datamodule.times()["train"]["wait"]))

    def configure_optimizers(self) -> Any:
        """There is nothing to optimise."""
        return None


def run(store: GraphStore, seconds: float, queue_size: int) -> tuple[float, float]:
    """Milliseconds from batch to batch in the steady state, and those of them that the training thread waited."""
    datamodule = MQGNNDataModule(
        store, input_train_nodes=range(40 * 512), num_neighbors=[15, 10], batch_size=512, queue_size=queue_size
    )
    module = StandIn(seconds, datamodule)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=datamodule)
    (began, waited_before), (ended, waited) = module.marks
    count = 3 * 40 - _SKIPPED
    return (ended - began) / count * 1e3, (waited - waited_before) / count * 1e3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queue-size", type=int, default=2)
    parser.add_argument("--compute-ms", type=float, nargs="+", default=[1, 2, 5, 10, 20, 50, 100])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = GraphStore.from_data(synthetic_graph(arguments.nodes, arguments.edges, num_features=100))
    print("ms per batch; the training thread's own time is the compute stage and Lightning's loop")
    print(f"{'compute':>10}{'own time':>12}{'loader alone':>14}{'together':>12}{'waited':>10}{'of the best':>14}")
    for compute_ms in arguments.compute_ms:
        rows = []
        for _ in range(arguments.rounds):
            alone, _ = run(store, 0.0, arguments.queue_size)
            together, waited = run(store, compute_ms / 1e3, arguments.queue_size)
            own = together - waited
            rows.append((own, alone, together, waited, max(alone, own) / together))
        own, alone, together, waited, share = (median(column) for column in zip(*rows, strict=True))
        print(
            f"{compute_ms:>10.0f}{own:>12.2f}{alone:>14.2f}{together:>12.2f}{waited:>10.2f}{min(share, 1):>14.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
