"""A Slurm of shell scripts, first on PATH: what the launcher calls, and what it gets to hear."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH with a Slurm that accepts everything as job 41."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    program(
        folder,
        "sbatch",
        f'env > {folder}/environment; echo "$@" >> {folder}/sbatch.calls; echo "Submitted batch job 41"',
    )
    program(folder, "srun", "exit 1")
    cluster(folder)
    program(folder, "scancel", f'echo "$@" >> {folder}/scancel.calls')
    queue(folder, "PENDING|Resources")
    return folder


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def cluster(folder: Path, nodes: str = "node[0-3]", state: str = "idle", limit: str = "infinite") -> None:
    """Let sinfo show one partition of nodes with four processors and two GPUs each."""
    program(folder, "sinfo", f"echo 'dev*|{nodes}|4|8000|gpu:4|(null)|{state}|{limit}|1-infinite'")


def queue(folder: Path, leader: str, other: str = "", exit_code: str = "0:0") -> None:
    """Let squeue and scontrol show two components as "STATE|REASON"."""
    lines = [f"41+0|{leader}|node0", f"41+1|{other or leader}|node1"]
    program(folder, "squeue", f"echo ask >> {folder}/squeue.calls; printf '%s\\n' '{lines[0]}' '{lines[1]}'")
    records = [
        f"JobId={41 + offset} HetJobId=41 HetJobOffset={offset} JobState={state} Reason={reason} ExitCode={exit_code} NodeList=n"
        for offset, (state, reason) in enumerate(text.split("|") for text in (leader, other or leader))
    ]
    program(folder, "scontrol", f"printf '%s\\n' '{records[0]}' '{records[1]}'")
