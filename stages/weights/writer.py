"""One rank's bytes of a version into its files, by a few threads."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from stages.weights.boxes import runs
from stages.weights.errors import NoSpaceError
from stages.weights.layout import Layout, Placement
from stages.weights.manifest import DTYPE_BYTES, Part, xxh3_128
from stages.weights.parallel import Lanes, map_threads
from stages.weights.progress import ProgressWriter, Stretch
from stages.weights.snapshot import Copy, Piece

_WRITE_BYTES = 64 << 20  # one pwrite; Linux cuts longer ones at 2 GiB anyway

Written = list[tuple[str, Part]]
"""Names of tensors, each with a part of it that has been written."""

_Unsummed = list[tuple[str, Part, Copy]]
"""The same, before sums are asked for: that waits for the copies of all pieces."""


class RankWriter:
    """Hashes and writes each piece of one rank as soon as its copy is in host memory.

    `began_s` and `ended_s` are when the first worker began and when the last ended (time.perf_counter).
    """

    def __init__(self) -> None:
        self._files = ExitStack()
        self._fds: dict[str, int] = {}
        self._lanes: Lanes[_Unsummed] = Lanes(())
        self._workers: list[Future[list[_Unsummed]]] = []
        self.began_s = self.ended_s = 0.0

    def start(
        self,
        folder: Path,
        layout: Layout,
        copies: Sequence[tuple[Piece, Copy]],
        whole: Mapping[str, bytes],
        pool: ThreadPoolExecutor,
        threads: int,
        progress: ProgressWriter | None = None,
    ) -> None:
        """Begin to write `copies`, and `whole`: small files, and what the weight files begin with. `progress` is told of parts."""
        if progress is not None:
            self._files.callback(progress.close)
        for name in sorted({layout.tensors[piece.name].file for piece, _ in copies} | whole.keys()):
            self._fds[name] = self._open(folder / name)
        places = layout.tensors
        self._lanes = Lanes(
            [
                *((name, len(data), partial(_write_beginning, self._fds[name], data)) for name, data in whole.items()),
                *(
                    # Where nothing is written, nobody waits for another who writes to the file, and of lanes that weigh
                    # nothing the oldest comes first: they are hashed in the order in which they arrive.
                    (
                        number if copy.in_file else place.file,
                        0 if copy.in_file else piece.num_bytes,
                        partial(_write_piece, self._fds[place.file], place, piece, copy, progress),
                    )
                    for number, (piece, copy) in enumerate(copies)
                    for place in (places[piece.name],)
                ),
            ]
        )
        self.began_s = time.perf_counter()
        self._workers = self._lanes.start(pool, threads)
        for worker in self._workers:
            worker.add_done_callback(self._note_end)

    def finish(self, *, flush: bool) -> Written:
        """Wait until everything is written, and with `flush` durable. Raises the first error."""
        done = [written for worker in self._workers for written in worker.result()]
        if flush:
            map_threads(os.fsync, list(self._fds.values()), len(self._fds))
        self._files.close()
        return [(name, replace(part, sum64=copy.sum64())) for written in done for name, part, copy in written]

    def close(self) -> None:
        """Begin no further write, wait for those under way, close the files, let go of the copies."""
        self._lanes.stop()
        wait(self._workers)
        self._lanes, self._workers = Lanes(()), []
        self._files.close()

    def _note_end(self, _worker: Future[list[_Unsummed]]) -> None:
        self.ended_s = time.perf_counter()

    def _open(self, path: Path) -> int:
        # Write-only and never truncated: several ranks have the file open, and an NFS client that may also read a page
        # may write all of it back, over its neighbour's bytes (Linux nfs_can_extend_write).
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files.callback(os.close, fd)  # close reports write errors too (NFS), so it may raise
        return fd


def _write_beginning(fd: int, data: bytes) -> _Unsummed:
    _pwrite(fd, memoryview(data), 0)
    return []


def _write_piece(
    fd: int, place: Placement, piece: Piece, copy: Copy, progress: ProgressWriter | None = None
) -> _Unsummed:
    """Hashed in one go, then written: in smaller steps, each still in the processor's cache, an idle machine takes a tenth less
    time, but every step waits for the interpreter's lock, 5 ms each while the training has something to compute."""
    view = copy.bytes().data
    digest = xxh3_128(view)
    length, stretches = runs(piece.box, piece.full_shape, DTYPE_BYTES[piece.dtype])
    offsets = list(stretches)
    if not copy.in_file:
        for number, offset in enumerate(offsets):
            _pwrite(fd, view[number * length : (number + 1) * length], place.offset + offset)
    if progress is not None and len(offsets) == 1:
        first = offsets[0]
        progress.add(Stretch(piece.name, place.file, place.offset + first, first, length))
    return [(piece.name, Part(piece.box.start, piece.box.shape, digest), copy)]


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _WRITE_BYTES], offset + done)


def available_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


@contextmanager
def space_checked(folder: Path, wanted_bytes: int) -> Iterator[None]:
    """Give a full filesystem or quota its own error."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(str(folder), wanted_bytes, available_bytes(folder)) from problem
        raise
