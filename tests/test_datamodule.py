import gc
import pickle
import subprocess
import sys
import threading
import traceback

import lightning as L
import pytest
import torch
from conftest import our_threads
from graphs import assert_same_batch, module, random_graph
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data
from torch_geometric.utils import k_hop_subgraph

from lightning_mqgnn import EpochPlan, GraphStore, MQGNNDataModule, NeighborSampler
from lightning_mqgnn.loader import _Course


def batches(datamodule: MQGNNDataModule, epochs: int = 1) -> list[Data]:
    return [batch for _ in range(epochs) for batch in datamodule.train_dataloader()]


# What is in a batch


def test_a_batch_holds_the_rows_of_its_nodes_and_edges():
    data = random_graph()
    data.name = "random"
    data.scale = torch.tensor(3.0)
    for batch in module(data).train_dataloader():
        for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
            assert torch.equal(batch[name], data[name][batch.n_id]), name
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)  # a mask: named by their ids
        assert (batch.name, batch.scale) == ("random", 3.0)
        assert batch.num_nodes == sum(batch.num_sampled_nodes)
        assert batch.num_edges == sum(batch.num_sampled_edges)
        assert {batch[name].dtype for name in ("edge_index", "n_id", "e_id", "input_id")} == {torch.int64}


def test_all_neighbours_give_the_k_hop_subgraph_of_pyg():
    data = random_graph(num_edges=900)
    for batch in module(data, num_neighbors=[-1, -1], batch_size=8).train_dataloader():
        nodes, _, _, _ = k_hop_subgraph(batch.input_id, 2, data.edge_index)
        assert sorted(batch.n_id.tolist()) == nodes.tolist()
        one_hop, _, _, edges = k_hop_subgraph(batch.input_id, 1, data.edge_index)
        assert sorted(batch.n_id[: sum(batch.num_sampled_nodes[:2])].tolist()) == one_hop.tolist()
        into_one_hop = torch.isin(data.edge_index[1], one_hop).nonzero().flatten()
        assert sorted(batch.e_id.tolist()) == into_one_hop.tolist()
        into_seeds = torch.isin(data.edge_index[1], batch.input_id).nonzero().flatten()
        assert sorted(batch.e_id[: batch.num_sampled_edges[0]].tolist()) == into_seeds.tolist()
        assert edges.sum() <= len(into_one_hop)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8])
def test_features_of_any_dtype_and_width_are_gathered(dtype):
    data = random_graph(num_features=3)
    data.x = (data.x * 10).to(dtype)
    data.tensor = torch.arange(400 * 6).reshape(400, 2, 3)
    for batch in module(data).train_dataloader():
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.tensor, data.tensor[batch.n_id])


def test_a_graph_without_features_or_edges_works():
    data = Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=5)
    (batch,) = module(data, input_train_nodes=torch.arange(5)).train_dataloader()
    assert (batch.num_nodes, batch.num_edges, batch.batch_size) == (5, 0, 5)


def test_listed_seed_nodes_are_named_by_their_place():
    nodes = torch.tensor([30, 10, 20])
    (batch,) = module(input_val_nodes=nodes).val_dataloader()
    assert batch.n_id[:3].tolist() == [30, 10, 20]
    assert batch.input_id.tolist() == [0, 1, 2]


def test_a_transform_makes_the_batch():
    def transform(batch: Data) -> Data:
        batch.doubled = batch.x * 2
        return batch

    for batch in module(transform=transform).train_dataloader():
        assert torch.equal(batch.doubled, batch.x * 2)


# Promise 1 and 3: a batch depends on seed, epoch and index alone


@pytest.mark.parametrize("sampling_threads", [0, 1, 3])
@pytest.mark.parametrize("prepare_threads", [0, 2])
@pytest.mark.parametrize("queue_size", [1, 5])
def test_batches_do_not_depend_on_threads_or_queues(sampling_threads, prepare_threads, queue_size):
    serial = batches(module(sampling_threads=0, prepare_threads=0), epochs=2)
    piped = batches(
        module(sampling_threads=sampling_threads, prepare_threads=prepare_threads, queue_size=queue_size), epochs=2
    )
    for one, other in zip(serial, piped, strict=True):
        assert_same_batch(one, other)


def test_replay_rebuilds_a_batch_of_any_epoch():
    datamodule = module()
    seen = [list(datamodule.train_dataloader()) for _ in range(3)]
    again = module()
    assert_same_batch(again.replay(epoch=2, batch=5), seen[2][5])
    assert_same_batch(again.replay(epoch=0, batch=0), seen[0][0])
    with pytest.raises(IndexError, match="batch=8: an epoch has batches 0 to 7"):
        again.replay(0, 8)


