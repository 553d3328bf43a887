"""Files of a version that nobody needs any more, kept for the next version to be written over them.

Most of the time of writing new files goes into getting pages, and blocks, for them; files that are written over have theirs. Kept
is at most one version, in a folder with a dot that belongs to one attempt: the next attempt removes it as it does all leftovers.
One owner, as of the collection: rank 0 of the trainer. On a network filesystem nothing is kept: whether another host has a file
open cannot be asked there.

Whoever still has such a file open or mapped, or has given it another name, keeps what he has: that file is not written over. A
process that would see it change all the same reads bytes that the manifest in its hands refuses.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stages.rundir import RunDir
from stages.weights.filesystems import is_quicker_written_over

if TYPE_CHECKING:
    from stages.weights.mapped_files import MappedFiles  # it needs torch, which a collection does without

_SPARE = re.compile(r"^\.v\d{6,}\.spare-(?P<attempt>\d+)-[0-9a-f]+$")
_BLOCK_BYTES = 512  # of st_blocks, stat(2)


def keep(run: RunDir, collected: Path) -> bool:
    """Rename a folder of weights/ that has lost, or now loses, its name; False when nothing is kept, or enough is already.

    Raises OSError.
    """
    if not is_quicker_written_over(run.weights) or _spares(run):
        return False
    version = collected.name.lstrip(".").partition(".")[0]
    os.rename(collected, run.weights / f".{version}.spare-{run.attempt}-{secrets.token_hex(4)}")
    return True


def take(run: RunDir, target: Path, mapped: MappedFiles) -> int:
    """Move the weight files that may be written over into the folder `target`, and leave the rest of the spare to the collection.

    Returns the bytes that they hold on the filesystem. `fit` makes them those of a layout. `mapped` are those of this process.
    To delete six small files took 0.2 to 0.7 s beside 3 GB that were written back (ext4 that discards), and here the training waits.
    """
    held_bytes = 0
    for spare in _spares(run):
        with suppress(FileNotFoundError):  # somebody frees the space by hand
            for name in sorted(os.listdir(spare)):
                if name.endswith(".safetensors") and stat.S_ISREG(os.lstat(spare / name).st_mode):
                    # First out of the folder, then the question who uses it: a search for its old name may be under way.
                    os.rename(spare / name, target / name)
                    held_bytes += _claimed_bytes(target / name, mapped)
            os.rename(spare, spare.with_name(f"{spare.name.partition('.spare-')[0]}.trash-{secrets.token_hex(4)}"))
    return held_bytes


def fit(folder: Path, sizes: Mapping[str, int]) -> None:
    """Delete weight files in `folder` that are not in `sizes` (bytes), and cut those that are longer; others may be writing there."""
    for name in os.listdir(folder):
        if not name.endswith(".safetensors"):
            continue
        if name not in sizes:
            os.unlink(folder / name)
        elif os.stat(folder / name).st_size > sizes[name]:
            os.truncate(folder / name, sizes[name])


def drop(run: RunDir) -> None:
    """Give back the space of what this attempt kept. What cannot be deleted goes with the leftovers of the attempt."""
    for spare in _spares(run):
        shutil.rmtree(spare, ignore_errors=True)


def _spares(run: RunDir) -> list[Path]:
    """Of this attempt."""
    found = ((name, _SPARE.match(name)) for name in os.listdir(run.weights))
    return [run.weights / name for name, match in found if match and int(match["attempt"]) == run.attempt]


def _claimed_bytes(path: Path, mapped: MappedFiles) -> int:
    """Bytes of a file that nobody else can see; else 0, and the name is gone."""
    with ExitStack() as stack:
        fd = mapped.descriptor(path.lstat())
        try:
            if fd is None:
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                stack.callback(os.close, fd)
        except PermissionError:  # somebody protects it
            path.unlink()
            return 0
        status = os.fstat(fd)
        if status.st_nlink == 1 and _is_alone(fd):
            return status.st_blocks * _BLOCK_BYTES
    path.unlink()
    return 0


def _is_alone(fd: int) -> bool:
    """Does no process of this host have another descriptor, or a memory map, of the file of `fd` (open for writing)?

    The kernel grants a write lease in no other case (fcntl(2), F_SETLEASE; a map counts as a descriptor). It is given back at
    once. Where leases are not to be had, the answer is no.
    """
    # Whoever opens the file in between breaks the lease, which is told by a signal: SIGIO would end the process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True
