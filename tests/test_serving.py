import concurrent.futures
import gc
import math
import subprocess
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from conftest import our_threads
from graphs import make_graph, random_graph
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from lightning_mqgnn import GraphStore, InferencePipeline, Overloaded
from lightning_mqgnn.serving import requests, server
from lightning_mqgnn.serving.service_time import ServiceTime

NUM_NODES = 60


class Sage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = GraphSAGE(8, 16, num_layers=2, out_channels=4, dropout=0.5)

    def forward(self, batch):
        return self.layers(batch.x, batch.edge_index)


def graph():
    return random_graph(NUM_NODES, 10 * NUM_NODES)


def path(num_nodes=100):
    """A graph whose node `i` has `i` in the first column of `x`."""
    return make_graph(num_nodes, [(i, i + 1) for i in range(num_nodes - 1)])


def features(batch):
    return batch.x


def serve(model=features, data=None, **arguments):
    return InferencePipeline(model, path() if data is None else data, **{"num_neighbors": [4, 3], **arguments})


def ids(rows):
    return rows[:, 0].tolist()


def until(condition):
    while not condition():
        time.sleep(0)  # lets the others run


class Gate:
    """A model that notes how many seeds come, and holds each batch until it is let through."""

    def __init__(self, is_open=False):
        self.sizes = []
        self.come = threading.Semaphore(0)
        self.go_on = threading.Semaphore(10**6 if is_open else 0)

    def __call__(self, batch):
        self.sizes.append(batch.batch_size)
        self.come.release()
        self.go_on.acquire()
        return batch.x

    def open(self):
        self.go_on.release(10**6)


class TimedGate(Gate):
    """An open gate that takes 10 ms, and 1 ms per seed, of a clock that stands still otherwise."""

    def __init__(self, monkeypatch):
        super().__init__(is_open=True)
        self.now = 0.0
        for module in (requests, server):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self, batch):
        rows = super().__call__(batch)
        self.now += 0.010 + 0.001 * batch.batch_size
        return rows

    def shut(self):
        """Begin to hold batches, and to note their sizes anew."""
        while self.go_on.acquire(blocking=False):
            pass
        del self.sizes[:]


def fill(pipeline, gate, requests=([0], [1], [2])):
    """Send one request to each stage and hold them there; what is submitted from now on waits."""
    futures = []
    before = pipeline.report().batches
    for number, nodes in enumerate(requests, before + 1):
        futures.append(pipeline.submit(nodes))
        until(lambda: pipeline.report().batches == number)  # noqa: B023
    gate.come.acquire()
    return futures


# What is predicted


@pytest.fixture(scope="module")
def one_by_one():
    with serve(Sage(), graph(), max_batch_size=1) as pipeline:
        return torch.cat([pipeline.predict([node]) for node in range(NUM_NODES)])


@given(
    requests=st.lists(st.lists(st.integers(0, NUM_NODES - 1), max_size=12), max_size=8),
    max_batch_size=st.integers(1, 20),
    latency_target=st.sampled_from([1e-9, 0.05, math.inf]),
)
def test_requests_are_answered_in_their_order_with_what_one_by_one_gives(
    one_by_one, requests, max_batch_size, latency_target
):
    done = []
    with serve(Sage(), graph(), max_batch_size=max_batch_size, latency_target=latency_target) as pipeline:
        futures = [pipeline.submit(nodes) for nodes in requests]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: done.append(i))
        results = [future.result() for future in futures]
    for nodes, result in zip(requests, results, strict=True):
        torch.testing.assert_close(result, one_by_one[nodes], atol=1e-6, rtol=1e-5)
    report = pipeline.report()
    assert (report.requests, report.seeds) == (len(requests), sum(map(len, requests)))
    assert our_threads() == []


