"""PeerWatch: knows whether the other ranks still live, where they are, and ends this one if they are gone."""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # torch names it in no __all__

_log = logging.getLogger(__name__)

_INTERVAL = 0.5  # seconds between two beats
_STORE_PATIENCE = 10.0  # seconds without an answer of the store until it counts as out of reach
_SUSPICION = 3.0  # seconds of silence after which a rank, or the store, is to blame for a collective that timed out
_FAREWELL = 5.0  # seconds that the last beat may take
_PATIENCE = 25.0  # seconds without a beat from another machine until its rank counts as gone
_GRACE = 15.0  # seconds that a rank has to notice by itself that another one is gone


class PeerError(RuntimeError):
    """Another rank has failed, or is gone, or did not come in time; the message says which, and where it was."""


@dataclass
class _Beat:
    host: str
    pid: int
    started: float
    count: int = 0
    phase: str = "setup"
    step: int = 0
    since: float = 0.0
    failure: str | None = None
    done: bool = False


class PeerWatch:
    """Each rank says twice a second where it is, in the store behind the process group, and reads what others say.

    A rank is gone when it said that it failed, when its process has ended (on this machine), or when nothing was heard
    of it for 25 s (on another one). Then `on_failure` is called in the thread of the watch, and `check` raises. A rank
    that is blocked in a collective, which nothing can interrupt, ends itself after 15 s more, so that none hangs or
    stays behind as an orphan. Where a rank was is known to half a second.

    One thread talks to the store. If the process that serves it is frozen, it waits there without end, and nothing can
    interrupt it; so all else is done elsewhere.

    Args:
        store: What the process group was made from; a connection of its own is made.
        rank: This rank.
        world_size: Ranks.
        on_failure: Told, once, that a rank is gone.
    """

    def __init__(self, store: Store, rank: int, world_size: int, on_failure: Callable[[PeerError], None]) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self._store.set_timeout(timedelta(seconds=10))
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._on_failure = on_failure
        self._own = _Beat(socket.gethostname(), os.getpid(), psutil.Process().create_time(), since=time.time())
        # Until a rank says where it is, it is in setup.
        self._beats = {other: _Beat("", 0, 0.0, since=time.time()) for other in self._others}
        self._heard: dict[int, float] = {}
        self._error: PeerError | None = None
        self._answers = 0  # beats that came through
        self._answered = time.monotonic()  # the last of them
        self._failures = 0  # beats in a row that failed
        self._stop = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="mqgnn-peers-store", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="mqgnn-peers", daemon=True)
        self._talker.start()
        self._watcher.start()

    def at(self, phase: str, step: int) -> None:
        """Note where this rank is, for the others to read."""
        self._own.phase, self._own.step, self._own.since = phase, step, time.time()

    def check(self) -> None:
        """Raise if another rank is gone.

        Raises:
            PeerError: It names the rank, its phase and its step.
        """
        if self._error is not None:
            raise self._error

    def explain(self, error: BaseException) -> PeerError:
        """Say which rank is to blame for an exchange that failed here with `error`."""
        if isinstance(error, PeerError):
            return error
        for _ in range(8):  # a process takes a moment to end; a rank on another machine is known to by its silence
            if self._error is not None:
                return self._error
            if (gone := self._gone(silence=6 * _INTERVAL)) is not None:
                return gone
            if "timed out" in str(error).lower() or self._stop.wait(_INTERVAL):
                break
        if time.monotonic() - self._answered > _SUSPICION:
            return PeerError(f"{self._lost_store()}. {error}")
        late = min(self._others, key=lambda rank: self._heard.get(rank, 0.0))
        if self._answered - self._heard.get(late, 0.0) <= _SUSPICION:  # it beats, as all do
            late = min(self._beats, key=lambda rank: (self._beats[rank].step, self._beats[rank].since))
        return PeerError(f"rank {late} did not come in time, it is {_place(self._beats[late])}. {error}")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank failed with `error`, or which other rank did, and stop watching them."""
        if not isinstance(error, PeerError) and _comes_from_a_collective(error):
            error = self.explain(error)
            _log.error("rank %d: %s", self._rank, error)
        self._own.failure = f"{type(error).__name__}: {error}".split("\n")[0][:500]
        self.stop()

    def stop(self) -> None:
        """Stop watching, and tell the others not to watch this rank any more."""
        if self._stop.is_set():
            return
        self._own.done = True
        self._stop.set()
        self._talker.join(_FAREWELL)
        self._watcher.join()

    def _talk(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(_INTERVAL if self._answers or self._failures else 0)
            try:
                self._beat()
            except (RuntimeError, ConnectionError, OSError):
                self._failures += 1
            else:
                self._answers += 1
                self._answered = time.monotonic()
                self._failures = 0

    def _watch(self) -> None:
        answers = unanswered = 0
        while not self._stop.wait(_INTERVAL):
            unanswered = unanswered + 1 if self._answers == answers else 0
            answers = self._answers
            gone = self._gone(silence=_PATIENCE)
            if gone is None and (self._failures >= 4 or unanswered * _INTERVAL >= _STORE_PATIENCE):
                gone = PeerError(self._lost_store())
            if gone is not None:
                self._error = gone
                _log.error("rank %d: %s", self._rank, gone)
                self._on_failure(gone)
                if not self._stop.wait(_GRACE):
                    sys.stderr.write(f"rank {self._rank} ends, since it is blocked waiting for others: {gone}\n")
                    sys.stderr.flush()
                    os._exit(1)
                return

    def _beat(self) -> None:
        """Write this rank's beat and read the others'."""
        self._own.count += 1
        self._store.set(_key(self._rank), json.dumps(asdict(self._own)))
        present = self._others
        if not all(beat.count for beat in self._beats.values()):  # some may not have begun
            present = [other for other in present if self._store.check([_key(other)])]
        values = self._store.multi_get([_key(other) for other in present])
        now, beats = time.monotonic(), {**self._beats}
        for other, value in zip(present, values, strict=True):
            beat = _Beat(**json.loads(value))
            if beat.count != beats[other].count:
                self._heard[other] = now
            beats[other] = beat
        self._beats = beats  # at once, since other threads iterate over it

    def _lost_store(self) -> str:
        place = f"; rank 0 was {_place(self._beats[0])}" if 0 in self._beats else ""
        return (
            "the store of the process group is out of reach: rank 0, or the launcher on its machine, is gone or "
            f"frozen{place}"
        )

    def _gone(self, silence: float) -> PeerError | None:
        for other, beat in sorted(self._beats.items(), key=lambda item: item[1].failure is None):
            if beat.failure is not None:
                return PeerError(f"rank {other} failed {_place(beat)}: {beat.failure}")
            if beat.done or not beat.count:
                continue
            if beat.host == self._own.host:
                if not _lives(beat.pid, beat.started):
                    return PeerError(f"rank {other} (process {beat.pid}) has ended; it was {_place(beat)}")
            elif time.monotonic() - self._heard[other] > silence:
                return PeerError(
                    f"rank {other} on {beat.host} was last heard {time.monotonic() - self._heard[other]:.0f} s ago; "
                    f"it was {_place(beat)}"
                )
        return None


def _comes_from_a_collective(error: BaseException) -> bool:
    """Collectives that are not ours, such as a metric's, fail with what the backend says."""
    return isinstance(error, RuntimeError) and any(name in str(error).lower() for name in ("gloo", "nccl", "store"))


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _place(beat: _Beat) -> str:
    return f"in {beat.phase} after optimizer step {beat.step}, since {max(time.time() - beat.since, 0):.0f} s"


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < 1)
    except psutil.NoSuchProcess:
        return False
