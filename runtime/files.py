"""Reads byte ranges of files into memory, through the page cache or past it.

Direct reads (O_DIRECT) need block-aligned offsets, sizes and memory. Packed experts and their slots are
aligned so; others are aligned to nothing, so each reading thread owns an aligned bounce buffer and copies
out of it. The copy costs a few per cent of the time of a read from a fast SSD.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from daop.core import DaopError

# Bounce buffers of readers that were closed, by size, for the next reader: how fast a disk writes into a page
# depends on where it lies (on a virtual machine by a third), so runs that are compared with each other in one
# process must read into the same pages.
_KEPT: dict[int, list[mmap.mmap]] = {}
_LOCK = threading.Lock()
BLOCK = 4096  # O_DIRECT alignment that every current Linux file system accepts


class FileReader:
    """Open files and positioned reads from them; safe to use from many threads.

    ``largest``: the most bytes that one ``read`` asks for.
    """

    def __init__(self, files: Sequence[Path], *, direct_io: bool, largest: int) -> None:
        self.files = tuple(files)
        self.direct_io = direct_io
        self._bounce_bytes = -(-largest // BLOCK) * BLOCK + BLOCK
        self._local = threading.local()
        self._fds: list[int] = []
        self._taken: list[mmap.mmap] = []
        try:
            for path in self.files:
                self._fds.append(self._open(path))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> int:
        flags = os.O_RDONLY | (os.O_DIRECT if self.direct_io else 0)
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if self.direct_io and error.errno == errno.EINVAL:
                raise DaopError(
                    f"the file system of {path} refuses direct reads (O_DIRECT): run without --direct-io"
                ) from error
            raise DaopError(f"cannot open {path}: {error.strerror}") from error
        if not self.direct_io:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # experts are read whole, at random
        return fd

    def read(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` from ``files[file]`` at ``offset``; raises OSError, also at an early end of file."""
        if self.direct_io:
            self._read_direct(file, offset, out)
        else:
            self._read_fully(file, offset, out.data, len(out))

    def _read_direct(self, file: int, offset: int, out: NDArray[np.uint8]) -> None:
        if not (offset | len(out) | out.ctypes.data) % BLOCK:  # as packed experts are: nothing to copy
            self._read_fully(file, offset, out.data, len(out))
            return
        if not hasattr(self._local, "buffer"):
            self._local.buffer = self._take_buffer()
            self._local.array = np.frombuffer(self._local.buffer, dtype=np.uint8)
        skip = offset % BLOCK
        needed = skip + len(out)
        window = memoryview(self._local.buffer)[: -(-needed // BLOCK) * BLOCK]
        self._read_fully(file, offset - skip, window, needed)
        np.copyto(out, self._local.array[skip:needed])

    def _take_buffer(self) -> mmap.mmap:
        with _LOCK:
            kept = _KEPT.setdefault(self._bounce_bytes, [])
            buffer = kept.pop() if kept else mmap.mmap(-1, self._bounce_bytes)
            self._taken.append(buffer)
        return buffer

    def _read_fully(self, file: int, offset: int, window: memoryview, needed: int) -> None:
        """Read at least ``needed`` bytes into ``window``; a direct read may only stop short at the end."""
        done = 0
        while done < needed:
            got = os.preadv(self._fds[file], [window[done:]], offset + done)
            if got == 0:
                raise OSError(errno.EIO, f"the file ends at byte {offset + done}", str(self.files[file]))
            done += got

    def drop_cache(self) -> None:
        """Ask the kernel to forget the files' cached pages, so that the next reads come from the disk."""
        for fd in self._fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        with _LOCK:
            _KEPT.setdefault(self._bounce_bytes, []).extend(self._taken)
            self._taken = []
