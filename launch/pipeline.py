"""compose -> validate -> plan -> render -> submit -> follow. Everything that can be checked is checked before a file is made."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from conf.pending import PLANNED_ONLY
from conf.schema import LibraConfig
from launch import machine, occupancy
from launch.compose import compose
from launch.errors import ConfigError, InterruptedRunError, LibraError
from planner.architecture import Architecture
from planner.errors import PlanError
from planner.model import from_model_config, resolve
from planner.plan import Plan
from planner.search import describe, make_plan
from planner.validate import problems
from stages.files import wait_for, write_bytes_atomic
from stages.rundir import RunDir, RunInUseError
from stages.trainer.architecture import ModelError, check_supported
from stages.warmup.key import cached_policy_path, damage

WARMUP_FAILED = (
    "the warm-up failed (exit code {code}); its output is above. Change warmup.* or set model_path and warmup.steps=0"
)

LOCAL_STOP_DEADLINE_S = 20.0
"""How long an interrupted local run may take to end, beyond the grace of its stages."""


@dataclass(frozen=True)
class Prepared:
    """A checked configuration with its plan; nothing exists on disk yet."""

    config: LibraConfig
    architecture: Architecture
    plan: Plan
    run_dir: Path


def prepare(overrides: Sequence[str]) -> Prepared:
    """Pure up to a look at the model folder. Raises ConfigError with every problem found."""
    config = settle(compose(overrides), overrides)
    found = problems(config)
    if found:
        raise ConfigError(found)
    try:
        architecture = read_architecture(config)
        plan = make_plan(config, architecture)
    except PlanError as error:
        raise ConfigError([str(error)]) from error
    return Prepared(config, architecture, plan, Path(config.launch.run_dir).absolute())


def settle(config: LibraConfig, overrides: Sequence[str]) -> LibraConfig:
    """Replace every "empty means ..." by its meaning, so that config.yaml re-creates the run."""
    launch = replace(
        config.launch,
        mode=machine.choose_mode(config.launch.mode),
        python=config.launch.python or sys.executable,
        cache_dir=config.launch.cache_dir or str(default_cache_dir()),
        run_dir=str(Path(config.launch.run_dir or default_run_dir(overrides)).absolute()),
    )
    config = replace(config, launch=launch)
    if config.warmup.steps > 0 and not config.model_path:
        config = replace(config, model_path=str(cached_policy_path(config, Path(launch.cache_dir))))
    return replace(config, tokenizer_path=config.tokenizer_path or config.model_path)


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "libra"


def default_run_dir(overrides: Sequence[str]) -> str:
    names = [text.split("=", 1)[1] for text in overrides if text.lstrip("+").startswith("experiment=")]
    return f"runs/{names[-1] if names else 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def read_architecture(config: LibraConfig) -> Architecture:
    """From model_path/config.json when it is there, else from the model group. Raises PlanError."""
    hf_config = machine.read_hf_config(Path(config.model_path)) if config.model_path else None
    if hf_config is None or config.warmup.steps:
        return from_model_config(config.model)
    architecture = resolve(hf_config, config.model)
    if architecture.name not in PLANNED_ONLY:
        try:
            check_supported(hf_config)
        except ModelError as error:
            raise PlanError(f"model_path={config.model_path}: {error}") from error
    return architecture


def check_machine(prepared: Prepared) -> None:
    """What needs this machine: the model folder, the run directory, free space. Raises ConfigError."""
    config = prepared.config
    occupancy.check_free(prepared.run_dir, replace_finished=config.launch.replace_finished)
    found = machine.space_problems(config, prepared.architecture, prepared.run_dir)
    if not config.warmup.steps:
        found += (
            machine.model_folder_problems(Path(config.model_path))
            if config.model_path
            else ["model_path is empty; set it to a HF model folder"]
        )
    if found:
        raise ConfigError(found)


def dry_run_text(prepared: Prepared) -> str:
    """The plan and the job script; for a local run the script that the same options would make on Slurm."""
    from launch.hetjob import render_job

    config, plan = prepared.config, prepared.plan
    header = f"run directory  {prepared.run_dir}\n{describe(plan)}\n"
    if config.launch.mode == "local":
        header += "\nlaunch.mode=local starts these stages here. The same run on a Slurm cluster would be this job:\n"
        config = replace(config, launch=replace(config.launch, mode="slurm"))
        plan = make_plan(config, prepared.architecture)
    return f"{header}\n# ---- job.sbatch ----\n{render_job(config, plan, prepared.run_dir)}"


def warm_up(config: LibraConfig) -> None:
    """Make the starter policy when the cache does not hold it. Raises LibraError when that fails."""
    if not config.warmup.steps or not damage(Path(config.model_path)):
        return
    text = OmegaConf.to_yaml(OmegaConf.structured(config)).encode()
    folder = Path(config.launch.cache_dir)
    request = folder / f"warmup-{secrets.token_hex(4)}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(request, text)
    except OSError as error:
        raise ConfigError([f"launch.cache_dir={folder} cannot hold the starter policy: {error}; change it"]) from error
    try:
        command = [config.launch.python, "-m", "stages.warmup", "--config", str(request), "--out", config.model_path]
        done = subprocess.run(command, check=False)
    finally:
        request.unlink(missing_ok=True)
    if done.returncode != 0:
        raise LibraError(WARMUP_FAILED.format(code=done.returncode))


def create_run(prepared: Prepared) -> RunDir:
    """Make the run directory with what the stages read; `submit` adds the desired state and the job script."""
    config = prepared.config
    about = {"git": git_state(), "launcher": occupancy.launcher_mark()}
    with occupancy.claimed(prepared.run_dir, replace_finished=config.launch.replace_finished) as aside:
        try:
            run = RunDir.create(prepared.run_dir, extra=about)
        except RunInUseError as error:
            raise ConfigError([f"launch.run_dir: {error}"]) from error
    if aside is not None:
        print(f"the earlier run was moved to {aside}", flush=True)
    write_bytes_atomic(run.token_file, f"{secrets.token_urlsafe(32)}\n".encode())
    write_bytes_atomic(run.config_yaml, OmegaConf.to_yaml(OmegaConf.structured(config)).encode())
    run.write(run.plan_json, prepared.plan.to_dict())
    return run


def git_state() -> str:
    """Commit of the code that runs, with "-dirty" when files differ; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def launch(overrides: Sequence[str]) -> None:
    """The whole way. Raises LibraError kinds; returns when the run has succeeded (or was submitted, without follow)."""
    prepared = prepare(overrides)
    if prepared.config.launch.dry_run:
        print(dry_run_text(prepared))
        return
    check_machine(prepared)
    warm_up(prepared.config)
    run = create_run(prepared)
    try:
        run_to_the_end(run, prepared)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; what was written stays in {run.root}") from None


def run_to_the_end(run: RunDir, prepared: Prepared) -> None:
    from launch.display import choose_display
    from launch.executors import SubmitError, submit
    from launch.follow import final_words, follow

    config = prepared.config
    try:
        submission = submit(config, prepared.plan, run)
    except SubmitError:
        shutil.rmtree(run.root)
        raise
    run.write(run.submission_json, {"mode": submission.mode, "job_id": submission.job_id})
    print(f"{run.root}: {submission.mode} job {submission.job_id}", flush=True)
    if not config.launch.follow:
        return
    try:
        with choose_display(run.root.name) as display:
            follow(run, submission, display)
    except KeyboardInterrupt:
        if submission.mode == "local":
            print("stopping; this takes a few seconds", file=sys.stderr, flush=True)
            submission.cancel()
            wait_for(
                lambda: submission.poll()[0] in ("succeeded", "failed") or None,
                deadline_s=config.launch.stop_grace_s + LOCAL_STOP_DEADLINE_S,
                awaited="the end of the interrupted run",
                from_whom=f"supervisor {submission.job_id}",
            )
        else:
            print(f"detached; the job goes on. To end it: scancel {submission.job_id}", file=sys.stderr)
        raise
    print(final_words(run))
