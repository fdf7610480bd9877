"""Trains on a few ranks, one of which meets with a fault; for `test_faults.py`, and by itself for many runs.

python tests/faulty.py --runs 200 --seed 0

Each run starts the ranks as a cluster would, without a launcher that ends the others, and plants one fault at a random
moment: a rank is killed, raises, gets SIGTERM, or stops for longer than the time limit. The other ranks must end within
30 s with an error that names the rank, the step and the phase.
"""

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = 30.0  # seconds that others may take to end
TIMEOUT = 8.0  # seconds that a collective may wait, of which a stopped rank is found out
FAULTS = ("killed", "raises", "terminated", "stopped")
NAMED = re.compile(r"rank (\d+)[^:\n]* in (?:training|validation|saving a checkpoint|setup) after optimizer step \d+")


def plant(fault: str) -> None:
    """Meet with a fault, in this process."""
    if fault == "raises":
        raise ArithmeticError("planted")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stopped": signal.SIGSTOP}[fault])


def train(fault: str, rank: int, phase: str, moment: float, ranks: int) -> None:
    """One rank's training.

    `phase` is that of the fault, at step `moment` or later; or "any", `moment` seconds after fit has begun.
    """
    import lightning as L
    import torch
    from graphs import random_graph
    from lightning.pytorch.callbacks import ModelCheckpoint
    from scenarios.training import Sage, adamw
    from torchmetrics import MeanMetric

    from lightning_mqgnn import MQGNNDataModule, MQGNNStrategy

    class Faulty(Sage):
        def __init__(self) -> None:
            super().__init__(adamw)
            self.metric = MeanMetric()
            self.due = False

        def meet(self, phase_here: str) -> None:
            here = phase == phase_here and self.trainer.global_step >= moment
            if self.global_rank == rank and here:
                said = self.trainer.strategy._watch._own.count
                while self.trainer.strategy._watch._own.count < said + 2:  # until the others can know where it is
                    time.sleep(0.05)
            if self.global_rank == rank and (here or (phase == "any" and self.due)):
                plant(fault)

        def on_train_start(self) -> None:
            (Path(self.trainer.default_root_dir) / f"begun-{self.global_rank}").touch()
            if phase == "any" and self.global_rank == rank:
                timer = threading.Timer(moment, self.come_due)
                timer.daemon = True
                timer.start()

        def come_due(self) -> None:
            if fault == "raises":
                self.due = True
            else:
                plant(fault)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.meet("training")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.meet("validation")
            self.metric(self(batch).mean())
            self.log("metric", self.metric, batch_size=1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.meet("saving a checkpoint")

    torch.set_num_threads(1)
    folder = os.environ["FAULTY_FOLDER"]
    trainer = L.Trainer(
        strategy=MQGNNStrategy(period=3, max_staleness=4, warmup=6, timeout=timedelta(seconds=TIMEOUT)),
        accelerator="cpu",
        devices=ranks,
        max_epochs=100_000,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=7)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Faulty()
    trainer.fit(module, datamodule=MQGNNDataModule(random_graph(), num_neighbors=[4, 3], batch_size=10))


def run(fault: str, rank: int, phase: str, moment: float, ranks: int) -> dict[int, str]:
    """Train with a fault and return what each of the other ranks wrote to stderr.

    Raises:
        AssertionError: A rank did not end in time, or said nothing of the one that is to blame.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
        chosen.close()
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FAULTY_FOLDER": folder}
        arguments = [fault, str(rank), phase, str(moment), str(ranks)]
        files = [open(f"{folder}/stderr-{i}", "w+") for i in range(ranks)]  # noqa: SIM115  # closed below
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--train", *arguments],
                env={**environment, "LOCAL_RANK": str(i), "NODE_RANK": "0"},
                stdout=subprocess.DEVNULL,
                stderr=files[i],
            )
            for i in range(ranks)
        ]
        try:
            wait_for_fault(processes[rank], fault)
            since = time.monotonic()
            others = [process for i, process in enumerate(processes) if i != rank]
            for process in others:
                process.wait(timeout=max(LIMIT + (fault == "stopped") * TIMEOUT - (time.monotonic() - since), 0.1))
            said = {i: Path(f"{folder}/stderr-{i}").read_text() for i in range(ranks) if i != rank}
            for i, text in said.items():
                assert processes[i].returncode != 0, f"rank {i} ended as if nothing had happened"
                named = [int(match[1]) for match in NAMED.finditer(text)]
                assert rank in named, f"rank {i} does not name rank {rank}:\n{text[:1500]}\n...\n{text[-3000:]}"
            return said
        finally:
            for process, file in zip(processes, files, strict=True):
                process.kill()
                process.wait()
                file.close()


def wait_for_fault(process: "subprocess.Popen[bytes]", fault: str) -> None:
    """Return when the rank has met with its fault."""
    if fault == "stopped":
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    else:
        process.wait(timeout=180)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        fault, rank, phase, moment, ranks = arguments.train
        train(fault, int(rank), phase, float(moment), int(ranks))
        return
    draw = random.Random(arguments.seed)
    for number in range(arguments.runs):
        ranks = draw.choice([2, 2, 3])
        fault, rank, moment = draw.choice(FAULTS), draw.randrange(ranks), draw.uniform(0, 3)
        began = time.monotonic()
        run(fault, rank, "any", moment, ranks)
        print(
            f"{number}: rank {rank} of {ranks} {fault} after {moment:.2f} s: {time.monotonic() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
