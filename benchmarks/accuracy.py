"""Test accuracy of a GCN on real graphs, over several seeds: does the sampled, pipelined training learn as it should?

python benchmarks/accuracy.py FOLDER_OF_NPZ_FILES/*.npz --seeds 3

The recipe is the plain one of two GCN layers, hidden width 64, dropout 0.5 before each layer, Adam with learning rate
0.01 and weight decay 5e-4. The result is the test accuracy at the epoch that is best on the validation nodes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

EXAMPLE = Path(__file__).parent.parent / "examples" / "node_classification.py"
RECIPE = ["--model", "gcn", "--hidden", "64", "--dropout", "0.5", "--lr", "0.01", "--weight-decay", "5e-4"]


def train(graph: Path, seed: int, arguments: argparse.Namespace) -> float:
    """Train once, in processes of its own, and return the test accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        fan_out = [str(fan) for fan in arguments.fan_out]
        eval_fan_out = [str(fan) for fan in arguments.eval_fan_out]
        command = [
            *(sys.executable, str(EXAMPLE), "--dataset", str(graph), *RECIPE),
            *("--strategy", arguments.strategy, "--devices", str(arguments.devices), "--seed", str(seed)),
            *("--epochs", str(arguments.epochs), "--batch-size", str(arguments.batch_size)),
            *("--fan-out", *fan_out, "--eval-fan-out", *eval_fan_out, "--json", str(results)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return float(json.loads(results.read_text())["test_accuracy"])


def main() -> None:
    """Train on each graph with each seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path, help=".npz files, see examples/graphs.py")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--fan-out", type=int, nargs="+", default=[15, 10])
    parser.add_argument("--eval-fan-out", type=int, nargs="+", default=[25, 25])
    parser.add_argument("--strategy", default="mqgnn")
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()
    print(f"{arguments.strategy}, {arguments.devices} ranks, {arguments.epochs} epochs, batch {arguments.batch_size},")
    print(f"fan-out {arguments.fan_out}, in evaluation {arguments.eval_fan_out}; {arguments.seeds} seeds\n")
    for graph in arguments.graphs:
        accuracies = [train(graph, seed, arguments) for seed in range(arguments.seeds)]
        spread = stdev(accuracies) if len(accuracies) > 1 else 0.0
        print(f"{graph.stem:<20}{mean(accuracies):.3f} ± {spread:.3f}", flush=True)


if __name__ == "__main__":
    main()
