"""How fast one node writes and another reads a file on the run root, with 1, 4 and 16 threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, ok
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import rate, seconds, size

KEY = "bandwidth"
THREADS = (1, 4, 16)
CHUNK_BYTES = 8 << 20
EXAMPLE_BYTES = 15.2e9
"""bf16 weights of a 7B model."""


def measure(scene: Scene) -> dict[str, Any]:
    """Bytes per second by number of threads: "write" on the first node (with fsync), "read" on the last.

    Reading drops the page cache of the file first; on another node it never was there. Each file is removed at once.
    """
    writer, reader = 0, scene.world - 1
    written: dict[str, float] = {}
    reading: dict[str, float] = {}
    limits = scene.order.limits
    longest_s = limits.peers_s + 2 * limits.transfer_s
    for threads in THREADS:
        path = scene.place("bandwidth") / f"{threads}.bin"
        if scene.rank == writer:
            done, took_s = write(path, limits.transfer_bytes, threads, limits.transfer_s)
            written[str(threads)] = done / took_s
            scene.meeting.say(f"written.{threads}", bytes=done)
        if scene.rank == reader:
            size_bytes = int(scene.meeting.hear(f"written.{threads}", writer, longest_s)["bytes"])
            done, took_s = read(path, size_bytes, threads, limits.transfer_s)
            reading[str(threads)] = done / took_s
            scene.meeting.say(f"read.{threads}")
        if scene.rank == writer:
            scene.meeting.hear(f"read.{threads}", reader, longest_s)
            path.unlink()
    return {
        **({"write": written} if written else {}),
        **({"read": reading} if reading else {}),
        "bytes": limits.transfer_bytes,
        "same_node": writer == reader,
    }


def write(path: Path, num_bytes: int, threads: int, most_s: float) -> tuple[int, float]:
    """(bytes written from the start of the file, seconds with fsync). Stops early after `most_s`, at equal shares."""
    chunk = os.urandom(min(CHUNK_BYTES, num_bytes // threads))  # some filesystems store zeros for nothing
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        started_s = time.monotonic()
        done = _in_threads(
            lambda offset: os.pwrite(fd, chunk, offset), num_bytes, len(chunk), threads, started_s + most_s
        )
        os.fsync(fd)
        return done, time.monotonic() - started_s
    finally:
        os.close(fd)


def read(path: Path, num_bytes: int, threads: int, most_s: float) -> tuple[int, float]:
    chunk_bytes = min(CHUNK_BYTES, num_bytes // threads)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = time.monotonic()
        done = _in_threads(
            lambda offset: len(os.pread(fd, chunk_bytes, offset)), num_bytes, chunk_bytes, threads, started_s + most_s
        )
        return done, time.monotonic() - started_s
    finally:
        os.close(fd)


def _in_threads(move: Callable[[int], int], num_bytes: int, chunk_bytes: int, threads: int, deadline_s: float) -> int:
    """Move chunk after chunk, thread t every `threads`-th; the bytes moved. Cut short, a few chunks at the end may be missing."""

    def work(thread: int) -> int:
        done = 0
        for offset in range(thread * chunk_bytes, num_bytes, threads * chunk_bytes):
            done += move(offset)
            if time.monotonic() > deadline_s:
                break
        return done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


def rates(evidence: Evidence, way: str) -> dict[int, float]:
    """Bytes per second by number of threads for "write" or "read"; empty when it was not measured."""
    for facts in evidence.answers(KEY).values():
        if way in facts:
            return {int(threads): float(facts[way][threads]) for threads in sorted(facts[way], key=int)}
    return {}


def judge(evidence: Evidence) -> list[Finding]:
    return [_judge(evidence, "write"), _judge(evidence, "read")]


def _judge(evidence: Evidence, way: str) -> Finding:
    name = f"{way} bandwidth of the run root"
    found = rates(evidence, way)
    if not found:
        return not_tried(name, evidence.why_not(KEY), "use up to 16 threads (weights.io_threads)")
    facts = next(facts for facts in evidence.answers(KEY).values() if way in facts)
    best_s = EXAMPLE_BYTES / max(found.values())
    listed = ", ".join(f"{rate(value)} with {threads}" for threads, value in found.items())
    how = "on one node, page cache dropped" if facts["same_node"] else "one node at a time"
    small = (
        f", a small file ({size(facts['bytes'])}): a cache may answer"
        if evidence.quick
        else f", file of {size(facts['bytes'])}"
    )
    verb = "write" if way == "write" else "read"
    return ok(
        name, f"{listed} threads ({how}{small})", f"{verb} the weights of a 7B model in about {seconds(best_s)} at best"
    )
