"""The rollout stage: one task per instance, until it is asked to stop."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from planner.plan import InstancePlacement
from stages.context import StageContext
from stages.process import incarnation
from stages.rollout.agent import ServerKeeper, StartPoint, host_name
from stages.rollout.errors import RolloutOptionError, UnprovedWeightsError
from stages.rollout.follow import follow_requests
from stages.rollout.orders import Order
from stages.rollout.registration import Registration
from stages.weights.delta_chain import State
from stages.weights.instances import InstanceStatus
from stages.weights.reader import load_manifest
from stages.weights.report import newest_version
from stages.weights.versions import chain_to


def run(context: StageContext) -> dict[str, Any]:
    """Serve the plan's instance `context.name` and follow the trainer's weight requests.

    Raises StoppedError when asked to stop; VllmStartError, ServerDiedError, UnprovedWeightsError otherwise.
    """
    _serve(context, StartPoint(_model_folder(context), 0), None)


def run_alone(context: StageContext) -> NoReturn:
    """Serve the newest published weights of a run, proved; model_path, unproved, when nothing is published.

    Raises WeightsError when LATEST.json, or what it names, is missing or damaged, as a crash of the host may leave it.
    """
    latest = (
        context.run.read(context.run.latest_json, any_attempt=True) if newest_version(context.run) is not None else None
    )
    if latest is None:
        print(f"{context.run.root} has published no weights: serving model_path as it is", flush=True)
        _serve(context, StartPoint(_model_folder(context), 0, serve_unproved=True), None)
    # Of the same reading: a run that is alive may point to the next version by now.
    manifest = load_manifest(context.run, int(latest["version"]), str(latest.get("digest")))
    whole = chain_to(context.run, manifest)[
        0
    ]  # a server starts from whole files; what changed since goes into it in place
    start = StartPoint(context.run.weights_version(whole.version), whole.version)
    _serve(context, start, manifest.state)


def _serve(context: StageContext, start: StartPoint, wanted: State | None) -> NoReturn:
    placement = _placement(context)
    status = InstanceStatus(
        instance=context.name,
        state="starting",
        base_url="",
        host=host_name(),
        version=-1,
        manifest_digest="",
        heartbeat=0,
        agent_pid=os.getpid(),
        server_pid=0,
        device=context.config.hardware.device,
        tp=placement.tp,
        leases=() if wanted is None else (wanted.version,),
        incarnation=incarnation(),
    )
    with Registration(context.run, status, context.config.rollout.heartbeat_interval_s) as registration:
        keeper = ServerKeeper(context, placement, registration)
        try:
            keeper.start(start)
            if wanted is not None:
                _bring_to(context, keeper, start.version, wanted)
                registration.update(version=wanted.version, manifest_digest=wanted.digest)
            registration.update(state="ready")
            print(f"{context.name} is ready at {keeper.server.base_url}", flush=True)
            follow_requests(context, keeper, registration)
        finally:
            try:
                registration.update(state="stopping")
            finally:
                keeper.close()


def _bring_to(context: StageContext, keeper: ServerKeeper, started: int, wanted: State) -> None:
    """Let a server that was started from version `started` prove `wanted`, after loading it where it is another one."""
    version, what = wanted.version, ("prove",) if wanted.version == started else ("prepare", "commit")
    path = str(context.run.weights_version(version).relative_to(context.run.root))
    deadline_s = context.config.weights.refresh_timeout_s
    method = "restart" if wanted.version == started else "inplace"
    order = Order(context.run.run_id, context.run.attempt, version, path, wanted.digest, method, deadline_s)
    with context.recorder.span("prove_weights", version=version):
        for each in what:
            answer = keeper.order(order, each)
            if not answer.is_ok:
                raise UnprovedWeightsError(f"version {version} could not be proved: {answer.body.get('error', answer)}")


def _placement(context: StageContext) -> InstancePlacement:
    """Raises RolloutOptionError when the plan has no instance of this name."""
    names = [placement.name for placement in context.plan.rollout.instances]
    for placement in context.plan.rollout.instances:
        if placement.name == context.name:
            return placement
    raise RolloutOptionError(f"the plan has no instance {context.name!r}; it has {', '.join(names)}")


def _model_folder(context: StageContext) -> Path:
    """Raises RolloutOptionError when model_path is no HF folder."""
    folder = Path(context.config.model_path).absolute()
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RolloutOptionError(f"model_path={folder} is not a HF model folder: {error}") from error
    return folder
