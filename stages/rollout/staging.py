"""A version of the weights in the memory of a node, read and verified once for all workers of all instances there.

Two files in /dev/shm: the bytes, used for one version after the other, and a lock whose content says which version
they are. Whoever finds another version there than it wants takes the lock for itself, removes the name, reads, and writes
the name last, so that a reader that dies leaves bytes without a name. Who can make its version of what is there does so in
place, and writes first what is on its way to what (`stages.rollout.staged_delta`). Whoever needs the bytes shares the lock
until they are in its engine; the kernel releases the lock of a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from stages.files import WaitTimeoutError
from stages.rollout.errors import RolloutError
from stages.rollout.memory_folder import ForeignFolderError, joined_memory_folder
from stages.rollout.signature import Signature
from stages.weights.errors import SignatureMismatchError
from stages.weights.manifest import DTYPE_BYTES, Manifest, canonical, xxh3_128
from stages.weights.pinning import pin
from stages.weights.tensors import TORCH_DTYPES

_ALIGNMENT_BYTES = 256
_LOCK_POLL_S = 0.005

Call = Callable[[], None]
Patch = Callable[[str, Callable[[str], None]], bool]
"""Called with the name of what is in the memory and a function that writes another one; False when it changed nothing."""


class DroppedError(Exception):
    """What was on its way into the memory is not wanted any more."""


class NoSharedMemoryError(RolloutError):
    """The node's memory cannot be shared; the message says why. Private memory does the same, once per worker."""


