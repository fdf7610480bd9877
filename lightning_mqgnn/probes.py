"""Readings of memory and utilisation: of this process, its machine or control group, and its CUDA device."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml
import torch

# Names of the files with the use and the limit of memory, and of the statistic of what can be taken back: version 2, 1.
_CONTROL_GROUP_FILES = (
    ("memory.current", "memory.max", "inactive_file"),
    ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file"),
)


class Memory(NamedTuple):
    """Bytes that are used, and that there are."""

    used: int
    limit: int


def host_memory() -> Memory:
    """Memory of the machine, or of this process's control group (a container, a batch job) where that has less left.

    What the system can take back at once, such as the page cache, does not count as used.
    """
    machine = psutil.virtual_memory()
    readings = [Memory(machine.total - machine.available, machine.total), *_control_groups(machine.total)]
    return min(readings, key=lambda memory: memory.limit - memory.used)


def process_memory() -> int:
    """Bytes of memory that this process shares with no other and with no file."""
    memory: Any = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_memory(device: torch.device) -> Memory | None:
    """Memory of a CUDA device, over all processes; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total - free, total)


def device_utilisation(device: torch.device) -> float | None:
    """Share of the last moments in which a CUDA device ran any kernel; None for a CPU, or where NVML has no answer."""
    if device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-" + str(torch.cuda.get_device_properties(device).uuid))
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None


def _control_groups(total: int) -> list[Memory]:
    """What the control groups of this process, version 1 or 2, say; nothing where the limit is not below `total`."""
    readings = []
    for folder in _control_group_folders():
        for current, most, inactive in _CONTROL_GROUP_FILES:
            try:
                limit = int((folder / most).read_text())
                if limit >= total:  # version 1 writes a huge number for no limit
                    break
                used = int((folder / current).read_text())
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # not this version, or "max"
                continue
            readings.append(Memory(max(used - int(statistics.get(inactive, 0)), 0), limit))
    return readings


def _control_group_folders(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        # In a container the path is often that of the host, and its own group is the top.
        place = top / path.lstrip("/")
        folders += [place, *(parent for parent in place.parents if parent.is_relative_to(top))]
    return folders
