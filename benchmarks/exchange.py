"""What the exchange costs in the training thread, and what a slow rank costs the others; two ranks on one machine.

python benchmarks/exchange.py

A step is a stand-in: the thread sleeps, so that two ranks and their exchanges fit on two cores, and the parameters are
moved. The first table counts what a rank's calls of `RaCoMExchange` take per step, waiting for others apart. In the
second, one rank takes twice as long for its steps, always or by chance; an epoch is all steps and the drain at its end.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_mqgnn import RaCoM, RaCoMExchange

SETTINGS = {"lock-step": RaCoM(period=1, max_staleness=0), "default": RaCoM()}
SLOW_RANKS: dict[str, Callable[[int, np.random.Generator], bool]] = {
    "none": lambda rank, generator: False,
    "rank 1, always": lambda rank, generator: rank == 1,
    "each by chance, every second step": lambda rank, generator: generator.random() < 0.5,
}


def epoch(settings: RaCoM, parameters: int, seconds: float, slow: str, steps: int) -> dict[str, Any]:
    """Take `steps` steps of `seconds` each, twice that where this rank is slow, and say what they took."""
    rank = dist.get_rank()
    generator = np.random.default_rng(rank)
    layer = torch.nn.Linear(1000, parameters // 1000, bias=False)
    torch.nn.init.zeros_(layer.weight)
    gradient = layer.weight.grad = torch.full_like(layer.weight, 1e-3)
    optimizers = [torch.optim.SGD(layer.parameters())]
    exchange = RaCoMExchange(optimizers, settings, dist.group.WORLD)
    work = wall = cpu = 0.0

    def step() -> None:
        nonlocal work, wall, cpu
        began = time.perf_counter()
        time.sleep(seconds * (2 if SLOW_RANKS[slow](rank, generator) else 1))
        with torch.no_grad():
            layer.weight.add_(gradient, alpha=1e-3)
        computed, computed_cpu = time.perf_counter(), time.thread_time()
        exchange.average_gradients(optimizers)
        exchange.before_step()
        exchange.after_step()
        work += computed - began
        wall += time.perf_counter() - computed
        cpu += time.thread_time() - computed_cpu

    for _ in range(200):  # until the period has settled
        step()
    exchange.drain()
    dist.barrier()
    work = wall = cpu = 0.0
    waited = exchange.seconds
    exchange.statistics.staleness.clear()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    waited = exchange.seconds - waited
    exchange.drain()
    result = {
        "seconds": time.perf_counter() - began,
        "work": work,
        "cpu_ms": 1e3 * cpu / steps,
        "ms": 1e3 * (wall - waited) / steps,
        "wait_ms": 1e3 * waited / steps,
        "period": exchange.statistics.period,
        "staleness": max(exchange.statistics.staleness, default=0),
    }
    exchange.close()
    return result


def run_rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Run everything in turn on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)

    def measure(name: str, parameters: float, milliseconds: float, slow: str) -> list[dict[str, Any]]:
        results: list[Any] = [None, None]
        own = epoch(SETTINGS[name], round(parameters * 1e6), milliseconds / 1e3, slow, arguments.steps)
        dist.all_gather_object(results, own)
        if rank == 0 and arguments.json:
            place = {"setting": name, "parameters": parameters, "ms_per_step": milliseconds, "slow": slow}
            with arguments.json.open("a") as file:
                file.write(json.dumps({**place, "ranks": results}) + "\n")
        return results

    def print_row(*cells: object) -> None:
        if rank == 0:
            print(f"| {' | '.join(map(str, cells))} |", flush=True)

    print_row(
        "parameters", "ms per step", "exchange", "period", "own ms per step", "of them CPU", "waiting", "own share"
    )
    print_row(*["---"] * 8)
    for parameters in arguments.parameters:
        for milliseconds in arguments.milliseconds:
            for name in SETTINGS:
                one = measure(name, parameters, milliseconds, "none")[0]
                period, own, share = 1, "", ""
                if not SETTINGS[name].synchronous:
                    period, own = one["period"], f"{one['ms']:.3f}"
                    share = f"{one['ms'] * arguments.steps / (1e3 * one['work']):.1%}"
                cpu, waiting = f"{one['cpu_ms']:.3f}", f"{one['wait_ms']:.3f}"
                print_row(f"{parameters:g} M", milliseconds, name, period, own, cpu, waiting, share)
    if rank == 0:
        print(flush=True)
    print_row(
        "slow", "exchange", "epoch, s", "own work, s: rank 0", "rank 1", "epoch / slower rank's work", "staleness"
    )
    print_row(*["---"] * 7)
    for slow in SLOW_RANKS:
        for name in SETTINGS:
            results = measure(name, 1, 10, slow)
            seconds = max(result["seconds"] for result in results)
            work = [result["work"] for result in results]
            late = max(result["staleness"] for result in results)
            print_row(slow, name, f"{seconds:.2f}", *(f"{w:.2f}" for w in work), f"{seconds / max(work):.3f}", late)
    dist.destroy_process_group()


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[1, 4], help="millions")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[5, 20], help="per step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path, help="append the results to this file, a line each")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        spawn(run_rank, (arguments, folder), nprocs=2)


if __name__ == "__main__":
    main()