@dataclass(frozen=True)
class SegmentLayout:
    """Where each tensor lies; `offsets` and `num_bytes` in bytes. The same for all versions of a run."""

    signature: Signature
    offsets: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, signature: Signature) -> SegmentLayout:
        offsets, end = {}, 0
        for name, (dtype, shape) in sorted(signature.items()):
            offsets[name] = end
            end += -(-math.prod(shape) * DTYPE_BYTES[dtype] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return cls(signature, offsets, end)

    @property
    def digest(self) -> str:
        return xxh3_128(canonical([[name, *entry] for name, entry in sorted(self.signature.items())]))

    def check_fit(self, manifest: Manifest) -> None:
        """Raises SignatureMismatchError: a tensor that is not in the version would leave the one before in memory."""
        for name, wanted in self.signature.items():
            entry = manifest.tensors.get(name)
            if entry is None or (entry.dtype, entry.shape) != wanted:
                raise SignatureMismatchError(name, f"the engine loads it as {wanted}, the version has {entry}")

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `memory` (uint8[num_bytes])."""
        found = {}
        for name, offset in self.offsets.items():
            dtype, shape = self.signature[name]
            length = math.prod(shape) * DTYPE_BYTES[dtype]
            found[name] = memory[offset : offset + length].view(TORCH_DTYPES[dtype]).view(shape)
        return found


class Staging:
    """One for each worker process. `memory` is uint8[layout.num_bytes]; `why_private` is empty when the node shares it."""

    def __init__(self, run_id: str, layout: SegmentLayout, *, for_cuda: bool) -> None:
        self._segment: Segment | None = None
        self._private_name = ""
        self.why_private = ""
        try:
            self._segment = Segment(run_id, layout)
            self.memory = self._segment.memory
            if for_cuda:
                _pin(self.memory)
        except NoSharedMemoryError as problem:
            self._segment, self.why_private = None, str(problem)
            self.memory = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=for_cuda)
        self.tensors = layout.views(self.memory)

    def hold(self, content: str, fill: Call, *, deadline_s: float, check: Call, patch: Patch | None = None) -> bool:
        """Return when the memory holds `content`, filled by this process (True) or another; it stays so until `release`.

        `patch` may make the content of what is there. Else `fill` reads it. Both verify, and raise to leave the memory without
        content. `check` runs while waiting and raises to give up. Raises WaitTimeoutError when another process keeps an older version for longer than `deadline_s`.
        """
        if self._segment is not None:
            return self._segment.hold(content, fill, deadline_s=deadline_s, check=check, patch=patch)
        is_new = self.name() != content
        if is_new:
            _fill(self, content, fill, patch)
        return is_new

    def name(self) -> str:
        return self._private_name

    def write_name(self, name: str) -> None:
        self._private_name = name

    def forget(self) -> None:
        """The bytes that are held are not what their name says: whoever comes next reads them anew."""
        (self._segment or self).write_name("")

    def release(self) -> None:
        """Let other processes replace the content. Harmless when nothing is held."""
        if self._segment is not None:
            self._segment.release()


class Segment:
    """The two files. The descriptor of the lock belongs to this object alone, so its flock is this object's.

    Unless it `makes` them, they are those that an engine of the node has made; then pages are mapped when they are touched.
    Raises NoSharedMemoryError.
    """

    def __init__(self, run_id: str, layout: SegmentLayout, *, makes: bool = True) -> None:
        self._makes = makes
        with ExitStack() as undo:
            try:
                joined = joined_memory_folder(run_id)
                self._membership = undo.enter_context(ExitStack())
                self._membership.callback(os.close, joined.users_fd)
                name = f"weights-{layout.digest[:16]}"
                self._lock = self._open(joined.path / f"{name}.lock")
                undo.callback(os.close, self._lock)
                self.memory = self._map(joined.path / name, layout.num_bytes)
            except (OSError, ForeignFolderError) as problem:
                is_missing = isinstance(problem, FileNotFoundError) and not makes
                why = "no engine of this model shares its own; the server's log says why" if is_missing else problem
                raise NoSharedMemoryError(f"memory of the node cannot be shared: {why}") from problem
            self._held = undo.pop_all()

    def leave(self) -> None:
        """Be no member of the folder any more, so that the last one can remove the files, though this process is still at work in them."""
        self._membership.close()

    def close(self) -> None:
        """Leave the folder; `memory` stays mapped for as long as somebody has it."""
        self._held.close()

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT * self._makes | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def _map(self, path: Path, num_bytes: int) -> torch.Tensor:
        fd = self._open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # of the bytes' file: only to make it, which whoever comes first does
            if os.fstat(fd).st_size != num_bytes:
                self._allocate(fd, path, num_bytes)
            mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE * self._makes)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # mmap keeps a duplicate of the descriptor, and so the lock
            os.close(fd)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def _allocate(self, fd: int, path: Path, num_bytes: int) -> None:
        """All pages now: a full filesystem is an error here, and would be a SIGBUS later."""
        if not self._makes:
            raise NoSharedMemoryError(f"{path} is not what an engine of this node made")
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as problem:
            os.ftruncate(fd, 0)
            if problem.errno != errno.ENOSPC:
                raise
            stats = os.fstatvfs(fd)
            raise NoSharedMemoryError(
                f"{path.parent} has no room for a version of the weights: wanted {num_bytes:,} bytes, "
                f"available {stats.f_bavail * stats.f_frsize:,}"
            ) from problem

    def hold(self, content: str, fill: Call, *, deadline_s: float, check: Call, patch: Patch | None = None) -> bool:
        """See `Staging.hold`."""
        started_s, was_filled = time.monotonic(), False
        while True:
            if self._try(fcntl.LOCK_SH):
                if self.name() == content:
                    return was_filled
                self.release()  # two sharers that both wait for the other's end would wait for ever
            if self._try(fcntl.LOCK_EX):
                if self.name() != content:
                    try:
                        _fill(self, content, fill, patch)
                    except BaseException:
                        self.release()
                        raise
                    was_filled = True
                continue  # turning this lock into a shared one lets others in between: look again
            check()
            waited_s = time.monotonic() - started_s
            if waited_s > deadline_s:
                raise WaitTimeoutError("the node's staged weights", "an instance that holds another version", waited_s)
            time.sleep(_LOCK_POLL_S)

    def try_alone(self) -> bool:
        """Have the memory for this object alone until `release`, unless anybody else has it now."""
        return self._try(fcntl.LOCK_EX)

    def release(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    def name(self) -> str:
        """Whatever stands there: what is no name of a version is replaced as one is."""
        return os.pread(self._lock, 256, 0).decode(errors="replace")

    def write_name(self, name: str) -> None:
        """Who is killed in between leaves none."""
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, name.encode(), 0)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class _Named(Protocol):
    """What has a name for its bytes; the caller alone may change both."""

    def name(self) -> str: ...

    def write_name(self, name: str) -> None: ...


def _fill(memory: _Named, content: str, fill: Callable[[], None], patch: Patch | None) -> None:
    try:
        if patch is None or not patch(memory.name(), memory.write_name):
            memory.write_name("")
            fill()
    except BaseException:
        memory.write_name("")
        raise
    memory.write_name(content)


def _pin(memory: torch.Tensor) -> None:
    """Raises NoSharedMemoryError."""
    try:
        pin(memory)
    except torch.cuda.CudaError as problem:
        raise NoSharedMemoryError(f"cudaHostRegister of {memory.numel():,} shared bytes: {problem}") from problem
