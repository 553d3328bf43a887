"""Appends whole lines to one file and never stops the caller because of a failing disk."""

from __future__ import annotations

import errno
import os
import sys
import threading
from pathlib import Path


class LineAppender:
    """One `write` per line to a file opened for append: a killed process loses nothing that it wrote.

    The first failure is reported on stderr, lines that could not be written are counted in `dropped`, and `close`
    repeats the count. A line cut short by a full disk, or by the death of an earlier writer, is ended before the next.

    Raises:
        OSError: the file can not be opened, for any reason except a full disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dropped = 0
        # Re-entrant: a Python signal handler may record while the main thread is inside a write.
        self._lock = threading.RLock()
        self._reported = False
        self._needs_newline = False
        self._closed = False
        self._fd = -1
        self._open()

    def write(self, line: str) -> None:
        """Append `line`, which must end in a newline. After `close` it is ignored."""
        data = line.encode()
        with self._lock:
            if self._closed:
                return
            try:
                if self._needs_newline:
                    data = b"\n" + data
                if self._fd < 0:
                    raise OSError(errno.EBADF, "the file is not open")
                self._needs_newline = os.write(self._fd, data) != len(data)
                if self._needs_newline:
                    raise OSError(errno.ENOSPC, "only part of a record was written")
            except OSError as error:
                self.dropped += 1
                self._report(error)

    def close(self) -> None:
        """Close the file and say on stderr how many lines were lost, if any were."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            if self.dropped:
                print(f"trace {self.path}: {self.dropped} records were lost", file=sys.stderr)

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            # An earlier writer that was killed in the middle of a write may have left half a line.
            self._needs_newline = os.fstat(self._fd).st_size > 0
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._reported:
            self._reported = True
            print(f"trace {self.path}: {error}; the run goes on, records are being lost", file=sys.stderr)
