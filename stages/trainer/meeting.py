"""Where the trainer's ranks find each other: torch's store, out of other users' reach as far as it can be.

A TCPStore asks nobody who he is. So one rank uses memory, the ranks of one host a file in the run's own folder on the node
(mode 0700), and only ranks of several hosts a port, on the one address that the others need. What an outsider who reaches
that port could do is in docs/security.md; he cannot make a rank run code, since nothing that comes from the store or from
another rank is unpickled.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from stages.context import StageContext
from stages.files import wait_for
from stages.rollout.address import node_address
from stages.rollout.node_folder import leave_node_folder, node_folder

MEETING_TIMEOUT_S = 300.0


class MeetingError(RuntimeError):
    """The ranks cannot find each other."""


@contextmanager
def meeting(context: StageContext) -> Iterator[Store]:
    """A store that all ranks share; rank 0 says where in attempts/N/rendezvous.json.

    Raises WaitTimeoutError, MeetingError, NoAddressError, ForeignFolderError.
    """
    if context.world_size == 1:
        yield HashStore()
    elif context.plan.train.nodes == 1:
        # What gloo and NCCL open by themselves stays on this host too (NCCL with torch 2.11 tried on two GPUs).
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        path = _file(context)
        try:
            yield FileStore(str(path), context.world_size)
        finally:
            if context.rank == 0:
                path.unlink(missing_ok=True)
                leave_node_folder(context.run.run_id)
    else:
        yield _tcp_store(context)


def _file(context: StageContext) -> Path:
    if context.rank == 0:
        path = node_folder(context.run.run_id) / f"ranks-{secrets.token_hex(8)}"
        path.touch(mode=0o600, exist_ok=False)
        _announce(context, {"file": str(path)})
        return path
    path = Path(_announced(context)["file"])
    if not path.is_file():
        raise MeetingError(
            f"{path} of trainer rank 0 is not there for rank {context.rank}: they need one TMPDIR on a node"
        )
    return path


def _tcp_store(context: StageContext) -> TCPStore:
    timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    if context.rank != 0:
        place = _announced(context)
        return TCPStore(place["host"], place["port"], context.world_size, is_master=False, timeout=timeout)
    host = node_address()
    listener = socket.create_server((host, 0), backlog=context.world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        context.world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    _announce(context, {"host": host, "port": port})
    return store


def _announce(context: StageContext, place: dict[str, Any]) -> None:
    context.run.write(context.run.attempt_dir / "rendezvous.json", {**place, "world_size": context.world_size})


def _announced(context: StageContext) -> dict[str, Any]:
    path = context.run.attempt_dir / "rendezvous.json"
    return wait_for(
        lambda: context.run.read(path),
        deadline_s=MEETING_TIMEOUT_S,
        awaited=str(path),
        from_whom="trainer rank 0",
        check=context.check_stop,
    )
