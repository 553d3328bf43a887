"""What a command line asks for is what it gets: a run, help, the configuration as text, or an answer of Hydra's own."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.load import load
from launch import pipeline
from launch.command_line import run
from launch.completion import folder_flags
from launch.compose import groups
from launch.errors import InterruptedRunError
from launch.prepare import prepare

PROJECT = Path(__file__).resolve().parents[2]
TERMINAL_DEADLINE_S = 60.0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Sequence[str]]]:
    """What was handed to Hydra, to the pipeline and to a sweep, instead of being done."""
    calls: list[tuple[str, Sequence[str]]] = []

    def note(who: str) -> Callable[..., int]:
        def noted(words: Sequence[str], tree: object = None) -> int:
            calls.append((who, words))
            return 0

        return noted

    monkeypatch.setattr("launch.command_line.hydra_main", note("hydra"))
    monkeypatch.setattr("launch.pipeline.launch", note("run"))
    monkeypatch.setattr("launch.sweeps.launch_sweep", note("sweep"))
    return calls


@pytest.mark.parametrize(
    ("words", "who", "overrides"),
    [
        (["+experiment=demo"], "run", ["+experiment=demo"]),
        (["model_path=/m"], "run", ["model_path=/m"]),
        (["--run", "seed=1"], "run", ["seed=1"]),
        (["-m", "seed=1,2"], "sweep", ["seed=1,2"]),
        (["seed=1,2", "--multirun", "total_steps=3"], "sweep", ["seed=1,2", "total_steps=3"]),
    ],
)
def test_flags_stand_anywhere_among_the_overrides(
    asked: list[tuple[str, Sequence[str]]], words: list[str], who: str, overrides: list[str]
) -> None:
    assert run(words) == 0

    assert asked == [(who, overrides)]


@pytest.mark.parametrize("flag", [["--info", "searchpath"], ["--cfg", "hydra"], ["--cfg", "all"], ["--hydra-help"]])
def test_what_concerns_hydra_goes_to_hydra(asked: list[tuple[str, Sequence[str]]], flag: list[str]) -> None:
    assert run([*flag, "seed=1"]) == 0

    who, words = asked[0]
    assert who == "hydra"
    assert words[: 1 + len(flag)] == ["seed=1", *flag]


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_usage_groups_and_options(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert run([flag]) == 0

    page = capsys.readouterr().out
    assert page.startswith("usage: python -m launch")
    assert all(choice in page for choices in groups().values() for choice in choices)
    assert "docs/configuration.md" in page
    assert max(len(line) for line in page.splitlines()) <= 120


def test_help_shows_the_choices_of_the_users_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").touch()

    run(["--help", "--config-dir", str(tmp_path)])

    assert "mine" in capsys.readouterr().out


def test_no_words_at_all_give_help_and_say_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert "nothing to run: name an experiment (+experiment=demo), or a model (model_path=FOLDER)" in said.err


def test_cfg_job_prints_what_config_yaml_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=demo", "seed=3", f"launch.run_dir={tmp_path}/run"]

    assert run([*words, "--cfg", "job"]) == 0

    text = capsys.readouterr().out
    assert text == pipeline.config_text(prepare(words))
    assert pipeline.create_run(prepare(words)).config_yaml.read_text() == text
    assert load(tmp_path / "run" / "config.yaml").seed == 3


def test_cfg_job_shows_a_configuration_that_cannot_run_and_then_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["+experiment=demo", "batch_size=10", "--cfg", "job"]) == 2

    said = capsys.readouterr()
    assert "batch_size: 10  # command line" in said.out
    assert "batch_size=10 is not a multiple" in said.err


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("train_gpus", "train_gpus: 8  # conf/experiment/grpo_7b.yaml\n"),
        ("slurm.partition", 'slurm:\n  partition: ""  # default\n'),
    ],
)
def test_cfg_job_with_the_name_of_an_option_shows_that_option(
    name: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["+experiment=grpo_7b", "--cfg", "job", "-p", name]) == 0
    assert capsys.readouterr().out == wanted


def test_cfg_job_with_a_package_that_does_not_exist_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["+experiment=grpo_7b", "--cfg", "job", "-p", "algorithm.clip_hi"]) == 2
    assert "did you mean 'algorithm.clip_high'" in capsys.readouterr().err


def test_cfg_job_with_a_package_shows_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["+experiment=demo", "--cfg", "job", "--package", "slurm"]) == 0

    assert list(yaml.safe_load(capsys.readouterr().out)) == ["slurm"]


def test_explain_shows_where_a_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["+experiment=demo", "launch.explain=batch_size"]) == 0

    assert "conf/experiment/demo.yaml" in capsys.readouterr().out


def test_explain_answers_where_no_plan_can_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch_size=10", "launch.explain=batch_size"]) == 0

    assert "command line" in capsys.readouterr().out


def test_explain_does_not_answer_for_words_that_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["totl_steps=10", "launch.explain=total_steps"]) == 2

    assert "did you mean 'total_steps'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--cfg", "job", "-m", "seed=1"], "--multirun and --cfg cannot be had together"),
        (["--experimental-rerun", "x.pickle"], "reads a pickle; use --config-path RUN"),
        (["--config-dir", "/nowhere", "seed=1"], "--config-dir=/nowhere is not a folder"),
        (["--config-path", "/nowhere", "seed=1"], "--config-path=/nowhere has no config.yaml"),
        (["--config-dir=", "seed=1"], "--config-dir is empty"),
        (["--config-path=", "--config-name=", "seed=1"], "--config-path and --config-name is empty"),
        (["+experiment=demo", "--package", "launch.dry_run=true"], "--package only goes with --cfg job"),
        (["+experiment=demo", "--resolve"], "--resolve only goes with --cfg job"),
        (["-sc"], "--shell-completion stands alone with one word"),
        (["-sc", "+experiment=demo"], "--shell-completion stands alone with one word"),
        (["-sc", "query=bash"], "what a shell asks, with its line in COMP_LINE"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], wanted: str
) -> None:
    assert run(words) == 2

    assert wanted in capsys.readouterr().err


# ---- what Hydra answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [["--info", "config"], ["--cfg", "all"], ["--hydra-help"]])
def test_hydra_is_not_asked_about_words_that_mean_nothing(
    asked: list[tuple[str, Sequence[str]]], capsys: pytest.CaptureFixture[str], flag: list[str]
) -> None:
    assert run([*flag, "totl_steps=1", "seed=x"]) == 2

    assert asked == []
    said = capsys.readouterr().err
    assert "did you mean 'total_steps'" in said
    assert "seed=x: wanted a whole number" in said


@pytest.mark.parametrize(
    "words", [["--info", "defaults", "experiment=demo"], ["--cfg", "all", "model=qwen3_8b", "cluster=null"]]
)
def test_what_hydra_refuses_is_said_without_a_stack_trace(words: list[str]) -> None:
    command = [sys.executable, "-m", "launch", *words]

    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "Hydra: " in done.stderr
    assert "Traceback" not in done.stderr


# ---- where it runs, and where its words go ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["+experiment=demo", "launch.dry_run=true"],
        ["-m", "+experiment=demo", "seed=1,2", "launch.dry_run=true"],
        ["--config-dir", "mine", "+experiment=x"],
        ["--info", "config"],
        ["-sc", "install=bash"],
    ],
)
def test_a_working_folder_that_is_gone_is_said(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()

    assert run(words) == 2

    assert "the folder in which this command was started is gone" in capsys.readouterr().err


def launched(*words: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "launch", *words]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **how.pop("env", {})}
    where = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": PROJECT, **how}
    return subprocess.run(command, env=environment, timeout=60, check=False, **where)


def test_a_working_folder_whose_name_is_no_text_is_said(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)

    done = launched("+experiment=demo", "launch.dry_run=true", cwd=folder)

    assert done.returncode == 2
    assert b"is no UTF-8 text without NUL; choose another launch.run_dir" in done.stderr
    assert launched("+experiment=demo", "launch.dry_run=true", "launch.run_dir=/runs/x", cwd=folder).returncode == 0


def test_a_terminal_that_cannot_show_a_letter_gets_it_escaped() -> None:
    done = launched(
        "+experiment=demo", "slurm.job_name='é'", "launch.dry_run=true", env={"PYTHONIOENCODING": "ascii:strict"}
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--job-name=" in done.stdout


def test_a_full_disk_behind_the_output_is_one_sentence() -> None:
    with open("/dev/full", "wb") as full:
        done = launched("+experiment=demo", "launch.dry_run=true", stdout=full)

    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == ["the system refused: [Errno 28] No space left on device"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, InterruptedRunError("stopped")])
def test_ctrl_c_gives_the_exit_code_of_the_shell(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def interrupted(words: Sequence[str], tree: object) -> None:
        raise error

    monkeypatch.setattr("launch.pipeline.launch", interrupted)

    assert run(["seed=1"]) == 130


def test_a_reader_that_leaves_early_causes_no_stack_trace() -> None:
    command = [sys.executable, "-m", "launch", "+experiment=demo", "launch.dry_run=true"]
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(command, cwd=PROJECT, stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(write_end)

    assert (done.returncode, done.stderr) == (141, b"")


# ---- completion ---------------------------------------------------------------------------------------------------------


class Terminal:
    """A bash at a pseudo-terminal, as a person has it."""

    def __init__(self, folder: Path) -> None:
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "TERM": "dumb",
            "HOME": str(folder),
            "PS1": "$ ",
        }
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def see(self, wanted: str) -> None:
        """Wait until `wanted` is on the screen after what was seen before."""
        deadline = time.monotonic() + TERMINAL_DEADLINE_S
        while wanted not in self._seen:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {wanted!r} within {TERMINAL_DEADLINE_S:g} s in {self._seen!r}"
            if select.select([self._fd], [], [], left_s)[0]:
                self._seen += os.read(self._fd, 4096).decode(errors="replace")
        self._seen = self._seen.split(wanted, 1)[1]

    def close(self) -> None:
        os.close(self._fd)
        os.waitpid(self._pid, 0)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    terminal.type('eval "$(python -m launch -sc install=bash)"; echo install"ed"\n')
    terminal.see("installed\r\n")
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("python -m launch total_st", "eps="),
        ("python -m launch +experiment=dem", "o"),
        ("python -m launch +experiment=demo algorithm.clip_lo", "w="),
        ("python -m launch -cd mine +experiment=my_ow", "n"),
    ],
)
def test_bash_completes_options_groups_and_choices(terminal: Terminal, tmp_path: Path, typed: str, wanted: str) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "my_own.yaml").touch()

    terminal.type(f"{typed}\t")

    terminal.see(typed + wanted)


def test_other_python_commands_keep_their_completion(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "script_with_a_name.py").touch()

    terminal.type("python script_wi\t")

    terminal.see("script_with_a_name.py")


def test_completion_can_be_taken_away(terminal: Terminal) -> None:
    terminal.type('eval "$(python -m launch -sc uninstall=bash)"; complete -p python || echo no"thing"\n')

    terminal.see("nothing")


def test_folders_named_in_the_line_count_for_its_completion() -> None:
    line = "launch -cd my --config-name=other -m +experiment=x"

    assert folder_flags(line) == ["--config-dir", "my", "--config-name", "other"]
