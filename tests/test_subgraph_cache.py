"""Subgraphs that are used again: what comes out of the cache is what the sampler would give, within the budget."""

import threading
import tracemalloc

import lightning as L
import numpy as np
import pytest
import torch
from graphs import assert_same_batch, module, random_graph
from hypothesis import given
from hypothesis import strategies as st
from scenarios.training import Sage, adamw

from lightning_mqgnn import GraphStore, MQGNNDataModule, NeighborSampler, SubgraphCache
from lightning_mqgnn.cache import subgraphs
from lightning_mqgnn.cache.budget import num_bytes

FIELDS = ("node", "colptr", "row", "position", "input_id")


def sampler(num_neighbors=(4, 3), replace=False, **graph):
    store = GraphStore.from_data(random_graph(**graph))
    return store, NeighborSampler(store, list(num_neighbors), replace)


def draw(sampler, batch, size=20):
    return sampler.sample(np.arange(batch * size, (batch + 1) * size), key=batch, input_id=np.arange(size) + 7 * batch)


def assert_same(one, other):
    for name in FIELDS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert getattr(one, name).dtype == getattr(other, name).dtype, name
    assert one.num_sampled_nodes == other.num_sampled_nodes
    assert one.num_sampled_edges == other.num_sampled_edges
    assert one.version == other.version


@given(
    fanouts=st.lists(st.sampled_from([-1, 0, 1, 5]), min_size=1, max_size=3),
    replace=st.booleans(),
    num_edges=st.sampled_from([0, 30, 4000]),
    seeds=st.lists(st.integers(0, 399), max_size=30, unique=True),
)
def test_a_subgraph_comes_back_as_it_was(fanouts, replace, num_edges, seeds):
    store, draws = sampler(fanouts, replace, num_edges=num_edges)
    subgraph = draws.sample(np.array(seeds, np.int64), key=5)
    cache = SubgraphCache(store, 10**7)
    assert cache.put("train", 0, 3, subgraph)
    assert_same(cache.get("train", 0, 3), subgraph)
    assert cache.get("train", 0, 4) is None
    assert cache.get("val", 0, 3) is None
    assert cache.get("train", 1, 3) is None
    assert cache.counts()[:2] == (1, 3)


def test_it_takes_less_than_the_subgraph():
    store, draws = sampler([15, 10], num_nodes=60_000, num_edges=600_000)
    subgraph = draws.sample(np.arange(1024), key=0)
    cache = SubgraphCache(store, 10**8)
    cache.put("train", 0, 0, subgraph)
    assert cache.counts().nbytes < 0.65 * subgraph.nbytes


@given(budget=st.integers(0, 60_000), spill=st.booleans())
def test_the_budget_holds_and_the_rest_is_not_kept_or_in_a_file(budget, spill, tmp_path_factory):
    store, draws = sampler()
    folder = tmp_path_factory.mktemp("spill") if spill else None
    cache = SubgraphCache(store, budget, folder)
    kept = [cache.put("train", 0, batch, draw(draws, batch)) for batch in range(20)]
    counts = cache.counts()
    assert counts.nbytes <= budget
    assert counts.entries == sum(kept)
    if budget >= 20 * 2048:
        assert all(kept) or not spill  # there is room for all but what is in files
    for batch in range(20):
        found = cache.get("train", 0, batch)
        assert (found is not None) == kept[batch]
        if found is not None:
            assert_same(found, draw(draws, batch))
    cache.close()
    assert cache.counts()[2:] == (0, 0, 0)
    if folder is not None:
        assert list(folder.iterdir()) == []


def test_what_is_counted_is_what_it_takes():
    store, draws = sampler([10, 10], num_nodes=5000, num_edges=50_000)
    cache = SubgraphCache(store, 10**8)
    cache.put("train", 0, 0, draw(draws, 0))
    tracemalloc.start()
    for batch in range(1, 101):
        cache.put("train", 0, batch, draw(draws, batch))
    before, counted = tracemalloc.get_traced_memory()[0], cache.counts().nbytes
    cache.close()
    freed = before - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * counted < freed <= counted


def test_a_later_epoch_replaces_an_earlier_one_of_its_split_only():
    store, draws = sampler()
    cache = SubgraphCache(store, 10**7)
    for split in ("train", "val"):
        cache.put(split, 0, 0, draw(draws, 0))
    cache.put("train", 2, 1, draw(draws, 1))
    assert cache.get("train", 0, 0) is None
    assert_same(cache.get("val", 0, 0), draw(draws, 0))
    assert_same(cache.get("train", 2, 1), draw(draws, 1))
    assert not cache.put("train", 0, 0, draw(draws, 0))  # a thread that was late


