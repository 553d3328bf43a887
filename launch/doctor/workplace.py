"""The doctor's folder on the run root: private, and gone afterwards, with the folders that were made on the way to it."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.doctor.order import FOLDER_PREFIX
from launch.errors import LibraError
from stages.files import list_names, make_directory, remove_tree

REMOVE_PATIENCE_S = 10.0
REMOVE_POLL_S = 0.2


class NoWorkplaceError(LibraError):
    """The run root cannot be written to."""

    exit_code = 1


@contextmanager
def workplace(run_root: Path) -> Iterator[Path]:
    """A new folder in `run_root`. Raises NoWorkplaceError."""
    root = run_root.absolute()
    missing = [folder for folder in (root, *root.parents) if not folder.is_dir()]
    folder = root / f"{FOLDER_PREFIX}{secrets.token_hex(4)}"
    try:
        make_directory(folder)
    except OSError as error:
        raise NoWorkplaceError(
            f"--run-root={root} cannot be written to: {error.strerror}; choose another --run-root"
        ) from error
    try:
        yield folder
    finally:
        _remove(folder)
        for made in missing:
            if made.is_dir() and not list_names(made) and not any(made.iterdir()):
                made.rmdir()


def _remove(folder: Path) -> None:
    """NFS keeps a file that somebody still has open; it is gone once the last process of the job has ended."""
    deadline_s = time.monotonic() + REMOVE_PATIENCE_S
    while not remove_tree(folder):
        if time.monotonic() > deadline_s:
            print(f"{folder} could not be removed: a file in it is still open", file=sys.stderr)
            return
        time.sleep(REMOVE_POLL_S)
