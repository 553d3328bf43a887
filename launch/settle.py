"""What the environment and the launcher decide: every "empty means ..." gets its meaning, so that config.yaml re-creates the run."""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.options import walk
from conf.schema import LibraConfig
from launch import allocation, machine
from launch.compose import Composed
from launch.containers import outer_python
from launch.job_environment import AllocationError
from launch.sources import COMMAND_LINE
from planner.errors import PlanError
from planner.given import SUBMIT, fitted
from stages.warmup.key import CACHED_POLICY, cached_policy_path

LAUNCHER = "launcher"
PLANNER = "planner"
ALLOCATION = "allocation"
UNSAID = ("launch.mode", "launch.run_dir")
"""Options that an allocation changes and that say nothing of its size."""
RUN_DIR_DIGITS = 6
TRACE_SWITCH = "RL_TRAIN_PHASE_TRACE"
TRACE_FOLDER = "RL_TRAIN_PHASE_TRACE_DIR"

Place = Callable[[str, Mapping[str, str]], str]
"""(launch.run_dir as composed, the choice of each group) -> the run directory."""


def default_place(given: str, choices: Mapping[str, str]) -> str:
    return given or default_run_dir(choices)


def run_dir_in_job(config: LibraConfig, choices: Mapping[str, str], job_id: str) -> str:
    """The same for the same words in the same job: a script that Slurm runs again goes on with the run that it had started.

    `config` as composed, before anything was fitted to the job.
    """
    words = hashlib.sha256(repr(config).encode()).hexdigest()[:RUN_DIR_DIGITS]
    return f"runs/{_name(choices)}-{job_id}-{words}"


def _name(choices: Mapping[str, str]) -> str:
    return choices.get("experiment", "run").replace("/", "-")


def default_run_dir(choices: Mapping[str, str]) -> str:
    return f"runs/{_name(choices)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def settle(composed: Composed, place: Place = default_place, environ: Mapping[str, str] = os.environ) -> Composed:
    """`composed` after the environment and the launcher; problems of the environment are added to its problems."""
    composed = with_allocation(with_environment(composed, environ), environ)
    config = _without_open_ends(composed.config, composed.choices, place)
    sources, problems = dict(composed.sources), list(composed.problems)
    if config.warmup.steps and not config.launch.cache_dir:
        problems.append("launch.cache_dir is empty and this user has no home folder; set it, for the starter policies")
    for name, before, after in changes(composed.config, config):
        # A path that only became absolute was still chosen where it was chosen.
        if not before or str(Path(before).absolute()) != after:
            sources[name] = LAUNCHER
    return replace(composed, config=config, sources=sources, problems=tuple(problems))


def with_environment(composed: Composed, environ: Mapping[str, str]) -> Composed:
    """The reference's two variables. They win over files, the command line wins over them."""
    config, sources, problems = composed.config, dict(composed.sources), list(composed.problems)
    switch, folder = environ.get(TRACE_SWITCH, ""), environ.get(TRACE_FOLDER, "")
    if switch not in ("", "0", "1"):
        problems.append(f"{TRACE_SWITCH}={switch} in the environment: 1 turns tracing on, 0 or empty leaves it alone")
    if switch == "1" and sources["phase_trace_enabled"] != COMMAND_LINE:
        config = replace(config, phase_trace_enabled=True)
        sources["phase_trace_enabled"] = f"environment {TRACE_SWITCH}"
    if folder and sources["trace.directory"] != COMMAND_LINE:
        config = replace(config, trace=replace(config.trace, directory=folder))
        sources["trace.directory"] = f"environment {TRACE_FOLDER}"
    return replace(composed, config=config, sources=sources, problems=tuple(problems))


def with_allocation(composed: Composed, environ: Mapping[str, str]) -> Composed:
    """Inside a Slurm job the run takes what the job has, unless the command line says otherwise: launch.mode=slurm submits.

    A profile of the site that says launch.mode=slurm means the cluster, not the queue.
    """
    mode, sources = composed.config.launch.mode, composed.sources
    if mode == "local" or (mode == "slurm" and sources["launch.mode"] == COMMAND_LINE):
        return composed
    try:
        if allocation.is_inside(environ):
            return composed if composed.problems else _inside(composed, environ)
    except AllocationError as error:
        return replace(composed, conflicts=(*composed.conflicts, str(error)))
    if mode != "allocation":
        return composed
    return replace(composed, conflicts=(*composed.conflicts, allocation.NOT_INSIDE))


