"""The merged view of a run's logs: whose line it is, in which order, only the ends of big files, into the next attempt."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch import logs
from launch.log_files import BLOCK_BYTES, LogFile, Part, chosen, last_lines, line_time, log_files, merged
from launch.logs import NoSuchLogError, Reader, Selection
from launch.runs import Folder
from stages.rundir import RunDir
from tests.fake_slurm import FakeSlurm, Job, short_looks, slurm_in_memory
from tests.made_runs import CAUSE, another_attempt, made, says

__all__ = ["short_looks", "slurm_in_memory"]
pytestmark = pytest.mark.usefixtures("slurm_in_memory", "short_looks")

NAMES = (
    "supervisor.log",
    "trainer.0.log",
    "trainer.1.log",
    "trainer.10.log",
    "trainer.srun.log",
    "rollout_000.0.log",
    "rollout_000.1.0.log",
    "rollout_000.server.log",
    "controller.0.log",
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return made(tmp_path / "run", "failed", cause=CAUSE)


def write(run: RunDir, **texts: str) -> None:
    """`trainer_0="..."` is the text of trainer.0.log."""
    for name, text in texts.items():
        (run.logs / f"{name.replace('__', '.')}.log").write_text(text)


def lines(run: RunDir, *words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert logs.main([str(run.root), *words]) == 0
    return capsys.readouterr().out.splitlines()


# ---- files ---------------------------------------------------------------------------------------------------------------


def test_files_are_known_by_their_names(tmp_path: Path) -> None:
    for name in (*NAMES, "core.1234", "notes.txt"):
        (tmp_path / name).write_text("")

    assert [file.prefix for file in log_files(tmp_path)] == [
        "supervisor",
        "controller.0",
        "rollout_000.0",
        "rollout_000.server",
        "rollout_000#1.0",
        "trainer.0",
        "trainer.1",
        "trainer.10",
        "trainer.srun",
    ]


@pytest.mark.parametrize(
    ("who", "rank", "wanted"),
    [
        ("trainer", None, ["trainer.0", "trainer.1", "trainer.10", "trainer.srun"]),
        ("trainer", 1, ["trainer.1"]),
        ("rollout", None, ["rollout_000.0", "rollout_000.server", "rollout_000#1.0"]),
        ("rollout_000", None, ["rollout_000.0", "rollout_000.server", "rollout_000#1.0"]),
        ("server", None, ["rollout_000.server"]),
        ("rollout_000.server", None, ["rollout_000.server"]),
        ("supervisor", None, ["supervisor"]),
        ("rollout_00", None, []),
    ],
)
def test_a_role_a_step_or_one_file_is_chosen(tmp_path: Path, who: str, rank: int | None, wanted: list[str]) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("")

    assert [file.prefix for file in chosen(log_files(tmp_path), who, rank)] == wanted


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=30), max_size=40),
    st.one_of(st.none(), st.integers(0, 50)),
    st.integers(1, 64),
)
def test_the_last_lines_are_those_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, written: list[str], count: int | None, block: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "x.log"
    path.write_bytes("".join(f"{line}\n" for line in written).encode() + b"unfinished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launch.log_files.BLOCK_BYTES", block)
        found, offset = last_lines(path, count)

    assert found == (written if count is None else written[len(written) - min(count, len(written)) :])
    assert offset == path.stat().st_size - len("unfinished")


def test_of_a_big_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    with open(path, "wb") as out:
        out.truncate(20 << 30)  # sparse
        out.seek(0, os.SEEK_END)
        out.write(b"\nfirst\nlast\n")
    started_s = time.process_time()

    assert last_lines(path, 2)[0] == ["first", "last"]
    assert time.process_time() - started_s < 1.0


def test_an_unfinished_last_line_is_shown_when_nothing_is_read_later(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, trainer__0="whole\nSegmentation fau")

    assert lines(run, "trainer", capsys=capsys) == ["trainer.0 | whole", "trainer.0 | Segmentation fau"]


def test_a_progress_bar_is_shown_in_its_last_state(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, trainer__0="load 1/9\rload 5/9\rload 9/9\ndone\n")

    assert lines(run, "trainer", capsys=capsys) == ["trainer.0 | load 9/9", "trainer.0 | done"]


def test_bytes_that_are_no_text_do_not_end_the_view(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    (run.logs / "trainer.0.log").write_bytes(b"\xff\xfe loss\n")

    assert "loss" in lines(run, "trainer", capsys=capsys)[0]


# ---- times ---------------------------------------------------------------------------------------------------------------

NEAR = datetime(2026, 11, 30, 0, 0, 40).timestamp()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("submitit INFO (2026-11-30 00:00:35,829) - Starting", datetime(2026, 11, 30, 0, 0, 35, 829000)),
        ("(MainProcess pid=14237) WARNING 11-30 00:00:42 [arg_utils.py:1945] seed", datetime(2026, 11, 30, 0, 0, 42)),
        ("00:00:35 phase phase=starting", datetime(2026, 11, 30, 0, 0, 35)),
        ("23:59:59 step name=trainer", datetime(2026, 11, 29, 23, 59, 59)),
        ("slurmstepd: error: *** JOB 41 ON n0 CANCELLED AT 2026-11-30T00:01:00 ***", datetime(2026, 11, 30, 0, 1)),
        ("step 3/10 reward 0.5", None),
        ("took 00:00:35 in all", None),
        ("99:99:99 nonsense", None),
    ],
)
def test_times_of_lines(line: str, wanted: datetime | None) -> None:
    assert line_time(line, NEAR) == (wanted.timestamp() if wanted else None)


def part(name: str, *written: str) -> Part:
    return Part(LogFile(Path(name), name), written, NEAR)


def test_lines_are_merged_by_time_and_keep_their_order_within_a_file() -> None:
    trainer = part("trainer", "no time yet", "00:00:01 a", "  of a", "00:00:03 c", "00:00:02 clock went back")
    other = part("rollout", "00:00:02 b")

    assert [line.text for line in merged([trainer, other])] == [
        "no time yet",
        "00:00:01 a",
        "  of a",
        "00:00:02 b",
        "00:00:03 c",
        "00:00:02 clock went back",
    ]


def test_a_file_without_times_stands_where_it_was_changed_last() -> None:
    silent = [Part(LogFile(Path(name), name), (f"{name}1",), NEAR + after) for name, after in [("x", 9), ("y", -9)]]

    found = merged([part("trainer", "00:00:35 early", "00:00:45 late"), *silent])

    assert [line.text for line in found] == ["y1", "00:00:35 early", "00:00:45 late", "x1"]


@given(
    st.lists(
        st.lists(st.one_of(st.just("text"), st.times().map(lambda t: f"{t:%H:%M:%S} line")), max_size=8), max_size=4
    )
)
def test_merging_loses_nothing_and_never_reorders_a_file(files: list[list[str]]) -> None:
    parts = [part(f"step_{number}", *written) for number, written in enumerate(files)]
    found = list(merged(parts))

    for each in parts:
        assert [line.text for line in found if line.file == each.file] == list(each.lines)


# ---- the command ---------------------------------------------------------------------------------------------------------


def test_every_line_has_whose_it_is(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, supervisor="00:00:01 phase\n", trainer__0="00:00:02 x\n", rollout_000__server="00:00:03 y\n")

    assert lines(run, capsys=capsys) == [
        "supervisor         | 00:00:01 phase",
        "trainer.0          | 00:00:02 x",
        "rollout_000.server | 00:00:03 y",
    ]


@pytest.mark.parametrize(("count", "wanted"), [("2", 2), ("0", 0), ("all", 6)])
def test_n_counts_the_lines_of_all_files_together(
    run: RunDir, count: str, wanted: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run, trainer__0="a\nb\nc\n", trainer__1="d\ne\nf\n")

    assert len(lines(run, "-n", count, capsys=capsys)) == wanted


def test_an_earlier_attempt_can_be_read(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, trainer__0="of the first\n")
    later = another_attempt(run)
    write(later, trainer__0="of the second\n")

    assert lines(run, "trainer", "--attempt", "0", capsys=capsys) == ["trainer.0 | of the first"]
    assert lines(run, "trainer", capsys=capsys) == ["trainer.0 | of the second"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainr"], r"no log of 'trainr'; there is rollout, rollout_000, server, trainer"),
        (["trainer", "--rank", "7"], "no rank 7 of trainer; ranks: 0 to 1"),
        (["--attempt", "3"], "has no attempt 3; attempts: 0"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(run: RunDir, words: list[str], said: str) -> None:
    write(run, trainer__0="", trainer__1="", rollout_000__server="")

    with pytest.raises(NoSuchLogError, match=said) as caught:
        logs.main([str(run.root), *words])

    assert caught.value.exit_code == 2


def test_a_run_that_has_not_written_anything_says_so(run: RunDir) -> None:
    with pytest.raises(NoSuchLogError, match="has no log yet"):
        logs.main([str(run.root)])


# ---- following -----------------------------------------------------------------------------------------------------------


def followed(run: RunDir, *events: Callable[[], object], who: str = "") -> list[str]:
    """What -f shows while one event happens at each look; then the run must have ended."""
    shown: list[str] = []
    script = list(events)
    reader = Reader(run.logs, Selection(who), shown.append)
    reader.tail(10, unfinished=False)

    def sleep(_seconds: float) -> None:
        if script:
            script.pop(0)()

    logs.follow(Folder.at(run.root), reader, goes_on=True, sleep=sleep)
    return shown


def add(run: RunDir, name: str, text: str) -> Callable[[], object]:
    def write() -> None:
        with open(run.logs / name, "a") as out:
            out.write(text)

    return write


@pytest.fixture
def alive(tmp_path: Path) -> RunDir:
    return made(tmp_path / "run", "running")


def test_new_lines_and_new_files_are_shown_until_the_last_word(alive: RunDir) -> None:
    write(alive, trainer__0="old\n")

    shown = followed(
        alive,
        add(alive, "trainer.0.log", "new\nhal"),
        add(alive, "trainer.0.log", "f\n"),
        add(alive, "rollout_000.0.log", "here\n"),
        lambda: says(alive, "succeeded"),
        add(alive, "trainer.0.log", "last wor"),
    )

    assert [line.partition("| ")[2] for line in shown] == ["old", "new", "half", "here", "last wor"]


def test_a_log_that_was_cut_is_read_from_its_beginning(alive: RunDir) -> None:
    write(alive, trainer__0="one\ntwo\nthree\n")

    shown = followed(alive, lambda: write(alive, trainer__0="new\n"), lambda: says(alive, "succeeded"))

    assert shown[-1] == "trainer.0 | new"


def test_the_view_goes_on_with_the_next_attempt(alive: RunDir) -> None:
    write(alive, trainer__0="00:00:02 a\n", supervisor="00:00:01 batch\n")

    def restart() -> None:
        says(alive, "requeued")
        later = another_attempt(alive, "requeue")
        (later.logs / "supervisor.log").symlink_to(alive.logs / "supervisor.log")
        write(later, trainer__0="b\n")
        says(later, "succeeded")

    shown = followed(alive, restart)

    assert [line.partition("| ")[2] or line for line in shown] == [
        "00:00:01 batch",
        "00:00:02 a",
        "---- attempt 1 ----",
        "b",
    ]


def test_following_ends_when_the_job_is_gone(
    alive: RunDir, slurm_in_memory: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm_in_memory.jobs[41] = Job("NODE_FAIL")
    monkeypatch.setattr(logs, "SILENT_S", -1.0)

    assert followed(alive, add(alive, "trainer.0.log", "x\n")) == ["trainer.0 | x"]


def test_ctrl_c_ends_the_view_without_a_stack_trace(alive: RunDir) -> None:
    write(alive, trainer__0="up\n")
    command = [sys.executable, "-u", "-m", "launch.logs", str(alive.root), "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trainer.0 | up\n"
        process.send_signal(2)
        _, errors = process.communicate(timeout=20)

    assert process.returncode == 130
    assert errors == ""


def test_a_reader_that_leaves_is_no_error(run: RunDir) -> None:
    write(run, trainer__0="line\n" * (2 * BLOCK_BYTES // 5))
    command = f"{sys.executable} -m launch.logs {run.root} -n all | head -1; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (141, "trainer.0 | line\n", "")
