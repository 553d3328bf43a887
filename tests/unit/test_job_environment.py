"""Variables of a Slurm job with values that Slurm would not set: every reader says which one, what it holds and what was wanted."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stages
from launch import again, slurm
from launch.allocation import held, is_inside
from launch.compose import draft
from launch.errors import RunFailedError
from launch.executors import SubmitError, submit
from launch.job_environment import AllocationError, JobEnvironment
from launch.settle import settle
from launch.srun import Allocation
from launch.supervise import supervise
from stages.rollout.address import NoAddressError, listen_address
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan, fake_run

ORDINARY = {
    "ENVIRONMENT": "BATCH",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_ACCOUNT": "lab",
    "SLURM_JOB_CPUS_PER_NODE": "96",
    "SLURM_JOB_ID": "55",
    "SLURM_JOB_NODELIST": "gpu07",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_QOS": "long",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_STEP_ID": "-5",
}
HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "53",
    "SLURM_RESTART_COUNT": "0",
    "SLURM_STEPID": "-5",
    **{
        f"{name}_HET_GROUP_{index}": value
        for index in range(2)
        for name, value in {
            "SLURM_GPUS_PER_NODE": "2",
            "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
            "SLURM_JOB_ID": str(53 + index),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_PARTITION": "big",
        }.items()
    },
}
ONE_NODE = {"SLURM_HET_SIZE": "1", "SLURM_JOB_NUM_NODES": "1"}
OLD_NAME = {"SLURM_NNODES": "1"}

COUNTS = [
    "x",
    "-7",
    "1.5",
    "1e3",
    "0x2",
    "+1",
    " 1",
    "1_0",
    "٣",
    "²",
    "9" * 5000,
    "4294967296",
    "1;2",
    "${HOME}",
    "None",
    "(null)",
]
LISTS = [
    "[",
    "]",
    "node[",
    "node[a]",
    "node[3-1]",
    "node[0-99999999]",
    "a[1-9999]b[1-9999]",
    ",",
    " ",
    "node[]",
    "node[1-]",
]
GARBAGE = {
    "SLURM_HET_SIZE": [*COUNTS, "129", "2000000000"],
    "SLURM_RESTART_COUNT": COUNTS,
    "SLURM_STEP_ID": ["x", "--5", "1.5", "5-", "²", "9" * 5000, "-", "4294967296", "0 "],
    "SLURM_JOB_ID": [*COUNTS, "0", "55_3", "55.0"],
    "SLURM_JOB_NODELIST": LISTS,
    "SLURM_JOB_CPUS_PER_NODE": [*(set(COUNTS) - {"4294967296"}), "0", "2(x", "2(x2),", ",2", "(x2)", "2(x2),0", "2x2"],
    "SLURM_GPUS_PER_NODE": [
        "x",
        "h100",
        "h100:",
        ":x",
        "-1",
        "8.5",
        "²",
        "9" * 5000,
        "h100:8,",
        "8 gpus",
        "8(S:0-1)",
        " ",
    ],
    "SLURM_GPUS_ON_NODE": COUNTS,
    "SLURM_JOB_PARTITION": ["a b", "a\n#SBATCH --nodes=9", "a\x1b[2J", "'", '"', "\\"],
    "SLURM_JOB_NUM_NODES": sorted(set(COUNTS) - {"4294967296"}),
}
GARBAGE["SLURM_STEPID"] = GARBAGE["SLURM_STEP_ID"]
GARBAGE["SLURM_JOB_ACCOUNT"] = GARBAGE["SLURM_JOB_QOS"] = GARBAGE["SLURM_JOB_PARTITION"]
GARBAGE["SLURM_NNODES"] = GARBAGE["SLURM_JOB_NUM_NODES"]


def silent(command: object) -> str:
    raise slurm.SlurmCommandError("scontrol did not answer within 10 s")


def from_shell(environ: Mapping[str, str]) -> object:
    return is_inside(environ) and held(environ, silent)


def listening(environ: Mapping[str, str]) -> object:
    return listen_address(environ)


READERS: list[tuple[Callable[[Mapping[str, str]], object], dict[str, str]]] = [
    (from_shell, ORDINARY),
    (from_shell, HET),
    (Allocation.from_environment, ORDINARY),
    (Allocation.from_environment, HET),
    (listening, ONE_NODE),
    (listening, OLD_NAME),
]
MEANINGLESS = {"ENVIRONMENT", "LIBRA_STEP_ID", "SUBMITIT_EXECUTOR"}
"""Asked for one value, or for being there at all: everything else is an answer too."""


class Recorder(dict[str, str]):
    """An environment that remembers which of its variables were read."""

    def __init__(self, values: Mapping[str, str]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return super().__contains__(name)


def kind(name: str) -> str:
    return name.partition("_HET_GROUP_")[0]


def read_by(reader: Callable[[Mapping[str, str]], object], environ: Mapping[str, str]) -> set[str]:
    """The variables with a value that `reader` looks at."""
    recorder = Recorder(environ)
    reader(recorder)
    return (recorder.read & set(environ)) - MEANINGLESS


def cases() -> list[Any]:
    return [
        pytest.param(reader, environ, name, id=f"{getattr(reader, '__name__', reader)}-{number}-{name}")
        for number, (reader, environ) in enumerate(READERS)
        for name in sorted(read_by(reader, environ))
    ]


@pytest.mark.parametrize("reader, environ, name", cases())
def test_a_value_that_slurm_would_not_set_is_named_with_what_was_wanted(
    reader: Callable[[Mapping[str, str]], object], environ: dict[str, str], name: str
) -> None:
    for value in GARBAGE[kind(name)]:
        if reader is listening and re.fullmatch("[0-9]{1,10}", value):
            continue  # many nodes are many nodes
        with pytest.raises((AllocationError, NoAddressError)) as caught:
            reader(environ | {name: value})

        words = str(caught.value)
        assert f"{name} is " in words or f"{name} of this step is " in words, value
        assert "wanted is " in words, value
        assert "\n" not in words, value
        assert len(words) < 700, value
        assert value[:10].encode("unicode_escape").decode() in words.replace("\\\\", "\\") or value[:10] in words


def test_the_cases_are_all_the_variables_that_are_read() -> None:
    read = set().union(*(read_by(reader, environ) for reader, environ in READERS))

    assert {kind(name) for name in read} == set(GARBAGE)


@pytest.mark.parametrize("name", ["SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE"])
def test_what_cannot_be_missing_is_said_to_be_missing(name: str) -> None:
    for environ in (ORDINARY | {name: ""}, {key: value for key, value in ORDINARY.items() if key != name}):
        with pytest.raises(AllocationError, match=f"{name} is not set, wanted is"):
            held(environ, silent)


def test_an_empty_variable_is_as_good_as_none() -> None:
    empty = dict.fromkeys(("SLURM_HET_SIZE", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "SLURM_JOB_QOS"), "")

    found = held(ORDINARY | empty, silent)

    assert (found.restarts, found.qos, len(found.given.components)) == (0, "", 1)
    assert not is_inside({"SLURM_JOB_ID": ""})


@pytest.mark.parametrize("value, count", [(None, 0), ("", 0), ("1", 1), ("12", 12)])
def test_slurm_tells_how_often_it_has_run_the_job(value: str | None, count: int) -> None:
    assert JobEnvironment({} if value is None else {"SLURM_RESTART_COUNT": value}).restarts == count


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*range(len(READERS))]),
    st.data(),
    st.one_of(
        st.text(max_size=20).filter(lambda text: "\0" not in text),
        st.from_regex(r"(node|gpu:|h100[:=])?[\[\]0-9,x()\-]{0,12}", fullmatch=True),
    ),
)
def test_no_value_at_all_gives_anything_but_an_answer_or_a_named_error(
    which: int, data: st.DataObject, value: str
) -> None:
    reader, environ = READERS[which]
    name = data.draw(st.sampled_from(sorted(environ)))

    try:
        reader(environ | {name: value})
    except (AllocationError, NoAddressError) as error:
        said = str(error)
    else:
        said = ""

    assert not said or any(words in said for words in (name, "has no address", "GPUs the nodes of job"))


def test_what_scontrol_says_may_be_odd_too() -> None:
    odd = "JobId=55 HetJobOffset=x Nodes=node[ CPU_IDs=0 Mem=1 GRES=gpu:1"

    assert held(ORDINARY, lambda command: odd).given.components[0].gpus_per_node == 8
    without = {name: value for name, value in ORDINARY.items() if "GPUS" not in name}
    with pytest.raises(AllocationError, match="cannot be told: what scontrol shows of job 55 cannot be read"):
        held(without, lambda command: odd)


def test_nothing_else_makes_a_number_of_a_variable() -> None:
    """But for the one that a supervisor sets itself, for each of its steps."""
    house = Path(stages.__file__).parents[1]
    files = [file for folder in ("launch", "stages", "planner", "traces") for file in (house / folder).rglob("*.py")]
    pattern = re.compile(r"\bint\((?!os\.environ\.get\(INCARNATION_VARIABLE)[^()]*environ\w*[.\[]")

    assert [str(file.relative_to(house)) for file in files if pattern.search(file.read_text())] == []


# ---- where it is said -----------------------------------------------------------------------------------------------

ODD = ORDINARY | {"SLURM_RESTART_COUNT": "often"}


@pytest.mark.parametrize("name, value", [("SLURM_RESTART_COUNT", "often"), ("SLURM_STEP_ID", "x")])
def test_a_command_line_inside_such_a_job_has_one_more_conflict(name: str, value: str) -> None:
    composed = settle(draft(["+experiment=demo", "cluster=slurm"]), environ=ORDINARY | {name: value})

    assert any(f"{name} is '{value}'" in conflict for conflict in composed.conflicts)


@pytest.mark.parametrize("word", ["launch.mode=local", "launch.mode=slurm"])
def test_a_run_that_does_not_want_the_job_does_not_mind(word: str) -> None:
    assert settle(draft(["+experiment=demo", "cluster=slurm", word]), environ=ODD).conflicts == ()


def with_environment(monkeypatch: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_submission_inside_such_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_environment(monkeypatch, ODD)
    monkeypatch.setattr("launch.slurm.command", silent)
    config = fake_config()
    config.launch.mode = "allocation"

    with pytest.raises(SubmitError, match="SLURM_RESTART_COUNT is 'often'"):
        submit(config, fake_plan(), RunDir.create(tmp_path / "run"))


def test_a_batch_script_that_runs_again_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_environment(monkeypatch, ODD)
    monkeypatch.setattr("launch.slurm.command", silent)
    config = fake_config()
    config.launch.mode = "allocation"

    class Prepared:
        pass

    Prepared.config = config  # type: ignore[attr-defined]
    with pytest.raises(AllocationError, match="SLURM_RESTART_COUNT is 'often'"):
        again.go_on(Prepared(), lambda *_: None)  # type: ignore[arg-type]


def test_a_supervisor_in_such_a_job_records_it_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_run(tmp_path / "run", fake_config(), fake_plan())
    with_environment(monkeypatch, ORDINARY | {"SLURM_RESTART_COUNT": "", "SLURM_JOB_NODELIST": "node["})
    monkeypatch.setattr(
        "launch.supervise.submitit.JobEnvironment", lambda: SimpleNamespace(cluster="slurm", job_id="55")
    )
    monkeypatch.setattr("launch.supervise.Interruption.install", lambda interruption: None)
    monkeypatch.setattr("launch.supervise.os.umask", lambda mask: 0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    with pytest.raises(RunFailedError, match=r"supervisor: .* SLURM_JOB_NODELIST is 'node\['"):
        supervise(str(run.root), 0)

    state = run.read(run.state_json)
    assert state is not None
    assert (state["phase"], state["cause"]["kind"]) == ("failed", "environment")
