"""What a rank knows of ranks on other machines, whose processes it can't see: only what they say."""

import json
from dataclasses import asdict, replace
from queue import SimpleQueue

import pytest
from torch.distributed import TCPStore

from lightning_mqgnn import peers
from lightning_mqgnn.peers import PeerError, PeerWatch


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True)


def say(store, **beat):
    """What rank 1, on another machine, wrote last."""
    known = peers._Beat("elsewhere", pid=1, started=0.0, count=1, phase="training", step=7)
    store.set("beat/1", json.dumps(asdict(replace(known, **beat))))


def test_a_rank_that_falls_silent_is_named_with_its_machine(store, monkeypatch):
    monkeypatch.setattr(peers, "_PATIENCE", 1.0)
    say(store)
    told = SimpleQueue()
    watch = PeerWatch(store, 0, 2, told.put)
    error = told.get(timeout=60)
    watch.stop()
    assert str(error).startswith("rank 1 on elsewhere was last heard")
    assert "in training after optimizer step 7" in str(error)
    with pytest.raises(PeerError, match="rank 1 on elsewhere"):
        watch.check()


def test_a_rank_that_says_that_it_failed_is_named_at_once(store):
    say(store, failure="ValueError: planted")
    told = SimpleQueue()
    watch = PeerWatch(store, 0, 2, told.put)
    error = told.get(timeout=60)
    watch.stop()
    assert "rank 1 failed in training after optimizer step 7" in str(error)
    assert "ValueError: planted" in str(error)


def test_an_exchange_that_failed_is_put_down_to_the_rank_that_is_silent(store):
    """Rank 1 beats no more, and rank 2, on this machine, does."""
    say(store, count=3)
    told = SimpleQueue()
    watch = PeerWatch(store, 0, 3, told.put)
    other = PeerWatch(store, 2, 3, told.put)
    other.at("validation", 9)
    error = watch.explain(RuntimeError("the connection was closed by a peer"))
    watch.stop()
    other.stop()
    assert "rank 1 on elsewhere" in str(error)
    assert told.empty()
