"""The instance's side of the protocol: find the request, answer with one new file each for prepared, loaded or refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stages.files import DamagedRecordError, list_inodes, list_names, make_directory, wait_for
from stages.rundir import RunDir
from stages.weights.records import Loaded, Nack, Prepared, RefreshRequest

_REQUEST_NAME = re.compile(r"^v(\d{6,})\.json$")
REREAD_S = 5.0
"""A record is read again after so long, whatever its inode number: ext4 hands out the number of a file that was just replaced,
so a request that was written anew twice between two looks may bear its old one.
"""


@dataclass(frozen=True)
class _Seen:
    """`request` is None for one that is not to this instance; `read_s` is on the clock of `Requests`."""

    inode: int
    request: RefreshRequest | None
    read_s: float


@dataclass
class Requests:
    """The requests to one instance. Each look is one listing; a record is read once, and again when it was written anew."""

    run: RunDir
    instance: str
    clock: Callable[[], float] = time.monotonic
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def newest(self, newer_than: int) -> RefreshRequest | None:
        """The newest request of this attempt for a version above `newer_than` that names this instance; None when there is none.

        Requests that an older attempt or another run left behind, and damaged ones, do not count. Raises RecordError for one
        with a wrong field.
        """
        inodes = {
            int(match[1]): inode
            for name, inode in list_inodes(self.run.requests).items()
            if (match := _REQUEST_NAME.match(name)) and int(match[1]) > newer_than
        }
        self._seen = {version: seen for version, seen in self._seen.items() if version in inodes}
        for version in sorted(inodes, reverse=True):
            request = self._read(version, inodes[version])
            if request is not None:
                return request
        return None

    def _read(self, version: int, inode: int) -> RefreshRequest | None:
        seen, now_s = self._seen.get(version), self.clock()
        if seen is not None and inode and seen.inode == inode and now_s < seen.read_s + REREAD_S:
            return seen.request
        read, record = self.run.read_inode(self.run.request_json(version), skip_damaged=True)
        request = None
        if record is not None:
            request = RefreshRequest.from_record(record, f"request for version {version}")
            if request.version != version or self.instance not in request.instances:
                request = None
        self._seen[version] = _Seen(read, request, now_s)
        return request


def pending_request(run: RunDir, instance: str, newer_than: int) -> RefreshRequest | None:
    """One look at the requests: see `Requests.newest`."""
    return Requests(run, instance).newest(newer_than)


def await_version(run: RunDir, request: RefreshRequest, check: Callable[[], None]) -> None:
    """Wait until this host sees the requested version: it may see the request first, or still a folder of the same name.

    (An NFS client may remember names and their absence for `acdirmax`, 60 s.) Raises WaitTimeoutError after the request's own
    deadline, and what `check` raises.
    """
    folder = run.weights_version(request.version)

    def look() -> bool | None:
        if folder.name not in list_names(run.weights):
            return None
        try:
            record = run.manifest(folder)
        except DamagedRecordError:
            return True  # it is there; what is wrong with it, the server will say
        return True if record is not None and record.get("digest") == request.digest else None

    what = f"{folder} with digest {request.digest}"
    wait_for(look, deadline_s=request.deadline_s, awaited=what, from_whom="the trainer", check=check)


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
    run.write(run.ack_json(record.version, record.instance, phase), payload, flush=run.flush_exchange)
