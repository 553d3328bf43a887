"""The instance's side: which request it takes, and which answers it may not write."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.rundir import RunDir
from stages.weights.apply import REREAD_S, Requests, pending_request, write_loaded, write_nack
from stages.weights.errors import RecordError
from stages.weights.instances import InstanceStatus, read_status, read_statuses
from stages.weights.records import Nack, RefreshRequest
from tests.weights_kit import Answers, as_writer, make_status, publish_full, register


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return as_writer(RunDir.create(tmp_path / "run"), "trainer")


def ask(run: RunDir, version: int, **changes: Any) -> None:
    request = RefreshRequest(
        version=version,
        path=f"weights/v{version:06d}",
        digest="ab" * 16,
        method="inplace",
        strategy="parallel",
        instances=("rollout_000", "rollout_001"),
        deadline_s=60.0,
        time=1.0,
    )
    run.write(run.request_json(version), replace(request, **changes).to_record())


def test_without_a_request_there_is_nothing_to_do(run: RunDir) -> None:
    assert pending_request(run, "rollout_000", -1) is None


def test_the_newest_request_is_taken_and_older_ones_are_skipped(run: RunDir) -> None:
    for version in (0, 2, 1):
        ask(run, version)

    request = pending_request(run, "rollout_000", -1)

    assert request is not None
    assert request.version == 2


def test_a_request_that_was_written_anew_under_its_old_inode_number_is_found_a_little_later(run: RunDir) -> None:
    now_s = [0.0]
    requests = Requests(run, "rollout_000", clock=lambda: now_s[0])
    ask(run, 2)
    first = requests.newest(-1)
    assert first is not None
    inode = run.request_json(2).stat().st_ino
    with run.request_json(2).open("r+") as handle:  # in place, as a new file with a number that was used before
        record = json.loads(handle.read())
        handle.seek(0)
        json.dump({**record, "retries": {"rollout_000": 1}}, handle)
        handle.truncate()
    assert run.request_json(2).stat().st_ino == inode

    now_s[0] = REREAD_S
    again = requests.newest(-1)

    assert again is not None
    assert (first.retries, again.retries) == ({}, {"rollout_000": 1})


def test_a_request_is_read_once_and_again_when_it_was_written_anew(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(run, 2)
    requests = Requests(run, "rollout_000")
    reads: list[Path] = []
    read_inode = RunDir.read_inode

    def counted(self: RunDir, path: Path, **options: Any) -> tuple[int, dict[str, Any] | None]:
        reads.append(path)
        return read_inode(self, path, **options)

    monkeypatch.setattr(RunDir, "read_inode", counted)

    found = [requests.newest(-1) for _ in range(3)]
    ask(run, 2, retries={"rollout_000": 1})
    found += [requests.newest(-1) for _ in range(3)]

    assert [request.retries for request in found if request is not None] == [{}] * 3 + [{"rollout_000": 1}] * 3
    assert len(reads) == 2


def test_a_version_already_served_is_no_request(run: RunDir) -> None:
    ask(run, 2)

    assert pending_request(run, "rollout_000", newer_than=2) is None
    assert pending_request(run, "rollout_000", newer_than=1) is not None


def test_a_request_to_others_is_no_request(run: RunDir) -> None:
    ask(run, 2)

    assert pending_request(run, "rollout_002", -1) is None


def test_a_request_left_by_an_older_attempt_is_not_obeyed_though_it_is_newer(run: RunDir) -> None:
    ask(run, 9)
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")
    ask(later, 5)

    request = pending_request(later, "rollout_000", -1)

    assert request is not None
    assert request.version == 5


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"path": "../other/weights/v000002"}, "path"),
        ({"path": "weights/v000001"}, "path"),
        ({"instances": ("rollout_001", "rollout_000")}, "instances"),
        ({"instances": ()}, "instances"),
        ({"method": "exec"}, "method"),
        ({"digest": ""}, "digest"),
        ({"deadline_s": -1.0}, "deadline_s"),
    ],
)
def test_an_unsound_request_is_an_error_that_names_the_field(run: RunDir, changes: dict[str, Any], field: str) -> None:
    ask(run, 2, **changes)

    with pytest.raises(RecordError, match=f"request for version 2: field '{field}'"):
        pending_request(run, "rollout_000", -1)


def test_an_answer_that_the_trainer_would_refuse_fails_where_it_is_made(run: RunDir) -> None:
    answers = Answers(run, publish_full(run, 1))

    with pytest.raises(RecordError, match="paused_s"):
        write_loaded(run, replace(answers.loaded("rollout_000"), paused_s=9.0))
    with pytest.raises(RecordError, match="phase"):
        write_nack(run, Nack("rollout_000", 1, "ab", "unknown phase", "error", 0))

    assert not run.acks(1).exists()


def test_the_protocol_needs_no_torch() -> None:
    modules = ("apply", "collect", "instances", "layout", "manifest", "records", "refresh")
    imports = ", ".join(f"stages.weights.{name}" for name in modules)
    command = [sys.executable, "-c", f"import sys, {imports}; sys.exit('torch' in sys.modules)"]

    assert subprocess.run(command, check=False, timeout=60).returncode == 0


# ---- registration ----------------------------------------------------------------------------------


def test_a_registration_survives_its_record(run: RunDir) -> None:
    register(run, "rollout_000", version=4, manifest_digest="ab", leases=(3, 4))

    assert read_status(run, "rollout_000") == make_status("rollout_000", version=4, manifest_digest="ab", leases=(3, 4))
    assert list(read_statuses(run)) == ["rollout_000"]


def test_registrations_of_an_older_attempt_do_not_count(run: RunDir) -> None:
    register(run, "rollout_000")
    run.start_attempt(1)
    later = RunDir.open(run.root, writer="trainer")

    assert read_status(later, "rollout_000") is None
    assert read_statuses(later) == {}


def test_a_registration_with_a_wrong_field_is_an_error() -> None:
    record = {**make_status("rollout_000").to_record(), "leases": ["3"]}

    with pytest.raises(RecordError, match="leases"):
        InstanceStatus.from_record(record, "registration")