def test_requests_complete_in_the_order_in_which_they_came():
    gate, done = Gate(), []
    with serve(gate, max_batch_size=7) as pipeline:
        for i, size in enumerate([1, 20, 0, 3, 9, 1]):
            pipeline.submit(list(range(size))).add_done_callback(lambda _, i=i: done.append(i))
        gate.open()
    assert done == list(range(6))


def test_a_prediction_does_not_depend_on_the_neighbours_that_share_its_batch(one_by_one):
    data = graph()
    with serve(Sage(), data) as pipeline:
        for source, destination in data.edge_index.t().tolist()[:100]:
            both = pipeline.predict([source, destination])
            torch.testing.assert_close(both, one_by_one[[source, destination]], atol=1e-6, rtol=1e-5)


def test_what_is_drawn_depends_on_the_seed(one_by_one):
    everything = list(range(NUM_NODES))
    with serve(Sage(), graph(), seed=1) as other, serve(Sage(), graph(), seed=1) as again:
        assert not torch.allclose(other.predict(everything), one_by_one, atol=1e-3)
        assert torch.equal(other.predict(everything), again.predict(everything))


@pytest.mark.parametrize("edge_format", ["coo", "csc"])
def test_with_all_neighbours_predictions_are_those_of_the_whole_graph(edge_format):
    data, model = graph(), Sage().eval()

    def adjacent(batch):
        return model.layers(batch.x, batch.adj_t)

    with serve(
        model if edge_format == "coo" else adjacent, data, num_neighbors=[-1, -1], edge_format=edge_format
    ) as pipeline:
        predicted = pipeline.predict(torch.arange(NUM_NODES))
    with torch.no_grad():
        torch.testing.assert_close(predicted, model(data), atol=1e-5, rtol=1e-5)


def test_models_that_trim_their_batch_by_hop_predict_the_same(one_by_one):
    model = Sage().eval()

    def trimmed(batch):
        return model.layers(
            batch.x,
            batch.edge_index,
            num_sampled_nodes_per_hop=batch.num_sampled_nodes,
            num_sampled_edges_per_hop=batch.num_sampled_edges,
        )

    with serve(trimmed, graph()) as pipeline:
        torch.testing.assert_close(pipeline.predict(range(NUM_NODES)), one_by_one, atol=1e-6, rtol=1e-5)


def test_a_node_may_be_asked_for_twice_and_the_model_sees_it_once():
    gate = Gate(is_open=True)
    with serve(gate) as pipeline:
        assert ids(pipeline.predict([7, 3, 7, 7, 0])) == [7, 3, 7, 7, 0]
    assert gate.sizes == [3]


def test_no_nodes_give_no_rows_of_the_usual_shape():
    with serve() as pipeline:
        assert pipeline.predict([]).shape == (0, 3)
        assert pipeline.predict(torch.zeros(0, dtype=torch.int64)).shape == (0, 3)


def test_a_saved_graph_can_be_served(tmp_path):
    GraphStore.from_data(path()).save(tmp_path / "graph")
    with serve(data=tmp_path / "graph") as pipeline:
        assert ids(pipeline.predict([5, 4])) == [5, 4]


def test_a_changed_graph_is_read_as_it_is_now():
    store = GraphStore.from_data(make_graph(3, [(0, 1)]))
    with serve(lambda batch: torch.full((batch.batch_size, 1), batch.num_edges), store) as pipeline:
        assert pipeline.predict([2]).item() == 0
        store.update(edges_added=torch.tensor([[0, 1], [2, 2]]))
        assert pipeline.predict([2]).item() == 3  # 0 -> 2, 1 -> 2, and a hop on 0 -> 1


def test_the_caller_may_change_its_array_after_submit():
    gate = Gate()
    with serve(gate) as pipeline:
        fill(pipeline, gate)
        nodes = torch.tensor([4, 5])
        future = pipeline.submit(nodes)
        nodes.fill_(0)
        gate.open()
        assert ids(future.result()) == [4, 5]


