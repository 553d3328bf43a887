"""Commands for people on a run in which one entry is something else than it should be: they say so, and never end in a stack trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import list, logs, status
from launch.people import command
from stages.rundir import STAMPS, RunDir
from stages.weights import __main__ as weights
from tests.fake_slurm import short_looks, slurm_in_memory
from tests.made_runs import another_attempt, finished, saved, says, serves

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")


def whole(root: Path) -> RunDir:
    run = finished(root)
    saved(run, 4)
    run = another_attempt(run)
    says(run, "succeeded")
    serves(run, "rollout_000", 10)
    (run.logs / "supervisor.log").write_text("ended\n")
    return run


def as_file(path: Path) -> None:
    path.write_text("in the way")


def as_folder(path: Path) -> None:
    path.mkdir()
    (path / "in the way").touch()


def as_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def as_loop(path: Path) -> None:
    path.symlink_to(path.name)


ENTRIES = sorted(
    {
        "run.json", "config.yaml", "plan.json", "desired.json", "metrics.jsonl", "summary.json", "token",
        "attempts", "attempts/0", "attempts/1", "attempts/1/logs", "attempts/1/logs/supervisor.log",
        "attempts/1/submitit", "attempts/1/state.json", "attempts/1/events.jsonl", "attempts/1/attempt.json",
        "weights", "weights/LATEST.json", "weights/v000010", "weights/v000010/manifest.json",
        "instances", "instances/rollout_000.json", "control", "control/requests", "control/refreshed",
        "checkpoints", "checkpoints/step_000004", "ledger", "batches",
    }
)  # fmt: skip


def asked_of(run: RunDir) -> dict[str, Callable[[], int]]:
    at, root = str(run.root), str(run.root.parent)
    return {
        "status": lambda: status.main([at]),
        "status --json": lambda: status.main([at, "--json"]),
        "status --all": lambda: status.main(["--all", "--root", root]),
        "list": lambda: list.main(["--root", root]),
        "logs": lambda: logs.main([at]),
        "weights inspect": lambda: weights.main(["inspect", at]),
    }


@pytest.mark.parametrize("replaced", [as_file, as_folder, as_dangling_link, as_loop])
@pytest.mark.parametrize("entry", ENTRIES)
def test_people_are_told_of_an_entry_that_is_something_else(
    tmp_path: Path, entry: str, replaced: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = whole(tmp_path / "run")
    path = run.root / entry
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    replaced(path)

    codes = {name: command(said) for name, said in asked_of(run).items()}

    assert all(code in (0, 1, 2) for code in codes.values()), codes
    assert codes["list"] == 0 or entry == "run.json"


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.endswith(".json")])
def test_people_are_told_of_a_record_that_lacks_what_it_should_say(
    tmp_path: Path, entry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = whole(tmp_path / "run")
    record = json.loads((run.root / entry).read_text()) if (run.root / entry).exists() else {}
    (run.root / entry).write_text(json.dumps({name: value for name, value in record.items() if name in STAMPS}))

    codes = {name: command(said) for name, said in asked_of(run).items()}

    assert all(code in (0, 1, 2) for code in codes.values()), codes
