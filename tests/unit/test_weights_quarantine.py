"""A refresh goes on without instances that fail, as long as enough prove the version, and takes them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stages.context import StageContext
from stages.desired import DesiredState, StepSpec, write_desired
from stages.rundir import RunDir
from stages.weights import refresh
from stages.weights.apply import write_nack
from stages.weights.errors import WeightRefreshError
from stages.weights.manifest import Manifest
from stages.weights.records import Nack
from stages.weights.refresh import request_refresh
from tests.weights_kit import Answers, Refuser, as_writer, make_context, publish_full, register

NAMES = ("rollout_000", "rollout_001", "rollout_002")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "RETRY_PAUSES_S", (0.01, 0.01))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


@pytest.fixture
def context(run: RunDir) -> StageContext:
    """Two of three instances are enough."""
    for name in NAMES:
        register(run, name)
    context = make_context(run, NAMES)
    context.config.rollout.min_instances = 2
    context.config.weights.refresh_timeout_s = context.config.weights.refresh_floor_s = 10
    return context


def supervised(run: RunDir) -> None:
    """A supervisor that starts each instance again when it fails."""
    step = StepSpec("", "rollout", 0, 0, 1, 1, 1, 1, 0, restart="replace", max_restarts=3)
    steps = tuple(replace(step, name=name) for name in NAMES)
    write_desired(as_writer(run, "launcher"), DesiredState("run", steps))


def refresh_to(
    context: StageContext, version: int, *sound: str, check: Callable[[Answers], None] | None = None
) -> None:
    """The next version, answered at once by the instances in `sound`; `check` plays the others."""
    answers = Answers(context.run, publish_full(context.run, version))
    for name in sound:
        register(context.run, name, version=version)
        answers.write(name)
    playing = None if check is None else (lambda: check(answers))
    request_refresh(context, answers.manifest, NAMES, publish_s=0.0, check=playing)


def quarantined(run: RunDir, version: int) -> dict[str, str]:
    record = run.read(run.refreshed_json(version))
    assert record is not None
    assert set(record["instances"]) == set(NAMES) - set(record["quarantined"])
    found: dict[str, str] = record["quarantined"]
    return found


def refusing(name: str, *, gives_in_after: int = 99) -> Callable[[Answers], None]:
    refusers: list[Refuser] = []

    def check(answers: Answers) -> None:
        refusers[:] = refusers or [Refuser(answers, name, gives_in_after)]
        refusers[0]()

    return check


@pytest.mark.exercises("rollout.min_instances")
def test_one_that_refuses_also_when_asked_again_is_quarantined(context: StageContext) -> None:
    refresh_to(context, 3, "rollout_000", "rollout_001", check=refusing("rollout_002"))

    assert "digest differs" in quarantined(context.run, 3)["rollout_002"]
    assert "asked again 2 times" in quarantined(context.run, 3)["rollout_002"]


def test_one_that_gives_in_when_asked_again_is_not(context: StageContext) -> None:
    refresh_to(context, 3, "rollout_000", "rollout_001", check=refusing("rollout_002", gives_in_after=2))

    assert quarantined(context.run, 3) == {}


def test_one_that_falls_silent_is_quarantined(context: StageContext) -> None:
    context.config.rollout.heartbeat_timeout_s = 0.05

    refresh_to(context, 3, "rollout_000", "rollout_001")

    assert "has not moved its heartbeat" in quarantined(context.run, 3)["rollout_002"]


@pytest.mark.exercises("weights.refresh_timeout_s")
def test_one_that_is_late_is_quarantined(context: StageContext) -> None:
    context.config.weights.refresh_timeout_s = 0.05

    refresh_to(context, 3, "rollout_000", "rollout_001")

    assert "no ACK from rollout_002 within 0.1 s" in quarantined(context.run, 3)["rollout_002"]


def test_one_that_ends_to_be_started_again_is_not_waited_for(context: StageContext) -> None:
    supervised(context.run)

    def dies(answers: Answers) -> None:
        nack = Nack("rollout_002", 3, answers.manifest.digest, "proof", "log-probs differ", -1)
        write_nack(as_writer(context.run, "rollout_002"), nack)

    refresh_to(context, 3, "rollout_000", "rollout_001", check=dies)

    assert "log-probs differ" in quarantined(context.run, 3)["rollout_002"]


def test_a_replacement_that_is_still_starting_is_not_waited_for(context: StageContext) -> None:
    supervised(context.run)
    register(context.run, "rollout_002", incarnation=1, state="starting")

    refresh_to(context, 3, "rollout_000", "rollout_001")

    assert "start 1 of instance rollout_002" in quarantined(context.run, 3)["rollout_002"]


def test_one_that_is_still_behind_is_not_waited_for_again(context: StageContext) -> None:
    context.config.weights.refresh_timeout_s = 0.05
    refresh_to(context, 3, "rollout_000", "rollout_001")
    context.config.weights.refresh_timeout_s = 1e6

    refresh_to(context, 4, "rollout_000", "rollout_001")

    assert quarantined(context.run, 4) == {"rollout_002": "instance rollout_002 has not proved version 3 either"}


def test_one_that_has_caught_up_is_waited_for_again(context: StageContext) -> None:
    context.config.weights.refresh_timeout_s = 0.05
    refresh_to(context, 3, "rollout_000", "rollout_001")
    register(context.run, "rollout_002", version=3)
    context.config.weights.refresh_timeout_s = 10
    answered: list[Answers] = []

    def answer_late(answers: Answers) -> None:
        answered.append(answers)
        if len(answered) == 3:
            answers.write("rollout_002")

    refresh_to(context, 4, "rollout_000", "rollout_001", check=answer_late)

    assert quarantined(context.run, 4) == {}


def test_it_is_said_once_who_is_quarantined_and_who_is_back(
    context: StageContext, capsys: pytest.CaptureFixture[str]
) -> None:
    context.config.weights.refresh_timeout_s = 0.05
    for version in (3, 4):
        refresh_to(context, version, "rollout_000", "rollout_001")
    refresh_to(context, 5, *NAMES)

    lines = [line for line in capsys.readouterr().out.splitlines() if "rollout_002" in line]
    assert len(lines) == 2
    assert lines[0].startswith("rollout_002 is quarantined at version 3: no ACK")
    assert lines[1] == "rollout_002 is back at version 5"


@pytest.mark.exercises("rollout.min_instances")
def test_too_few_end_the_run_with_the_reason_of_each_that_failed(context: StageContext) -> None:
    context.config.weights.refresh_timeout_s = 0.5

    with pytest.raises(WeightRefreshError) as caught:
        refresh_to(context, 3, "rollout_000", check=refusing("rollout_002"))

    assert caught.value.instances == ("rollout_001", "rollout_002")
    assert "digest differs" in str(caught.value)
    assert "rollout_001: no answer" in str(caught.value)


def test_where_no_instance_can_be_spared_its_replacement_is_waited_for(context: StageContext) -> None:
    supervised(context.run)
    context.config.rollout.min_instances = 3
    register(context.run, "rollout_002", incarnation=1, state="starting")
    looks: list[Manifest] = []

    def answer_late(answers: Answers) -> None:
        looks.append(answers.manifest)
        if len(looks) == 3:
            answers.write("rollout_002")

    refresh_to(context, 3, "rollout_000", "rollout_001", check=answer_late)

    assert quarantined(context.run, 3) == {}


def test_quarantine_does_not_outlive_an_attempt(context: StageContext) -> None:
    context.config.weights.refresh_timeout_s = 0.05
    refresh_to(context, 3, "rollout_000", "rollout_001")
    context.run.start_attempt(1)
    later = make_context(as_writer(RunDir.open(context.run.root, writer="trainer"), "trainer"), NAMES)
    later.config.rollout.min_instances = 2
    later.config.weights.refresh_timeout_s = 0.05

    refresh_to(later, 4, "rollout_000", "rollout_001")

    assert "no ACK" in quarantined(later.run, 4)["rollout_002"]  # it was waited for
