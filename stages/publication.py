"""A directory on its way to being published: filled under a temporary name, renamed when its manifest is in it."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.files import fsync_path, fsync_paths, json_text, list_names, remove_tree

if TYPE_CHECKING:
    from stages.rundir import RunDir


@dataclass
class Publication:
    """See `RunDir.publishing`."""

    run: RunDir
    path: Path
    final: Path
    manifest_name: str
    committed: bool = False

    def commit(
        self, payload: dict[str, Any], pointer: tuple[Path, dict[str, Any]] | None = None, *, flush: bool = True
    ) -> None:
        """Write the manifest last, make every file and the directory durable, and give the directory its name.

        Without `flush` nothing is made durable, for data whose damage the manifest tells, and that is made again when it is lost.
        `pointer` is a record beside the directory, written when the directory has its name (weights/LATEST.json).
        A directory of that name left by an older attempt is moved aside first and removed.

        Raises what `RunDir.write` raises. When a newer attempt begins meanwhile, what it has published keeps its name.
        """
        self._write_manifest(payload)
        if flush:
            fsync_paths([*(self.path / name for name in list_names(self.path)), self.path])
        self.run.check_fence()  # making it durable may have taken minutes
        trash = self._move_aside()
        self._take_name()
        self.committed = True
        if pointer is not None:
            self.run.write(*pointer, flush=flush)  # its fsync of the common parent covers both names
        elif flush:
            fsync_path(self.final.parent)
        if trash is not None:
            remove_tree(trash)

    def _write_manifest(self, payload: dict[str, Any]) -> None:
        """Not by rename: nobody looks into the directory before it has its name."""
        manifest = self.path / self.manifest_name
        text = json_text(self.run.stamped(manifest, payload))
        with os.fdopen(os.open(manifest, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as handle:
            handle.write(text)

    def _move_aside(self) -> Path | None:
        """Looks once more after the move: the fence may have fallen, or been seen late (NFS remembers listings), before it."""
        if self.final.name not in list_names(self.final.parent):
            return None
        trash = self.final.with_name(f".{self.final.name}.trash-{secrets.token_hex(4)}")
        os.rename(self.final, trash)
        try:
            self.run.check_fence()
            self.run.check_older(self._attempt_of(trash))
        except BaseException:
            os.rename(trash, self.final)
            raise
        return trash

    def _attempt_of(self, folder: Path) -> int:
        """-1 for what is no whole publication of this run: it may be replaced."""
        record = self.run.read(folder / self.manifest_name, any_attempt=True, skip_damaged=True)
        return -1 if record is None else int(record["attempt"])

    def _take_name(self) -> None:
        try:
            os.rename(self.path, self.final)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self.run.check_fence()  # who took the name between our two steps is a newer attempt
            raise
