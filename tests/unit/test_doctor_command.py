"""The doctor's command line, its job, and what it leaves behind: nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.doctor import command, examine
from launch.doctor.commands import NOT_FOUND, TIMED_OUT, Answer, ask
from launch.doctor.order import FOLDER_PREFIX
from launch.doctor.workplace import NoWorkplaceError, workplace

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- command line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["--quick", "slurm.acount=x"], "slurm.account"),
        (["--nodes=-1"], "--nodes=-1"),
        (["--queue-wait=0"], "--queue-wait=0"),
        (["--write", "site.yaml"], "folder named cluster"),
        (["--config-dir", "nowhere"], "not a folder"),
    ],
)
def test_wrong_use_is_exit_code_2_and_touches_nothing(
    here: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(words) == 2

    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_an_unknown_flag_is_exit_code_2(here: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(["--quikc"])

    assert ended.value.code == 2


@pytest.fixture
def nodes_are_measured_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on nodes is another test's matter."""
    monkeypatch.setattr(examine, "drive_here", lambda order: None)


def test_without_slurm_it_examines_this_machine_and_leaves_only_the_profile(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(["--quick", "--json", "launch.mode=local"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["quick"], found["job_id"]) == ("local", True, 0)
    assert found["profile"] == "libra_site/cluster/site.yaml"
    assert {finding["status"] for finding in found["findings"]} <= {"ok", "note", "not tried"}
    assert {path.name for path in here.iterdir()} == {"libra_site"}


@pytest.mark.usefixtures("nodes_are_measured_nowhere")
def test_a_problem_is_exit_code_1(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)

    assert command.run(["--quick", "launch.mode=slurm"]) == 1

    shown = capsys.readouterr().out
    assert "sbatch is not on PATH" in shown
    assert "1 problem" in shown
    assert list(here.iterdir()) == [], "no profile of a machine that was not meant"


@pytest.mark.usefixtures("nodes_are_measured_nowhere")
def test_ctrl_c_leaves_nothing(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_order: object) -> None:
        assert list((here / "deep" / "runs").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(examine, "drive_here", interrupt)

    assert command.run(["--quick", "--run-root", "deep/runs", "launch.mode=local"]) == 130

    assert "nothing is left" in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_run_root_that_cannot_be_written_to_is_an_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")

    assert command.run(["--quick", "--run-root", "file/runs", "launch.mode=local"]) == 1

    assert "--run-root=" in capsys.readouterr().err


@pytest.mark.usefixtures("nodes_are_measured_nowhere")
def test_the_run_root_is_where_runs_would_be(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(examine, "drive_here", lambda order: seen.append(order.path.parent))

    command.run(["--quick", "launch.mode=local"])
    command.run(["--quick", "launch.mode=local", "launch.run_dir=shared/a/first"])
    command.run(["--quick", "launch.mode=local", "launch.run_dir=shared/a/first", "--run-root=other"])

    assert [place.relative_to(here) for place in seen] == [Path("runs"), Path("shared/a"), Path("other")]


def test_importing_the_doctor_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, launch.doctor.command, launch.doctor.inside.node;"
        "print(*sorted({'torch', 'vllm', 'transformers', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


# ---- workplace -------------------------------------------------------------------------------------------------------------------


def test_the_folder_is_private_and_goes_with_the_folders_made_for_it(tmp_path: Path) -> None:
    with workplace(tmp_path / "a" / "b") as folder:
        assert folder.name.startswith(FOLDER_PREFIX)
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "deep").mkdir()

    assert list(tmp_path.iterdir()) == []


def test_a_run_root_that_was_there_or_is_used_meanwhile_stays(tmp_path: Path) -> None:
    with workplace(tmp_path / "runs"):
        (tmp_path / "runs" / "first").mkdir()

    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["first"]


def test_the_error_of_a_run_root_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(NoWorkplaceError, match="file"), workplace(tmp_path / "file"):
        pass


# ---- commands ----------------------------------------------------------------------------------------------------------------------


def test_a_command_is_answered_whatever_happens() -> None:
    assert ask(["sh", "-c", "echo out; echo 'err   text' >&2; exit 3"]) == Answer(3, "out\n", "err   text\n")
    assert ask(["sh", "-c", "exit 1"]).words == ""
    assert ask(["/no/such/program"]).code == NOT_FOUND
    assert ask(["sleep", "20"], deadline_s=0.05).code == TIMED_OUT


def test_commands_do_not_see_an_outer_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")

    assert ask(["sh", "-c", "echo $SLURM_JOB_ID $SLURM_CONF"]).out == "/etc/slurm.conf\n"
    assert os.environ["SLURM_JOB_ID"] == "1"
