"""Shared memory and node-local folders: room in /dev/shm, and what runs of Libra have left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, size
from stages.process import environments

KEY = "shm"
SHARED_MEMORY = Path("/dev/shm")
NAMED = 3
LEAST_BYTES = 1e9
"""Containers give 64 MB unless told otherwise; NCCL and tensor-parallel vLLM exchange through it."""


def measure(_scene: Scene) -> dict[str, Any]:
    """Bytes of /dev/shm, and paths named by Libra on this node that no living process of ours belongs to."""
    folders = {str(SHARED_MEMORY), tempfile.gettempdir(), "/tmp"}
    return {**_room(SHARED_MEMORY), "leftovers": leftovers(map(Path, sorted(folders)), os.geteuid(), environments())}


def _room(folder: Path) -> dict[str, int]:
    """0 when the folder is missing."""
    try:
        found = os.statvfs(folder)
    except FileNotFoundError:
        return {"total": 0, "free": 0}
    return {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}


def leftovers(folders: Iterable[Path], user: int, environments: Iterable[bytes]) -> list[str]:
    """Entries "libra-<user>-<run id>..." whose run id no living process carries in its environment."""
    alive = b"\0".join(environments)
    found = []
    for folder in folders:
        for path in sorted(folder.glob(f"libra-{user}-*")):
            run_id = path.name.split("-")[2]
            if run_id.encode() not in alive:
                found.append(str(path))
    return found


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried("/dev/shm", evidence.why_not(KEY), "use it for NCCL and tensor-parallel vLLM")]
    texts = {node: f"{size(facts['total'])}, {size(facts['free'])} free" for node, facts in answers.items()}
    if any(facts["free"] < LEAST_BYTES for facts in answers.values()):
        room = note(
            "/dev/shm",
            by_value(texts),
            "fail with vllm_tp_size > 1 or several GPUs that exchange through it; free it, or give the container more (--shm-size)",
        )
    else:
        room = ok("/dev/shm", by_value(texts), "have room for NCCL and tensor-parallel vLLM")
    return [room, _left(evidence)]


def _left(evidence: Evidence) -> Finding:
    left = {node: facts["leftovers"] for node, facts in evidence.answers(KEY).items() if facts["leftovers"]}
    if not left:
        return ok("leftovers of earlier runs", "none", "remove its own at the end of a run")
    seen = by_value({node: f"{len(paths)}: {' '.join(paths[:NAMED])}" for node, paths in left.items()})
    return note(
        "leftovers of earlier runs",
        seen,
        "remove those in the folder of temporary files at the next start of a run on that node",
    )
