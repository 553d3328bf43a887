"""What a user is told of a job that `sbatch --test-only` refuses, in words that Slurm has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch import preflight, slurm
from launch.hetjob import job_spec
from launch.partitions import SubmitError
from tests.fake_runs import fake_config, fake_plan

Refuse = Callable[[str], str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """The message for the given words of Slurm, on a cluster that sinfo does not show."""

    def said(words: str) -> str:
        monkeypatch.setattr(slurm, "command", lambda *_, **__: "")
        monkeypatch.setattr(preflight, "test_only", lambda _: (False, words))
        spec = job_spec(fake_config("slurm"), fake_plan(), tmp_path / "run", 0, [])
        with pytest.raises(SubmitError) as caught:
            preflight.check(spec, tmp_path / "run" / "job.sbatch")
        return str(caught.value)

    return said


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("Invalid account or account/partition combination specified", "slurm.account or slurm.partition"),
        ("Invalid qos specification", "slurm.qos"),
        ("Invalid feature specification", "slurm.constraint"),
        ("Invalid license specification", "slurm.licenses"),
        ("Invalid node name specified", "slurm.exclude"),
        ("Invalid partition name specified", "slurm.partition"),
        ("User's group not permitted to use this partition", "slurm.partition"),
        ("Requested reservation is invalid", "slurm.reservation"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "slurm.time_min"),
        (
            "Invalid generic resource (gres) specification",
            "slurm.gpu_flag, slurm.gpu_type or hardware.gpus_per_node",
        ),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "slurm.qos, slurm.account, slurm.time_min, train_gpus or rollout_gpus",
        ),
        ("Requested node configuration is not available", preflight.OPTIONS),
    ],
)
def test_a_refusal_names_the_options_that_it_is_about(refused: Refuse, words: str, change: str) -> None:
    assert f"nothing was submitted: allocation failure: {words}; change {change}; " in refused(
        f"allocation failure: {words}"
    )


def test_a_refusal_points_at_no_file_of_the_run_directory_which_is_removed(refused: Refuse, tmp_path: Path) -> None:
    message = refused("allocation failure: Requested reservation is invalid")

    assert str(tmp_path) not in message
    assert "launch.dry_run=true shows the script" in message