def test_threads_may_share_it(tmp_path):
    store, draws = sampler()
    cache = SubgraphCache(store, 30_000, tmp_path)
    errors = []

    def use(first):
        try:
            for batch in [(first + 7 * i) % 20 for i in range(60)]:
                found = cache.get("train", 0, batch)
                if found is None:
                    cache.put("train", 0, batch, draw(draws, batch))
                else:
                    assert_same(found, draw(draws, batch))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(5 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.counts().entries <= 20


def test_a_full_cache_packs_nothing_and_uses_the_room_of_what_an_update_drops(monkeypatch):
    store, draws = sampler()
    cache = SubgraphCache(store, 20_000)
    kept = [batch for batch in range(20) if cache.put("val", 0, batch, draw(draws, batch))]
    assert 0 < len(kept) < 20
    packed = []
    own = subgraphs._pack
    monkeypatch.setattr(subgraphs, "_pack", lambda *arguments: packed.append(arguments) or own(*arguments))
    missing = next(batch for batch in range(20) if batch not in kept)
    assert not cache.put("val", 0, missing, draw(draws, missing))
    assert packed == []

    seed = kept[0] * 20
    store.update(edges_added=torch.tensor([[0], [seed]]), edge_attrs={"edge_attr": torch.zeros(1, 2)})
    changed = NeighborSampler(store, [4, 3])
    assert cache.get("val", 0, kept[0]) is None
    room = cache.counts().nbytes
    assert cache.put("val", 0, kept[0], draw(changed, kept[0]))
    assert room < cache.counts().nbytes <= 20_000
    assert_same(cache.get("val", 0, kept[0]), draw(changed, kept[0]))


def test_a_folder_that_takes_nothing_is_not_the_end(tmp_path, caplog):
    (tmp_path / "file").touch()
    store, draws = sampler()
    cache = SubgraphCache(store, 3000, tmp_path / "file" / "folder")
    assert not cache.put("train", 0, 0, draw(draws, 0))
    assert "takes no more" in caplog.text


def test_an_update_drops_what_it_changed_and_nothing_else():
    store, draws = sampler([2], num_edges=300)
    cache = SubgraphCache(store, 10**7)
    for batch in range(20):
        cache.put("train", 0, batch, draw(draws, batch))
    stale = draw(draws, 19)
    into = torch.tensor([[0, 1], [45, 130]])
    store.update(edges_added=into, edge_attrs={"edge_attr": torch.zeros(2, 2)})  # into seeds of the batches 2 and 6
    for batch in range(20):
        found = cache.get("train", 0, batch)
        assert (found is None) == (batch in (2, 6))
        if found is not None:
            assert_same(found, draw(draws, batch))
    assert cache.counts().entries == 18
    assert not cache.put("train", 0, 2, stale)


# In the DataModule


@pytest.mark.parametrize("sampling_threads", [0, 1, 3])
@pytest.mark.parametrize("budget", [0, 20_000, 0.1, "1GiB"])
@pytest.mark.parametrize("resample_every", [1, 2, 3])
def test_batches_do_not_depend_on_what_is_kept(tmp_path, sampling_threads, budget, resample_every):
    plain = module(resample_every=resample_every, subgraph_cache=0, sampling_threads=0)
    other = module(
        resample_every=resample_every,
        subgraph_cache=budget,
        sampling_threads=sampling_threads,
        spill_path=tmp_path if budget == 20_000 else None,
    )
    for epoch in range(4):
        batches = list(plain.train_dataloader())
        for i, (one, batch) in enumerate(zip(batches, other.train_dataloader(), strict=True)):
            assert_same_batch(one, batch)
            assert_same_batch(batch, other.replay(epoch, i))
        for pair in zip(plain.val_dataloader(), other.val_dataloader(), strict=True):
            assert_same_batch(*pair)
    assert sorted(torch.cat([batch.input_id for batch in batches]).tolist()) == sorted(
        plain.store.node_attrs["train_mask"].nonzero().flatten().tolist()
    )


def count_samples(monkeypatch):
    calls = []
    whole = NeighborSampler.sample

    def sample(self, seeds, *arguments, **keywords):
        if len(seeds):
            calls.append(len(seeds))
        return whole(self, seeds, *arguments, **keywords)

    monkeypatch.setattr(NeighborSampler, "sample", sample)
    return calls


@pytest.mark.parametrize("epochs", [1, 3, 4, 6])
def test_sampling_is_done_once_in_so_many_epochs(monkeypatch, epochs):
    datamodule = module(resample_every=3, subgraph_cache="1GiB")
    datamodule.setup("fit")
    calls = count_samples(monkeypatch)
    for _ in range(epochs):
        num_batches = len(list(datamodule.train_dataloader()))
        list(datamodule.val_dataloader())
    num_val = len(datamodule.val_dataloader())
    assert len(calls) == num_batches * -(-epochs // 3) + num_val  # evaluation is sampled once for ever


def test_reused_batches_come_in_another_order():
    datamodule = module(resample_every=2)
    first, second = ([batch.input_id.tolist() for batch in datamodule.train_dataloader()] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_sanity_check_or_a_cut_off_pass_leaves_no_truncated_epoch():
    """Known from PyG's CachedLoader: 16 of 80 validation nodes for ever after."""
    datamodule = module(resample_every=2, subgraph_cache="1GiB")
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        limit_train_batches=2,
    )

    class Counting(Sage):
        def on_validation_epoch_start(self):
            self.visited = []

        def validation_step(self, batch, batch_idx):
            self.visited.append(batch.input_id)

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                assert len(torch.cat(self.visited).unique()) == 80

    trainer.fit(Counting(adamw), datamodule=datamodule)
    for _ in range(2):
        for _ in zip(range(2), datamodule.val_dataloader(), strict=False):
            pass
        assert len(torch.cat([batch.input_id for batch in datamodule.val_dataloader()]).unique()) == 80
        assert len(torch.cat([batch.input_id for batch in datamodule.train_dataloader()]).unique()) == 240


def test_the_end_of_a_run_lets_go_of_everything(tmp_path):
    datamodule = module(resample_every=2, subgraph_cache=4000, spill_path=tmp_path)
    list(datamodule.train_dataloader())
    datamodule.teardown()
    assert list(tmp_path.iterdir()) == []
    list(datamodule.train_dataloader())


def test_a_new_version_of_the_graph_is_used_from_the_next_epoch_on():
    datamodule = module(resample_every=2, subgraph_cache="1GiB")
    assert {batch.graph_version for batch in datamodule.train_dataloader()} == {0}
    datamodule.store.update(
        edges_added=torch.tensor([[0, 1, 2], [3, 4, 5]]),
        edge_attrs={"edge_attr": torch.zeros(3, 2)},
        features={"x": (torch.tensor([7]), torch.full((1, 8), 9.0))},
    )
    other = MQGNNDataModule(datamodule.store, num_neighbors=[4, 3], batch_size=32, resample_every=2, subgraph_cache=0)
    other.train_dataloader().set_epoch(1)
    batches = list(datamodule.train_dataloader())
    assert {batch.graph_version for batch in batches} == {1}
    for pair in zip(batches, other.train_dataloader(), strict=True):
        assert_same_batch(*pair)
    for batch in batches:
        assert bool((batch.x[batch.n_id == 7] == 9).all())


def test_an_update_within_an_epoch_is_refused_by_the_next_batch():
    datamodule = module(sampling_threads=1, queue_size=1)
    iterator = iter(datamodule.train_dataloader())
    next(iterator)
    datamodule.store.update(features={"x": (torch.tensor([7]), torch.full((1, 8), 9.0))})
    with pytest.raises(RuntimeError, match="between two epochs"):
        list(iterator)
    assert len(list(datamodule.train_dataloader())) == 8


# Budgets


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(0, 0), (12, 12), (0.1, 100), (1.0, 1000), ("3KiB", 3072), ("1.5GB", 1.5e9), (" 2 MiB ", 2**21), ("77", 77)],
)
def test_budgets_are_bytes_sizes_or_fractions(budget, expected):
    assert num_bytes("subgraph_cache", budget, 1000) == expected


@pytest.mark.parametrize("budget", [-1, -0.1, float("inf"), float("nan"), "lots", "-2GiB", "GiB", True, None, [1]])
def test_other_budgets_are_refused_by_name(budget):
    with pytest.raises((TypeError, ValueError), match=r"subgraph_cache=.*give bytes"):
        module(subgraph_cache=budget)


@pytest.mark.parametrize("resample_every", [0, -1, 1.5, True, "2"])
def test_resample_every_is_a_positive_integer(resample_every):
    with pytest.raises((TypeError, ValueError), match="resample_every="):
        module(resample_every=resample_every)