def test_a_lightning_module_predicts_with_its_predict_step_in_inference_mode():
    class Lit(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.seen = []

        def predict_step(self, batch, batch_idx):
            self.seen.append((batch_idx, self.training, torch.is_inference_mode_enabled()))
            return batch.x[: batch.batch_size]

    model = Lit()
    with serve(model) as pipeline:
        result = pipeline.predict([2])
        pipeline.predict([3])
    assert ids(result) == [2]
    assert not result.is_inference()  # so it may take part in training
    assert model.seen == [(0, False, True), (1, False, True)]


@pytest.mark.parametrize(
    ("returned", "kind", "said"),
    [
        (lambda batch: batch.x[:0], ValueError, r"shape \(0, 3\) for a batch of 3 nodes, 1 of them seeds"),
        (lambda batch: batch.x.repeat(2, 1), ValueError, r"shape \(6, 3\) for a batch of 3 nodes"),
        (lambda batch: batch.x.sum(), ValueError, r"shape \(\) for a batch"),
        (lambda batch: None, TypeError, "returned a NoneType"),
    ],
)
def test_what_the_model_returns_is_checked(returned, kind, said):
    with serve(returned) as pipeline, pytest.raises(kind, match=said):
        pipeline.predict([5])


# How requests become batches


def test_requests_that_come_while_the_model_is_busy_share_a_batch():
    gate = Gate()
    with serve(gate, latency_target=math.inf) as pipeline:
        fill(pipeline, gate)
        futures = [pipeline.submit([node, 99]) for node in range(12)]
        gate.open()
        assert [ids(future.result()) for future in futures] == [[node, 99] for node in range(12)]
    assert gate.sizes == [1, 1, 1, 13]


def test_beside_another_a_batch_is_begun_when_it_is_worth_its_fixed_cost(monkeypatch):
    gate = TimedGate(monkeypatch)
    with serve(gate, latency_target=math.inf) as pipeline:
        for size in (1, 10, 20):
            pipeline.predict(range(size))
        gate.shut()
        fill(pipeline, gate, [[0]])
        futures = [pipeline.submit([node]) for node in range(12)]
        until(lambda: pipeline.report().batches == 5)
        gate.open()
        concurrent.futures.wait(futures)
    assert gate.sizes[0] == 1
    assert gate.sizes[1] >= 10


def test_requests_for_more_than_a_batch_are_split_and_joined_again():
    gate = Gate(is_open=True)
    with serve(gate, max_batch_size=8) as pipeline:
        assert ids(pipeline.predict(range(30))) == list(range(30))
    assert gate.sizes == [8, 8, 8, 6]


def test_a_batch_takes_as_many_requests_as_the_latency_target_allows(monkeypatch):
    gate = TimedGate(monkeypatch)
    with serve(gate, latency_target=0.050) as pipeline:
        for size in (1, 10, 20, 5, 90):
            pipeline.predict(range(size))
        assert pipeline.report().p50 == pytest.approx(0.020)
        gate.shut()
        futures = [*fill(pipeline, gate, ([0], range(12), range(12))), *(pipeline.submit([node]) for node in range(90))]
        gate.go_on.release()
        until(lambda: pipeline.report().batches == 9)
        gate.open()
        concurrent.futures.wait(futures)
    assert gate.sizes[3] == 40


def test_the_largest_batch_is_the_one_whose_time_is_the_target():
    service_time = ServiceTime()
    for seeds in (1, 30, 7, 12, 50):
        service_time = service_time.after(seeds, 0.010 + 0.001 * seeds)
    assert service_time.line() == pytest.approx((0.010, 0.001))
    assert service_time.largest_batch(0.050, most=1024) == 40
    assert service_time.largest_batch(0.030, most=1024) == 20
    assert service_time.largest_batch(0.050, most=16) == 16
    assert service_time.largest_batch(math.inf, most=1024) == 1024


def test_the_largest_batch_follows_a_model_that_becomes_slower():
    service_time = ServiceTime()
    for i in range(200):
        seeds = 1 + i * 7 % 30
        service_time = service_time.after(seeds, (0.010 + 0.001 * seeds) * (1 if i < 100 else 3))
    assert service_time.largest_batch(0.060, most=1024) == pytest.approx(10, abs=1)


def test_before_batches_differ_in_size_at_most_twice_as_much_is_tried():
    service_time = ServiceTime()
    for _ in range(100):
        service_time = service_time.after(1, 0.040)
    assert service_time.largest_batch(0.050, most=1024) == 2
    service_time = service_time.after(2, 0.041)  # nearly all of it is a fixed cost
    assert service_time.largest_batch(0.050, most=1024) == pytest.approx(11, abs=1)


def test_a_target_out_of_reach_gives_batches_that_are_half_fixed_cost():
    service_time = ServiceTime()
    for seeds in (1, 2, 3):
        service_time = service_time.after(seeds, 0.100 + 0.001 * seeds)
    assert service_time.largest_batch(0.050, most=1024) == 100


@given(
    batches=st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 10)), max_size=50),
    target=st.floats(1e-6, 10),
    most=st.integers(1, 2000),
)
def test_whatever_was_measured_a_batch_has_a_seed_and_no_more_than_the_most(batches, target, most):
    service_time = ServiceTime()
    for seeds, seconds in batches:
        service_time = service_time.after(seeds, seconds)
    largest = service_time.largest_batch(target, most)
    assert 1 <= largest <= most
    fixed, per_seed = service_time.line()
    assert fixed >= -1e-9
    assert per_seed >= 0
    if batches and service_time.spread > 0.01 and fixed + per_seed <= target:
        assert fixed + per_seed * largest <= target * (1 + 1e-6)


