"""MQGNNDataModule: a graph in, loaders of sampled batches out."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import BaseData

from lightning_mqgnn.adaptive import AdaptiveQueueCallback
from lightning_mqgnn.adjacency import check_edge_format, check_edge_weight
from lightning_mqgnn.arguments import check_int
from lightning_mqgnn.buffers import BufferPool
from lightning_mqgnn.cache import FeatureCache, SubgraphCache
from lightning_mqgnn.cache.features import CacheReport, warm_up
from lightning_mqgnn.cache.settings import CacheSettings
from lightning_mqgnn.cache.subgraphs import SubgraphCounts
from lightning_mqgnn.fetch import Fetch
from lightning_mqgnn.graph import GraphStore
from lightning_mqgnn.graph.memory import give_back_free_memory
from lightning_mqgnn.loader import MQGNNLoader
from lightning_mqgnn.pipeline import Stage
from lightning_mqgnn.plan import EpochPlan
from lightning_mqgnn.prepare import Prepare
from lightning_mqgnn.sample import Sample, Task, tasks_of
from lightning_mqgnn.sampling import CacheBias, NeighborSampler
from lightning_mqgnn.sampling.neighbor import check_num_neighbors
from lightning_mqgnn.transfer import CUDATransfer, device_of, hand_over

InputNodes = Tensor | np.ndarray | Sequence[int] | None

_SPLITS = {"train": "fit", "val": "fit", "test": "test", "pred": "predict"}
_EVAL_ARGUMENTS = ("num_neighbors", "batch_size", "replace", "edge_format")
_INITIAL_QUEUE_SIZE = 2  # what "auto" begins with, and stays at without a Trainer
_INSTEAD = {
    "num_workers": "threads do the work here, see sampling_threads and prepare_threads",
    "persistent_workers": "threads do the work here, and start in no time",
    "prefetch_factor": "see queue_size",
    "pin_memory": "buffers are page-locked whenever the device is a CUDA one",
    "shuffle": "training is shuffled anew each epoch, evaluation is not",
    "filter_per_worker": "rows are gathered in the prepare stage",
    "subgraph_type": "subgraphs are directional",
    "directed": "subgraphs are directional",
    "disjoint": "it is not supported",
    "time_attr": "temporal sampling is not supported",
    "weight_attr": "weighted sampling is not supported",
    "transform_sampler_output": "see transform",
    "loader": "batches are always sampled neighbourhoods",
}


class MQGNNDataModule(LightningDataModule):
    """Loads a graph's training, validation, test and prediction batches, prepared ahead of their use.

    A batch is the `Data` that PyG's `NeighborLoader` yields, with the same attributes. It is a pure function of
    (`seed`, epoch, global batch index): the same for any number of threads and any queue size. Evaluation batches do
    not depend on the epoch. Over all ranks, each seed node is in exactly one batch per epoch.

    Works under a Trainer with any strategy, and by hand::

        dm.setup("fit")
        for batch in dm.train_dataloader():
            ...

    Args:
        data: A homogeneous graph, a `GraphStore`, the path of a saved one, or, with `store_path`, a function that
            returns the graph.
        input_train_nodes: Seed nodes of training: a boolean mask over the nodes, or node ids. By default the graph's
            `train_mask`; likewise for the other splits. A batch's `input_id` holds, as in PyG, the node ids if a mask
            was given and places in the list of ids otherwise.
        input_val_nodes: Seed nodes of validation; by default `val_mask`.
        input_test_nodes: Seed nodes of the test; by default `test_mask`.
        input_pred_nodes: Seed nodes of prediction; by default `pred_mask` if there, else all nodes.
        num_neighbors: Fan-out per hop, one per layer of the model; -1 takes all neighbours.
        batch_size: Seed nodes per batch and rank.
        replace: Draw neighbours with replacement.
        drop_last: Leave out training seeds that don't fill a batch; otherwise all are visited, each exactly once.
        transform: Called with each batch in the prepare stage; must be safe to call from `prepare_threads` threads.
        edge_format: `"coo"` for batches with `edge_index`, as `NeighborLoader` yields them, or `"csc"` for batches with
            `adj_t` in its place: a `torch.sparse_csr` matrix with a row per target node, which PyG's layers multiply
            by, where they can, in place of making a message for each edge. Its values are the graph's `edge_weight`,
            else ones. See `trim_adj`.
        eval_loader_kwargs: Other values of `num_neighbors`, `batch_size`, `replace` or `edge_format` for validation,
            test and prediction.
        sampling_threads: Threads that sample; with 0 the next stage's thread does.
        prepare_threads: Threads that gather features and make batches; with 0 the training thread does.
        queue_size: Finished items that may wait behind each stage; behind the sample stage as many as it samples at a
            time, if that is more. "auto" begins with 2 and, under a Trainer, lets an `AdaptiveQueueCallback` change the
            sizes and the numbers of threads while training runs.
        resample_every: Epochs of training that have the same batches, with the same sampled neighbourhoods, each in an
            order of its own: sampling is done in one of them, as far as `subgraph_cache` holds its result.
        subgraph_cache: Memory on each machine for sampled subgraphs: those that wait for their batch to be prepared,
            and those that come again, in the epochs of `resample_every` and in each evaluation. Bytes, a size such as
            "512MiB", or, as a float, a fraction of the graph's bytes. What exceeds it is sampled when it is needed.
        spill_path: Folder for temporary files that take what exceeds `subgraph_cache`; removed at the end.
        feature_cache: Memory on each machine, or on each CUDA device, for rows of `x` that training keeps near, given
            as `subgraph_cache` is; for features on a disk, or in host memory with a CUDA device.
        feature_policy: Which rows: `"optimal"`, those that are read again soonest, as far as batches are sampled ahead;
            `"frequency"`, those read most often in the epoch before; `"degree"`, those of the nodes with most outgoing
            edges; `"lru"`, those read last; or `"none"`. See `FeatureCache`.
        cache_bias: How much likelier training draws a neighbour whose row is cached than another one; 1 for no
            preference. Needs `feature_policy="degree"`. Batches get `edge_weight`, with which a mean over neighbours
            keeps its expectation: give it to your convolutions. See `CacheBias`.
        redraw_every: Epochs between two draws of the nodes that `cache_bias` prefers.
        seed: Seed of shuffling and sampling.
        check_finite: Refuse NaN and infinity in the graph's attributes.
        store_path: Save the graph to this folder, unless it is there already, and map it from there: the ranks of a
            machine then share one copy. With a function for `data`, only one of them ever calls it. Remove the folder
            when the graph has changed.

    Raises:
        TypeError: An argument has a wrong type, or is one of PyG's that has no meaning here (says what to use).
        ValueError: A value is out of range, or the graph is inconsistent; names the field, the value and the remedy.
    """

    def __init__(
        self,
        data: Data | GraphStore | str | Path | Callable[[], Data],
        input_train_nodes: InputNodes = None,
        input_val_nodes: InputNodes = None,
        input_test_nodes: InputNodes = None,
        input_pred_nodes: InputNodes = None,
        *,
        num_neighbors: Sequence[int],
        batch_size: int = 1024,
        replace: bool = False,
        drop_last: bool = False,
        transform: Callable[[Data], Data] | None = None,
        edge_format: str = "coo",
        eval_loader_kwargs: Mapping[str, Any] | None = None,
        sampling_threads: int = 1,
        prepare_threads: int = 1,
        queue_size: int | Literal["auto"] = "auto",
        resample_every: int = 1,
        subgraph_cache: int | float | str = 0.1,
        spill_path: str | Path | None = None,
        feature_cache: int | float | str = 0,
        feature_policy: str = "optimal",
        cache_bias: float = 1.0,
        redraw_every: int = 1,
        seed: int = 0,
        check_finite: bool = False,
        store_path: str | Path | None = None,
        **unsupported: Any,
    ) -> None:
        super().__init__()
        for name in unsupported:
            raise TypeError(f"{name}={unsupported[name]!r} is no argument here: {_INSTEAD.get(name, 'remove it')}")
        self._train_arguments: dict[str, Any] = {
            "num_neighbors": num_neighbors,
            "batch_size": batch_size,
            "replace": replace,
            "edge_format": edge_format,
        }
        if not isinstance(eval_loader_kwargs, Mapping | None):
            raise TypeError(f"eval_loader_kwargs={eval_loader_kwargs!r}: give a dict, e.g. {{'batch_size': 4096}}")
        self._eval_arguments: dict[str, Any] = {**self._train_arguments, **(eval_loader_kwargs or {})}
        for name in self._eval_arguments:
            if name not in _EVAL_ARGUMENTS:
                raise TypeError(f"eval_loader_kwargs holds {name!r}: give only {', '.join(_EVAL_ARGUMENTS)}")
        for arguments in (self._train_arguments, self._eval_arguments):
            check_num_neighbors(arguments["num_neighbors"])
            check_int("batch_size", arguments["batch_size"], least=1)
            check_edge_format(arguments["edge_format"])
        check_int("sampling_threads", sampling_threads, least=0)
        check_int("prepare_threads", prepare_threads, least=0)
        if isinstance(queue_size, str) and queue_size != "auto":
            raise ValueError(f"queue_size={queue_size!r}: give a number of batches, or 'auto'")
        if queue_size != "auto":
            check_int("queue_size", queue_size, least=1)
        check_int("resample_every", resample_every, least=1)
        check_int("redraw_every", redraw_every, least=1)
        check_int("seed", seed, least=0)
        self._caching = CacheSettings(
            resample_every, subgraph_cache, spill_path, feature_cache, feature_policy, cache_bias, redraw_every
        )
        if not sampling_threads and self._caching.plans_super_batches:
            raise ValueError(
                "feature_policy='optimal' with sampling_threads=0: what is read again is known from batches that are "
                "sampled ahead, so give 1 thread or more, or another policy"
            )
        if transform is not None and not callable(transform):
            raise TypeError(f"transform={transform!r} can't be called: give a function that takes and returns a batch")
        self._drop_last = bool(drop_last)
        self._transform = transform
        self._sampling_threads = sampling_threads
        self._prepare_threads = prepare_threads
        self._queue_size = queue_size
        self._seed = seed
        self._check_finite = check_finite
        self._input_nodes = (input_train_nodes, input_val_nodes, input_test_nodes, input_pred_nodes)
        self._seeds: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._store: GraphStore | None = None
        self._to_save: tuple[Data | Callable[[], Data], Path] | None = None
        if isinstance(data, GraphStore):
            self._use(data)
        elif isinstance(data, str | Path):
            self._use(GraphStore.open(data))
        elif store_path is not None and (isinstance(data, Data) or _is_function(data)):
            self._to_save = data, Path(store_path)
        elif _is_function(data):
            raise TypeError("data is a function: give store_path=..., the folder to which its graph is saved")
        else:
            self._use(GraphStore.from_data(data, check_finite=check_finite))
        self._loaders: dict[str, tuple[object, MQGNNLoader]] = {}
        self._subgraphs: tuple[int, SubgraphCache] | None = None  # ranks that share the budget, and this one's cache
        self._features: FeatureCache | None = None
        self._resume_at: dict[str, int] | None = None

    @property
    def store(self) -> GraphStore:
        """The graph.

        Raises:
            RuntimeError: It is not saved yet: `prepare_data` or `setup` were not called.
        """
        if self._store is None:
            raise RuntimeError("the graph is not there yet: call datamodule.setup() first, or let a Trainer do it")
        return self._store

    # Lightning's hooks, in the order in which a Trainer calls them

    def prepare_data(self) -> None:
        """On one rank per machine: save the graph if that was asked for, and compile the kernels, for all ranks."""
        self._save()
        self._warm_up()

    def setup(self, stage: str | None = None) -> None:
        """Map the graph, load the kernels and check that every rank gets seed nodes."""
        self._save()
        self._warm_up()
        for split, needed_by in _SPLITS.items():
            if split in self._seeds and stage in (needed_by, None):
                self._loader(split)
        if self._queue_size == "auto" and self.trainer is not None and stage == "fit":
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # it is a list
            if not any(isinstance(callback, AdaptiveQueueCallback) for callback in callbacks):
                callbacks.append(AdaptiveQueueCallback())

    def train_dataloader(self) -> MQGNNLoader:
        """The training batches of this rank, in a new order each epoch."""
        loader = self._loader("train")
        if self._resume_at is not None:
            loader.load_state_dict(self._resume_at)
            self._resume_at = None
        return loader

    def val_dataloader(self) -> MQGNNLoader | list[Any]:
        """The validation batches of this rank; an empty list if the graph has no validation nodes."""
        return self._loader("val") if "val" in self._seeds else []

    def test_dataloader(self) -> MQGNNLoader:
        """The test batches of this rank."""
        return self._loader("test")

    def predict_dataloader(self) -> MQGNNLoader:
        """The batches to predict on this rank: consecutive seed nodes, rank after rank."""
        return self._loader("pred")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Hand a batch over to the training stream; the transfer stage has copied it to the device already."""
        if not isinstance(batch, Data):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        if device_of(batch).type == device.type == "cuda":
            hand_over(batch)
        else:
            batch = batch.to(device)
        if self.trainer is not None:  # Lightning's converts tensors to, say, float64, but not those inside of a Data
            tensors = {name: value for name, value in batch.to_dict().items() if isinstance(value, Tensor)}
            for name, value in self.trainer.precision_plugin.convert_input(tensors).items():
                if value is not tensors[name]:
                    batch[name] = value
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the training data, for a checkpoint."""
        return {"train": self._loaders["train"][1].state_dict()} if "train" in self._loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training where the checkpoint was taken; with another number of ranks too."""
        if "train" in state_dict and (self.trainer is None or self.trainer.state.fn == "fit"):
            self._resume_at = state_dict["train"]
            if self.trainer is not None and self._resume_at["world_size"] != self.trainer.world_size:
                self.trainer.callbacks.append(_ResumesWithOtherRanks())  # type: ignore[attr-defined]  # it is a list

    def teardown(self, stage: str | None = None) -> None:
        """End all threads."""
        for _, loader in self._loaders.values():
            loader.close()
        if self._subgraphs is not None:
            self._subgraphs[1].close()
        if self._features is not None:
            self._features.close()

    def on_exception(self, exception: BaseException) -> None:
        """End all threads."""
        self.teardown()

    # Ours

    def replay(self, epoch: int, batch: int, split: str = "train") -> Data:
        """Rebuild a batch, bit by bit.

        Args:
            epoch: Its epoch (0 for all splits but `train`).
            batch: Its global index: the index on its rank times the number of ranks, plus the rank.
            split: `train`, `val`, `test` or `pred`.
        """
        return self._loader(split).replay(epoch, batch)

    def times(self) -> dict[str, dict[str, float]]:
        """Where the time of this rank's loaders went so far, in seconds.

        Returns:
            Per split that was read: `wait`, how long the consumer waited for batches, `batches`, how many were
            prepared, and per stage the time that its threads were busy.
        """
        report = {}
        for split, (_, loader) in self._loaders.items():
            wait, clocks = loader.times()
            items = min(clock.items for clock in clocks.values())
            if items:
                report[split] = {"wait": wait, "batches": items, **{name: clock.busy for name, clock in clocks.items()}}
        return report

    @property
    def features_on_disk(self) -> bool:
        """Whether rows of `x` are read from a file."""
        return "x" in self.store.node_attrs and self.store.node_file("x") is not None

    @property
    def has_transform(self) -> bool:
        """Whether a function of the user's is called with each batch."""
        return self._transform is not None

    @property
    def edge_format(self) -> str:
        """Of training batches."""
        return str(self._train_arguments["edge_format"])

    def feature_report(self) -> CacheReport | None:
        """What training asked of this rank's feature cache, and how much was there; None without one."""
        return None if self._features is None else self._features.report()

    def subgraph_counts(self) -> SubgraphCounts | None:
        """What was found in this rank's cache of sampled subgraphs, and what it holds; None before it is used."""
        return None if self._subgraphs is None else self._subgraphs[1].counts()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_loaders": {},
            "_subgraphs": None,
            "_features": None,
        }  # made anew where it is unpickled

    def _save(self) -> None:
        """Save the graph unless it is there, forget where it came from, and map it."""
        if self._to_save is None:
            return
        data, path = self._to_save
        if not path.exists():
            graph = data if isinstance(data, Data) else data()
            GraphStore.from_data(graph, check_finite=self._check_finite).save(path)
            del graph
            give_back_free_memory()
        self._to_save = None
        self._use(GraphStore.open(path))

    def _use(self, store: GraphStore) -> None:
        if "csc" in (self._train_arguments["edge_format"], self._eval_arguments["edge_format"]):
            check_edge_weight(store)
        self._store = store
        for split, nodes in zip(_SPLITS, self._input_nodes, strict=True):
            name = f"input_{split}_nodes"
            if nodes is None:
                name = f"{split}_mask"
                nodes = store.node_attrs.get(name)
            if nodes is not None:
                self._seeds[split] = _seed_nodes(name, nodes, store.num_nodes)
        if "pred" not in self._seeds:
            everything = np.arange(store.num_nodes)
            self._seeds["pred"] = everything, everything

    def _loader(self, split: str) -> MQGNNLoader:
        if split not in self._seeds:
            raise ValueError(
                f"there are no {split} nodes: give input_{split}_nodes=..., or a graph with a {split}_mask"
            )
        rank, world_size, device = self._place()
        place = rank, world_size, device
        if split in self._loaders and self._loaders[split][0] == place:
            return self._loaders[split][1]
        training = split == "train"
        arguments = self._train_arguments if training else self._eval_arguments
        seeds, input_id = self._seeds[split]
        plan = EpochPlan(
            num_seeds=len(seeds),
            batch_size=arguments["batch_size"],
            world_size=world_size,
            seed=self._seed,
            stream=split,
            shuffle=training,
            drop_last=training and self._drop_last,
            resample_every=self._caching.resample_every if training else 1,
        )
        ranks_here = self._ranks_here(world_size)
        budget = self._caching.subgraph_budget(self.store.nbytes, ranks_here)
        features = self._feature_cache(ranks_here, device) if training else None
        bias = None
        if training and self._caching.is_biased:
            num_cached = 0 if features is None else features.num_rows
            bias = CacheBias(self.store, num_cached, self._caching.cache_bias, self._seed, self._caching.redraw_every)
        sampler = NeighborSampler(self.store, arguments["num_neighbors"], arguments["replace"], bias)
        recurs = plan.resample_every > 1 or not training
        sample = Sample(
            plan, seeds, input_id, sampler, self._subgraph_cache(ranks_here, budget.kept) if recurs else None
        )
        ahead = budget.training_ahead if training else budget.evaluation_ahead
        group = 1
        if self._sampling_threads and ahead:
            # By a sampler that is gone afterwards, with its scratch memory.
            pilot = NeighborSampler(self.store, arguments["num_neighbors"], arguments["replace"], bias)
            one = Sample(plan, seeds, input_id, pilot).draw(tasks_of(plan, rank, 0)[0])
            del pilot
            group = self._caching.group(ahead, self._sampling_threads, one.nbytes, plan.num_batches)
        queue_size = _INITIAL_QUEUE_SIZE if self._queue_size == "auto" else self._queue_size
        room = max(queue_size, group)
        pool = BufferPool(pin_memory=device.type == "cuda")
        prepare = Prepare(self.store, pool, self._transform, arguments["edge_format"])
        transfer = (
            [Stage("transfer", CUDATransfer(device), 1, queue_size, serial=True)] if device.type == "cuda" else []
        )
        if features is None:
            stages = [
                Stage("sample", sample, self._sampling_threads, room, group),
                Stage("prepare", prepare, self._prepare_threads, queue_size),
                *transfer,
            ]
        else:
            fetch = Fetch(sample, features, pool, self.store, bias)
            plans = fetch.plan if self._caching.feature_policy == "optimal" else None
            stages = [
                Stage("sample", fetch.announce, self._sampling_threads, room, group, plans),
                Stage("fetch", fetch, min(self._prepare_threads, 1), queue_size, serial=True),
                Stage("prepare", lambda fetched: prepare(*fetched), self._prepare_threads, queue_size),
                *transfer,
            ]

        def rebuild(task: Task) -> Data:
            batch = prepare(sample.draw(task))
            return transfer[0].work(batch) if transfer else batch

        loader = MQGNNLoader(
            plan,
            rank,
            stages,
            rebuild,
            self._training_epoch if training else _always_epoch_0,
            self._training_epoch_after if training else _no_epoch,
            lambda: self.store.version,
            pool,
        )
        self._loaders[split] = place, loader
        return loader

    def _place(self) -> tuple[int, int, torch.device]:
        """This process's rank, the number of ranks, and the device."""
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size, self.trainer.strategy.root_device
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu")
        return 0, 1, torch.device("cpu")

    def _ranks_here(self, world_size: int) -> int:
        """Ranks on this machine, as far as that is known."""
        return (
            self.trainer.num_devices
            if self.trainer is not None
            else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        )

    def _subgraph_cache(self, ranks_here: int, budget: int) -> SubgraphCache:
        """The cache that all splits share."""
        if self._subgraphs is None or self._subgraphs[0] != ranks_here:
            self._subgraphs = ranks_here, SubgraphCache(self.store, budget, self._caching.spill_path)
        return self._subgraphs[1]

    def _feature_cache(self, ranks_here: int, device: torch.device) -> FeatureCache | None:
        """The cache of training's rows; None if there is no room for any."""
        share = 1 if device.type == "cuda" else ranks_here  # a device is one rank's
        budget = self._caching.feature_bytes(self.store.nbytes, share)
        if not budget or self._caching.feature_policy == "none":
            return None
        if "x" not in self.store.node_attrs:
            raise ValueError(f"feature_cache={self._caching.feature_cache!r}: the graph has no x whose rows to keep")
        num_rows = FeatureCache.rows_for(self.store, budget, self._caching.feature_policy)
        if self._features is not None:
            self._features.close()
        self._features = FeatureCache(self.store, num_rows, self._caching.feature_policy, device=device)
        return self._features

    def _training_epoch(self) -> int | None:
        """The Trainer's epoch; None by hand."""
        if self.trainer is None or not self.trainer.training:
            return None
        return 0 if getattr(self.trainer, "overfit_batches", 0) > 0 else self.trainer.current_epoch

    def _training_epoch_after(self, epoch: int) -> int | None:
        """The epoch that the Trainer will train after this one, as far as it knows; None by hand."""
        trainer = self.trainer
        if trainer is None or trainer.should_stop or epoch != self._training_epoch() or epoch != trainer.current_epoch:
            return None
        last = -1 if trainer.max_epochs is None else trainer.max_epochs - 1  # negative: there is no last one
        return None if epoch == last else epoch + 1

    def _warm_up(self) -> None:
        NeighborSampler(self.store, self._train_arguments["num_neighbors"]).warm_up(say=rank_zero_info)
        Prepare(self.store, BufferPool()).warm_up()
        if self._caching.is_biased:
            bias = CacheBias(self.store, 0, self._caching.cache_bias)
            NeighborSampler(self.store, self._train_arguments["num_neighbors"], bias=bias).warm_up(say=rank_zero_info)
        if self._caching.feature_bytes(self.store.nbytes, 1) and "x" in self.store.node_attrs:
            warm_up(self.store, self._caching.feature_policy)


