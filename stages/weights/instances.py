"""Rollout instances as others see them: registration, leases and heartbeat, one file each, written by its agent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from stages.files import list_names
from stages.rundir import RunDir
from stages.weights.fields import Fields

STATES = ("starting", "ready", "reloading", "stopping")
_READERS = 16
_ALONE = 16
"""So many records are read by one thread; more by several, because each is a few round trips to a file server."""


@dataclass(frozen=True)
class InstanceStatus:
    """`version` and `manifest_digest` are those proved and served; -1 and "" before the first proof.

    `heartbeat` is a counter that the agent raises with every writing. `leases` are all versions whose folder the
    instance reads or may still read: they are not deleted. A lease is written before the folder is opened. `incarnation`
    counts the starts of the instance within the attempt, from 0.
    """

    instance: str
    state: str
    base_url: str
    host: str
    version: int
    manifest_digest: str
    heartbeat: int
    agent_pid: int
    server_pid: int
    device: str
    tp: int
    leases: tuple[int, ...] = ()
    incarnation: int = 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], what: str) -> InstanceStatus:
        fields = Fields(record, what)
        status = cls(
            instance=fields.text("instance"),
            state=fields.text("state", STATES),
            base_url=fields.text("base_url", empty=True),
            host=fields.text("host"),
            version=fields.integer("version", -1),
            manifest_digest=fields.text("manifest_digest", empty=True),
            heartbeat=fields.integer("heartbeat"),
            agent_pid=fields.integer("agent_pid"),
            server_pid=fields.integer("server_pid"),
            device=fields.text("device"),
            tp=fields.integer("tp", 1),
            leases=fields.integers("leases"),
            incarnation=fields.integer("incarnation"),
        )
        fields.finish()
        return status


def write_status(run: RunDir, status: InstanceStatus) -> None:
    run.write(run.instance_json(status.instance), status.to_record(), flush=run.flush_exchange)


def read_status(run: RunDir, instance: str, *, skip_damaged: bool = True) -> InstanceStatus | None:
    """What `instance` says in this attempt; None when it has not registered, with `skip_damaged` also when its record is no JSON.

    Raises RecordError for a record with a wrong field, DamagedRecordError.
    """
    record = run.read(run.instance_json(instance), skip_damaged=skip_damaged)
    return None if record is None else InstanceStatus.from_record(record, f"registration of {instance}")


def read_statuses(
    run: RunDir, names: Iterable[str] | None = None, *, skip_damaged: bool = True
) -> dict[str, InstanceStatus]:
    """Instances that registered in this attempt, by name: all, or those of `names`. Raises what `read_status` raises."""
    if names is None:
        names = [name.removesuffix(".json") for name in list_names(run.instances) if name.endswith(".json")]
    wanted = list(names)
    if len(wanted) <= _ALONE:
        found = [read_status(run, name, skip_damaged=skip_damaged) for name in wanted]
    else:
        with ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(lambda name: read_status(run, name, skip_damaged=skip_damaged), wanted))
    return {name: status for name, status in zip(wanted, found, strict=True) if status is not None}