# Overload and failures


def test_more_than_may_wait_is_refused_at_once_and_served_later():
    gate = Gate()
    with serve(gate, max_pending=10) as pipeline:
        held = fill(pipeline, gate)
        waiting = [pipeline.submit(range(6)), pipeline.submit(range(3)), pipeline.submit([])]
        for nodes in ([1], [], range(50)):
            with pytest.raises(Overloaded, match=r"10 seeds wait, and \d+ more .* max_pending=10: try again later"):
                pipeline.submit(nodes)
        gate.open()
        assert [len(future.result()) for future in held + waiting] == [1, 1, 1, 6, 3, 0]
        assert ids(pipeline.predict([1])) == [1]
        assert pipeline.report().refused == 3


def fails_at_3(batch):
    if 3 in batch.x[: batch.batch_size, 0]:
        raise KeyError("planted")
    return batch


@pytest.mark.parametrize("stage", ["model", "transform"])
def test_a_failure_is_raised_by_the_requests_of_its_batch_and_the_next_ones_are_served(stage):
    def model(batch):
        return fails_at_3(batch).x if stage == "model" else batch.x

    with serve(model, transform=fails_at_3 if stage == "transform" else None) as pipeline:
        for _ in range(3):
            assert ids(pipeline.predict([1, 2])) == [1, 2]
            with pytest.raises(KeyError, match="planted") as caught:
                pipeline.predict([4, 3])
            assert "fails_at_3" in "".join(traceback.format_tb(caught.tb))


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
def test_nothing_that_a_model_raises_ends_the_service(kind):
    def model(batch):
        if batch.batch_size > 1:
            raise kind("planted")
        return batch.x

    with serve(model) as pipeline:
        assert isinstance(pipeline.submit([1, 2]).exception(), kind)
        assert ids(pipeline.predict([1])) == [1]


def test_a_split_request_fails_with_its_first_failing_part_and_the_rest_of_it_is_not_computed():
    gate = Gate()

    def model(batch):
        rows = gate(batch)
        fails_at_3(batch)
        return rows

    with serve(model, max_batch_size=2) as pipeline:
        large, small = pipeline.submit(range(40)), pipeline.submit([50])
        gate.open()
        assert isinstance(large.exception(), KeyError)
        assert ids(small.result()) == [50]
    assert len(gate.sizes) < 15


