"""One vLLM server as a child: started, watched, and ended with everything that it started."""

from __future__ import annotations

import os
import re
import secrets
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.schema import LibraConfig
from stages.rollout.address import bound_socket, listen_address
from stages.rollout.command import server_command
from stages.rollout.errors import ProcessesLeftError
from stages.rollout.node_folder import node_folder, remove_scratch
from stages.rollout.orphans import marked_pids
from stages.rollout.settings import ServerSettings
from stages.rollout.shared_memory import note_shared_memory

_TAIL_LINES = 30
_TAIL_BYTES = 16 << 10
_KILL_WAIT_S = 5.0
_NOISE = re.compile(r"nanobind: | - (leaked|\.\.\.) |See https://nanobind")
"""What triton's bindings print when any process that imported them exits; it would push the reason out of the tail."""


@dataclass
class ServerProcess:
    """`log_start` is where this server's output begins in the instance's log, in bytes."""

    process: subprocess.Popen[bytes]
    server_id: str
    base_url: str
    log_path: Path
    log_start: int
    scratch: Path
    _pidfds: dict[int, int]
    _names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def start(
        cls, config: LibraConfig, settings: ServerSettings, *, tp: int, num_threads: int, log_path: Path
    ) -> ServerProcess:
        """Start a server for `settings` (whose `listen_fd` is filled in here) in a process group of its own.

        Main thread only: the server dies with the thread that starts it. Raises OSError, RolloutOptionError.
        """
        server_id = f"{settings.instance}-{secrets.token_hex(4)}"
        scratch = node_folder(settings.run_id) / server_id
        host = listen_address()
        log_fd = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with bound_socket(host) as listening, os.fdopen(log_fd, "ab") as log:
            port, log_start = listening.getsockname()[1], log_path.stat().st_size
            command = server_command(
                config,
                replace(settings, listen_fd=listening.fileno()),
                host=host,
                port=port,
                tp=tp,
                server_id=server_id,
                scratch=scratch,
                num_threads=num_threads,
            )
            scratch.mkdir(mode=0o700)
            process = subprocess.Popen(
                command.arguments,
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(listening.fileno(),),
                process_group=0,
            )
            pidfds = {process.pid: os.pidfd_open(process.pid)}
            return cls(process, server_id, f"http://{host}:{port}", log_path, log_start, scratch, pidfds)

    @property
    def pid(self) -> int:
        return self.process.pid

    def watch_children(self) -> None:
        """From now on `wait_for_end` also notices the end of the processes that the server has started by now."""
        for pid in set(marked_pids(self.server_id)) - self._pidfds.keys():
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
                self._names[pid] = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
            except (ProcessLookupError, FileNotFoundError):
                pass  # a helper that ended meanwhile; the server's own end is watched anyway
        note_shared_memory(self.scratch, self._pidfds)

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of a watched process; True as soon as one has ended."""
        poll = select.poll()
        for fd in self._pidfds.values():
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1e3))

    def ended_children(self) -> list[str]:
        """Watched processes behind the server that have ended, with their names (Linux keeps 15 characters of them)."""
        poll = select.poll()
        pids = {fd: pid for pid, fd in self._pidfds.items() if pid != self.pid}
        for fd in pids:
            poll.register(fd, select.POLLIN)
        return [f"{self._names.get(pids[fd], 'process')} (pid {pids[fd]})" for fd, _ in poll.poll(0)]

    def exit_code(self, timeout_s: float = 0.0) -> int | None:
        """As `Popen.returncode`: negative for a signal, None while the server itself still runs."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> str:
        """The last lines that this server wrote."""
        with self.log_path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, end - _TAIL_BYTES))
            lines = [line for line in log.read().decode(errors="replace").splitlines() if not _NOISE.match(line)]
        return "\n".join(lines[-_TAIL_LINES:]) or "(it wrote nothing)"

    def stop(self, timeout_s: float) -> None:
        """TERM, at most `timeout_s` of patience, then KILL for all that carries the server's mark. Idempotent.

        Raises ProcessesLeftError when something survives even that.
        """
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.exit_code(timeout_s)
        if self.process.poll() is None or marked_pids(self.server_id):
            self._kill_group()
        deadline_s = time.monotonic() + _KILL_WAIT_S
        while left := marked_pids(self.server_id):
            for pid in left:
                _kill(pid)
            if time.monotonic() > deadline_s:
                raise ProcessesLeftError(f"processes {left} of server {self.server_id} cannot be ended")
            time.sleep(0.02)
        self.process.wait(_KILL_WAIT_S)
        self._forget()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # nothing of the group is left

    def _forget(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        remove_scratch(self.scratch)


def clear_scratch(run_id: str, instance: str) -> None:
    """Remove from the node's folder what killed servers of this instance left there, in this attempt or an earlier one."""
    for scratch in node_folder(run_id).glob(f"{instance}-*"):
        if not marked_pids(scratch.name):
            remove_scratch(scratch)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself
