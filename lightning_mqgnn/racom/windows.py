"""ProgressExchange: the asynchronous exchange of windows of progress, with a bounded staleness."""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_mqgnn.racom.arrivals import Arrivals
from lightning_mqgnn.racom.period import PERIODS, PeriodController, needed_slot
from lightning_mqgnn.racom.settings import RaCoM

_log = logging.getLogger(__name__)

_CHUNK = 1 << 15  # elements: what one pass of the outer step works on stays in the CPU's second-level cache
_MAX_IN_FLIGHT = 4  # windows: hides latency; more would only delay the controller's decisions
_TAIL = 2 + len(PERIODS)  # ranks with finite progress, sum of |u_i|^2, how many ranks need which period


@dataclass
class ExchangeStatistics:
    """What the exchange did so far, on this rank.

    Attributes:
        windows: Windows completed, those of drains too.
        bytes: Given to the all-reduce.
        wait_seconds: Spent by the training thread waiting for windows, in drains too.
        staleness: How often a window was applied so many optimizer steps after it closed.
        period: Steps of the last window that was completed.
        delta: Distance of the replicas in it, see `RaCoM.divergence_bound`; the same number on all ranks.
        discarded: Windows of this rank whose progress was not finite.
    """

    windows: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    period: int = 0
    delta: float = 0.0
    discarded: int = 0


class _Window:
    """A window's way: closed, sent, arrived (its mean is known), applied; then its memory serves another one."""

    def __init__(self, parameters: Sequence[Parameter], like: Tensor, wire_dtype: torch.dtype, num_times: int) -> None:
        # The snapshot of the parameters, then this rank's progress, then the correction of its parameters.
        self.own = torch.empty_like(like)
        self.views = _views(self.own, parameters)
        size = like.numel()
        self.wire = torch.empty(size + _TAIL + num_times, dtype=wire_dtype, device=like.device)
        self.progress, self.tail, self.times = self.wire.split([size, _TAIL, num_times])
        self.ready = threading.Event()
        self.number = 0
        self.steps = 0
        self.closed_at = 0
        self.final = False
        self.share = 0.0
        self.alone = False
        self.num_applied = 0
        self.discarded = False
        self.wanted = False
        self.own_seconds = 0.0
        self.step_seconds = 0.0
        self.sent_at = 0.0
        self.exchange_seconds = math.inf
        self.delta = 0.0
        self.needed = 0
        self.snapshot: torch.cuda.Event | None = None
        self.finished: torch.cuda.Event | None = None