def test_parts_that_do_not_go_together_fail_their_request_alone():
    with serve(lambda batch: batch.x[:, : batch.batch_size], max_batch_size=2) as pipeline:
        assert isinstance(pipeline.submit([0, 1, 2]).exception(), RuntimeError)
        assert pipeline.predict([1]).shape == (1, 1)


def test_if_the_threads_can_not_run_requests_fail_instead_of_waiting_for_ever(monkeypatch):
    def no_threads(tasks, stages):
        raise MemoryError("planted")

    monkeypatch.setattr(server, "Pipeline", no_threads)
    pipeline = serve()
    with pytest.raises(MemoryError, match="planted"):
        pipeline.predict([0])
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed") as caught:
        pipeline.submit([0])
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_request_that_was_cancelled_while_it_waited_is_not_computed():
    gate = Gate()
    with serve(gate) as pipeline:
        held = fill(pipeline, gate)
        first, second = pipeline.submit([10]), pipeline.submit([11, 12])
        assert first.cancel()
        assert not held[0].cancel()
        gate.open()
        assert ids(second.result()) == [11, 12]
        concurrent.futures.wait([first])
    assert gate.sizes == [1, 1, 1, 2]


# Beginning and end


def test_threads_start_with_the_first_request_and_end_with_close():
    pipeline = serve()
    assert our_threads() == []
    pipeline.predict([0])
    assert sorted(our_threads()) == ["mqgnn-prepare-0", "mqgnn-sample-0", "mqgnn-serve"]
    pipeline.close()
    assert our_threads() == []
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        pipeline.submit([0])


@pytest.mark.parametrize("wait", [True, False])
def test_what_was_never_used_can_be_closed(wait):
    serve().close(wait)


def test_close_waits_until_everything_is_answered():
    gate = Gate()
    pipeline = serve(gate, max_batch_size=4)
    futures = [*fill(pipeline, gate), *(pipeline.submit(range(9)) for _ in range(5))]
    closing = threading.Thread(target=pipeline.close)
    closing.start()

    def refuses():
        try:
            pipeline.submit([])
        except RuntimeError:
            return True
        return False

    until(refuses)
    assert not any(future.done() for future in futures)
    gate.open()
    closing.join()
    assert all(future.done() for future in futures)
    assert our_threads() == []
    assert [ids(future.result()) for future in futures[3:]] == [list(range(9))] * 5


def test_close_without_waiting_cancels_what_has_not_begun_and_finishes_what_has():
    gate = Gate()
    pipeline = serve(gate, max_batch_size=4)
    begun = fill(pipeline, gate, ([0], [1], range(9)))
    waiting = [pipeline.submit([node]) for node in range(5)]
    pipeline.close(wait=False)
    assert all(future.cancelled() for future in waiting)
    assert not any(future.done() for future in begun)
    assert len(concurrent.futures.wait(waiting).done) == 5
    gate.open()
    assert [len(future.result()) for future in begun] == [1, 1, 9]
    pipeline.close()
    assert our_threads() == []


def test_any_thread_may_close_also_the_one_that_gives_the_answer():
    pipeline = serve()
    pipeline.predict([0])
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    closing.join()
    assert our_threads() == []

    pipeline, closed = serve(), threading.Event()

    def close(_):
        pipeline.close()
        closed.set()

    pipeline.submit([0]).add_done_callback(close)
    closed.wait()
    pipeline.close()
    assert our_threads() == []


def test_many_clients_at_once_get_their_own_answers_until_it_is_closed():
    pipeline = serve(max_batch_size=16)
    wrong, answered = [], threading.Semaphore(0)

    def client(first):
        for node in range(200):
            try:
                rows = pipeline.predict([first, node % 100])
            except (RuntimeError, concurrent.futures.CancelledError):
                return
            if ids(rows) != [first, node % 100]:
                wrong.append((first, node))
            answered.release()

    clients = [threading.Thread(target=client, args=(first,)) for first in range(8)]
    for thread in clients:
        thread.start()
    for _ in range(100):
        answered.acquire()
    pipeline.close(wait=False)
    for thread in clients:
        thread.join()
    pipeline.close()
    assert not wrong


