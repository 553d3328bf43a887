"""The doctor's job: what it asks for, its script, its way through the queue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch import slurm
from launch.compose import compose
from launch.doctor import examine, job
from launch.doctor.commands import Answer
from launch.doctor.examine import Wish, make_order, why_local
from launch.doctor.inside.driver import longest_s
from launch.doctor.order import FULL, QUICK, Order, read_order
from launch.slurm import ComponentState
from stages.files import make_directory, write_json_atomic
from tests.doctor_kit import slurm_facts

# ---- what is asked for -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, has_sbatch, answers, wanted",
    [
        ("auto", True, True, ("", False)),
        ("slurm", True, True, ("", False)),
        ("local", True, True, ("launch.mode=local", False)),
        ("auto", False, False, ("sbatch is not on PATH", False)),
        ("slurm", False, False, ("sbatch is not on PATH", True)),
        ("auto", True, False, ("sbatch is here, and no controller answers (scontrol ping)", True)),
    ],
)
def test_a_missing_slurm_is_wrong_only_where_there_should_be_one(
    mode: str, has_sbatch: bool, answers: bool, wanted: tuple[str, bool]
) -> None:
    assert why_local(mode, has_sbatch, lambda: answers) == wanted


def test_the_quick_mode_asks_for_little_and_the_full_one_for_whole_nodes(tmp_path: Path) -> None:
    facts = slurm_facts()
    big = replace(facts, nodes=tuple(replace(node, cpus=64, gres="gpu:h100:8") for node in facts.nodes))
    wish = Wish(LibraConfig())

    full = make_order(wish, tmp_path / ".libra-doctor-ab", big)
    quick = make_order(replace(wish, quick=True), tmp_path / ".libra-doctor-ab", big)

    assert (full.nodes, full.cpus, full.gpus, full.mem_bytes, full.limits) == (2, 64, 8, 0, FULL)
    assert (quick.nodes, quick.cpus, quick.gpus, quick.mem_bytes, quick.limits) == (2, 4, 2, 2**30, QUICK)
    assert (quick.step_cpus, full.step_cpus, quick.token) == (2, 64, "ab")


def test_steps_get_whole_cores(tmp_path: Path) -> None:
    facts = slurm_facts()
    threaded = replace(facts, nodes=tuple(replace(node, cpus=64, threads=2) for node in facts.nodes))

    order = make_order(Wish(LibraConfig(), quick=True), tmp_path / "x", threaded)

    assert (order.cpus, order.step_cpus, order.threads) == (8, 4, 2)


def test_a_container_stands_around_the_python_of_steps_only(tmp_path: Path) -> None:
    config = compose(["launch.prefix=[apptainer,exec,x.sif]", "launch.python=/inside/python"])

    order = make_order(Wish(config), tmp_path / "x", slurm_facts())

    assert order.python == "/inside/python"
    assert order.around.prefix("trainer") == ("apptainer", "exec", "x.sif")
    assert f"exec {sys.executable} -u" in job.script(order, config)


def test_another_way_to_ask_for_gpus_is_tried_when_sbatch_refuses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(arguments: Sequence[str]) -> Answer:
        if "--gpus-per-node=2" in Path(arguments[-1]).read_text():
            return Answer(1, "", "sbatch: error: Invalid Trackable RESource (TRES) specification")
        return Answer(0, "12")

    fake_sbatch(monkeypatch, answer)
    order = order_with_driver(tmp_path)

    tried, submitted, refused = examine._submit(order, LibraConfig(), slurm_facts(), print)

    assert isinstance(submitted, job.Submitted)
    assert tried.gpu_flag == read_order(order.path).gpu_flag == "gres"
    assert list(refused) == ["gpus-per-node"]


def test_a_refusal_for_another_reason_is_told_in_the_words_for_what_was_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sbatch(monkeypatch, lambda arguments: Answer(1, "", "sbatch: error: Invalid account"))

    _, submitted, refused = examine._submit(order_with_driver(tmp_path), LibraConfig(), slurm_facts(), print)

    assert submitted == "sbatch: error: Invalid account"
    assert set(refused) == {"gpus-per-node", "gres"}, "'none' would be accepted for want of any demand"


def test_the_smallest_usable_node_decides(tmp_path: Path) -> None:
    facts = slurm_facts()
    nodes = (replace(facts.nodes[0], cpus=2), replace(facts.nodes[1], cpus=1, state="DOWN"))

    order = make_order(Wish(LibraConfig()), tmp_path / "x", replace(facts, nodes=nodes))

    assert (order.nodes, order.cpus) == (2 if len([n for n in nodes if n.is_usable]) > 1 else 1, 2)


def script_lines(tmp_path: Path, *overrides: str, most_min: int | None = None) -> list[str]:
    order = make_order(Wish(compose(overrides), quick=True), tmp_path / "x", slurm_facts())
    return job.script(order, compose(overrides), most_min).splitlines()


def test_the_job_is_submitted_as_a_run_is(tmp_path: Path) -> None:
    lines = script_lines(
        tmp_path,
        "slurm.partition=gpu",
        "slurm.account=lab",
        "slurm.extra=['--constraint=ib']",
        "launch.setup=[module x]",
    )

    for wanted in ("#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --constraint=ib", "module x"):
        assert wanted in lines
    assert lines[-1] == f"exec {sys.executable} -u -m launch.doctor.inside.driver {tmp_path / 'x'}"


def test_the_job_asks_for_no_more_time_than_the_partition_gives(tmp_path: Path) -> None:
    assert f"#SBATCH --time={int(longest_s(QUICK) // 60) + 2}" in script_lines(tmp_path)
    assert "#SBATCH --time=1" in script_lines(tmp_path, most_min=1)


def test_the_trial_is_a_hetjob_with_a_step_on_each_component(tmp_path: Path) -> None:
    order = make_order(Wish(LibraConfig()), tmp_path / "x", slurm_facts())

    text = job.trial_script(order, LibraConfig())

    assert text.count("#SBATCH hetjob") == 1
    assert "--het-group=0" in text
    assert "--het-group=1" in text


# ---- the job's way -----------------------------------------------------------------------------------------------------------------


def states(monkeypatch: pytest.MonkeyPatch, *words: tuple[str, str]) -> list[int]:
    """Slurm will say these (state, reason), the last one for ever; what is cancelled is returned."""
    left, cancelled = list(words), list[int]()

    def query(job_id: int) -> list[ComponentState]:
        if cancelled:
            return [ComponentState(job_id, 0, "CANCELLED")]
        state, reason = left.pop(0) if len(left) > 1 else left[0]
        return [ComponentState(job_id, 0, state, reason)]

    monkeypatch.setattr(slurm, "query", query)
    monkeypatch.setattr(slurm, "cancel_job", cancelled.append)
    monkeypatch.setattr(job, "POLL_FIRST_S", 0.001)
    monkeypatch.setattr(job, "POLL_LAST_S", 0.002)
    return cancelled


def order_with_driver(tmp_path: Path, **driver: object) -> Order:
    order = make_order(Wish(LibraConfig(), quick=True), tmp_path / "x", slurm_facts())
    make_directory(order.reports)
    if driver:
        write_json_atomic(order.reports / "driver.json", driver)
    return order


def test_a_job_that_does_not_start_is_cancelled_and_its_reason_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = states(monkeypatch, ("PENDING", "Priority"))
    said: list[str] = []

    story = job.follow(job.Submitted(7, "to start at noon", said.append), order_with_driver(tmp_path), 0.01)

    assert (story.state, cancelled) == ("PENDING", [7])
    assert "(Priority), and was cancelled; before: to start at noon" in story.trouble
    assert said == ["job 7 waits: Priority"]


def test_a_job_that_reports_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = states(monkeypatch, ("PENDING", ""), ("RUNNING", ""), ("RUNNING", ""), ("COMPLETED", ""))
    order = order_with_driver(tmp_path, nodes=["n0", "n1"], done=True, doing="measuring")
    said: list[str] = []

    story = job.follow(job.Submitted(7, "", said.append), order, 60.0)

    assert (story.state, story.nodes, story.trouble, cancelled) == ("COMPLETED", ("n0", "n1"), "", [])
    assert said == ["job 7: measuring"]


@pytest.mark.parametrize(
    "driver, log, words",
    [
        ({}, "", "is this folder there on the nodes"),
        ({}, "exec: /env/python: not found\n", "before its first word: exec: /env/python: not found"),
        ({"doing": "measuring on the nodes", "nodes": ["n0"]}, "boom\n", "while measuring on the nodes: boom"),
    ],
)
def test_a_job_that_ends_early_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: dict[str, object], log: str, words: str
) -> None:
    states(monkeypatch, ("FAILED", "NonZeroExitCode"))
    order = order_with_driver(tmp_path, **driver)
    (order.path / "job.log").write_text(log)

    story = job.follow(job.Submitted(7, "", lambda text: None), order, 60.0)

    assert story.state == "FAILED"
    assert words in story.trouble


def test_an_interrupted_wait_cancels_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = states(monkeypatch, ("RUNNING", ""))

    def interrupt(_order: object) -> dict[str, object]:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "_driver", interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.follow(job.Submitted(7, "", lambda text: None), order_with_driver(tmp_path), 60.0)

    assert cancelled == [7]


def fake_sbatch(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Sequence[str]], Answer]) -> None:
    monkeypatch.setattr(job, "ask", lambda arguments, deadline_s: answer(arguments))


def test_what_sbatch_refuses_is_told_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sbatch(monkeypatch, lambda arguments: Answer(1, "", "sbatch: error: Invalid account\n"))

    assert job.submit(tmp_path / "job.sbatch", "#!/bin/bash\n", print) == "sbatch: error: Invalid account"


@pytest.mark.parametrize("printed", ["12\n", "12;cluster\n"])
def test_the_job_id_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    fake_sbatch(monkeypatch, lambda arguments: Answer(0, printed if "--parsable" in arguments else "", ""))

    submitted = job.submit(tmp_path / "job.sbatch", "#!/bin/bash\n", print)

    assert isinstance(submitted, job.Submitted)
    assert submitted.job_id == 12


def test_one_node_cannot_have_a_hetjob(tmp_path: Path) -> None:
    story = job.try_hetjob(order_with_driver(tmp_path), LibraConfig(), 1, 1.0, print)

    assert story.allowed is None
