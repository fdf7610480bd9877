"""Trains small models in real processes, for `test_strategy.py`.

python tests/launch.py FOLDER STRATEGY DEVICES SCENARIO [SCENARIO ...]

Lightning's launcher starts this script again for each further rank. Each rank writes what a scenario returns to
FOLDER/SCENARIO.RANK.pt. One start serves many scenarios, each with a Trainer of its own.
"""

import sys
from pathlib import Path

import lightning as L
import torch
from scenarios import asynchronous, exchange, failures, resuming, visits  # noqa: F401  # they register their scenarios
from scenarios.training import DDP_NEEDS_UNUSED, SCENARIOS


def main() -> None:
    folder, strategy, _, *names = sys.argv[1:]
    torch.set_num_threads(1)
    for name in names:
        L.seed_everything(1, verbose=False)
        unused = strategy == "ddp" and name in DDP_NEEDS_UNUSED
        outcome = SCENARIOS[name]("ddp_find_unused_parameters_true" if unused else strategy, Path(folder))
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        torch.save(outcome, Path(folder) / f"{name}.{rank}.pt")


if __name__ == "__main__":
    main()
