"""What the controller believes of the trainer's records, and the line it makes of each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.batches import BatchManifest
from stages.controller.metrics import StepMetrics
from stages.controller.progress import Progress, TrainerRecordError, TrainerSilentError
from stages.files import make_directory
from stages.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def progress_of(run: RunDir, **options: Any) -> Progress:
    return Progress(run, **{"total_steps": 6, "sync_interval": 1, "timeout_s": 60.0, **options})


def sign(run: RunDir, step: int, record: dict[str, int] | None = None) -> None:
    make_directory(run.batch(step))
    run.write(run.batch(step) / "trained.json", record or {"step": step, "version": step + 1})


def refresh(run: RunDir, version: int) -> None:
    run.write(run.refreshed_json(version), {"version": version})


def test_receipts_and_versions_are_followed_in_order(run: RunDir) -> None:
    progress = progress_of(run)
    refresh(run, 0)
    refresh(run, 1)
    sign(run, 0)
    sign(run, 1)

    new = progress.look(batches_written=2)

    assert (new, progress.trained_steps, progress.served_version) == ([0, 1], 2, 1)


def test_a_receipt_of_a_batch_that_was_never_written_is_not_looked_for(run: RunDir) -> None:
    progress = progress_of(run)
    sign(run, 0)

    assert progress.look(batches_written=0) == []


@pytest.mark.parametrize("record", [{"step": 0, "version": 5}, {"step": 3, "version": 1}])
def test_a_receipt_about_something_else_is_an_error(run: RunDir, record: dict[str, int]) -> None:
    sign(run, 0, record)

    with pytest.raises(TrainerRecordError, match=r"trained\.json is about step . and version .*, wanted 0 and 1"):
        progress_of(run).look(batches_written=1)


def test_a_refreshed_record_about_another_version_is_an_error(run: RunDir) -> None:
    refresh(run, 0)
    run.write(run.refreshed_json(1), {"version": 2})

    with pytest.raises(TrainerRecordError, match="about version 2, wanted 1"):
        progress_of(run).look(batches_written=0)


def test_records_of_an_older_attempt_do_not_count(run: RunDir) -> None:
    refresh(run, 0)
    run.start_attempt(1)
    newer = RunDir.open(run.root, writer="controller")
    progress = progress_of(newer)

    progress.look(batches_written=0)

    assert progress.served_version == -1


def test_a_trainer_that_owes_nothing_may_be_silent(run: RunDir) -> None:
    clock = iter(range(0, 10_000, 1000))
    progress = progress_of(run, clock=lambda: next(clock))
    refresh(run, 0)

    for _ in range(3):
        progress.look(batches_written=0)

    assert progress.served_version == 0


def test_the_time_that_servers_take_to_start_is_not_the_trainers(run: RunDir) -> None:
    clock = iter(range(0, 10_000, 1000))
    progress = progress_of(run, clock=lambda: next(clock))

    for _ in range(3):
        progress.look(batches_written=0)

    refresh(run, 0)
    progress.look(batches_written=0)
    assert progress.served_version == 0


def test_a_silent_trainer_is_told_which_record_is_missing(run: RunDir) -> None:
    clock = iter([0.0, 1.0, 2.0, 63.0])
    progress = progress_of(run, clock=lambda: next(clock))
    refresh(run, 0)
    progress.look(batches_written=0)
    sign(run, 0)
    progress.look(batches_written=1)

    with pytest.raises(TrainerSilentError, match=r"waited 61 s .*refreshed/v000001\.json from the trainer"):
        progress.look(batches_written=1)


@given(total=st.integers(0, 30), interval=st.integers(1, 8))
def test_the_published_versions_are_the_multiples_of_the_interval_and_the_last(total: int, interval: int) -> None:
    progress = Progress(RunDir(Path("/"), "r", 0, "w"), total, interval, 1.0)
    versions: list[int] = []
    while not versions or versions[-1] < total:
        versions.append(progress.next_version)
        progress.served_version = versions[-1]

    assert versions == sorted({*range(0, total + 1, interval), total})


def test_rates_and_time_left_are_means_over_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 3.0])
    monkeypatch.setattr("stages.controller.metrics.time.monotonic", lambda: next(clock))
    metrics = StepMetrics(total_steps=10, last_s=next(clock))
    names = ("loss", "grad_norm", "learning_rate", "clip_fraction", "logprob_difference_max", "logprob_difference_mean")
    receipt: dict[str, Any] = {**dict.fromkeys(names, 0.5), "seconds": {}}

    for step, version in ((0, 1), (1, 2)):
        manifest = BatchManifest(step, 8, 100, 60, 0, 0, 0.25, 1, "", {"reward_std": 0.5})
        line = metrics.line(manifest, receipt, {"refresh_s": 0.5, "publish_s": 0.125}, version)

    assert (line["step_s"], line["tokens_per_s"], line["eta_s"]) == (1.0, 40.0, 12.0)
    assert (line["reward"], line["reward_std"], line["sync_s"], line["version"]) == (0.25, 0.5, 0.5, 2)
