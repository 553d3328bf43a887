"""Shared memory that a killed engine leaves: noted while it runs, removed with its folder on the node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from stages.rollout.shared_memory import NOTE, SHARED_MEMORY, note_shared_memory, remove_shared_memory


@pytest.fixture
def segment() -> Iterator[Path]:
    """A segment that this process has created and let go of."""
    memory = SharedMemory(create=True, size=4096)
    unregister(f"/{memory.name}", "shared_memory")
    memory.close()
    path = SHARED_MEMORY / memory.name
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def server(segment: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has mapped the segment."""
    code = "import mmap, os, sys; held = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096); print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(segment)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_what_a_killed_server_left_is_removed(segment: Path, server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    note_shared_memory(tmp_path, [server.pid])
    server.kill()
    server.wait()

    remove_shared_memory(tmp_path)

    assert not segment.exists()


def test_what_a_living_process_has_mapped_stays(segment: Path, server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    note_shared_memory(tmp_path, [server.pid])

    remove_shared_memory(tmp_path)

    assert segment.exists()


def test_another_segment_of_that_name_stays(segment: Path, tmp_path: Path) -> None:
    (tmp_path / NOTE).write_text(f"{segment.stat().st_ino + 1} {segment}\n")

    remove_shared_memory(tmp_path)

    assert segment.exists()


def test_a_file_elsewhere_is_no_shared_memory(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.touch()
    (tmp_path / NOTE).write_text(f"{mine.stat().st_ino} {mine}\n")

    remove_shared_memory(tmp_path)

    assert mine.exists()


def test_a_folder_without_a_note_and_a_process_without_segments_are_no_trouble(tmp_path: Path) -> None:
    remove_shared_memory(tmp_path)
    note_shared_memory(tmp_path, [os.getpid(), 2**22])

    remove_shared_memory(tmp_path)