def test_another_process_makes_the_same_batches():
    script = (
        "import sys, torch; sys.path.insert(0, 'tests'); from test_datamodule import *\n"
        "torch.manual_seed(5); list(module().train_dataloader())\n"
        "print(int(module().replay(3, 1).e_id.sum()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == int(module().replay(3, 1).e_id.sum())


def test_each_epoch_and_each_seed_has_batches_of_its_own():
    datamodule = module()
    orders = [torch.cat([batch.input_id for batch in datamodule.train_dataloader()]) for _ in range(3)]
    orders.append(torch.cat([batch.input_id for batch in module(seed=1).train_dataloader()]))
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert len({tuple(sorted(order.tolist())) for order in orders}) == 1


def test_set_epoch_chooses_the_epoch_of_the_next_pass():
    loader = module().train_dataloader()
    loader.set_epoch(7)
    assert_same_batch(next(iter(loader)), module().replay(7, 0))


def test_evaluation_is_the_same_in_every_pass_and_in_the_given_order():
    datamodule = module()
    first, second = list(datamodule.val_dataloader()), list(datamodule.val_dataloader())
    for one, other in zip(first, second, strict=True):
        assert_same_batch(one, other)
    assert torch.equal(torch.cat([batch.input_id for batch in first]), random_graph().val_mask.nonzero().flatten())


def test_evaluation_may_use_another_fan_out_and_batch_size():
    datamodule = module(eval_loader_kwargs={"num_neighbors": [-1], "batch_size": 50})
    (batch, _) = datamodule.val_dataloader()
    assert len(batch.num_sampled_edges) == 1
    assert batch.batch_size == 50
    in_degree = torch.bincount(random_graph().edge_index[1], minlength=400)
    assert batch.num_edges == int(in_degree[batch.input_id].sum())


def test_prediction_visits_all_nodes_by_default():
    visited = torch.cat([batch.input_id for batch in module().predict_dataloader()])
    assert torch.equal(visited, torch.arange(400))


def test_ranks_draw_neighbours_independently():
    """64 seeds with 100 neighbours each of their own, fan-out 10: two ranks agree by chance only, in about a tenth."""
    sources = torch.arange(64, 64 + 6400)
    data = Data(edge_index=torch.stack([sources, torch.arange(64).repeat_interleave(100)]), num_nodes=64 + 6400)
    datamodule = module(data, input_train_nodes=torch.arange(64), num_neighbors=[10], batch_size=64)
    plan = datamodule.train_dataloader().plan
    sampler = NeighborSampler(datamodule.store, [10])
    seeds = torch.arange(64).numpy()
    one, other = (sampler.sample(seeds, plan.key(0, batch)) for batch in (0, 1))
    shared = len(set(one.position.tolist()) & set(other.position.tolist()))
    assert 35 <= shared <= 95  # 64 on average


# Promise 4: batches may be kept


def test_kept_batches_keep_their_content():
    kept = list(module(queue_size=1).train_dataloader())
    for index, batch in enumerate(kept):
        assert_same_batch(batch, module().replay(0, index))


def test_dropped_batches_are_used_again():
    datamodule = module()
    for _ in range(5):
        for _ in datamodule.train_dataloader():
            pass
    pool = datamodule.train_dataloader()._stages[1].work._pool
    names = 9  # x, y, three masks, edge_attr, edge_index, n_id, e_id: once more if more batches than ever are under way
    assert pool.allocations <= names * 8
    before = pool.allocations
    for _ in datamodule.train_dataloader():
        pass
    assert pool.allocations - before <= names


# Promise 5: threads and failures


def test_nothing_starts_before_the_first_batch_is_asked_for():
    datamodule = module()
    datamodule.setup("fit")
    iterator = iter(datamodule.train_dataloader())
    assert our_threads() == []
    next(iterator)
    assert our_threads()


def test_the_next_epoch_begins_while_the_last_batch_of_this_one_is_used():
    made, next_epoch_begun = [], threading.Event()

    def transform(batch: Data) -> Data:
        made.append(batch.input_id)
        if len(made) == 8 + 1:
            next_epoch_begun.set()
        return batch

    class Waiting(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(8))
            self.used = []

        def training_step(self, batch, batch_idx):
            self.used.append(batch.input_id)
            if len(self.used) == 8:
                assert next_epoch_begun.wait(60)
            return (batch.x @ self.weight).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    waiting = Waiting()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(waiting, datamodule=module(transform=transform))
    assert our_threads() == []
    assert len(made) == len(waiting.used) == 16  # nothing was made in vain
    for one, other in zip(made, waiting.used, strict=True):
        assert torch.equal(one, other)


@given(
    threads=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    queue_size=st.integers(1, 3),
    batch_size=st.sampled_from([240, 100, 30]),
    known=st.lists(st.booleans(), min_size=6, max_size=6),
    cut_off_at=st.lists(st.sampled_from([None, None, 0, 1]), min_size=4, max_size=4),
)
def test_passes_follow_each_other_whatever_is_known_and_cut_off(threads, queue_size, batch_size, known, cut_off_at):
    sampling_threads, prepare_threads = threads
    datamodule = module(
        batch_size=batch_size, sampling_threads=sampling_threads, prepare_threads=prepare_threads, queue_size=queue_size
    )
    loader = datamodule.train_dataloader()
    loader._epoch_after = lambda epoch: epoch + 1 if epoch < len(known) and known[epoch] else None
    for epoch, cut_off in enumerate(cut_off_at):
        for index, batch in enumerate(loader):
            assert torch.equal(batch.e_id, datamodule.replay(epoch, index).e_id)
            if index == cut_off:
                break
        else:
            assert index == len(loader) - 1
    datamodule.teardown()
    assert our_threads() == []


def test_epochs_that_become_known_too_late_do_not_revive_a_course_that_has_ended():
    answers = iter([2, None, 3])
    course = _Course(EpochPlan(10, 5), 0, 1, 1, lambda epoch: next(answers), graph_version=0)
    places = [(course[number].epoch, course[number].global_batch) for number in range(3)]
    assert places == [(1, 1), (2, 0), (2, 1)]
    for _ in range(2):
        with pytest.raises(IndexError):
            course[3]
    assert len(course) == 3


def test_a_pass_that_is_cut_off_ends_its_threads_and_leaves_no_trace():
    datamodule = module()
    for i, _ in enumerate(datamodule.val_dataloader()):
        if i == 1:
            break
    gc.collect()
    assert our_threads() == []
    visited = torch.cat([batch.input_id for batch in datamodule.val_dataloader()])
    assert torch.equal(visited, random_graph().val_mask.nonzero().flatten())


def fail_on_purpose(batch: Data) -> Data:
    if batch.input_id[0] == fail_on_purpose.at:
        raise ZeroDivisionError("planted")
    return batch


@pytest.mark.parametrize("prepare_threads", [0, 1, 2])
def test_a_failing_transform_is_raised_at_its_batch_with_its_traceback(prepare_threads):
    fail_on_purpose.at = module().replay(0, 3).input_id[0]
    iterator = iter(module(transform=fail_on_purpose, prepare_threads=prepare_threads).train_dataloader())
    for _ in range(3):
        next(iterator)
    with pytest.raises(ZeroDivisionError, match="planted") as caught:
        next(iterator)
    assert "fail_on_purpose" in "".join(traceback.format_tb(caught.tb))
    assert our_threads() == []


def test_an_exception_of_the_user_and_teardown_end_the_threads():
    datamodule = module()
    iterator = iter(datamodule.train_dataloader())
    next(iterator)
    datamodule.on_exception(RuntimeError())
    assert our_threads() == []
    iterator = iter(datamodule.train_dataloader())
    next(iterator)
    datamodule.teardown("fit")
    assert our_threads() == []


def test_a_new_pass_retires_the_one_before():
    loader = module().train_dataloader()
    older, newer = iter(loader), iter(loader)
    next(older)
    next(newer)
    with pytest.raises(RuntimeError, match="closed after 1 of 8 items: begin a new pass"):
        next(older)
    assert len(list(newer)) == 7


# State


def test_a_pass_continues_where_its_state_was_taken():
    datamodule = module()
    next(iter(datamodule.train_dataloader()))  # epoch 0, cut off
    iterator = iter(datamodule.train_dataloader())
    for _ in range(3):
        next(iterator)
    state = datamodule.state_dict()
    rest = list(iterator)
    assert state == {"train": {"epoch": 1, "batches": 3, "world_size": 1, "before": []}}

    resumed = module()
    resumed.load_state_dict(state)
    continued = list(resumed.train_dataloader())
    for one, other in zip(rest, continued, strict=True):
        assert_same_batch(one, other)
    assert_same_batch(next(iter(resumed.train_dataloader())), resumed.replay(2, 0))


def test_after_a_complete_epoch_the_next_one_follows():
    datamodule = module()
    assert len(batches(datamodule)) == 8
    resumed = module()
    resumed.load_state_dict(datamodule.state_dict())
    assert_same_batch(next(iter(resumed.train_dataloader())), resumed.replay(1, 0))


def test_a_datamodule_in_use_can_be_pickled():
    datamodule = module()
    iterator = iter(datamodule.train_dataloader())
    next(iterator)
    copy = pickle.loads(pickle.dumps(datamodule))
    assert_same_batch(copy.replay(0, 0), datamodule.replay(0, 0))
    datamodule.teardown()


def test_a_saved_graph_gives_the_same_batches(tmp_path):
    GraphStore.from_data(random_graph()).save(tmp_path / "graph")
    for one, other in zip(batches(module(tmp_path / "graph")), batches(module()), strict=True):
        assert_same_batch(one, other)


def test_a_graph_is_loaded_once_and_then_mapped(tmp_path):
    calls = []

    def load() -> Data:
        calls.append(1)
        return random_graph()

    for _ in range(2):
        datamodule = module(load, store_path=tmp_path / "graph")
        with pytest.raises(RuntimeError, match=r"call datamodule\.setup\(\) first"):
            _ = datamodule.store
        datamodule.setup("fit")
        for one, other in zip(batches(datamodule), batches(module()), strict=True):
            assert_same_batch(one, other)
    assert calls == [1]


def test_times_are_reported_per_split_that_was_read():
    datamodule = module()
    batches(datamodule)
    times = datamodule.times()
    assert list(times) == ["train"]
    assert times["train"]["batches"] == 8
    assert set(times["train"]) == {"wait", "batches", "sample", "prepare"}
    assert all(value > 0 for value in times["train"].values())
