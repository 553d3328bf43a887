"""What publishing and preparing are measured beside: plain copies, and the libraries' own ways to save."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

PIECE_BYTES = 1 << 20
"""One read and one write of a copy: it stays in a core's cache between the two (cp takes 256 KiB)."""


class Pieces:
    """Equal pieces of all files of a folder (and of later ones with the same files), for threads that each own a buffer.

    A thread's pieces follow each other: threads that write to one file wait for each other in the kernel (in /dev/shm, with
    two threads that took turns, a copy took a sixth to a third longer).
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._threads = threads
        self._sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        self._memory = mmap.mmap(-1, sum(self._sizes.values()))
        self.read(folder)

    def copy(self, source: Path, target: Path, *, durable: bool) -> None:
        """Every file of `source` into a new one in `target`, which must not exist."""
        target.mkdir()

        def move(old: int, new: int, offset: int, _place: int, length: int, buffer: memoryview) -> None:
            got = os.preadv(old, [buffer[:length]], offset)
            os.pwrite(new, buffer[:got], offset)

        self._each(move, source, target, durable=durable)

    def write(self, target: Path, *, durable: bool) -> None:
        """As many bytes from memory into new files in `target`."""
        target.mkdir()
        view = memoryview(self._memory)

        def move(_old: int, new: int, offset: int, place: int, length: int, _buffer: memoryview) -> None:
            os.pwrite(new, view[place : place + length], offset)

        self._each(move, None, target, durable=durable)

    def read(self, source: Path) -> None:
        """All files of `source` into memory, the same each time."""
        view = memoryview(self._memory)

        def move(old: int, _new: int, offset: int, place: int, length: int, _buffer: memoryview) -> None:
            os.preadv(old, [view[place : place + length]], offset)

        self._each(move, source, None, durable=False)

    def _each(self, move: Callable[..., None], source: Path | None, target: Path | None, *, durable: bool) -> None:
        todo, place = [], 0
        for name, size in self._sizes.items():
            old = -1 if source is None else os.open(source / name, os.O_RDONLY)
            new = -1 if target is None else os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            for offset in range(0, size, PIECE_BYTES):
                todo.append((old, new, offset, place, min(PIECE_BYTES, size - offset)))
                place += todo[-1][-1]

        def work(first: int) -> None:
            buffer = memoryview(bytearray(PIECE_BYTES))
            for piece in todo[first * len(todo) // self._threads : (first + 1) * len(todo) // self._threads]:
                move(*piece, buffer)

        with ThreadPoolExecutor(self._threads) as pool:
            for done in [pool.submit(work, first) for first in range(self._threads)]:
                done.result()
        for fd in {fd for piece in todo for fd in piece[:2] if fd >= 0}:
            if durable:
                os.fsync(fd)
            os.close(fd)


def save_safetensors(tensors: Mapping[str, torch.Tensor], target: Path, *, durable: bool) -> None:
    target.mkdir()
    safetensors.torch.save_file(dict(tensors), target / "model.safetensors")
    if durable:
        _flush(target / "model.safetensors")


def save_torch(tensors: Mapping[str, torch.Tensor], target: Path, *, durable: bool) -> None:
    target.mkdir()
    torch.save(dict(tensors), target / "model.pt")
    if durable:
        _flush(target / "model.pt")


def _flush(path: Path) -> None:
    """Neither of the two does, so it is done for them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def save_distributed(tensors: Mapping[str, torch.Tensor], target: Path, threads: int, *, durable: bool) -> None:
    """torch.distributed.checkpoint of one rank, with as many writing threads as everybody else."""
    writer = FileSystemWriter(target, thread_count=threads, single_file_per_rank=False, sync_files=durable)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said although no_dist asks for just that
        save(dict(tensors), storage_writer=writer, no_dist=True)
