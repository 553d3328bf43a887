"""How an instance carries out a request for new weights, with either method, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stages.context import StageContext
from stages.rollout.agent import ServerKeeper, StartPoint, host_name
from stages.rollout.client import GuardAnswer
from stages.rollout.errors import UnprovedWeightsError
from stages.rollout.node_folder import node_lock
from stages.rollout.orders import Order
from stages.rollout.registration import Registration
from stages.weights.apply import write_loaded, write_nack, write_prepared
from stages.weights.records import Loaded, Nack, Prepared, Proof, RefreshRequest

_FATAL = ("swap_failed", "proof_failed")
"""Kinds of refusal after which the engine may hold anything."""


class _NotAcknowledgedError(Exception):
    """The server refused an order; the refusal was written down."""


class Refresh:
    """One request for one version. `apply` is called once."""

    def __init__(
        self, context: StageContext, keeper: ServerKeeper, registration: Registration, request: RefreshRequest
    ) -> None:
        self._context = context
        self._keeper = keeper
        self._registration = registration
        self._request = request
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

    def apply(self) -> None:
        """Prepare, commit, prove, acknowledge. A refusal before the commit leaves the old version served, with a NACK.

        Raises UnprovedWeightsError after a commit that failed, ServerDiedError, VllmStartError, StoppedError.
        """
        status = self._registration.status
        # The lease comes before the first look into the folder: it keeps the trainer from deleting it.
        self._registration.update(state="reloading", leases=(*status.leases, self._request.version))
        try:
            self._prepare()
            with self._lock() as lock_wait_s:
                measured = self._commit() if self._request.method == "inplace" else self._restart()
            self._acknowledge(measured, lock_wait_s)
        except _NotAcknowledgedError:
            self._registration.update(state="ready", leases=status.leases)

    # ---- prepare -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        request = self._request
        with self._context.recorder.span("prepare_weights", version=request.version) as span:
            self._context.recorder.flow_step("version", request.version)
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
        )
        write_prepared(self._context.run, prepared)

    # ---- commit --------------------------------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[float]:
        if self._request.strategy == "parallel":
            yield 0.0
            return

        def check() -> None:
            self._keeper.pause(0.0)

        with node_lock(self._context.run.run_id, deadline_s=self._request.deadline_s, check=check) as waited_s:
            yield waited_s

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

    def _acknowledge(self, measured: dict[str, Any], lock_wait_s: float) -> None:
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
        )
        self._registration.update(
            state="ready",
            version=request.version,
            manifest_digest=request.digest,
            # A server that was started from a version's folder may read it again; one that was reloaded does not.
            leases=(request.version,) if request.method == "restart" else (),
        )
        write_loaded(self._context.run, loaded)

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
        phase = "proof" if body.get("kind") == "proof_failed" or what == "prove" else what
        error = str(body.get("error") or f"the server answered {answer.status}")
        fatal = body.get("kind") in _FATAL or what == "prove"
        nack = Nack(
            instance=self._context.name,
            version=self._request.version,
            digest=self._request.digest,
            phase=phase,
            error=error,
            serving_version=-1 if fatal else int(body.get("version", self._registration.status.version)),
            tensor=str(body.get("tensor") or ""),
        )
        self._context.recorder.instant("nack", version=self._request.version, error=error, tensor=nack.tensor)
        print(f"{self._context.name} refuses version {self._request.version}: {error}", flush=True)
        write_nack(self._context.run, nack)
