"""The trainer believes only a complete set of ACKs, each field of which is right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from launch.desired_steps import desired_steps
from stages.context import StageContext, StoppedError
from stages.desired import write_desired
from stages.members import write_given_up
from stages.rundir import RunDir
from stages.weights import refresh
from stages.weights.apply import write_loaded, write_nack, write_prepared
from stages.weights.errors import WeightRefreshError
from stages.weights.manifest import Manifest
from stages.weights.records import Loaded, Nack, Prepared
from stages.weights.refresh import request_refresh
from tests.delta_kit import publish_chain
from tests.fake_runs import fake_config, fake_plan
from tests.weights_kit import INSTANCES, Answers, Refuser, as_writer, make_context, publish_full, register


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


@pytest.fixture
def manifest(run: RunDir) -> Manifest:
    return publish_full(run, 3)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresh, "RETRY_PAUSES_S", (0.01, 0.01))


@pytest.fixture
def context(run: RunDir) -> StageContext:
    for instance in INSTANCES:
        register(run, instance)
    return make_context(run)


@pytest.fixture
def answers(run: RunDir, manifest: Manifest) -> Answers:
    return Answers(run, manifest)


def write_raw(run: RunDir, record: Prepared | Loaded, phase: str, **changes: Any) -> None:
    """An answer as a faulty instance might write it."""
    path = run.ack_json(record.version, record.instance, phase)
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = {**record.to_record(), **changes}
    as_writer(run, record.instance).write(path, {key: value for key, value in payload.items() if value is not ...})


def test_a_complete_set_of_acks_is_a_refresh(run: RunDir, context: StageContext, answers: Answers) -> None:
    answers.write("rollout_000", total_reload_s=1.5)
    answers.write("rollout_001", total_reload_s=2.5)

    result = request_refresh(context, answers.manifest, INSTANCES, publish_s=0.25)

    assert result.slowest["instance"] == "rollout_001"
    assert result.slowest["total_reload_s"] == 2.5
    assert result.slowest["paused_s"] == 0.05
    record = run.read(run.refreshed_json(3))
    assert record is not None
    assert (record["version"], record["digest"], record["publish_s"]) == (3, answers.manifest.digest, 0.25)
    assert record["instances"] == list(INSTANCES)
    assert 0 <= record["refresh_s"] < 5


def test_a_delta_says_nothing_about_the_rate_of_whole_versions(run: RunDir, context: StageContext) -> None:
    manifests, _ = publish_chain(run, 3)
    rates = []
    for manifest, reload_s in zip(manifests, (2.0, 0.5, 0.5), strict=True):
        for instance in INSTANCES:
            Answers(run, manifest).write(instance, total_reload_s=reload_s)
        rates.append(request_refresh(context, manifest, INSTANCES, publish_s=0.0).slowest_bytes_per_s)

    assert rates == [manifests[0].weight_bytes / 2.0] * 3


@pytest.mark.exercises("rollout_weight_sync_mode")
def test_the_request_names_version_folder_digest_and_the_sorted_instances(
    run: RunDir, context: StageContext, answers: Answers
) -> None:
    for instance in INSTANCES:
        answers.write(instance)

    request_refresh(context, answers.manifest, ("rollout_001", "rollout_000"), publish_s=0.0)

    request = run.read(run.request_json(3))
    assert request is not None
    assert (request["version"], request["path"], request["digest"]) == (3, "weights/v000003", answers.manifest.digest)
    assert (request["method"], request["strategy"]) == ("inplace", "parallel")
    assert request["instances"] == ["rollout_000", "rollout_001"]


@pytest.mark.exercises("rollout_weight_reload_method", "rollout_weight_reload_strategy")
@pytest.mark.parametrize(
    ("method", "strategy"), [("restart", "serial"), ("inplace", "serial"), ("restart", "parallel")]
)
def test_the_request_names_the_method_and_the_strategy_of_the_run(
    run: RunDir, context: StageContext, answers: Answers, method: str, strategy: str
) -> None:
    context.config.rollout_weight_reload_method = method
    context.config.rollout_weight_reload_strategy = strategy

    with pytest.raises(WeightRefreshError):  # nobody answers
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    request = run.read(run.request_json(3))
    assert request is not None
    assert (request["method"], request["strategy"]) == (method, strategy)


def test_answers_that_come_later_are_waited_for(context: StageContext, answers: Answers) -> None:
    context.config.weights.refresh_timeout_s = 30
    answers.write("rollout_000")
    late = threading.Timer(0.1, answers.write, ["rollout_001"])
    late.start()

    result = request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    late.join()
    assert result.refresh_s >= 0.05


def test_a_missing_ack_names_its_instance_and_how_far_it_got(
    run: RunDir, context: StageContext, answers: Answers
) -> None:
    answers.write("rollout_000")
    write_prepared(as_writer(run, "rollout_001"), answers.prepared("rollout_001"))

    with pytest.raises(
        WeightRefreshError, match=r"rollout_001: prepared, not loaded; limit: weights\.refresh"
    ) as caught:
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    assert caught.value.instances == ("rollout_001",)
    assert run.read(run.refreshed_json(3)) is None


def test_loaded_without_prepared_is_no_ack(run: RunDir, context: StageContext, answers: Answers) -> None:
    answers.write("rollout_000")
    write_loaded(as_writer(run, "rollout_001"), answers.loaded("rollout_001"))

    with pytest.raises(WeightRefreshError, match="rollout_001: no answer"):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


def test_refusals_end_the_wait_and_name_instance_tensor_and_error(context: StageContext, answers: Answers) -> None:
    context.config.weights.refresh_timeout_s = 10
    refuser = Refuser(answers, "rollout_001")

    with pytest.raises(WeightRefreshError) as caught:
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0, check=refuser)

    message = str(caught.value)
    assert "rollout_001" in message
    assert "rollout_000" not in message
    assert "tensor model.embed: digest differs (it serves version 2)" in message
    assert refuser.told == [0, 1, 2]


def test_answers_of_an_older_attempt_do_not_count(run: RunDir, answers: Answers) -> None:
    for instance in INSTANCES:
        answers.write(instance)
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")
    for instance in INSTANCES:
        register(later, instance)

    with pytest.raises(WeightRefreshError, match="rollout_000: no answer, rollout_001: no answer"):
        request_refresh(make_context(later), answers.manifest, INSTANCES, publish_s=0.0)


def test_answers_of_another_run_do_not_count(run: RunDir, context: StageContext, tmp_path: Path) -> None:
    other = as_writer(RunDir.create(tmp_path / "other"), "trainer")
    manifest = publish_full(run, 3)
    for instance in INSTANCES:
        Answers(other, manifest).write(instance)
    run.acks(3).parent.mkdir()
    other.acks(3).rename(run.acks(3))

    with pytest.raises(WeightRefreshError, match="no answer"):
        request_refresh(context, manifest, INSTANCES, publish_s=0.0)


def test_a_refusal_left_by_an_older_attempt_is_not_heard(run: RunDir, answers: Answers) -> None:
    nack = Nack("rollout_000", 3, answers.manifest.digest, "proof", "wrong", 2)
    write_nack(as_writer(run, "rollout_000"), nack)
    run.start_attempt(1)
    later = as_writer(RunDir.open(run.root, writer="trainer"), "trainer")
    for instance in INSTANCES:
        Answers(later, answers.manifest).write(instance)

    result = request_refresh(make_context(later), answers.manifest, INSTANCES, publish_s=0.0)

    assert result.version == 3


WRONG_LOADED = [
    ("instance", "rollout_001"),
    ("version", 2),
    ("version", "3"),
    ("version", True),
    ("digest", "0" * 32),
    ("digest", None),
    ("method", "restart"),
    ("method", "copy"),
    ("strategy", "serial"),
    ("strategy", ""),
    ("lock_wait_s", -0.1),
    ("lock_wait_s", "0"),
    ("process_stop_s", float("nan")),
    ("process_stop_s", 99.0),
    ("model_load_s", None),
    ("model_load_s", 1.1),
    ("total_reload_s", float("inf")),
    ("total_reload_s", True),
    ("paused_s", 1.5),
    ("prepare_s", [0.1]),
    ("host", ""),
    ("host", 7),
    ("server_response", "ok"),
    ("proof", None),
    ("proof", {"max_difference": 0.0, "tolerance": 1e-3}),
    ("unknown", 1),
]


@pytest.mark.parametrize("field, value", WRONG_LOADED)
def test_an_ack_with_a_wrong_field_is_refused_by_the_name_of_the_field(
    run: RunDir, context: StageContext, answers: Answers, field: str, value: Any
) -> None:
    answers.write("rollout_001")
    write_prepared(as_writer(run, "rollout_000"), answers.prepared("rollout_000"))
    write_raw(run, answers.loaded("rollout_000"), "loaded", **{field: value})

    with pytest.raises(WeightRefreshError, match=field) as caught:
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    assert caught.value.instances == ("rollout_000",)
    assert run.read(run.refreshed_json(3)) is None


@pytest.mark.parametrize("field", [name for name in Loaded.__dataclass_fields__])
def test_an_ack_without_a_field_is_refused_by_the_name_of_the_field(
    run: RunDir, context: StageContext, answers: Answers, field: str
) -> None:
    answers.write("rollout_001")
    write_prepared(as_writer(run, "rollout_000"), answers.prepared("rollout_000"))
    write_raw(run, answers.loaded("rollout_000"), "loaded", **{field: ...})

    with pytest.raises(WeightRefreshError, match=f"field '{field}': missing"):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


@pytest.mark.parametrize(
    "proof, field",
    [
        ({"max_difference": 0.5, "tolerance": 1e-3, "tokens": 2}, "max_difference"),
        ({"max_difference": 0.5, "tolerance": 1.0, "tokens": 2}, r"proof\.tolerance"),
        ({"max_difference": 0.0, "tolerance": 1e-3, "tokens": 1}, r"proof\.tokens"),
        ({"max_difference": float("nan"), "tolerance": 1e-3, "tokens": 2}, "max_difference"),
    ],
)
def test_a_proof_that_proves_too_little_is_refused(
    run: RunDir, context: StageContext, answers: Answers, proof: dict[str, float], field: str
) -> None:
    write_prepared(as_writer(run, "rollout_000"), answers.prepared("rollout_000"))
    write_raw(run, answers.loaded("rollout_000"), "loaded", proof=proof)

    with pytest.raises(WeightRefreshError, match=field):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


@pytest.mark.parametrize(
    "field, value", [("bytes", 5), ("digest", "0"), ("version", 4), ("prepare_s", -1), ("host", "")]
)
def test_a_wrong_prepared_is_refused(
    run: RunDir, context: StageContext, answers: Answers, field: str, value: Any
) -> None:
    write_raw(run, answers.prepared("rollout_000"), "prepared", **{field: value})

    with pytest.raises(WeightRefreshError, match=field):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


def test_an_ack_written_by_someone_else_is_refused(run: RunDir, context: StageContext, answers: Answers) -> None:
    write_prepared(as_writer(run, "rollout_001"), answers.prepared("rollout_000"))

    with pytest.raises(WeightRefreshError, match="writer"):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


@pytest.mark.parametrize("content", ["", "\0\0", "{"])
def test_a_damaged_ack_is_no_answer_and_is_named(
    run: RunDir, context: StageContext, answers: Answers, content: str
) -> None:
    write_prepared(as_writer(run, "rollout_000"), answers.prepared("rollout_000"))
    run.ack_json(3, "rollout_000", "loaded").write_text(content)

    with pytest.raises(WeightRefreshError, match=r"rollout_000: prepared, not loaded, for .*loaded.json is not JSON"):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


def test_an_instance_that_fell_silent_ends_the_wait(context: StageContext, answers: Answers) -> None:
    context.config.weights.refresh_timeout_s = 10
    context.config.rollout.heartbeat_timeout_s = 0.05
    answers.write("rollout_000")

    with pytest.raises(WeightRefreshError, match=r"rollout_00\d \(last state 'ready'\) has not moved its heartbeat"):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


def test_a_request_to_stop_ends_the_wait(context: StageContext, answers: Answers) -> None:
    context.config.weights.refresh_timeout_s = 10
    context.stop.set()

    with pytest.raises(StoppedError):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)


def test_a_server_that_has_yet_to_start_gets_the_time_to_start(run: RunDir, answers: Answers) -> None:
    register(run, "rollout_000", state="starting")
    register(run, "rollout_001")
    context = make_context(run)
    context.config.rollout.ready_timeout_s = 300
    for instance in INSTANCES:
        answers.write(instance)

    request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    request = run.read(run.request_json(3))
    assert request is not None
    assert request["deadline_s"] == pytest.approx(300.05)


def supervised(run: RunDir) -> None:
    """A supervisor that replaces instances, as the desired state says."""
    write_desired(as_writer(run, "launcher"), desired_steps(fake_config(), fake_plan()))


def test_an_instance_that_gave_up_on_a_version_is_waited_for_as_its_replacement(
    run: RunDir, context: StageContext, answers: Answers
) -> None:
    supervised(run)
    context.config.weights.refresh_timeout_s = 30
    answers.write("rollout_000")
    nack = Nack("rollout_001", 3, answers.manifest.digest, "proof", "log-probs differ", -1)
    write_nack(as_writer(run, "rollout_001"), nack)
    replacement = threading.Timer(0.3, answers.write, ["rollout_001"])
    replacement.start()

    result = request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    replacement.join()
    assert result.instances == INSTANCES


def test_a_refusal_of_an_instance_that_goes_on_ends_the_wait_also_where_instances_are_replaced(
    run: RunDir, context: StageContext, answers: Answers
) -> None:
    supervised(run)
    context.config.weights.refresh_timeout_s = 10
    answers.write("rollout_000")

    with pytest.raises(WeightRefreshError, match="digest differs"):
        request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0, check=Refuser(answers, "rollout_001"))


def test_an_instance_that_was_given_up_meanwhile_is_not_waited_for(
    run: RunDir, context: StageContext, answers: Answers
) -> None:
    supervised(run)
    context.config.weights.refresh_timeout_s = 30
    context.config.rollout.heartbeat_timeout_s = 1.0
    answers.write("rollout_000")
    lost = threading.Timer(0.2, write_given_up, [as_writer(run, "supervisor"), {"rollout_001": "its node failed"}])
    lost.start()

    result = request_refresh(context, answers.manifest, INSTANCES, publish_s=0.0)

    lost.join()
    assert result.instances == ("rollout_000",)
