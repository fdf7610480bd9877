"""Runs functions in real processes of one group."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world_size, function, tmp_path):
    """Run `function(rank)` in processes of one group and return what each saved."""
    mp.get_context("forkserver").set_forkserver_preload(["lightning_mqgnn"])  # imported once for all tests
    arguments = (world_size, function, str(tmp_path))
    mp.start_processes(in_group, arguments, nprocs=world_size, start_method="forkserver")
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]


def in_group(rank, world_size, function, folder):
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.save(function(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