def test_dropping_it_answers_what_waits_and_ends_its_threads():
    gate = Gate()
    pipeline = serve(gate)
    futures = [*fill(pipeline, gate), pipeline.submit([9])]
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("mqgnn-")]
    assert len(threads) == 3
    del pipeline
    gc.collect()
    gate.open()
    assert ids(futures[-1].result()) == [9]
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("used", "dropped"), [(False, False), (True, False), (True, True)])
def test_the_interpreter_ends_cleanly_while_requests_wait(used, dropped):
    script = f"""
import threading
from graphs import random_graph
from lightning_mqgnn import InferencePipeline

def model(batch):
    threading.Event().wait(0.2)
    return batch.x

pipeline = InferencePipeline(model, random_graph(), num_neighbors=[2])
if {used}:
    pipeline.predict([0])
futures = [pipeline.submit([node]) for node in range(50)]
if {dropped}:
    del pipeline
print("at the end")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd="tests", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "at the end\n", "")


# Reports and bad input


def test_the_report_counts_and_times_requests():
    with serve() as pipeline:
        empty = pipeline.report()
        assert empty[:4] == (0, 0, 0, 0)
        assert math.isnan(empty.p50)
        assert empty.seeds_per_second == 0
        pipeline.predict([1, 1])
        pipeline.predict([2])
        report = pipeline.report()
    assert report[:4] == (2, 3, 2, 0)
    assert 0 < report.p50 <= report.p99
    assert report.seeds_per_second > 0


@pytest.mark.parametrize(
    ("nodes", "kind", "said"),
    [
        ([0, 100], ValueError, "nodes hold 100: ids go from 0 to 99"),
        ([-1], ValueError, "nodes hold -1: ids go from 0 to 99"),
        (torch.tensor([[0]]), ValueError, r"nodes have shape \(1, 1\): give a list of node ids"),
        (3, ValueError, r"nodes have shape \(\)"),
        ([0.5], TypeError, "nodes have dtype float64: give integer node ids"),
        (torch.ones(100, dtype=torch.bool), TypeError, r"mask.nonzero\(\).flatten\(\)"),
        ([[0], [1, 2]], TypeError, "give a list of node ids"),
        (["a"], TypeError, "give integer node ids"),
    ],
)
def test_bad_nodes_are_refused_by_submit(nodes, kind, said):
    with serve() as pipeline, pytest.raises(kind, match=said):
        pipeline.submit(nodes)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"model": 3}, TypeError, "model=3 can't be called"),
        ({"model": None}, TypeError, "model=None can't be called"),
        ({"transform": 3}, TypeError, "transform=3 can't be called"),
        ({"num_neighbors": 4}, TypeError, "num_neighbors=4 is not a list"),
        ({"edge_format": "csr"}, ValueError, "edge_format='csr'"),
        ({"latency_target": 0}, ValueError, "latency_target=0: give seconds, more than 0"),
        ({"latency_target": math.nan}, ValueError, "latency_target=nan"),
        ({"latency_target": "50ms"}, TypeError, "latency_target='50ms': give seconds"),
        ({"max_batch_size": 0}, ValueError, "max_batch_size=0: give 1 or more"),
        ({"max_pending": 1.5}, TypeError, "max_pending=1.5: give an integer"),
        ({"seed": -1}, ValueError, "seed=-1: give 0 or more"),
        ({"data": 3}, TypeError, "data is a int"),
        ({"data": Data(x=torch.ones(2, 1))}, ValueError, "edge_index is missing"),
    ],
)
def test_bad_arguments_are_refused(arguments, kind, said):
    with pytest.raises(kind, match=said):
        serve(**arguments)
