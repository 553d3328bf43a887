"""stages.rundir: one test for each rule of the run directory."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.files import read_json, write_json_atomic
from stages.rundir import (
    FencedError,
    OutsideRunError,
    RunDir,
    RunDirectoryError,
    RunInUseError,
    RunNotFoundError,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def next_attempt(run: RunDir) -> RunDir:
    run.start_attempt(run.attempt + 1)
    return RunDir.open(run.root, writer=run.writer)


# ---- making and opening ------------------------------------------------------------------------------------------


def test_nobody_else_can_enter_any_directory_of_a_new_run(run: RunDir) -> None:
    folders = [run.root, *(path for path in run.root.rglob("*") if path.is_dir())]

    assert len(folders) > 8
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_an_empty_open_directory_is_closed_when_it_becomes_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)

    run = RunDir.create(tmp_path / "run")

    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700


def test_a_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()

    with pytest.raises(RunInUseError, match=r"launch\.run_dir"):
        RunDir.create(tmp_path)


def test_of_two_launchers_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    start = threading.Barrier(4, timeout=10)

    def create() -> bool:
        start.wait()
        try:
            RunDir.create(tmp_path / "run")
        except RunInUseError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        made = [future.result() for future in [pool.submit(create) for _ in range(4)]]

    assert made.count(True) == 1


def test_two_runs_have_different_ids(tmp_path: Path) -> None:
    assert RunDir.create(tmp_path / "a").run_id != RunDir.create(tmp_path / "b").run_id


def test_opening_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"python -m launch"):
        RunDir.open(tmp_path, writer="trainer")


def test_opening_without_attempt_takes_the_newest(run: RunDir) -> None:
    for attempt in (1, 9, 10):
        run.start_attempt(attempt)

    assert RunDir.open(run.root, writer="trainer").attempt == 10
    assert RunDir.open(run.root, writer="trainer", attempt=1).attempt == 1


def test_a_run_of_another_layout_is_refused(run: RunDir) -> None:
    write_json_atomic(run.run_json, {**(read_json(run.run_json) or {}), "schema_version": 2})

    with pytest.raises(RunDirectoryError, match="layout 2"):
        RunDir.open(run.root, writer="trainer")


# ---- records -----------------------------------------------------------------------------------------------------


def test_a_record_carries_run_attempt_sequence_and_writer(run: RunDir) -> None:
    run.write(run.desired_json, {"phase": "run"})
    first = run.read(run.desired_json)
    run.write(run.desired_json, {"phase": "stop"})
    second = run.read(run.desired_json)

    assert first is not None
    assert second is not None
    assert (first["run_id"], first["attempt"], first["writer"]) == (run.run_id, 0, "launcher")
    assert second["sequence"] > first["sequence"]
    assert second["phase"] == "stop"


def test_a_payload_cannot_pose_as_another_attempt(run: RunDir) -> None:
    run.write(run.desired_json, {"attempt": 7, "run_id": "other"})

    record = run.read(run.desired_json)
    assert record is not None
    assert record["attempt"] == 0


def test_a_record_of_another_run_does_not_exist(run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(tmp_path / "other")
    other.write(other.desired_json, {"phase": "stop"})
    os.replace(other.desired_json, run.desired_json)

    assert run.read(run.desired_json) is None
    assert run.read(run.desired_json, any_attempt=True) is None


def test_a_record_of_an_older_attempt_counts_only_as_published_data(run: RunDir) -> None:
    run.write(run.request_json(3), {"version": 3})
    later = next_attempt(run)

    assert later.read(run.request_json(3)) is None
    assert later.read(run.request_json(3), any_attempt=True) is not None


def test_a_writer_of_an_older_attempt_is_fenced_out(run: RunDir) -> None:
    run.write(run.desired_json, {"phase": "run"})
    later = next_attempt(run)
    later.write(run.desired_json, {"phase": "stop"})

    with pytest.raises(FencedError, match=r"attempt 0 .*attempt 1"):
        run.write(run.desired_json, {"phase": "run"})

    record = later.read(run.desired_json)
    assert record is not None
    assert record["phase"] == "stop"


# ---- paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["..", "../other/desired.json", "/etc/passwd", "weights/../../x"])
def test_a_path_outside_the_run_is_refused(run: RunDir, path: str) -> None:
    with pytest.raises(OutsideRunError, match="outside the run"):
        run.inside(path)


def test_a_link_that_leads_out_of_the_run_is_refused(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run.weights / "v000001").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutsideRunError):
        run.inside("weights/v000001/model.safetensors")
    with pytest.raises(OutsideRunError):
        run.write(run.weights_version(1) / "record.json", {})


def test_a_neighbour_whose_name_begins_alike_is_outside(run: RunDir) -> None:
    with pytest.raises(OutsideRunError):
        run.inside(f"../{run.root.name}2/file")


def test_a_run_behind_a_link_is_inside_itself(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.root)
    linked = RunDir.open(tmp_path / "link", writer="trainer")

    linked.write(linked.desired_json, {"phase": "run"})

    assert run.read(run.desired_json) is not None


# ---- publishing a directory --------------------------------------------------------------------------------------


def test_a_directory_has_its_name_only_when_committed(run: RunDir) -> None:
    with run.publishing(run.batch(3)) as publication:
        (publication.path / "data").write_text("x")
        assert run.published_batches() == []
        publication.commit({"step": 3})

    manifest = run.manifest(run.batch(3))
    assert manifest is not None
    assert manifest["step"] == 3
    assert run.published_batches() == [3]
    assert (run.batch(3) / "data").read_text() == "x"
    assert os.listdir(run.batches) == ["step_000003"]


def test_files_are_durable_before_the_name_and_the_name_before_the_end(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename, replace_ = os.fsync, os.rename, os.replace

    def logged_fsync(fd: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def logged_rename(source: Path, target: Path) -> None:
        calls.append(f"rename {Path(target).name}")
        rename(source, target)

    def logged_replace(source: Path, target: Path) -> None:
        calls.append(f"replace {Path(target).name}")
        replace_(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    monkeypatch.setattr(os, "replace", logged_replace)
    with run.publishing(run.weights_version(1)) as publication:
        (publication.path / "data").write_text("x")
        hidden = publication.path.name
        publication.commit({"version": 1}, pointer=(run.latest_json, {"version": 1}))

    named = calls.index("rename v000001")
    assert set(calls[:named]) == {"fsync data", "fsync manifest.json", f"fsync {hidden}"}
    assert calls[named + 2 :] == ["replace LATEST.json", "fsync weights"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_publication_without_commit_leaves_nothing(run: RunDir, fails: bool) -> None:
    def fill() -> None:
        with run.publishing(run.batch(3)) as publication:
            (publication.path / "data").write_text("x")
            if fails:
                raise KeyError("broken")

    if fails:
        with pytest.raises(KeyError):
            fill()
    else:
        fill()

    assert os.listdir(run.batches) == []


@pytest.mark.parametrize("moment", ["fsync", "rename"], ids=["while it flushes", "between its last look and the move"])
def test_what_a_newer_attempt_has_published_keeps_its_name(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    _publish_batch(run, "left over")
    call, newer = getattr(os, moment), list[int]()

    def overtaken(*arguments: Any) -> None:
        if not newer:
            newer.append(run.attempt + 1)
            run.start_attempt(run.attempt + 1)
            _publish_batch(RunDir.open(run.root, writer="trainer"), "new")
        call(*arguments)

    monkeypatch.setattr(os, moment, overtaken)
    with pytest.raises(FencedError):
        _publish_batch(run, "old")

    assert (run.batch(3) / "data").read_text() == "new"
    assert [name for name in os.listdir(run.batches) if not name.startswith(".step_000003.trash-")] == ["step_000003"]


def test_what_a_newer_attempt_has_published_keeps_its_name_where_its_beginning_is_not_seen(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start_attempt(1)
    _publish_batch(RunDir.open(run.root, writer="trainer"), "new")
    monkeypatch.setattr(RunDir, "newest_attempt", lambda _: 0)  # an NFS client remembers the listing for a while

    with pytest.raises(FencedError, match="attempt 1 of"):
        _publish_batch(run, "old")

    assert (run.batch(3) / "data").read_text() == "new"
    assert os.listdir(run.batches) == ["step_000003"]


def test_a_name_taken_by_a_newer_attempt_at_the_last_moment_is_its(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, newer = os.rename, list[int]()

    def overtaken(source: Path, target: Path) -> None:
        if not newer:
            newer.append(1)
            run.start_attempt(1)
            _publish_batch(RunDir.open(run.root, writer="trainer"), "new")
        rename(source, target)

    monkeypatch.setattr(os, "rename", overtaken)
    with pytest.raises(FencedError):
        _publish_batch(run, "old")

    assert (run.batch(3) / "data").read_text() == "new"


def test_a_publication_that_cannot_get_its_name_leaves_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        _publish_batch(run, "new")

    assert os.listdir(run.batches) == []


def test_a_leftover_of_an_older_attempt_gives_way(run: RunDir) -> None:
    _publish_batch(run, "old")
    later = next_attempt(run)

    _publish_batch(later, "new")

    assert (run.batch(3) / "data").read_text() == "new"
    assert os.listdir(run.batches) == ["step_000003"]


def test_a_fenced_writer_publishes_nothing(run: RunDir) -> None:
    later = next_attempt(run)
    _publish_batch(later, "new")

    with pytest.raises(FencedError):
        _publish_batch(run, "old")

    assert (run.batch(3) / "data").read_text() == "new"
    assert os.listdir(run.batches) == ["step_000003"]


def test_a_directory_without_manifest_of_this_run_does_not_exist(run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(tmp_path / "other")
    _publish_batch(other, "theirs")
    run.batch(1).mkdir()
    os.rename(other.batch(3), run.batch(3))

    assert run.manifest(run.batch(1)) is None
    assert run.manifest(run.batch(3)) is None


def test_only_proper_names_count_as_published(run: RunDir) -> None:
    for name in ("v000001", "v1000000", "v12", ".v000002.tmp-0-ab", ".v000003.trash-ab", "LATEST.json", "vx00001"):
        (run.weights / name).mkdir()

    assert sorted(run.published_versions()) == [1, 1000000]


def test_writers_of_one_run_are_told_apart(run: RunDir) -> None:
    replace(run, writer="rollout_000").write(run.instance_json("rollout_000"), {})

    record = run.read(run.instance_json("rollout_000"))
    assert record is not None
    assert record["writer"] == "rollout_000"


def _publish_batch(run: RunDir, content: str) -> None:
    with run.publishing(run.batch(3)) as publication:
        (publication.path / "data").write_text(content)
        publication.commit({"step": 3})
