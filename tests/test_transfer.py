"""The copy to a CUDA device, with streams and events that only write down what they are asked for."""

from contextlib import contextmanager

import pytest
import torch
from graphs import make_graph
from torch_geometric.data import Data

from lightning_mqgnn import transfer


@pytest.fixture
def calls(monkeypatch):
    calls = []

    class Event:
        def synchronize(self):
            calls.append("copy complete")

    class Stream:
        def __init__(self, device):
            calls.append(f"stream on {device}")

        def record_event(self):
            calls.append("event")
            return Event()

    @contextmanager
    def stream(_):
        calls.append("enter")
        yield
        calls.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return calls


def test_a_batch_is_handed_on_when_its_copy_is_complete(calls):
    class Watched(Data):
        def to(self, *arguments, **options):
            calls.append(("copy", options))
            return super().to(*arguments, **options)

    batch = Watched.from_dict(make_graph(3, [(0, 1)]).to_dict())
    copy_to_device = transfer.CUDATransfer(torch.device("cpu"))
    copy = copy_to_device(batch)
    assert torch.equal(copy.x, batch.x)
    assert calls == ["stream on cpu", "enter", ("copy", {"non_blocking": True}), "event", "leave", "copy complete"]


def test_handing_over_tells_the_allocator_about_every_tensor(monkeypatch):
    recorded = []

    class OnDevice(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream):
            recorded.append((self.shape, stream))

    batch = make_graph(3, [(0, 1)])
    for name in ("x", "edge_index"):
        batch[name] = batch[name].as_subclass(OnDevice)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "training stream")
    transfer.hand_over(batch)
    assert recorded == [((3, 3), "training stream"), ((2, 1), "training stream")]
