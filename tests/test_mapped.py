"""Mapped files that are cut short, or removed, while they are in use."""

import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from graphs import random_graph

from lightning_mqgnn import GraphStore, MQGNNDataModule

SCRIPT = Path(__file__).parent / "cut_short.py"

catches_sigbus = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="SIGBUS is caught on Linux alone"
)


def run(folder, *arguments):
    command = [sys.executable, *arguments[1:], str(SCRIPT), str(folder), arguments[0]]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@catches_sigbus
def test_a_file_that_is_cut_short_in_use_is_an_error_that_names_it_in_this_pass_and_in_later_ones(tmp_path):
    result = run(tmp_path, "within")
    assert result.returncode == 0, result.stderr
    *lines, (other, _, _, batches, whole) = [line.split("|") for line in result.stdout.splitlines()]
    files = ["colptr", "row", "edge_id", "node.x", "node.y", "edge.edge_attr"]
    assert [line[:3] for line in lines] == [[f, t, p] for f in files for t in "01" for p in "12"]
    for name, threads, number, taken, error in lines:
        assert (int(taken) >= 3) == (number == "1")
        assert error.startswith(
            f"'{tmp_path / f'{name}-{threads}' / name}.npy' can't be read any more: the file was cut"
        )
    assert (other, batches, whole) == ("other", "100", "whole")


@catches_sigbus
def test_the_nodes_that_sampling_prefers_are_not_drawn_from_what_was_lost(tmp_path):
    result = run(tmp_path, "drawing")
    assert result.returncode == 0, result.stderr
    lines = [line.split("|") for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines] == [[name, epoch] for name in ("colptr", "row") for epoch in "123456"]
    for name, _, error in lines:
        assert error.startswith(f"'{tmp_path / name / name}.npy' can't be read any more: the file was cut")


@catches_sigbus
@pytest.mark.parametrize("options", [[], ["-X", "faulthandler"]])
def test_elsewhere_the_signal_does_what_it_did(options, tmp_path):
    result = run(tmp_path, "outside", *options)
    assert result.returncode == -signal.SIGBUS
    assert "read" not in result.stdout
    assert ("Fatal Python error: Bus error" in result.stderr) == bool(options)


def test_files_that_are_removed_in_use_are_read_to_the_end(tmp_path):
    GraphStore.from_data(random_graph()).save(tmp_path / "graph")
    datamodule = MQGNNDataModule(str(tmp_path / "graph"), num_neighbors=[3], batch_size=10)
    datamodule.setup("fit")
    batches = iter(datamodule.train_dataloader())
    next(batches)
    shutil.rmtree(tmp_path / "graph")
    assert sum(1 for _ in batches) == 23
