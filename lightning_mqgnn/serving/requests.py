"""Requests, and batches made of parts of them."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Request:
    """Nodes that were asked for together, and what is known of their predictions."""

    def __init__(self, nodes: np.ndarray) -> None:
        self.nodes = nodes
        self.future: Future[Tensor] = Future()
        self.submitted = time.perf_counter()
        self.begun = False
        self.taken = 0  # nodes that went into batches
        self.pieces: list[Tensor] = []

    @property
    def weight(self) -> int:
        """Seeds that it counts for while it waits."""
        return max(len(self.nodes) - self.taken, 1)

    def begin(self) -> bool:
        """Whether predictions are still wanted; if so, it can't be cancelled from now on."""
        if self.begun:
            return not self.future.done()
        self.begun = self.future.set_running_or_notify_cancel()
        return self.begun

    def add(self, piece: Tensor) -> Tensor | None:
        """Add the predictions of the next nodes, and return them all if these were the last."""
        self.pieces.append(piece)
        if sum(map(len, self.pieces)) < len(self.nodes):
            return None
        return piece if len(self.pieces) == 1 else torch.cat(self.pieces)


class Part(NamedTuple):
    """A stretch of a request's nodes, in a batch."""

    request: Request
    nodes: np.ndarray


class Batch:
    """Parts of requests on their way through the stages.

    Attributes:
        number: How many batches were made before.
        parts: What it is made of; nothing in the pipeline's last batch, which no stage works on.
        size: Nodes of all parts.
        began: When it was made.
        item: What the last stage has left: a subgraph, a `Data`, a row per seed; None after an error.
        error: What a stage has raised.
        num_sampled_nodes: Nodes per hop of the sampled block, once there is one; the seeds come first.
    """

    def __init__(self, number: int, parts: list[Part]) -> None:
        self.number = number
        self.parts = parts
        self.size = sum(len(part.nodes) for part in parts)
        self.began = time.perf_counter()
        self.item: Any = None
        self.error: BaseException | None = None
        self.num_sampled_nodes: list[int] = []
        self._place = np.zeros(0, np.int64)

    def find_seeds(self) -> np.ndarray:
        """Return the distinct nodes, and remember where each part's are among them."""
        seeds, self._place = np.unique(np.concatenate([part.nodes for part in self.parts]), return_inverse=True)
        if not len(seeds):
            seeds = np.zeros(1, np.int64)  # the shape of no predictions is only known from one
        return seeds

    def answers(self) -> Iterator[tuple[Request, Tensor | BaseException]]:
        """The requests that this batch completes, and the predictions or the exception that each gets."""
        end = 0
        for request, nodes in self.parts:
            begin, end = end, end + len(nodes)
            if request.future.done():  # an earlier part failed
                continue
            answer: Tensor | BaseException | None = self.error
            if answer is None:
                try:
                    answer = request.add(self.item[torch.from_numpy(self._place[begin:end])])
                except Exception as error:  # the parts don't go together
                    answer = error
            if answer is not None:
                yield request, answer


def carry(work: Callable[[Batch], Any]) -> Callable[[Batch], Batch]:
    """A stage that leaves in a batch what `work` returns for it, or what it raises: the pipeline would end with it."""

    def stage(batch: Batch) -> Batch:
        if batch.parts and batch.error is None:
            try:
                batch.item = work(batch)
            except BaseException as error:
                batch.item, batch.error = None, error
        return batch

    return stage
