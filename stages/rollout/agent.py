"""The agent of one rollout instance: keeps a guarded vLLM server running at the newest weights that it has proved."""

from __future__ import annotations

import concurrent.futures
import http.client
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from conf.schema import LibraConfig
from planner.plan import InstancePlacement
from stages.context import StageContext
from stages.rollout.client import GuardAnswer, GuardClient
from stages.rollout.command import threads_per_worker
from stages.rollout.errors import GuardOpenError, ServerDiedError, VllmStartError, describe_exit
from stages.rollout.node_folder import leave_node_folder
from stages.rollout.node_reader import NodeReader
from stages.rollout.orders import Order
from stages.rollout.registration import Registration
from stages.rollout.server_process import ServerProcess, clear_scratch
from stages.rollout.settings import ServerSettings, read_token_digest
from stages.weights.proof import resolution_nats

_READY_POLL_S = 0.05
_START_TRIES = 3
_LAST_WORDS_S = 2.0
_COMMON_STOP_S = 0.2
_GUARDED_PATHS = ("/health", "/v1/models")

Result = TypeVar("Result")


@dataclass(frozen=True)
class StartPoint:
    """What a server is started from: a HF folder, and the version that its weights count as (0 for model_path)."""

    folder: Path
    version: int
    serve_unproved: bool = False


class ServerKeeper:
    """Starts, watches, orders and stops the instance's server; one at a time.

    Everything that waits here notices at once when the server ends (ServerDiedError) or when a stop is asked for
    (StoppedError).
    """

    def __init__(self, context: StageContext, placement: InstancePlacement, registration: Registration) -> None:
        self._context = context
        self._config: LibraConfig = context.config
        self._tp = placement.tp
        self._registration = registration
        self._token = context.run.token_file.read_text(encoding="ascii").strip()
        read_token_digest(context.run.token_file)  # raises when others could read it
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="orders")
        self._server: ServerProcess | None = None
        self._is_broken = False
        self.reader = NodeReader(context.run, context.config.weights.dtype, context.recorder)
        self.log_path = context.run.logs / f"{context.name}.server.log"

    @property
    def server(self) -> ServerProcess:
        if self._server is None:
            raise RuntimeError("the instance has no server")
        return self._server

    # ---- start and stop ------------------------------------------------------------------------------------------

    def start(self, start: StartPoint) -> None:
        """Start a server and wait until it answers. Raises VllmStartError, StoppedError."""
        clear_scratch(self._context.run.run_id, self._context.name)
        with self._context.recorder.span("start_server", version=start.version) as span:
            for tries_left in reversed(range(_START_TRIES)):
                self._server = ServerProcess.start(
                    self._config,
                    self._settings(start),
                    tp=self._tp,
                    num_threads=threads_per_worker(self._config, len(os.sched_getaffinity(0))),
                    log_path=self.log_path,
                )
                self._registration.update(server_pid=self.server.pid)
                try:
                    self._wait_ready()
                except VllmStartError as error:
                    self.stop()
                    # vLLM takes ports of its own (distributed initialisation) that others may take first.
                    if tries_left and "address already in use" in error.log_tail.lower():
                        continue
                    raise
                span.add(tries=_START_TRIES - tries_left)
                break
        self.server.watch_children()
        self.reader.start_folder = start.folder
        self._registration.update(base_url=self.server.base_url)

    def stop(self) -> None:
        """Stop the server, if there is one, and everything that it started. Raises ProcessesLeftError."""
        if self._server is not None:
            with self._context.recorder.span("stop_server"):
                # Half a server has nothing left to finish, and the run's failure waits for its end.
                self._server.stop(0.0 if self._is_broken else self._config.rollout.stop_timeout_s)
            self._server = None

    def close(self) -> None:
        self.stop()
        self._caller.shutdown(wait=False, cancel_futures=True)
        self.reader.close()
        leave_node_folder(self._context.run.run_id)

    def _settings(self, start: StartPoint) -> ServerSettings:
        run, config = self._context.run, self._config
        return ServerSettings(
            run_root=str(run.root),
            run_id=run.run_id,
            attempt=run.attempt,
            instance=self._context.name,
            token_file=str(run.token_file),
            start_folder=str(start.folder),
            start_version=start.version,
            serve_unproved=start.serve_unproved,
            weights_dtype=config.weights.dtype,
            proof_tolerance=config.weights.proof_tolerance,
            agent_pid=os.getpid(),
            listen_fd=-1,
            proof_resolution=resolution_nats(config),
            trace_directory=str(self._context.recorder.path.parent) if config.phase_trace_enabled else "",
        )

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + self._config.rollout.ready_timeout_s
        client = self._client()
        while True:
            self._context.check_stop()
            self._registration.check()
            if self.server.wait_for_end(_READY_POLL_S):
                self._check_common_stop()
                code = self.server.exit_code(_LAST_WORDS_S)
                raise VllmStartError(f"it {describe_exit(code)}", self.server.log_tail(), str(self.log_path))
            try:
                if client.state(timeout_s=5.0).is_ok:
                    break
            except (OSError, http.client.HTTPException):
                pass  # not listening yet
            if time.monotonic() > deadline_s:
                why = f"not ready after {self._config.rollout.ready_timeout_s:g} s (rollout.ready_timeout_s)"
                raise VllmStartError(why, self.server.log_tail(), str(self.log_path))
        self._check_guarded(client)

    def _check_guarded(self, client: GuardClient) -> None:
        for path in _GUARDED_PATHS:
            if (status := client.status_without_token(path, timeout_s=5.0)) != 401:
                raise GuardOpenError(f"{path} answered {status} to a request without token, wanted 401")

    # ---- while it runs -------------------------------------------------------------------------------------------

    def pause(self, timeout_s: float) -> None:
        """Sleep that ends with an exception when the server ends, a stop is asked for, or the heartbeat fails."""
        self._context.check_stop()
        self._registration.check()
        if self.server.wait_for_end(timeout_s):
            self._raise_death()

    def order(self, order: Order, what: str) -> GuardAnswer:
        """Give an order and wait for the answer, whatever it is. Raises ServerDiedError, StoppedError."""
        client = self._client()
        return self._while_watching(lambda: client.give(order, what, timeout_s=order.deadline_s + 30.0))

    def _client(self) -> GuardClient:
        return GuardClient(self.server.base_url, self._token)

    def _while_watching(self, call: Callable[[], Result]) -> Result:
        future: Future[Result] = self._caller.submit(call)
        while True:
            done, _ = concurrent.futures.wait([future], timeout=0.05)
            if done:
                break
            self.pause(0.0)
        try:
            return future.result()
        except (OSError, http.client.HTTPException) as error:
            if self.server.wait_for_end(_LAST_WORDS_S):
                self._raise_death()
            raise ServerDiedError(None, self.server.log_tail(), str(self.log_path)) from error

    def _check_common_stop(self) -> None:
        """Raises StoppedError when the server ended because both were asked to stop.

        Slurm sends a step's TERM to every process in it, so the server may have obeyed before we heard of it.
        """
        self._context.stop.wait(_COMMON_STOP_S)
        self._context.check_stop()

    def _raise_death(self) -> None:
        self._check_common_stop()
        self._is_broken = True
        ended = ", ".join(self.server.ended_children()) or "a process"
        code = self.server.exit_code(_LAST_WORDS_S)
        what = "the vLLM server" if code is not None else f"{ended} of the vLLM server ended, and the server"
        raise ServerDiedError(code, self.server.log_tail(), str(self.log_path), what)


def host_name() -> str:
    return socket.gethostname()
