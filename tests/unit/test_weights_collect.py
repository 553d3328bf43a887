"""Collection: nothing grows without bound, nothing in use is deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.context import StageContext
from stages.rundir import FencedError, RunDir
from stages.weights.apply import write_prepared
from stages.weights.collect import collect, drop_versions, sweep_leftovers
from tests.delta_kit import publish_chain, publish_next, sparse_publisher, start_tensors
from tests.weights_kit import Answers, as_writer, make_context, publish_full, register


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


@pytest.fixture(autouse=True)
def on_any_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is kept to be written over: tests/unit/test_weights_spares.py."""
    monkeypatch.setattr("stages.weights.spares.is_quicker_written_over", lambda folder: False)


@pytest.fixture
def context(run: RunDir) -> StageContext:
    return make_context(run)


def publish_versions(run: RunDir, *versions: int, refreshed: bool = True) -> None:
    for version in versions:
        publish_full(run, version)
        run.write(run.request_json(version), {"version": version})
        if refreshed:
            run.write(run.refreshed_json(version), {"version": version})


def add_batch(run: RunDir, step: int, trained: bool) -> None:
    with run.publishing(run.batch(step)) as publication:
        publication.commit({"step": step})
    if trained:
        run.write(run.batch(step) / "trained.json", {"step": step})


def test_the_newest_versions_stay(run: RunDir, context: StageContext) -> None:
    publish_versions(run, 0, 1, 2, 3)

    collected = collect(context)

    assert collected.versions == (0, 1)
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]


def test_a_leased_or_served_version_stays(run: RunDir, context: StageContext) -> None:
    publish_versions(run, 0, 1, 2, 3, 4)
    register(run, "rollout_000", version=1, leases=())
    register(run, "rollout_001", version=3, leases=(0,))

    assert collect(context).versions == (2,)
    register(run, "rollout_000", version=4)
    register(run, "rollout_001", version=4)
    assert collect(context).versions == (0, 1)


def test_what_the_kept_versions_are_deltas_of_stays(run: RunDir, context: StageContext) -> None:
    publish_chain(run, 4)
    with sparse_publisher(run) as publisher:
        for version in (4, 5, 6):
            publish_next(publisher, version, start_tensors())

    assert collect(context).versions == (0, 1, 2, 3)
    assert sorted(run.published_versions()) == [4, 5, 6]


def test_what_a_leased_version_is_a_delta_of_stays(run: RunDir, context: StageContext) -> None:
    publish_chain(run, 4)
    publish_versions(run, 4, 5, 6)
    register(run, "rollout_000", version=6, leases=(2,))
    register(run, "rollout_001", version=6)

    assert collect(context).versions == (3, 4)
    register(run, "rollout_000", version=6)
    assert collect(context).versions == (0, 1, 2)


def test_a_base_of_a_version_that_is_leased_while_it_is_collected_keeps_its_name(
    run: RunDir, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_chain(run, 3)
    publish_versions(run, 3, 4)
    rename = os.rename

    def lease_first(old: Path, new: Path) -> None:
        register(run, "rollout_000", version=4, leases=(2,))
        rename(old, new)

    monkeypatch.setattr(os, "rename", lease_first)

    assert collect(context).versions == ()
    assert sorted(run.published_versions()) == [0, 1, 2, 3, 4]


def test_a_damaged_manifest_of_a_kept_version_stops_the_collection_of_what_may_be_its_base(
    run: RunDir, context: StageContext
) -> None:
    publish_versions(run, 0, 1, 2, 3)
    (run.weights_version(2) / "manifest.json").write_text("{")

    collected = collect(context)

    assert collected.versions == ()
    assert "v000002" in " ".join(collected.left_alone)


def test_leases_of_an_older_attempt_are_void(run: RunDir) -> None:
    publish_versions(run, 0, 1, 2)
    register(run, "rollout_000", leases=(0,))
    run.start_attempt(1)

    assert collect(make_context(RunDir.open(run.root, writer="trainer"))).versions == (0,)


def test_a_requested_version_stays_until_all_have_proved_it(run: RunDir, context: StageContext) -> None:
    publish_versions(run, 0, refreshed=False)
    publish_versions(run, 1, 2, 3)

    assert collect(context).versions == (1,)
    run.write(run.refreshed_json(0), {"version": 0})
    assert collect(context).versions == (0,)


def test_a_damaged_registration_stops_collection_rather_than_lifting_its_lease_or_ending_the_run(
    run: RunDir, context: StageContext
) -> None:
    publish_versions(run, 0, 1, 2)
    run.write(run.instance_json("rollout_000"), {"leases": [0]})

    collected = collect(context)

    assert collected.versions == ()
    assert "registration of rollout_000" in collected.left_alone[0]
    assert sorted(run.published_versions()) == [0, 1, 2]


def test_what_a_crash_left_of_a_registration_stops_collection_as_well(run: RunDir, context: StageContext) -> None:
    publish_versions(run, 0, 1, 2)
    run.instance_json("rollout_000").touch()

    collected = collect(context)

    assert collected.versions == ()
    assert "rollout_000.json is not JSON" in collected.left_alone[0]


def test_a_foreign_file_among_the_registrations_stops_nothing(run: RunDir, context: StageContext) -> None:
    publish_versions(run, 0, 1, 2)
    (run.instances / "notes.json").write_text("not a registration")

    assert collect(context).versions == (0,)


def make_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def make_file(path: Path, outside: Path) -> None:
    path.write_text("not a version")


def make_dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "nowhere")


@pytest.mark.parametrize("make", [make_link, make_file, make_dangling_link])
@pytest.mark.parametrize("folder", ["weights/v000000", "weights/.v000007.trash-ab", "batches/step_000000"])
def test_what_somebody_put_there_is_left_alone_and_ends_no_run(
    run: RunDir, context: StageContext, tmp_path: Path, make: Callable[[Path, Path], None], folder: str
) -> None:
    publish_versions(run, 1, 2, 3)
    context.config.weights.keep_batches = 4
    for step in range(1, 6):
        add_batch(run, step, trained=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "trained.json").write_text("{}")
    make(run.root / folder, outside)

    collected = collect(context)

    assert collected.versions == (1,)
    assert collected.batches == (1,)
    assert (outside / "trained.json").read_text() == "{}"
    assert collect(context).versions == ()


