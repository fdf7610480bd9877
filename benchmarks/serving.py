"""Latency and throughput of predictions on request: by an `InferencePipeline`, and by the same steps one by one.

python benchmarks/serving.py                                  # 200k nodes, 4M edges; four minutes
python benchmarks/serving.py --nodes 20000 --edges 300000 --seconds 1   # a quick look

A request is for one random node, or for `--seeds` of them; the model is a GraphSAGE of two layers. "Closed": so many
clients, each of which sends its next request when the last is answered. "Open": requests come at random moments
(Poisson), whether or not the earlier ones are answered, and their latency counts from the moment at which they were
due. "One by one" samples, prepares and predicts in the client's thread; with an open loop, in one thread, behind a
queue.
"""

import argparse
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_mqgnn import GraphStore, InferencePipeline, NeighborSampler, Overloaded, synthetic_graph
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.prepare import Prepare

_WARM_UP = 50  # requests


class GraphSAGE(torch.nn.Module):
    """Two layers."""

    def __init__(self, num_features: int, hidden: int = 128, num_classes: int = 8) -> None:
        super().__init__()
        self.first = SAGEConv(num_features, hidden)
        self.second = SAGEConv(hidden, num_classes)

    def forward(self, batch: Data) -> Tensor:
        """Return a row per node of the batch."""
        x = self.first(batch.x, batch.edge_index).relu()
        logits: Tensor = self.second(x, batch.edge_index)
        return logits


class OneByOne:
    """Predicts for a request in the thread that asks."""

    def __init__(self, model: GraphSAGE, store: GraphStore, num_neighbors: list[int]) -> None:
        self._sampler = NeighborSampler(store, num_neighbors)
        self._prepare = Prepare(store, BufferPool())
        self._model = model

    def predict(self, nodes: np.ndarray) -> Tensor:
        """Return a row per node; these must be distinct."""
        batch = self._prepare(self._sampler.sample(nodes, key=0))
        with torch.inference_mode():
            rows: Tensor = self._model(batch)[: len(nodes)].clone()
        return rows

    def behind(self, executor: ThreadPoolExecutor) -> "Callable[[np.ndarray], Future[Tensor]]":
        """The same, but in a thread of `executor`."""
        return lambda nodes: executor.submit(self.predict, nodes)


class Requests:
    """Random nodes; those of a client are the same in all runs."""

    def __init__(self, num_nodes: int, seeds: int, client: int) -> None:
        self._generator = np.random.default_rng(client)
        self._num_nodes = num_nodes
        self._seeds = seeds

    def __call__(self) -> np.ndarray:
        """The distinct nodes of the next request."""
        return np.unique(self._generator.integers(self._num_nodes, size=self._seeds))


def closed_loop(
    predict: Callable[[np.ndarray], Tensor], clients: int, seconds: float, num_nodes: int, seeds: int
) -> tuple[list[float], float]:
    """Latencies in seconds of all requests, and how long it took."""
    latencies: list[float] = []

    def client(number: int) -> None:
        requests = Requests(num_nodes, seeds, number)
        while time.perf_counter() < end:
            began = time.perf_counter()
            predict(requests())
            latencies.append(time.perf_counter() - began)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    end = began + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies, time.perf_counter() - began


def open_loop(
    submit: Callable[[np.ndarray], "Future[Tensor]"], rate: float, seconds: float, num_nodes: int, seeds: int
) -> tuple[list[float], float, int]:
    """Latencies in seconds of all requests, how long it took until the last answer, and how many were refused."""
    due = np.cumsum(np.random.default_rng(0).exponential(1 / rate, int(rate * seconds)))
    requests = Requests(num_nodes, seeds, 0)
    latencies: list[float] = []
    futures: list[Future[Tensor]] = []
    refused = 0

    def answered(due: float, _: "Future[Tensor]") -> None:
        latencies.append(time.perf_counter() - due)

    began = time.perf_counter()
    for moment in due.tolist():
        time.sleep(max(began + moment - time.perf_counter(), 0))
        try:
            future = submit(requests())
        except Overloaded:
            refused += 1
            continue
        future.add_done_callback(partial(answered, began + moment))
        futures.append(future)
    for future in futures:
        future.result()
    return latencies, time.perf_counter() - began, refused


def print_row(name: str, load: str, latencies: list[float], took: float, per_batch: float, refused: int = 0) -> None:
    """Print milliseconds, requests per second, and requests per batch."""
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    rate = len(latencies) / took
    print(f"| {name} | {load} | {p50:.1f} | {p99:.1f} | {rate:,.0f} | {per_batch:.1f} | {refused or ''} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=4_000_000, help="before duplicates are removed")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--seeds", type=int, default=1, help="nodes of a request")
    parser.add_argument("--latency-target", type=float, default=0.05, help="seconds")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=[200, 1000, 2000], help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="per row")
    parser.add_argument("--threads", type=int, default=1, help="of torch, per operation")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    store = GraphStore.from_data(synthetic_graph(arguments.nodes, arguments.edges, num_features=arguments.features))
    model = GraphSAGE(arguments.features).eval()
    load = arguments.seconds, store.num_nodes, arguments.seeds

    print(f"{store.num_nodes:,} nodes, {store.num_edges:,} edges, fan-out {arguments.num_neighbors}, ", end="")
    print(f"{arguments.seeds} node(s) a request, latency target {arguments.latency_target * 1e3:.0f} ms\n")
    print("| | load | p50 ms | p99 ms | requests/s | requests/batch | refused |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    plain = OneByOne(model, store, arguments.num_neighbors)
    requests = Requests(store.num_nodes, arguments.seeds, 0)
    for _ in range(_WARM_UP):
        plain.predict(requests())

    def pipeline() -> InferencePipeline:
        serving = InferencePipeline(
            model, store, num_neighbors=arguments.num_neighbors, latency_target=arguments.latency_target
        )
        for _ in range(_WARM_UP):
            serving.predict(requests())
        return serving

    gc.collect()
    gc.freeze()  # as a server should once it is set up: a full collection stops all threads for a quarter of a second
    for clients in arguments.clients:
        name = f"closed, {clients} client{'s' if clients > 1 else ''}"
        latencies, took = closed_loop(plain.predict, clients, *load)
        print_row("one by one", name, latencies, took, 1)
        with pipeline() as serving:
            latencies, took = closed_loop(serving.predict, clients, *load)
            per_batch = len(latencies) / (serving.report().batches - _WARM_UP)
        print_row("`InferencePipeline`", name, latencies, took, per_batch)
    for rate in arguments.rates:
        name = f"open, {rate:g}/s"
        with ThreadPoolExecutor(1) as executor:
            latencies, took, _ = open_loop(plain.behind(executor), rate, *load)
        print_row("one by one", name, latencies, took, 1)
        with pipeline() as serving:
            latencies, took, refused = open_loop(serving.submit, rate, *load)
            per_batch = len(latencies) / (serving.report().batches - _WARM_UP)
        print_row("`InferencePipeline`", name, latencies, took, per_batch, refused)


if __name__ == "__main__":
    main()
