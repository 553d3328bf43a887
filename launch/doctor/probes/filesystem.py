"""The filesystem under the run root: its kind, its room, and what it costs to publish a record on it."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, seconds, size
from stages.files import write_json_atomic

KEY = "filesystem"
MOUNTS = Path("/proc/self/mountinfo")
PUBLISHED = 10
LOCAL_KINDS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "zfs", "f2fs", "devtmpfs"}
)
LITTLE_BYTES = 50e9
NO_BYTES = 1e9
FEW_FILES = 100_000
SLOW_PUBLISH_S = 0.25


def measure(scene: Scene) -> dict[str, Any]:
    """`kind` and `source` of the mount; bytes and files free (None when the filesystem does not count files);
    `publish_s`, `slowest_s`: one record by write, fsync, rename and fsync of the folder."""
    folder = scene.place("published")
    took = []
    for number in range(PUBLISHED):
        started_s = time.monotonic()
        write_json_atomic(folder / f"{scene.rank}.{number}.json", {"number": number})
        took.append(time.monotonic() - started_s)
    room = os.statvfs(folder)
    kind, source = mount_of(os.path.realpath(folder), MOUNTS.read_text())
    return {
        "kind": kind,
        "source": source,
        "free": room.f_bavail * room.f_frsize,
        "files": room.f_favail if room.f_files else None,
        "publish_s": statistics.median(took),
        "slowest_s": max(took),
    }


def mount_of(path: str, mounts: str) -> tuple[str, str]:
    """(kind, source) of the mount that holds `path`, from the lines of mountinfo (proc(5)); the last of equal ones hides others."""
    best = ("", "", "")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ").replace("\\134", "\\")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            kind, source, *_ = right.split()
            best = (point, kind, source)
    return best[1], best[2]


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried("filesystem of the run root", evidence.why_not(KEY), "find out with the first run")]
    return [_kind(evidence, answers), _room(answers), _publishing(answers)]


def _kind(evidence: Evidence, answers: dict[str, Report]) -> Finding:
    name = "filesystem of the run root"
    seen = by_value({node: f"{facts['kind']} ({facts['source']})" for node, facts in answers.items()})
    if evidence.mode == "slurm" and any(facts["kind"] in LOCAL_KINDS for facts in answers.values()):
        libra = "work only if this is the same folder on all nodes, which 'seen by other nodes' says"
        return note(name, f"{seen}, usually a node's own", libra)
    return ok(name, seen, "publish by rename, and wait by listing folders")


def _room(answers: dict[str, Report]) -> Finding:
    name = "room on the run root"
    free = min(facts["free"] for facts in answers.values())
    files = [facts["files"] for facts in answers.values() if facts["files"] is not None]
    seen = f"{size(free)} free, {f'{min(files):,} files' if files else 'files are not counted'}"
    if free < NO_BYTES or (files and min(files) < FEW_FILES // 10):
        return problem(name, seen, "be refused before it starts; choose another launch.run_dir")
    if free < LITTLE_BYTES or (files and min(files) < FEW_FILES):
        return note(name, seen, "check before each start that weights.keep_versions + 2 versions fit")
    return ok(name, seen, "check before each start that weights.keep_versions + 2 versions fit")


def _publishing(answers: dict[str, Report]) -> Finding:
    name = "publishing a record"
    median_s = max(facts["publish_s"] for facts in answers.values())
    slowest_s = max(facts["slowest_s"] for facts in answers.values())
    seen = f"write, fsync, rename, fsync: {seconds(median_s)} (slowest of {PUBLISHED}: {seconds(slowest_s)})"
    if median_s > SLOW_PUBLISH_S:
        return note(
            name,
            seen,
            "wait this long for each heartbeat, acknowledgement and batch; raise rollout.heartbeat_interval_s",
        )
    return ok(name, seen, "publish every heartbeat, acknowledgement and batch this way")