def test_a_version_that_cannot_be_deleted_is_named_and_goes_later(
    run: RunDir, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(run, 1, 2, 3)

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "not yours", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("stages.weights.collect.remove_tree", refuse)
        collected = collect(context)

    assert collected.versions == (1,)
    assert "not yours" in collected.left_alone[0]
    assert collect(context).leftovers[0].startswith(".v000001.trash-")


def test_a_version_that_is_leased_while_it_is_collected_keeps_its_name(
    run: RunDir, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(run, 1, 2, 3)
    rename = os.rename

    def lease_first(old: Path, new: Path) -> None:
        if Path(old).name == "v000001":
            register(run, "rollout_001", leases=(1,))
        rename(old, new)

    monkeypatch.setattr(os, "rename", lease_first)

    assert collect(context).versions == ()
    assert sorted(run.published_versions()) == [1, 2, 3]


def test_a_collection_that_a_newer_attempt_overtakes_gives_the_version_back(
    run: RunDir, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_versions(run, 1, 2, 3)
    rename = os.rename

    def start_first(old: Path, new: Path) -> None:
        if Path(old).name == "v000001":
            run.start_attempt(1)
        rename(old, new)

    monkeypatch.setattr(os, "rename", start_first)

    with pytest.raises(FencedError):
        collect(context)

    assert sorted(run.published_versions()) == [1, 2, 3]


def test_a_record_that_this_process_is_writing_is_no_leftover(run: RunDir, context: StageContext) -> None:
    swept: list[tuple[str, ...]] = []
    replace = os.replace

    def sweep_first(source: Path, target: Path) -> None:
        swept.append(sweep_leftovers(run, run.weights))
        replace(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", sweep_first)
        run.write(run.latest_json, {"version": 1})

    assert swept == [()]
    assert os.listdir(run.weights) == ["LATEST.json"]


def test_versions_of_an_attempt_that_got_further_than_its_checkpoint_go(run: RunDir) -> None:
    publish_versions(run, 8, 9, 10, 11, 12)
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")
    publish_versions(later, 10)

    collected = collect(make_context(later))

    assert collected.versions == (8, 11, 12)
    assert sorted(later.published_versions()) == [9, 10]


def test_before_the_first_version_there_is_nothing_to_collect(context: StageContext) -> None:
    assert collect(context).versions == ()


def test_old_trained_batches_go_and_untrained_ones_stay(run: RunDir, context: StageContext) -> None:
    context.config.weights.keep_batches = 4
    for step in range(8):
        add_batch(run, step, trained=step not in (1, 7))

    assert collect(context).batches == (0, 2, 3)
    assert sorted(run.published_batches()) == [1, 4, 5, 6, 7]


def test_batches_that_a_checkpoint_may_need_stay(run: RunDir, context: StageContext) -> None:
    context.config.weights.keep_batches = 4
    for step in range(8):
        add_batch(run, step, trained=True)

    assert collect(context, batches_before=2).batches == (0, 1)
    assert collect(context, batches_before=99).batches == (2, 3)


def test_versions_beyond_the_step_to_go_on_from_are_dropped_with_their_pointer_and_leases(run: RunDir) -> None:
    publish_versions(run, 2, 3, 4)
    register(run, "rollout_000", version=4, leases=(4,))
    run.start_attempt(1)
    later = as_writer(RunDir.open(run.root, writer="trainer"), "trainer")

    assert drop_versions(later, newer_than=2) == (3, 4)
    assert os.listdir(run.weights) == ["v000002"]


def test_a_pointer_to_a_version_that_stays_stays(run: RunDir) -> None:
    publish_versions(run, 2, 3)

    assert drop_versions(run, newer_than=3) == ()
    assert sorted(os.listdir(run.weights)) == ["LATEST.json", "v000002", "v000003"]


def test_only_the_newest_attempt_drops_versions(run: RunDir) -> None:
    publish_versions(run, 2)
    run.start_attempt(1)

    with pytest.raises(FencedError):
        drop_versions(run, newer_than=0)


def test_old_requests_and_results_go_and_acks_stay(run: RunDir, context: StageContext) -> None:
    context.config.weights.keep_records = 2
    publish_versions(run, 0, 1, 2, 3)
    for version in range(4):
        manifest = publish_full(as_writer(run, "trainer"), version + 100)
        write_prepared(run, Answers(run, manifest).prepared("rollout_000"))

    collected = collect(context)

    assert len(collected.records) == 4
    assert sorted(os.listdir(run.requests)) == ["v000002.json", "v000003.json"]
    assert sorted(os.listdir(run.refreshed)) == ["v000002.json", "v000003.json"]
    assert len(os.listdir(run.acks(0).parent)) == 4


def test_leftovers_of_killed_processes_are_swept_but_not_those_of_living_ones(run: RunDir) -> None:
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")
    for name in (
        ".v000001.tmp-0-ab",
        ".v000001.tmp-1-ab",
        ".v000002.trash-ab",
        ".v000003.spare-0-ab",
        ".v000003.spare-1-ab",
        ".keep",
    ):
        (run.weights / name).mkdir()
    (run.weights / ".LATEST.json.0123abcd.tmp").touch()

    swept = sweep_leftovers(later, run.weights)

    assert swept == (".LATEST.json.0123abcd.tmp", ".v000001.tmp-0-ab", ".v000002.trash-ab", ".v000003.spare-0-ab")
    assert sorted(os.listdir(run.weights)) == [".keep", ".v000001.tmp-1-ab", ".v000003.spare-1-ab"]


def test_an_older_attempt_deletes_nothing(run: RunDir, context: StageContext) -> None:
    publish_versions(run, 0, 1, 2)
    run.start_attempt(1)

    with pytest.raises(FencedError):
        collect(context)

    assert sorted(run.published_versions()) == [0, 1, 2]
