"""Server: makes batches of the requests that wait, and answers them."""

import atexit
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lightning_mqgnn.pipeline import Pipeline, Stage
from lightning_mqgnn.serving.requests import Batch, Part, Request
from lightning_mqgnn.serving.service_time import ServiceTime

_RECENT = 1024  # requests whose latencies are reported


class Overloaded(RuntimeError):
    """More seeds would wait than `InferencePipeline` was allowed to let wait."""


class ServingReport(NamedTuple):
    """What an `InferencePipeline` has done.

    Attributes:
        requests: Requests answered so far, with a prediction or an exception.
        seeds: Nodes of these requests, each as often as it was asked for.
        batches: Batches made.
        refused: Requests that were refused with `Overloaded`.
        p50: Median latency of the last 1024 requests, from `submit` to the answer, in seconds; NaN before the first.
        p99: Its 99th percentile.
        seeds_per_second: Nodes of these last requests, per second from the first one's `submit` to the last answer.
    """

    requests: int
    seeds: int
    batches: int
    refused: int
    p50: float
    p99: float
    seeds_per_second: float


class Server:
    """Holds the requests that wait, makes batches of them, and answers them; the pipeline's tasks are its batches.

    A batch is made at once when none is under way. Beside others, at most one for each stage, it is made when it has
    seeds enough that its fixed cost is no more than half of it. Until then it waits here, where it can grow.

    The thread that takes the results out of the pipeline is started by the first request. It ends with the last batch,
    an empty one that is made when the server is closed and no request waits any more.
    """

    def __init__(self, stages: list[Stage], latency_target: float, max_batch_size: int, max_pending: int) -> None:
        self._stages = stages
        self._latency_target = latency_target
        self._max_batch_size = max_batch_size
        self._max_pending = max_pending
        self._changed = threading.Condition()  # reentrant: garbage collection may call `close` anywhere
        self._waiting: deque[Request] = deque()
        self._pending = 0  # seeds of those that wait
        self._under_way: deque[Batch] = deque()
        self._service_time = ServiceTime()
        self._cap = self._service_time.largest_batch(latency_target, max_batch_size)
        self._batches = 0
        self._closed = False
        self._ended = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._requests = self._seeds = self._refused = 0
        self._recent: deque[tuple[float, float, int]] = deque(
            maxlen=_RECENT
        )  # when they came and went, and their seeds

    # What users ask for, from any thread

    def submit(self, nodes: np.ndarray) -> "Future[Tensor]":
        """See `InferencePipeline.submit`."""
        request = Request(nodes)
        with self._changed:
            if self._closed:
                raise RuntimeError("the inference pipeline is closed: make a new one") from self._failure
            if self._pending + request.weight > self._max_pending:
                self._refused += 1
                raise Overloaded(
                    f"{self._pending} seeds wait, and {request.weight} more would exceed max_pending="
                    f"{self._max_pending}: try again later, ask for fewer nodes at a time, or raise max_pending"
                )
            if self._thread is None:
                self._start()
            self._waiting.append(request)
            self._pending += request.weight
            if self._can_begin():
                self._changed.notify_all()
        return request.future

    def close(self, cancel: bool = False) -> None:
        """Take no more requests; with `cancel`, cancel those that no batch was begun for."""
        cancelled: list[Request] = []
        with self._changed:
            self._closed = True
            if cancel:
                begun = [request for request in self._waiting if request.begun]
                cancelled = [request for request in self._waiting if not request.begun]
                self._waiting = deque(begun)
                self._pending = sum(request.weight for request in begun)
            self._changed.notify_all()
        for request in cancelled:
            request.future.cancel()  # not under the lock: it calls the user's callbacks
            request.future.set_running_or_notify_cancel()  # wakes those that wait in `concurrent.futures.wait`

    def join(self) -> None:
        """Wait until the threads have ended, after `close`."""
        with self._changed:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def report(self) -> ServingReport:
        """What was done so far."""
        with self._changed:
            recent = list(self._recent)
            counts = self._requests, self._seeds, self._batches, self._refused
        if not recent:
            return ServingReport(*counts, math.nan, math.nan, 0.0)
        came, went, seeds = np.array(recent).T
        p50, p99 = np.percentile(went - came, [50, 99]).tolist()
        return ServingReport(*counts, p50, p99, float(seeds.sum() / (went.max() - came.min())))

    # The pipeline's tasks, for the thread of its first stage

    def __len__(self) -> int:
        with self._changed:
            return self._batches + 1  # one that may come, or the empty one at the end

    def __getitem__(self, number: int) -> Batch:
        """The next batch, once there is something to be put into it."""
        with self._changed:
            while True:
                while self._can_begin():
                    parts = self._take()
                    if parts:
                        batch = Batch(number, parts)
                        self._batches += 1
                        self._under_way.append(batch)
                        return batch
                if self._closed and not self._waiting:
                    if self._ended:
                        raise IndexError(number)
                    self._ended = True
                    return Batch(number, [])
                self._changed.wait()

    def _can_begin(self) -> bool:
        """Whether there is something for a batch, and place for it."""
        if not self._waiting or not self._under_way:
            return bool(self._waiting)
        enough = min(self._service_time.half_fixed(), self._cap)
        return self._pending >= enough and len(self._under_way) < len(self._stages)

    def _take(self) -> list[Part]:
        """As much of what waits as goes into a batch. Only a request that no batch could hold is split."""
        parts: list[Part] = []
        size = 0
        while self._waiting:
            request = self._waiting[0]
            left = len(request.nodes) - request.taken
            if parts and size + left > self._cap:
                break
            self._pending -= request.weight
            if not request.begin():  # it was cancelled, or failed with an earlier part
                self._waiting.popleft()
                continue
            count = min(left, self._max_batch_size)
            parts.append(Part(request, request.nodes[request.taken : request.taken + count]))
            request.taken += count
            size += count
            if count == left:
                self._waiting.popleft()
            else:
                self._pending += request.weight
        return parts

    # The thread that gives the answers

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name="mqgnn-serve", daemon=True)
        thread.start()
        self._thread = thread
        # Comes before what was registered earlier: the pipeline's own exit, which joins a thread that waits for tasks.
        atexit.register(self._end_at_exit)

    def _serve(self) -> None:
        try:
            for batch in Pipeline(self, self._stages):
                if batch.parts:
                    self._answer(batch)
                del batch  # else it would be held here until the next one is ready
        except BaseException as error:
            self._abandon(error)
        finally:
            atexit.unregister(self._end_at_exit)

    def _answer(self, batch: Batch) -> None:
        answers = list(batch.answers())
        now = time.perf_counter()
        with self._changed:
            self._under_way.popleft()  # results come in the order of the tasks
            if batch.size and batch.error is None:
                self._service_time = self._service_time.after(batch.size, now - batch.began)
                self._cap = self._service_time.largest_batch(self._latency_target, self._max_batch_size)
            self._requests += len(answers)
            for request, _ in answers:
                self._seeds += len(request.nodes)
                self._recent.append((request.submitted, now, len(request.nodes)))
            self._changed.notify_all()
        for request, answer in answers:
            if isinstance(answer, Tensor):
                request.future.set_result(answer)
            else:
                request.future.set_exception(answer)

    def _abandon(self, error: BaseException) -> None:
        """Nobody will be answered any more, and nobody shall wait for it."""
        with self._changed:
            self._failure = error
            self._closed = True
            requests = [part.request for batch in self._under_way for part in batch.parts] + list(self._waiting)
            self._waiting.clear()
        for request in requests:
            if request.begin():
                request.future.set_exception(error)

    def _end_at_exit(self) -> None:
        self.close(cancel=True)
        self.join()