class _ResumesWithOtherRanks(Callback):
    """Corrects, once, the Trainer's count of an epoch's batches: they are others, with another number of ranks."""

    _done = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the count was restored, and before it is used."""
        if self._done:
            return
        self._done = True
        loader = trainer.train_dataloader
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if isinstance(loader, MQGNNLoader) and progress.processed:
            moved = (loader.first_batch or len(loader)) - progress.processed
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, getattr(progress, name) + moved)


def _is_function(data: object) -> bool:
    return callable(data) and not isinstance(data, BaseData)  # PyG's graphs can be called


def _always_epoch_0() -> int:
    return 0


def _no_epoch(epoch: int) -> None:
    return None


def _seed_nodes(name: str, nodes: InputNodes, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the node ids that `nodes` selects, and what PyG calls them in `input_id`."""
    try:
        chosen = torch.as_tensor(nodes).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}={nodes!r}: give a boolean mask or a list of node ids") from error
    if chosen.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(chosen.shape)}: give a mask ({num_nodes},) or a list of node ids")
    if chosen.dtype == torch.bool:
        if len(chosen) != num_nodes:
            raise ValueError(f"{name} has {len(chosen)} entries for {num_nodes} nodes: give one per node")
        ids = chosen.nonzero().flatten()
    elif chosen.numel() and (chosen.is_floating_point() or chosen.is_complex()):
        raise TypeError(f"{name} has dtype {chosen.dtype}: give a boolean mask or integer node ids")
    elif name.endswith("_mask"):
        raise TypeError(f"{name} has dtype {chosen.dtype}: make it boolean, {name}.bool()")
    else:
        ids = chosen.long()
    if not len(ids):
        raise ValueError(f"{name} selects no node: give at least one seed node, or leave it out")
    if int(ids.min()) < 0 or int(ids.max()) >= num_nodes:
        bad = int(ids[(ids < 0) | (ids >= num_nodes)][0])
        raise ValueError(f"{name} holds node {bad}: ids go from 0 to {num_nodes - 1}")
    if len(ids.unique()) != len(ids):
        raise ValueError(f"{name} holds a node more than once: pass {name}.unique()")
    return ids.numpy(), (ids if chosen.dtype == torch.bool else torch.arange(len(ids))).numpy()
