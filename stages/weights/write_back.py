"""Have the disk write what was published, soon after, and in nobody's way.

On a local filesystem a version is published when it is in the page cache. Linux writes it to the disk when half a minute has gone
by, or when too much is dirty: from some share of the memory on it slows those who write (vm.dirty_ratio in
Documentation/admin-guide/sysctl/vm.rst, and mm/page-writeback.c). What the version before has left dirty counts.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_BEGIN_AFTER_S = 2.0
"""Instances take the version over first. Their records wait for no disk, but for ext4's journal when it commits what was flushed."""


class WriteBack:
    """A thread for the newest version, from two seconds after it was published; the one of an older version ends at the end of a file.

    One file at a time: what a slow disk has not written yet would only keep further files open, which cannot be written over then.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._disk = threading.Lock()

    def begin(self, folder: Path) -> None:
        """Write back the weight files in `folder` soon; it may lose its name meanwhile, or its files."""
        self.stop()
        self._stop = threading.Event()
        threading.Thread(target=self._write_back, args=(folder, self._stop), name="write-back", daemon=True).start()

    def stop(self) -> None:
        """Begin no further file. Does not wait for the one under way; a process that ends is gone only when the disk has it."""
        self._stop.set()

    def _write_back(self, folder: Path, stop: threading.Event) -> None:
        if stop.wait(_BEGIN_AFTER_S):
            return
        with self._disk:
            _write_back_files(folder, stop)


def _write_back_files(folder: Path, stop: threading.Event) -> None:
    try:
        for name in sorted(os.listdir(folder)):
            if stop.is_set():
                return
            if name.endswith(".safetensors"):
                _write_back_file(folder / name)
    except FileNotFoundError:
        pass  # collected meanwhile
    except OSError as problem:
        # Not an error of the version: digests tell who reads it whether its bytes are right.
        print(f"{folder.name} was not written back to its disk: {problem}", flush=True)


def _write_back_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
