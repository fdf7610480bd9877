"""FileRows: feature rows that are read from a file, one by one."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import types

from lightning_mqgnn.compiled import kernel

# The system's own pread: called from compiled code, it needs no Python object and no GIL.
_pread: Any = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))


class FileRows:
    """Rows of a file, read one by one into where they are wanted, by several threads.

    A row that is not there any more, since the file was cut short, is an error; a mapped file would end the process.

    Args:
        path: The file.
        begin: Byte at which the first row begins.
        row_bytes: Bytes of a row.
        threads: How many reads may wait for the disk at a time.
    """

    def __init__(self, path: Path, begin: int, row_bytes: int, threads: int) -> None:
        self._path = path
        self._begin = begin
        self._row_bytes = row_bytes
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed in `close`
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self._threads = threads
        self._readers: ThreadPoolExecutor | None = None

    def read(self, node: np.ndarray, at: np.ndarray, out: np.ndarray) -> None:
        """`out[at[i]] = row node[at[i]]`; rows are read in the order in which they lie in the file.

        Raises:
            OSError: A row could not be read; names the file.
        """
        at = at[np.argsort(node[at])]
        if self._readers is None and self._threads > 1:
            self._readers = ThreadPoolExecutor(self._threads, "mqgnn-read")
        parts = np.array_split(at, self._threads if len(at) > 64 * self._threads else 1)
        arguments = self._file.fileno(), self._begin, self._row_bytes, node
        if self._readers is None or len(parts) == 1:
            failed = [read_rows(*arguments, at, out)]
        else:
            failed = list(self._readers.map(lambda part: read_rows(*arguments, part, out), parts))
        for row in failed:
            if row >= 0:
                raise OSError(
                    f"{str(self._path)!r}: row {row} can't be read any more: the file was cut short or its disk fails; "
                    "save the graph again"
                )

    def close(self) -> None:
        """End the threads and close the file."""
        if self._readers is not None:
            self._readers.shutdown()
        self._file.close()


@kernel
def read_rows(file: int, begin: int, row_bytes: int, node: np.ndarray, at: np.ndarray, out: np.ndarray) -> int:
    """Read rows from a file into `out`; return the first row that could not be read whole, or -1."""
    stride = out.strides[0]
    for i in range(len(at)):
        row: int = np.int64(node[at[i]])
        done = 0
        while done < row_bytes:
            target = np.uint64(out.ctypes.data) + np.uint64(at[i] * stride + done)
            count = _pread(np.int32(file), target, np.uint64(row_bytes - done), begin + row * row_bytes + done)
            if count <= 0:
                return row
            done += count
    return -1
