"""The cluster's own record, `devcluster.json`: proof that the folder is ours, and which processes are."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.devcluster.errors import DevClusterError, DevClusterRequestError
from launch.devcluster.processes import Process
from launch.devcluster.topology import Site, Topology

FILE_NAME = "devcluster.json"
MADE_BY = "libra launch.devcluster"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Record:
    """`created_parents`: folders above the root that `up` had to make, innermost first."""

    site: Site
    daemons: tuple[Process, ...] = ()
    created_parents: tuple[Path, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether munged, slurmctld and every slurmd were started: `up` may have been killed half way."""
        return len(self.daemons) == 2 + self.site.topology.nodes

    def with_daemon(self, daemon: Process) -> Record:
        return replace(self, daemons=(*self.daemons, daemon))


def write_record(record: Record) -> None:
    """Replace the record as a whole: a reader sees the old one or the new one."""
    path = record.site.root / FILE_NAME
    fields = asdict(record)
    site = fields.pop("site")
    body = {"made_by": MADE_BY, "schema": SCHEMA, **site, **fields}
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(body, indent=1, default=str) + "\n")
    os.replace(draft, path)


def read_record(root: Path) -> Record | None:
    """None when nothing lies at `root`. Raises DevClusterRequestError when something of others does."""
    if not root.is_symlink() and not root.exists():
        return None
    if root.is_symlink() or not root.is_dir() or not (root / FILE_NAME).is_file():
        if root.is_dir() and not root.is_symlink() and not any(root.iterdir()):
            return None
        raise DevClusterRequestError(
            f"{root} exists and was not made by launch.devcluster: it is left as it is. Choose another folder with "
            "--root or LIBRA_DEVCLUSTER_ROOT"
        )
    return _parse(root, (root / FILE_NAME).read_text())


def _parse(root: Path, text: str) -> Record:
    try:
        body: dict[str, Any] = json.loads(text)
        if body["made_by"] != MADE_BY or body["schema"] != SCHEMA or Path(body["root"]) != root:
            raise DevClusterRequestError(f"{root / FILE_NAME} is not the record of a development cluster in {root}")
        site = Site(
            root=root,
            hostname=body["hostname"],
            user=body["user"],
            topology=Topology(**body["topology"]),
            controller_port=body["controller_port"],
            node_ports=tuple(body["node_ports"]),
        )
        daemons = tuple(Process(**fields) for fields in body["daemons"])
        return Record(site, daemons, tuple(Path(parent) for parent in body["created_parents"]))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DevClusterError(f"{root / FILE_NAME} cannot be read ({error!r}); look at it and delete {root}") from error
