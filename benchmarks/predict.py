"""Time and memory of whole-graph prediction: `model(x, edge_index)` against `predict_all`, each in a new process.

python benchmarks/predict.py                  # 50k nodes, 1.4M edges, 64 features; one thread
"""

import argparse
import multiprocessing
import os
import threading
import time
from typing import Any

import torch
from large_graph import private_bytes
from torch_geometric.nn import GAT, GCN, GraphSAGE

from lightning_mqgnn import predict_all, synthetic_graph

MODELS = {
    "GraphSAGE(64, 128, 3, 8)": lambda: GraphSAGE(64, 128, 3, 8),
    "GCN(64, 128, 3, 8)": lambda: GCN(64, 128, 3, 8),
    "GAT(64, 128, 2, 8, heads=4, v2=True)": lambda: GAT(64, 128, 2, 8, heads=4, v2=True),
}


def measure(name: str, edge_chunk: int, nodes: int, edges: int, results: Any) -> None:
    """Predict once; put seconds, and bytes of private memory above those before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = synthetic_graph(nodes, edges, num_features=64)
    model = MODELS[name]().eval()
    before = largest = private_bytes(os.getpid())
    done = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.005):
            largest = max(largest, private_bytes(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    with torch.no_grad():
        if edge_chunk:
            predict_all(model, data, edge_chunk=edge_chunk, progress=False)
        else:
            model(data.x, data.edge_index)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    results.put((seconds, largest - before))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=1_500_000)
    parser.add_argument("--edge-chunks", type=int, nargs="+", default=[2**12, 2**14, 2**16, 2**18])
    arguments = parser.parse_args()
    columns = ["model(x, edge_index)", *(f"edge_chunk={chunk}" for chunk in arguments.edge_chunks)]
    print("| s, MiB | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 1))
    context = multiprocessing.get_context("spawn")
    for name in MODELS:
        row = []
        for chunk in (0, *arguments.edge_chunks):
            results = context.SimpleQueue()
            process = context.Process(target=measure, args=(name, chunk, arguments.nodes, arguments.edges, results))
            process.start()
            seconds, memory = results.get()
            process.join()
            row.append(f"{seconds:.1f} s, {memory / 2**20:.0f}")
        print(f"| {name} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
