"""How an instance carries out a request for new weights, with either method, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

from stages.context import StageContext
from stages.files import WaitTimeoutError
from stages.rollout.agent import ServerKeeper, StartPoint, host_name
from stages.rollout.client import GuardAnswer
from stages.rollout.errors import UnprovedWeightsError
from stages.rollout.node_folder import node_lock
from stages.rollout.orders import Order
from stages.rollout.registration import Registration
from stages.weights.apply import await_version, write_loaded, write_nack, write_prepared
from stages.weights.records import Loaded, Nack, Prepared, Proof, RefreshRequest

_FATAL = ("swap_failed", "proof_failed")
"""Kinds of refusal after which the engine may hold anything."""


class _NotAcknowledgedError(Exception):
    """The server refused an order, and the refusal was written down; or a newer request makes this one pointless."""


class Refresh:
    """One request for one version. `apply` is called once; `is_superseded` tells whether there is a request for a newer one."""

    def __init__(
        self,
        context: StageContext,
        keeper: ServerKeeper,
        registration: Registration,
        request: RefreshRequest,
        is_superseded: Callable[[RefreshRequest], bool] = lambda request: False,
    ) -> None:
        self.was_refused = False
        self._is_superseded = is_superseded
        self._context = context
        self._keeper = keeper
        self._registration = registration
        self._request = request
        self._retry = request.retries.get(context.name, 0)
        self._started_s = time.monotonic()
        self._order = Order(
            run_id=context.run.run_id,
            attempt=context.run.attempt,
            version=request.version,
            path=request.path,
            digest=request.digest,
            method=request.method,
            deadline_s=request.deadline_s,
        )

    def apply(self) -> tuple[Prepared, Loaded] | None:
        """Prepare, commit, prove, acknowledge; the answers written. None when it ended before the commit: the old version is
        served on, and a NACK says why, unless a newer version was asked for meanwhile.

        Raises UnprovedWeightsError after a commit that failed, ServerDiedError, VllmStartError, StoppedError.
        """
        status = self._registration.status
        # The lease comes before the first look into the folder: it keeps the trainer from deleting it.
        self._registration.update(state="reloading", leases=(*status.leases, self._request.version))
        try:
            prepared = self._prepare()
            with self._lock() as lock_wait_s:
                measured = self._commit() if self._request.method == "inplace" else self._restart()
            return prepared, self._acknowledge(measured, lock_wait_s)
        except _NotAcknowledgedError:
            self._registration.update(state="ready", leases=status.leases)
            return None

    # ---- prepare -------------------------------------------------------------------------------------------------

    def _prepare(self) -> Prepared:
        request = self._request
        try:
            await_version(self._context.run, request, self._check_worth)
        except WaitTimeoutError as late:
            self._refuse_for("prepare", str(late))
        with self._context.recorder.span("prepare_weights", version=request.version) as span:
            self._context.recorder.flow_step("version", request.version)
            with self._reading():
                answer = self._obey("prepare")
            span.add(bytes=answer["bytes"])
        self._prepare_s = float(answer["prepare_s"])
        prepared = Prepared(
            instance=self._context.name,
            version=request.version,
            digest=request.digest,
            bytes=int(answer["bytes"]),
            prepare_s=self._prepare_s,
            host=host_name(),
            retry=self._retry,
        )
        write_prepared(self._context.run, prepared)
        return prepared

    def _reading(self) -> AbstractContextManager[None]:
        """A server that will be restarted verifies the files, and keeps nothing."""
        request = self._request
        if request.method != "inplace":
            return nullcontext()
        return self._keeper.reader.reading(
            request.version, request.digest, deadline_s=request.deadline_s, pause=self._keeper.pause
        )

    def _check_worth(self) -> None:
        self._keeper.pause(0.0)
        if self._is_superseded(self._request):
            raise _NotAcknowledgedError

    # ---- commit --------------------------------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[float]:
        if self._request.strategy == "parallel":
            yield 0.0
            return
        with ExitStack() as stack:
            yield self._take_turn(stack)

    def _take_turn(self, stack: ExitStack) -> float:
        lock = node_lock(
            self._context.run.run_id, deadline_s=self._request.deadline_s, check=lambda: self._keeper.pause(0.0)
        )
        try:
            return stack.enter_context(lock)
        except WaitTimeoutError as late:
            self._refuse_for("commit", str(late))

    def _commit(self) -> dict[str, Any]:
        with self._context.recorder.span("commit_weights", version=self._request.version) as span:
            self._context.recorder.flow_end("version", self._request.version)
            answer = self._obey("commit")
            span.add(paused_s=answer["paused_s"], swap_s=answer["swap_s"])
        return {
            "answer": answer,
            "process_stop_s": 0.0,
            "model_load_s": answer["swap_s"],
            "paused_s": answer["paused_s"],
        }

    def _restart(self) -> dict[str, Any]:
        """A new process on the verified folder; the answers of requests under way are lost with the old one."""
        request, run = self._request, self._context.run
        begun_s = time.monotonic()
        self._registration.update(base_url="", version=-1, manifest_digest="")
        self._keeper.stop()
        stopped_s = time.monotonic()
        self._keeper.start(StartPoint(run.weights_version(request.version), request.version))
        loaded_s = time.monotonic()
        with self._context.recorder.span("prove_weights", version=request.version):
            self._context.recorder.flow_end("version", request.version)
            answer = self._obey("prove")
        return {
            "answer": answer,
            "process_stop_s": stopped_s - begun_s,
            "model_load_s": loaded_s - stopped_s,
            "paused_s": time.monotonic() - begun_s,
        }

    def _acknowledge(self, measured: dict[str, Any], lock_wait_s: float) -> Loaded:
        request, answer = self._request, measured["answer"]
        loaded = Loaded(
            instance=self._context.name,
            version=request.version,
            digest=request.digest,
            method=request.method,
            strategy=request.strategy,
            lock_wait_s=lock_wait_s,
            process_stop_s=measured["process_stop_s"],
            model_load_s=measured["model_load_s"],
            total_reload_s=time.monotonic() - self._started_s,
            paused_s=measured["paused_s"],
            prepare_s=self._prepare_s,
            proof=Proof(**answer["proof"]),
            host=host_name(),
            server_response=answer,
            retry=self._retry,
        )
        self._registration.update(
            state="ready",
            version=request.version,
            manifest_digest=request.digest,
            # A server that was started from a version's folder may read it again; one that was reloaded does not.
            leases=(request.version,) if request.method == "restart" else (),
        )
        write_loaded(self._context.run, loaded)
        return loaded

    # ---- both ----------------------------------------------------------------------------------------------------

    def _obey(self, what: str) -> dict[str, Any]:
        answer = self._keeper.order(self._order, what)
        if answer.is_ok:
            return answer.body
        self._refuse(what, answer)
        if answer.body.get("kind") in _FATAL or what == "prove":
            raise UnprovedWeightsError(
                f"{self._context.name} holds weights that are not version {self._request.version} and serves nothing: "
                f"{answer.body.get('error', answer)}"
            )
        raise _NotAcknowledgedError

    def _refuse(self, what: str, answer: GuardAnswer) -> None:
        body = answer.body
        fatal = body.get("kind") in _FATAL or what == "prove"
        self._write_nack(
            phase="proof" if body.get("kind") == "proof_failed" or what == "prove" else what,
            error=str(body.get("error") or f"the server answered {answer.status}"),
            serving_version=-1 if fatal else int(body.get("version", self._registration.status.version)),
            tensor=str(body.get("tensor") or ""),
        )

    def _refuse_for(self, phase: str, error: str) -> NoReturn:
        """What the server was not even asked."""
        self._write_nack(phase, error, self._registration.status.version)
        raise _NotAcknowledgedError

    def _write_nack(self, phase: str, error: str, serving_version: int, tensor: str = "") -> None:
        request, name = self._request, self._context.name
        nack = Nack(name, request.version, request.digest, phase, error, serving_version, tensor, self._retry)
        self.was_refused = True
        self._context.recorder.instant("nack", version=request.version, error=error, tensor=tensor)
        print(f"{name} refuses version {request.version}: {error}", flush=True)
        write_nack(self._context.run, nack)
