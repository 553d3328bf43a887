"""The instance's side of the protocol: find the request, answer with one new file each for prepared, loaded or refused."""

from __future__ import annotations

import re

from stages.files import list_names, make_directory
from stages.rundir import RunDir
from stages.weights.records import Loaded, Nack, Prepared, RefreshRequest

_REQUEST_NAME = re.compile(r"^v(\d{6,})\.json$")


def pending_request(run: RunDir, instance: str, newer_than: int) -> RefreshRequest | None:
    """The newest request of this attempt for a version above `newer_than` that names `instance`; None when there is none.

    Requests that an older attempt or another run left behind do not count. Raises RecordError for a damaged request.
    """
    versions = (int(match[1]) for name in list_names(run.requests) if (match := _REQUEST_NAME.match(name)))
    for version in sorted((version for version in versions if version > newer_than), reverse=True):
        record = run.read(run.request_json(version))
        if record is None:
            continue
        request = RefreshRequest.from_record(record, f"request for version {version}")
        if request.version == version and instance in request.instances:
            return request
    return None


def write_prepared(run: RunDir, prepared: Prepared) -> None:
    _answer(run, prepared, "prepared")


def write_loaded(run: RunDir, loaded: Loaded) -> None:
    _answer(run, loaded, "loaded")


def write_nack(run: RunDir, nack: Nack) -> None:
    _answer(run, nack, "nack")


def _answer(run: RunDir, record: Prepared | Loaded | Nack, phase: str) -> None:
    """Refuses (RecordError) what the trainer would refuse, so that a wrong answer fails where it was made."""
    payload = record.to_record()
    type(record).from_record(payload, f"{phase} of {record.instance} for version {record.version}")
    make_directory(run.acks(record.version))
    run.write(run.ack_json(record.version, record.instance, phase), payload)
