"""MappedFiles: what can't be read of a mapped file any more raises an error, in place of ending the process.

Where Linux can't bring a page of a mapped file, since the file was cut short or its disk or server fails, it sends the
thread that touched the page the signal SIGBUS, and that is the end of the process. The handler installed here puts an
empty page in its place, if the thread is within a `MappedFiles.reading` section, and counts it; the section then
raises. Anywhere else the signal does what it did before, so that nobody takes the empty page for data.
"""

import ctypes
import platform
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, PROT_READ, PROT_WRITE
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

# The handler's memory, 64-bit words: the address of the action that was there before; for each range of mapped memory
# its begin, its end and how many pages of it were lost; for each open section its thread.
_RANGES = 1
_NUM_RANGES = 4096
_SECTIONS = _RANGES + 3 * _NUM_RANGES
_NUM_SECTIONS = 1024
_WORDS = _SECTIONS + _NUM_SECTIONS

_SUPPORTED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_ASK = 0  # no signal has this number: the caller asks where the memory is
_SIGBUS = 7
_FAULT_ADDRESS = 2  # 64-bit words into Linux's siginfo_t
_SA_SIGINFO = 4
_SA_ONSTACK = 0x08000000
_MAP_FIXED = 0x10
_NEW_PAGE = MAP_PRIVATE | MAP_ANONYMOUS | _MAP_FIXED
_READ_WRITE = PROT_READ | PROT_WRITE


class _Action(ctypes.Structure):
    """`struct sigaction` of the C library on 64-bit Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def _compile_words(typing_context: Any) -> Any:
    """The handler's memory: a variable of its own module, since a handler is given nothing but the signal."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.ArrayType(ir.IntType(64), _WORDS)
        variable = ir.GlobalVariable(builder.module, kind, builder.module.get_unique_name("mqgnn_mapped"))
        variable.initializer = ir.Constant(kind, None)
        variable.linkage = "internal"
        return builder.bitcast(variable, ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(), generate


def _compile_address(typing_context: Any, pointer: Any) -> Any:
    """What `pointer` points to, as a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(pointer), generate


_words: Any = intrinsic(_compile_words)
_address: Any = intrinsic(_compile_address)
_mmap: Any = types.ExternalFunction(
    "mmap", types.int64(types.int64, types.uintp, types.int32, types.int32, types.int32, types.int64)
)
_sigaction: Any = types.ExternalFunction("sigaction", types.int32(types.int32, types.int64, types.int64))
_pthread_self: Any = types.ExternalFunction("pthread_self", types.int64())


def _on_bus_error(number: int, info: Any, context: int) -> None:
    words = _words()
    if number == _ASK:
        info[0] = _address(words)
        return
    missing = info[_FAULT_ADDRESS]
    thread = _pthread_self()
    reading = False
    for section in range(_SECTIONS, _WORDS):
        reading = reading or words[section] == thread
    if reading:
        for place in range(_RANGES, _SECTIONS, 3):
            if words[place] <= missing and missing < words[place + 1]:
                words[place + 2] += 1  # before another thread can read the empty page
                page = missing // PAGESIZE * PAGESIZE
                if _mmap(page, PAGESIZE, _READ_WRITE, _NEW_PAGE, -1, 0) == page:
                    return
    # The instruction runs again when this returns, and meets what was there before.
    _sigaction(_SIGBUS, words[0], 0)


class _Guard:
    """The installed handler. It is never taken away: others may have installed theirs on top of it."""

    def __init__(self) -> None:
        self._handler = numba.cfunc("void(int32, CPointer(int64), int64)", cache=True)(_on_bus_error)
        address = (ctypes.c_int64 * 1)()
        self._handler.ctypes(_ASK, address, 0)
        words = np.ctypeslib.as_array((ctypes.c_int64 * _WORDS).from_address(address[0]))
        self.ranges = words[_RANGES:_SECTIONS].reshape(_NUM_RANGES, 3)
        self.sections = words[_SECTIONS:]
        self.free_ranges = deque(range(_NUM_RANGES))
        self.free_sections = deque(range(_NUM_SECTIONS))
        action = _Action(handler=self._handler.address, flags=_SA_SIGINFO | _SA_ONSTACK)
        self._before = _Action()
        words[0] = ctypes.addressof(self._before)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.sigaction(_SIGBUS, ctypes.byref(action), ctypes.byref(self._before)):
            raise OSError(ctypes.get_errno(), "sigaction")

    def give_back(self, ranges: list[int]) -> None:
        self.ranges[ranges] = 0
        self.free_ranges.extend(ranges)


_guard: _Guard | None = None
_installing = threading.Lock()


def _installed() -> _Guard:
    global _guard
    with _installing:
        if _guard is None:
            _guard = _Guard()
        return _guard


class MappedFiles:
    """The mapped files of a graph.

    Args:
        folder: Where the files lie.
        arrays: What is mapped of each, by the name of the file without `.npy`.
    """

    def __init__(self, folder: Path, arrays: Mapping[str, Tensor]) -> None:
        self._folder = folder
        self._names = [name for name, tensor in arrays.items() if tensor.nbytes]
        self._guard = _installed() if _SUPPORTED else None
        if self._guard is None:
            return
        places = [self._guard.free_ranges.popleft() for _ in self._names]
        for place, name in zip(places, self._names, strict=True):
            begin = arrays[name].data_ptr()
            self._guard.ranges[place] = begin, begin + arrays[name].nbytes, 0
        self._lost = [self._guard.ranges[place, 2:] for place in places]
        weakref.finalize(self, self._guard.give_back, places)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A section in which this thread may read the arrays.

        At its end an OSError is raised that names the file, if a page of one could not be read, in this section or in
        an earlier one: then what was read are zeros.
        """
        if self._guard is None:
            yield
            return
        place = self._guard.free_sections.popleft()
        self._guard.sections[place] = threading.get_ident()
        try:
            yield
        finally:
            self._guard.sections[place] = 0
            self._guard.free_sections.append(place)
            self._check()

    def _check(self) -> None:
        for name, lost in zip(self._names, self._lost, strict=True):
            if lost[0]:
                raise OSError(
                    f"{str(self._folder / f'{name}.npy')!r} can't be read any more: the file was cut short or its disk "
                    "fails; save the graph again"
                )
