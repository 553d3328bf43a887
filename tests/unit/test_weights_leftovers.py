"""Records of the weight exchange are not flushed on a local filesystem: whoever reads what a crash of the host left of them copes.

`tests/contract/test_weights_power_failure.py` has trainer and agents; here are the others, and people.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from launch import list as list_runs
from launch import status
from launch.heartbeats import Silence
from launch.people import command
from launch.runs import Folder
from launch.truth import Truth
from planner.plan import InstancePlacement
from stages.controller.instances import InstancePool
from stages.controller.progress import Progress
from stages.controller.resume import find_position
from stages.rollout import __main__ as rollout
from stages.rollout.registration import Registration
from stages.rollout.stage import run_alone
from stages.rundir import RunDir
from stages.weights import __main__ as weights
from stages.weights.collect import collect, drop_versions
from stages.weights.deadlines import read_before
from stages.weights.errors import WeightsError
from stages.weights.reader import load_manifest, verify
from stages.weights.refresh import request_refresh
from tests.fake_slurm import short_looks, slurm_in_memory
from tests.made_runs import another_attempt, finished, saved, says, serves
from tests.rollout_agent_kit import make_context as make_agent
from tests.weights_kit import INSTANCES, Answers, as_writer, make_context, make_status, publish_full, register

__all__ = ["short_looks", "slurm_in_memory"]

FIRST = INSTANCES[0]


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(200))


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: list[Callable[[Path], None]] = [empty, zeros, half]


@pytest.fixture
def old(tmp_path: Path) -> RunDir:
    """Attempt 0 as its trainer saw it: versions 1 to 3 served."""
    run = as_writer(RunDir.create(tmp_path / "run"), "trainer")
    for version in (1, 2, 3):
        publish_full(run, version)
        record: dict[str, Any] = {
            "version": version,
            "method": "inplace",
            "slowest_bytes_per_s": 10.0 * version,
            "quarantined": [],
        }
        run.write(run.refreshed_json(version), record)
    register(run, FIRST, version=3, heartbeat=9)
    return run


@pytest.fixture
def run(old: RunDir) -> RunDir:
    """Attempt 1, as its trainer sees it."""
    old.start_attempt(1)
    return RunDir.open(old.root, writer="trainer")


# ---- the next attempt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_version_with_a_damaged_manifest_is_published_again_under_its_name(
    run: RunDir, damage: Callable[[Path], None]
) -> None:
    damage(run.weights_version(3) / "manifest.json")
    drop_versions(run, newer_than=3)

    manifest = publish_full(run, 3)

    verify(run, load_manifest(run, 3, manifest.digest))
    assert run.read(run.latest_json) is not None


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pointer_goes_and_versions_that_count_stay(run: RunDir, damage: Callable[[Path], None]) -> None:
    damage(run.latest_json)

    assert drop_versions(run, newer_than=2) == (3,)

    assert not run.latest_json.exists()
    assert run.published_versions() == [1, 2]


def test_without_a_pointer_nothing_is_collected(run: RunDir) -> None:
    empty(run.latest_json)

    assert collect(make_context(run)).versions == ()


def test_the_rate_is_remembered_from_the_newest_refresh_that_is_whole(run: RunDir) -> None:
    empty(run.refreshed_json(3))

    assert read_before(run, make_context(run).config, 4).slowest_bytes_per_s == 20.0


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_registration_in_pieces_is_none_until_its_agent_writes_it_anew(
    run: RunDir, damage: Callable[[Path], None]
) -> None:
    damage(run.instance_json(FIRST))
    pool = InstancePool(run, (InstancePlacement(FIRST, 1, 1, 0),), 10.0, reload_keeps_requests=True)

    assert not Silence(run, 10.0, lambda: 0.0).any_served([FIRST])
    assert pool.usable() == []
    assert "not registered" in pool.describe()
    with Registration(as_writer(run, FIRST), make_status(FIRST, version=0), interval_s=60.0):
        assert not pool.is_interrupted(FIRST)
        assert pool.instances[FIRST].state == "ready"
        assert Silence(run, 10.0, lambda: 0.0).any_served([FIRST])


def test_an_answer_in_pieces_does_not_hide_the_one_that_replaces_it(run: RunDir) -> None:
    context, answers = make_context(run), Answers(run, publish_full(run, 4))
    context.config.weights.refresh_timeout_s = 10.0
    for name in INSTANCES:
        register(run, name)
        answers.write(name)
    empty(run.ack_json(4, FIRST, "loaded"))

    result = request_refresh(context, answers.manifest, INSTANCES, 0.0, lambda: answers.write(FIRST))

    assert result.instances == INSTANCES


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_controller_takes_no_damaged_record_for_a_version_that_is_served(
    run: RunDir, damage: Callable[[Path], None]
) -> None:
    for path in (run.latest_json, run.refreshed_json(3)):
        damage(path)
    progress = Progress(run, total_steps=4, sync_interval=1, timeout_s=60.0, first_version=3)

    assert find_position(run, 0).served_version == -1
    assert find_position(run, 0).served_version == -1, "started again within the attempt"
    progress.look(0)
    assert progress.served_version == -1
    run.write(run.refreshed_json(3), {"version": 3})
    progress.look(0)
    assert progress.served_version == 3


# ---- people ----------------------------------------------------------------------------------------------------------

SPOILT = [
    "weights/LATEST.json",
    "weights/v000010/manifest.json",
    "instances/rollout_000.json",
    "control/requests/v000010.json",
    "control/refreshed/v000010.json",
]


@pytest.mark.usefixtures("slurm_in_memory", "short_looks")
@pytest.mark.parametrize("damage", [empty, zeros])
@pytest.mark.parametrize("entry", SPOILT)
def test_people_are_told_of_a_record_in_pieces(tmp_path: Path, entry: str, damage: Callable[[Path], None]) -> None:
    run = another_attempt(finished(tmp_path / "run"))
    saved(run, 4)
    says(run, "failed")
    serves(run, "rollout_000", 10)
    damage(run.root / entry)
    at = str(run.root)

    codes = [
        command(lambda: status.main([at])),
        command(lambda: list_runs.main(["--root", str(tmp_path)])),
        command(lambda: weights.main(["inspect", at])),
        command(lambda: weights.main(["verify", at])),
    ]

    assert all(code in (0, 1) for code in codes), codes


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        *(("manifest.json", damage, "v000003/manifest.json is damaged") for damage in DAMAGE),
        *(("model.safetensors", damage, "model.safetensors") for damage in (empty, zeros, half, os.unlink)),
    ],
)
def test_verify_names_a_damaged_file(
    old: RunDir, name: str, damage: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(old.weights_version(3) / name)

    assert weights.main(["verify", str(old.root)]) == 1

    printed = capsys.readouterr()
    assert words in (printed.err if name == "manifest.json" else printed.out)


@pytest.mark.parametrize("damage", [empty, zeros, half, os.unlink])
def test_alone_an_instance_serves_nothing_in_place_of_a_version_that_it_cannot_find(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    context = make_agent(tmp_path)
    publish_full(as_writer(context.run, "trainer"), 7)
    damage(context.run.latest_json)

    with pytest.raises(WeightsError, match=r"LATEST\.json.*published are 7"):
        run_alone(context)


def test_who_starts_an_instance_alone_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = make_agent(tmp_path)
    publish_full(as_writer(context.run, "trainer"), 7)
    shutil.rmtree(context.run.weights_version(7))
    monkeypatch.setattr(sys, "argv", ["rollout", str(context.run.root), "--instance", context.name])
    monkeypatch.setattr(rollout, "open_context", lambda *_, **__: nullcontext(context))
    monkeypatch.setattr(rollout, "install_stop_handlers", lambda _: None)

    assert rollout.main() == 1

    assert "version 7 is not published" in (said := capsys.readouterr().err)
    assert "launch.resume" in said


@pytest.mark.parametrize(
    ("entry", "may_push"),
    [
        ("weights/LATEST.json (damaged)", True),
        ("weights/v000003 (missing)", True),
        ("instances/rollout_000.json (damaged)", True),
        ("weights/ (missing)", False),
        ("plan.json (missing)", False),
    ],
)
def test_a_push_is_refused_only_for_damage_that_it_does_not_mend(tmp_path: Path, entry: str, may_push: bool) -> None:
    RunDir.create(tmp_path / "run")
    truth = Truth(Folder.at(tmp_path / "run"), "failed", damage=(entry,))

    if may_push:
        weights._check_nobody_publishes(truth, sure=False)
    else:
        with pytest.raises(ValueError, match="half-deleted"):
            weights._check_nobody_publishes(truth, sure=False)