def _inside(composed: Composed, environ: Mapping[str, str]) -> Composed:
    sources = composed.sources
    fixed = frozenset(name for name, source in sources.items() if source == COMMAND_LINE)
    config = replace(composed.config, launch=replace(composed.config.launch, mode="allocation"))
    try:
        where = allocation.held(environ)
        if where.is_batch and not config.launch.run_dir:
            run_dir = run_dir_in_job(composed.config, composed.choices, where.job_id)
            config = replace(config, launch=replace(config.launch, run_dir=run_dir))
        config = fitted(_queue_of(config, where, fixed), where.given, fixed)
    except (AllocationError, PlanError) as error:
        return replace(composed, config=config, conflicts=(*composed.conflicts, str(error)))
    changed = list(changes(composed.config, config))
    words = ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in changed if name not in UNSAID)
    said = [f"this run takes {where.given}{f': {words}' if words else ''} ({SUBMIT})"]
    if config.launch.setup:
        said.append("launch.setup is not run here: the steps get the environment of this shell")
    return replace(
        composed,
        config=config,
        sources={**sources, **{name: ALLOCATION for name, _, _ in changed}},
        said=(*composed.said, *said),
    )


def _queue_of(config: LibraConfig, where: allocation.Held, fixed: Collection[str]) -> LibraConfig:
    """The limits of the job, and where it was asked for: a job that follows this one must ask for the same."""
    slurm = config.slurm
    if where.limit_min is not None and "slurm.time_min" not in fixed:
        slurm = replace(slurm, time_min=where.limit_min)
    if not where.is_batch and "slurm.requeue" not in fixed:
        slurm = replace(slurm, requeue="never")  # who works in a shell does not expect a job afterwards
    slurm = replace(slurm, account=slurm.account or where.account, qos=slurm.qos or where.qos)
    first, *others = where.partitions
    if len({first, *others}) == 1:
        slurm = replace(slurm, partition=slurm.partition or first)
    else:
        trainer, rollout = slurm.trainer, slurm.rollout
        trainer = replace(trainer, partition=trainer.partition or slurm.partition or first)
        rollout = replace(rollout, partition=rollout.partition or slurm.partition or others[0])
        slurm = replace(slurm, trainer=trainer, rollout=rollout)
    return replace(config, slurm=slurm)


def _shown(value: Any) -> str:
    return repr(value) if value in ("", []) else str(value)


def changes(before: LibraConfig, after: LibraConfig) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value before, value after) of every option that differs."""
    for (name, _, old), (_, _, new) in zip(walk(before), walk(after), strict=True):
        if old is not new and old != new:  # a number that is none differs from itself
            yield name, old, new


def _without_open_ends(config: LibraConfig, choices: Mapping[str, str], place: Place) -> LibraConfig:
    launch = replace(
        config.launch,
        mode=machine.choose_mode(config.launch.mode),
        python=config.launch.python or sys.executable,
        supervisor_python=outer_python(config),
        cache_dir=config.launch.cache_dir or _default_cache_dir(),
        run_dir=str(Path(place(config.launch.run_dir, choices)).absolute()),
    )
    config = replace(config, launch=launch)
    if config.trace.directory:
        config = replace(config, trace=replace(config.trace, directory=str(Path(config.trace.directory).absolute())))
    if config.warmup.steps > 0 and (not config.model_path or _is_cached(config)):
        policy = str(cached_policy_path(config, Path(launch.cache_dir)))
        tokenizer = "" if config.tokenizer_path == config.model_path else config.tokenizer_path
        config = replace(config, model_path=policy, tokenizer_path=tokenizer)
    return replace(config, tokenizer_path=config.tokenizer_path or config.model_path)


def _is_cached(config: LibraConfig) -> bool:
    """Is model_path a made policy in the cache, from the config.yaml of an earlier run? Other options may make another."""
    path = Path(config.model_path)
    return path.parent == Path(config.launch.cache_dir) and path.name.startswith(CACHED_POLICY)


def _default_cache_dir() -> str:
    """Empty for a user without a home folder (a container with a user id of its own)."""
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return "" if base.startswith("~") else str(Path(base, "libra").absolute())