class ProgressExchange:
    """Shares the progress of a rank's parameters with the other ranks, while it goes on.

    With theta_i the parameters of rank i, and an anchor theta_g that is the same on all ranks:

    * After `period` optimizer steps a window closes. Its progress is u_i, what the steps in it moved theta_i. An
      asynchronous all-reduce takes the mean u of all ranks.
    * When the mean is there: step = eta (u + mu v), v = mu v + u, theta_g += step, theta_i += step - u_i.
      This is heavy-ball momentum: u itself joins v afterwards. Nesterov's, where it joins before, overshoots: ranks
      have gone on along u by the time that it comes back.
    * A drain closes a window early. All that v would still give is mu v / (1 - mu); a whole window gives 1 - mu of it,
      so one of r periods gives 1 - mu^r, and v keeps the rest.
    * If no window was full since the drain before, nothing overlaps: the window counts as a whole one, however short,
      and its step is Nesterov's.
    * So theta_i - theta_g is, to rounding, the rank's own progress in windows that have not come back.
    * A window that closed `max_staleness` steps ago must have come back: then the rank waits for it.

    The training thread copies parameters at a window's end and adds a correction when a mean has arrived; the
    arithmetic between is done by a thread of this object, which starts with the first window and ends with `close`.

    Beside the progress the buffer carries, summed over ranks: how many sent finite progress, |u_i|^2, and how many need
    which period. Every decision is made from these sums, so that all ranks decide alike: the decision made from a
    window holds from the first window that no rank can have begun by then.

    Args:
        parameters: Floating-point parameters on one device, the same on all ranks.
        settings: `warmup` and `drain_each_epoch` are the caller's business; so is a `momentum` of None.
        controller: Decides the periods, here fed with what was exchanged.
        statistics: Here counted on.
        arrivals: Here counted on.
        group: A process group that nothing else uses while windows are in flight.

    Raises:
        ValueError: Parameters on several devices, or none.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        settings: RaCoM,
        controller: PeriodController,
        statistics: ExchangeStatistics,
        arrivals: Arrivals,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1:
            raise ValueError(f"parameters: are on {sorted(map(str, devices))}, must be on one device")
        (self._device,) = devices
        self.parameters = list(parameters)
        self._controller = controller
        self._statistics = statistics
        self._arrivals = arrivals
        self._settings = settings
        assert settings.momentum is not None
        self._momentum = settings.momentum
        self._group = group
        double = any(parameter.dtype == torch.float64 for parameter in parameters)
        size = sum(parameter.numel() for parameter in parameters)
        self._anchor = torch.empty(size, dtype=torch.float64 if double else torch.float32, device=self._device)
        self._anchor_views = _views(self._anchor, parameters)
        self._velocity = torch.zeros_like(self._anchor)
        self._chunk = _CHUNK if self._device.type == "cpu" else max(size, 1)
        self._scratch = torch.empty(min(self._chunk, size), dtype=self._anchor.dtype, device=self._device)

        # Of the training thread
        self._steps = 0
        self._open_steps = 0
        self._since_drain = 0
        self._num_closed = 0
        self._num_applied = 0
        self._in_flight: list[_Window] = []
        self._free: list[_Window] = []
        self._limit = max(1, min(_MAX_IN_FLIGHT, -(-settings.max_staleness // settings.period)))
        self._periods: dict[int, int] = {}
        self._period = controller.period
        self._last_step: float | None = None
        self._compute_seconds = 0.0
        self._timed_steps = 0
        self._step_seconds = 0.0
        self._own_seconds = 0.0
        self._costs: deque[float] = deque(maxlen=4)

        # Of the worker
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._unfinished: dict[int, _Window] = {}
        self._unapplied: dict[int, _Window] = {}
        self._arrived: dict[int, _Window] = {}
        self._num_finished = 0
        self._last_arrival = 0.0

        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._failure: BaseException | None = None
        self._begin()

    @property
    def period(self) -> int:
        """Optimizer steps in the window that is open."""
        return self._period

    def after_step(self) -> None:
        """Count an optimizer step; close the window if it is full, and apply the means that have arrived.

        Raises:
            RuntimeError: The exchange failed, for example since another rank has gone.
        """
        self._raise_failure()
        began = time.thread_time()
        if self._last_step is not None:
            self._compute_seconds += time.perf_counter() - self._last_step
            self._timed_steps += 1
        self._steps += 1
        self._open_steps += 1
        self._since_drain += 1
        if self._open_steps >= self._period:
            if len(self._in_flight) == self._limit:
                self._apply_oldest()
            self._close(final=False)
        while self._in_flight:
            oldest = self._in_flight[0]
            fixed = self._settings.arrival == "fixed"
            bound = min(oldest.steps, self._settings.max_staleness) if fixed else self._settings.max_staleness
            if self._steps - oldest.closed_at < bound and (fixed or not oldest.ready.is_set()):
                break
            self._apply_oldest()
        self._own_seconds += time.thread_time() - began
        self._last_step = time.perf_counter()  # so that waiting in here does not count as computing

    @torch.no_grad()
    def drain(self, force: bool = False) -> None:
        """Complete all windows and make the parameters of all ranks equal, bit by bit.

        All ranks must call it after the same number of steps; without a step since the last time it does nothing,
        unless with `force`: then the result is the plain mean of the parameters as they are, whatever moved them.
        """
        self._raise_failure()
        if force:
            parameters = [parameter.clone() for parameter in self.parameters]
            self.drain()
            _copy(self.parameters, parameters)
        elif not self._since_drain:
            return
        if len(self._in_flight) == self._limit:
            self._apply_oldest()
        self._close(final=True)
        while self._in_flight:
            self._apply_oldest()
        # To the last bit; and where parameters are less precise than the anchor, it is they who count.
        _copy(self.parameters, self._anchor_views)
        _copy(self._anchor_views, self.parameters)
        self._since_drain = 0
        self._last_step = None
        # All ranks have applied all windows: the latest decision holds at once, as it does for a run that resumes here.
        self._periods.clear()
        self._period = self._controller.period

    def abort(self, error: BaseException) -> None:
        """Make the training thread raise `error` instead of waiting; may be called by any thread."""
        self._fail(error)

    def close(self) -> None:
        """End the thread. Windows in flight are left to themselves: `drain` before, unless something failed."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def momentum(self) -> list[Tensor]:
        """The outer momentum v, a tensor for each parameter. Only after a `drain`."""
        return [view.clone() for view in _views(self._velocity, self.parameters)]

    def load_momentum(self, momentum: Sequence[Tensor | None]) -> None:
        """Set the outer momentum v; None is zero. Only before the first step or after a `drain`."""
        for view, value in zip(_views(self._velocity, self.parameters), momentum, strict=True):
            view.zero_() if value is None else view.copy_(value)

    # The training thread's side

    @torch.no_grad()
    def _begin(self) -> None:
        """Make rank 0's parameters the anchor; where others differ, the difference is their progress."""
        _copy(self._anchor_views, self.parameters)
        dist.broadcast(self._anchor, src=dist.get_process_group_ranks(self._group)[0], group=self._group)

    @torch.no_grad()
    def _close(self, final: bool) -> None:
        wire_dtype = self._anchor.dtype if final else self._settings.exchange_dtype
        window = self._take_window(wire_dtype)
        _copy(window.views, self.parameters)
        if self._timed_steps:
            self._step_seconds = self._compute_seconds / self._timed_steps
        window.number, window.final = self._num_closed, final
        window.alone = final and self._open_steps == self._since_drain
        # 0 where no step was taken: what a forced drain finds is not progress, and leaves the momentum alone.
        window.share = min(self._open_steps, 1) if window.alone else self._open_steps / self._period
        window.steps, window.closed_at = self._open_steps, self._steps
        window.num_applied = self._num_applied
        window.step_seconds = self._step_seconds
        if not final:  # a shorter window costs less
            self._costs.append(self._own_seconds)
        self._own_seconds = 0.0
        # The first touch of new buffers takes longer, and is not what follows.
        window.own_seconds = min(self._costs, default=0.0)
        if self._stream is not None:
            window.snapshot = torch.cuda.current_stream(self._device).record_event()
        self._compute_seconds, self._timed_steps = 0.0, 0
        self._num_closed += 1
        self._open_steps = 0
        self._period = self._periods.pop(self._num_closed, self._period)
        self._in_flight.append(window)
        self._raise_failure()  # one that came before the window was in flight would not have woken a wait for it
        self._put(partial(self._send, window))

    @torch.no_grad()
    def _apply_oldest(self) -> None:
        window = self._in_flight[0]
        if self._settings.arrival == "fixed":
            self._put(partial(self._want, window))
        if not window.ready.is_set():
            began = time.perf_counter()
            window.ready.wait()
            self._raise_failure()
            waited = time.perf_counter() - began
            self._statistics.wait_seconds += waited
            self._arrivals.count_wait(waited, window.exchange_seconds)
        del self._in_flight[0]
        if window.finished is not None:
            torch.cuda.current_stream(self._device).wait_event(window.finished)
        if window.discarded:
            self._restore()
        for parameter, correction in zip(self.parameters, window.views, strict=True):
            parameter.add_(correction)
        self._num_applied += 1
        statistics = self._statistics
        statistics.windows += 1
        statistics.staleness[self._steps - window.closed_at] += 1
        statistics.discarded += window.discarded
        if not window.final:
            statistics.period, statistics.delta = window.steps, window.delta
            self._controller.update(window.steps, window.needed, window.delta)
        # Any rank has applied window n before it closes window n + limit, so before window n + limit + 1 begins.
        self._periods[window.number + self._limit + 1] = self._controller.period
        self._put(partial(self._release, window))

    def _restore(self) -> None:
        """Take the parameters back to where they would be without the progress that is not finite."""
        restored = torch.empty_like(self._anchor)
        done = threading.Event()
        self._put(partial(self._without_open_progress, restored, done))
        done.wait()
        self._raise_failure()
        _copy(self.parameters, _views(restored, self.parameters))

    def _take_window(self, wire_dtype: torch.dtype) -> _Window:
        for i, window in enumerate(self._free):
            if window.wire.dtype == wire_dtype:
                del self._free[i]
                break
        else:
            num_times = self._arrivals.num_times(self._device)
            window = _Window(self.parameters, self._anchor, wire_dtype, num_times)
        window.ready.clear()
        window.discarded = window.wanted = False
        if window.finished is not None:
            torch.cuda.current_stream(self._device).wait_event(window.finished)
        return window

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mqgnn-exchange", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The worker's side

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with self._on_stream():
                    job()
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for window in [*self._in_flight]:
            window.ready.set()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _send(self, window: _Window) -> None:
        if self._stream is not None and window.snapshot is not None:
            self._stream.wait_event(window.snapshot)
        own, payload = window.own, window.progress
        lossy = payload.dtype != own.dtype
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        # theta_i less the anchor, less progress that is on its way already; but with the corrections which the anchor
        # has had and these parameters had not.
        pending = [earlier.own for earlier in self._unfinished.values()]
        corrections = [w.own for n, w in self._unapplied.items() if n >= window.num_applied]
        for part in self._parts():
            progress = own[part]
            progress.sub_(self._anchor[part])
            for other in pending:
                progress.sub_(other[part])
            for other in corrections:
                progress.add_(other[part])
            payload[part].copy_(progress)
            if lossy:
                progress.copy_(payload[part])  # what was rounded away remains in theta_i - theta_g, for the next window
            square += progress.dot(progress)
        squared_norm = float(square)
        if not math.isfinite(squared_norm):
            window.discarded = True
            own.zero_()
            payload.zero_()
            _log.warning(
                "the progress of rank %d up to optimizer step %d is not finite: it is not shared, and this rank "
                "continues from the common parameters",
                dist.get_rank(),
                window.closed_at,
            )
        slots = [0.0] * len(PERIODS)
        slots[needed_slot(self._arrivals.own_seconds, window.own_seconds, window.step_seconds)] = 1.0
        shared = [0.0, 0.0] if window.discarded else [1.0, squared_norm]
        window.tail.copy_(torch.tensor([*shared, *slots], dtype=torch.float64))
        self._arrivals.write(window.times)
        self._unfinished[window.number] = window
        window.sent_at = time.perf_counter()
        self._statistics.bytes += window.wire.nbytes
        work = dist.all_reduce(window.wire, group=self._group, async_op=True)
        assert work is not None
        work.get_future().add_done_callback(lambda future: self._jobs.put(partial(self._arrive, window, work, future)))

    def _arrive(self, window: _Window, work: dist.Work, future: "torch.futures.Future[object]") -> None:
        future.value()  # raises what the collective raised
        if self._stream is not None:
            work.wait()  # lets this stream wait for the collective's
        now = time.perf_counter()
        self._arrivals.own_seconds = now - max(window.sent_at, self._last_arrival)
        self._last_arrival = now
        self._arrived[window.number] = window
        self._finish_arrived()

    def _want(self, window: _Window) -> None:
        window.wanted = True
        self._finish_arrived()

    def _finish_arrived(self) -> None:
        """In order, since momentum depends on it; and if runs shall repeat bit by bit, when the training thread says.

        The progress of the next window is rounded differently before and after.
        """
        while (window := self._arrived.get(self._num_finished)) is not None:
            if self._settings.arrival == "fixed" and not window.wanted:
                break
            del self._arrived[self._num_finished]
            self._finish(window)
            self._num_finished += 1

    def _finish(self, window: _Window) -> None:
        """The outer step, from the sum of all ranks' progress."""
        weight, squares, *slots = window.tail.double().tolist()
        window.exchange_seconds = self._arrivals.read(window.times)
        finite_ranks = max(round(weight), 1)
        momentum, lr = (self._momentum, self._settings.outer_lr) if window.share else (0.0, 1.0)
        kept = momentum**window.share
        released = momentum * (1 - kept) / (1 - momentum)
        norms = torch.zeros(2, dtype=torch.float64, device=self._device)
        for part in self._parts():
            anchor, own = self._anchor[part], window.own[part]
            step = self._scratch[: anchor.numel()]
            step.copy_(window.progress[part]).div_(finite_ranks)
            norms[0] += step.dot(step)
            if momentum:
                velocity = self._velocity[part]
                if window.alone:
                    velocity.add_(step)
                    step.add_(velocity, alpha=released)
                    velocity.mul_(kept)
                else:
                    velocity.mul_(kept).add_(step)
                    step.lerp_(velocity, released / kept)  # step + released v, with the v of before
            if lr != 1:
                step.mul_(lr)
            anchor.add_(step)
            norms[1] += anchor.dot(anchor)
            torch.sub(step, own, out=own)
        mean_square, anchor_square = norms.tolist()
        window.delta = math.sqrt(max(squares / finite_ranks - mean_square, 0.0) / max(anchor_square, 1e-30))
        window.needed = self._settings.period
        if self._settings.arrival == "eager":
            # The least that any rank needs: the last to join sees the exchange alone, the others also wait for it.
            window.needed = PERIODS[next(slot for slot, count in enumerate(slots) if count > 0.5)]
        del self._unfinished[window.number]
        self._unapplied[window.number] = window
        if self._stream is not None:
            window.finished = self._stream.record_event()
        window.ready.set()

    def _without_open_progress(self, out: Tensor, done: threading.Event) -> None:
        try:
            out.copy_(self._anchor)
            for window in self._unfinished.values():
                out.add_(window.own)
            for number, window in self._unapplied.items():
                if number >= self._num_applied:
                    out.sub_(window.own)
        finally:
            done.set()

    def _release(self, window: _Window) -> None:
        del self._unapplied[window.number]
        self._free.append(window)

    def _parts(self) -> Iterator[slice]:
        size = self._anchor.numel()
        return (slice(start, min(start + self._chunk, size)) for start in range(0, size, self._chunk))


def _views(flat: Tensor, parameters: Sequence[Parameter]) -> list[Tensor]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
