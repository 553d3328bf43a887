"""Have the disk write what was published, soon after, and in nobody's way.

On a local filesystem a version is published when it is in the page cache. Linux writes it to the disk when half a minute has gone
by, or when too much is dirty: from some share of the memory on it slows those who write (vm.dirty_ratio in
Documentation/admin-guide/sysctl/vm.rst, and mm/page-writeback.c). What the version before has left dirty counts.

A piece at a time, by sync_file_range(2): a process cannot end, not even when it is killed, before the call that it is in comes back.
fdatasync(2) of 0.8 GB on a disk of 10 MB/s kept a trainer that had done its work for 71 s. Nor does it wait for the disk's own cache,
or hold up the journal: it is no promise that a crash leaves the bytes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

_BEGIN_AFTER_S = 2.0
"""Instances take the version over first."""
_PIECE_BYTES = 16 << 20
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # linux/fs.h


class WriteBack:
    """A thread for the newest version, from two seconds after it was published; an older one is left to the kernel at the end of a piece.

    One piece at a time: what a slow disk has not written yet would only keep further files open, which cannot be written over then.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._disk = threading.Lock()

    def begin(self, folder: Path) -> None:
        """Write back the weight files in `folder` soon; it may lose its name meanwhile, or its files."""
        self.stop()
        self._stop = threading.Event()
        thread = threading.Thread(target=self._write_back, args=(folder, self._stop), name="write-back", daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:  # a limit of processes is reached; the version has its name already
            print(f"{folder.name} is written to its disk when the kernel likes: {problem}", flush=True)

    def stop(self) -> None:
        """Begin no further piece. Does not wait for the one under way, for which a process that ends waits."""
        self._stop.set()

    def _write_back(self, folder: Path, stop: threading.Event) -> None:
        if stop.wait(_BEGIN_AFTER_S):
            return
        with self._disk:
            _write_files(folder, stop)


def _write_files(folder: Path, stop: threading.Event) -> None:
    try:
        for name in sorted(os.listdir(folder)):
            if name.endswith(".safetensors") and not stop.is_set():
                _write_file(folder / name, stop)
    except FileNotFoundError:
        pass  # collected meanwhile
    except OSError as problem:
        # Not an error of the version: digests tell who reads it whether its bytes are right.
        print(f"{folder.name} was not written back to its disk: {problem}", flush=True)


def _write_file(path: Path, stop: threading.Event) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for begin in range(0, os.fstat(fd).st_size, _PIECE_BYTES):
            if stop.is_set():
                return
            write_piece(fd, begin, _PIECE_BYTES)
    finally:
        os.close(fd)


def write_piece(fd: int, begin: int, length: int) -> None:
    """Have the disk write `length` bytes from `begin` on, and wait for it. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
    if libc.sync_file_range(fd, ctypes.c_int64(begin), ctypes.c_int64(length), flags):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
