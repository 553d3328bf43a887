"""Weight files in memory (tmpfs) into which a version is copied directly: the file is the snapshot.

A file that lies in memory anyway needs no second copy of its bytes in a buffer. It is mapped, for a GPU its pages are pinned, and
the copy of the parameters ends where readers will look for it. Mapping and pinning 15 GB takes about a second, so it is kept with
the file for as long as that has a name: versions are written over the files of old ones (`stages.weights.spares`).

For a trainer of one rank. With several, each would have its own descriptor of each file, and the kernel could not tell a
reader from them (`spares.take` asks it who uses a file).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.weights.parallel import map_threads
from stages.weights.pinning import pin, unpin

Identity = tuple[int, int]
"""Device and inode."""


def identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class _Mapped:
    """`memory` is the whole file, uint8[bytes]. `fd` is open for reading and writing, the only one of this process."""

    fd: int
    memory: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, fd: int, num_bytes: int, device: torch.device) -> _Mapped:
        """Raises OSError, also when the filesystem is full: later that would be a SIGBUS."""
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        memory = torch.frombuffer(
            mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8
        )
        mapped = cls(fd, memory, device)
        if device.type == "cuda":
            pin(memory, device)
        return mapped

    def close(self) -> None:
        """Views of `memory` may live on; they keep the pages, and nothing else."""
        os.close(self.fd)
        if self.device.type == "cuda":
            unpin(self.memory, self.device)


class MappedFiles:
    """`device` is where the copies come from. With `makes_files` files are made and mapped, else only those that are there.

    For a GPU files are made: buffers in host memory instead would have to be pinned too, which takes longer. Elsewhere it is
    quicker to write a new file than to fill a mapped one, whose pages the kernel clears first.
    """

    def __init__(self, device: torch.device) -> None:
        self.makes_files = device.type == "cuda"
        self._device = device
        self._held: dict[Identity, _Mapped] = {}

    def descriptor(self, status: os.stat_result) -> int | None:
        """Of a file that is mapped: the only one that this process has."""
        held = self._held.get(identity(status))
        return None if held is None else held.fd

    def memory(self, folder: Path, sizes: Mapping[str, int], threads: int) -> dict[str, torch.Tensor]:
        """Files of these names and lengths (bytes) in `folder`, each as uint8[length].

        Raises OSError when the filesystem is full, RuntimeError when pages cannot be pinned.
        """
        names = [name for name, size in sizes.items() if self.makes_files or _has_length(folder / name, size)]
        held = map_threads(lambda name: self._hold(folder / name, sizes[name]), names, threads)
        return {name: each.memory for name, each in zip(names, held, strict=True)}

    def forget_unnamed(self) -> None:
        """Give back the memory of files that were deleted."""
        for key, held in list(self._held.items()):
            if os.fstat(held.fd).st_nlink == 0:
                del self._held[key]
                held.close()

    def close(self) -> None:
        while self._held:
            # A device that has failed says so here again; the driver gives the pages back with the process.
            with suppress(torch.cuda.CudaError):
                self._held.popitem()[1].close()

    def _hold(self, path: Path, num_bytes: int) -> _Mapped:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        key = identity(os.fstat(fd))
        held = self._held.get(key)
        if held is not None:
            os.close(fd)
            if held.memory.numel() == num_bytes:
                return held
            del self._held[key]
            held.close()
            return self._hold(path, num_bytes)
        try:
            self._held[key] = _Mapped.of(fd, num_bytes, self._device)
        except (OSError, RuntimeError):
            os.close(fd)
            raise
        return self._held[key]


def _has_length(path: Path, num_bytes: int) -> bool:
    try:
        return path.lstat().st_size == num_bytes
    except FileNotFoundError:
        return False
