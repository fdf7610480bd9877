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
        self._beats: dict[int, _Beat] = {}
        self._heard: dict[int, float] = {}
        self._error: PeerError | None = None
        self._stop = threading.Event()
        self._beating = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="mqgnn-peers", daemon=True)
        self._thread.start()

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
            self._beat()
            if (gone := self._gone(silence=6 * _INTERVAL)) is not None:
                return gone
            if "timed out" in str(error).lower() or self._stop.wait(_INTERVAL):
                break
        if not self._beats:
            return PeerError(f"an exchange with the other ranks failed: {error}")
        behind = min(self._beats, key=lambda rank: (self._beats[rank].step, self._beats[rank].since))
        return PeerError(f"rank {behind} did not come in time, it is {_place(self._beats[behind])}. {error}")

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
        self._stop.set()
        self._own.done = True
        self._beat()
        self._thread.join()

    def _watch(self) -> None:
        failed_beats = 0
        while not self._stop.is_set():
            failed_beats = 0 if self._beat() else failed_beats + 1
            gone = self._gone(silence=_PATIENCE)
            if gone is None and failed_beats >= 4:
                gone = PeerError(
                    "the store of the process group is out of reach: rank 0, or the launcher on its machine, is gone"
                    + (f"; rank 0 was {_place(self._beats[0])}" if 0 in self._beats else "")
                )
            if gone is not None:
                self._error = gone
                _log.error("rank %d: %s", self._rank, gone)
                self._on_failure(gone)
                if not self._stop.wait(_GRACE):
                    sys.stderr.write(f"rank {self._rank} ends, since it is blocked waiting for others: {gone}\n")
                    sys.stderr.flush()
                    os._exit(1)
                return
            self._stop.wait(_INTERVAL)

    def _beat(self) -> bool:
        """Write this rank's beat and read the others'; whether that was possible."""
        with self._beating:
            self._own.count += 1
            try:
                self._store.set(_key(self._rank), json.dumps(asdict(self._own)))
                present = self._others
                if len(self._beats) < len(present):  # some may not have begun
                    present = [other for other in present if self._store.check([_key(other)])]
                values = self._store.multi_get([_key(other) for other in present])
            except (RuntimeError, ConnectionError, OSError):
                return False
            now = time.monotonic()
            for other, value in zip(present, values, strict=True):
                beat = _Beat(**json.loads(value))
                if other not in self._beats or beat.count != self._beats[other].count:
                    self._heard[other] = now
                self._beats[other] = beat
            return True

    def _gone(self, silence: float) -> PeerError | None:
        for other, beat in sorted(self._beats.items(), key=lambda item: item[1].failure is None):
            if beat.failure is not None:
                return PeerError(f"rank {other} failed {_place(beat)}: {beat.failure}")
            if beat.done:
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
