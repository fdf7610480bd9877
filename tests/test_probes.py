"""Readings of memory: real ones of this process, and those of control groups from files as Linux writes them."""

import mmap
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from graphs import random_graph
from ranks import run_ranks

from lightning_mqgnn import GraphStore, probes
from lightning_mqgnn.graph import memory
from lightning_mqgnn.probes import Memory, device_memory, device_utilisation, host_memory, process_memory, processors

MIB = 2**20


# In processes of their own: what other tests have left may be freed, by a collection of garbage, between two readings.


def run_allocation(rank):
    before = process_memory()
    array = np.ones(100 * MIB, np.uint8)
    return {
        "more": process_memory() - before,
        "size": array.nbytes,
        "host": tuple(host_memory()),
        "processors": processors(),
    }


def test_what_is_allocated_is_seen(tmp_path):
    (seen,) = run_ranks(1, run_allocation, tmp_path)
    assert seen["more"] == pytest.approx(seen["size"], rel=0.1)
    used, limit = seen["host"]
    assert seen["size"] < used <= limit
    assert seen["processors"] >= 1


def run_mapped(path, rank):
    before = process_memory()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return {"sum": sum(mapped[:: mmap.PAGESIZE]), "more": process_memory() - before}


def test_a_mapped_file_is_not_memory_of_the_process(tmp_path):
    (tmp_path / "file").write_bytes(bytes(100 * MIB))
    (seen,) = run_ranks(1, partial(run_mapped, tmp_path / "file"), tmp_path)
    assert seen["sum"] == 0
    assert seen["more"] < 20 * MIB


def write_version_2(folder, used, limit, inactive):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def write_version_1(folder, used, limit, inactive):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A function that lets the lines be what `/proc/self/cgroup` says; the groups lie in `tmp_path / "cgroup"`."""
    own = probes._control_group_folders

    def say(lines):
        (tmp_path / "self").write_text(lines)
        monkeypatch.setattr(probes, "_control_group_folders", lambda: own(tmp_path / "cgroup", tmp_path / "self"))
        return tmp_path / "cgroup"

    return say


def test_a_limit_of_the_group_or_of_one_above_it_counts_and_the_page_cache_does_not(groups):
    root = groups("0::/job/task\n")
    write_version_2(root / "job" / "task", 50 * MIB, "max", 0)
    write_version_2(root / "job", 60 * MIB, 64 * MIB, 20 * MIB)
    write_version_2(root, 70 * MIB, "max", 0)
    assert host_memory() == Memory(40 * MIB, 64 * MIB)


def test_the_first_version_of_groups_is_read_too(groups):
    root = groups("5:cpu,cpuacct:/other\n4:memory:/job\n")
    write_version_1(root / "memory" / "job", 60 * MIB, 64 * MIB, 10 * MIB)
    write_version_1(root / "memory", 60 * MIB, 2**63 - 4096, 0)  # no limit
    assert host_memory() == Memory(50 * MIB, 64 * MIB)


def test_in_a_container_the_group_is_the_top(groups):
    root = groups("0::/a/path/of/the/host\n")
    write_version_2(root, 10 * MIB, 64 * MIB, 0)
    assert host_memory() == Memory(10 * MIB, 64 * MIB)


@pytest.mark.parametrize("lines", ["", "0::/job\n"])
def test_without_groups_it_is_the_machine(groups, lines):
    groups(lines)
    machine = probes.psutil.virtual_memory().total
    assert host_memory().limit == machine


class FakeNVML:
    """A driver with one device, or none that answers."""

    NVMLError = RuntimeError

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def nvmlInit(self):
        if not self.answers:
            raise self.NVMLError

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=37, memory=4)


@pytest.mark.parametrize(("answers", "expected"), [(True, 0.37), (False, None)])
def test_the_utilisation_is_that_of_the_devices_own_id_or_unknown(monkeypatch, answers, expected):
    nvml = FakeNVML(answers)
    monkeypatch.setattr(probes, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    assert device_utilisation(torch.device("cuda", 0)) == expected
    assert nvml.asked == ["GPU-1-2-3"] * answers
    assert device_utilisation(torch.device("cpu")) is None
    assert device_memory(torch.device("cpu")) is None


def flags_of(tensor):
    """What Linux says of the mapping that a tensor lies in."""
    address, here = tensor.data_ptr(), False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                begin, end = (int(place, 16) for place in line.split()[0].split("-"))
                here = begin <= address + 2 * MIB < end
            elif here and line.startswith("VmFlags"):
                return line.split()[1:]
    raise AssertionError("no mapping")


@pytest.mark.parametrize(("free", "expected"), [(MIB, True), (2**40, False)])
def test_files_larger_than_memory_are_read_page_by_page(tmp_path, monkeypatch, free, expected):
    data = random_graph(num_nodes=500)
    data.x = torch.zeros(500, 5000)
    GraphStore.from_data(data).save(tmp_path / "graph")
    monkeypatch.setattr(memory, "host_memory", lambda: Memory(0, free))
    features = GraphStore.open(tmp_path / "graph").node_attrs["x"]
    assert ("rr" in flags_of(features)) == expected
