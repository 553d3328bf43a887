"""compose -> validate -> plan -> render -> submit -> follow. Everything that can be checked is checked before a file is made."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from conf.dump import dump
from conf.reads import reads_of
from conf.schema import LibraConfig
from launch import occupancy
from launch.compose import Composed
from launch.containers import surroundings
from launch.errors import ConfigError, InterruptedRunError, LibraError
from launch.machine import about_run_dir
from launch.metrics import from_here
from launch.prepare import Prepared, check_machine, complete, prepare, settled
from launch.tree import HOUSE, Tree
from launch.unrecorded import scripts
from planner.allocation import adopt
from planner.describe import describe
from planner.errors import PlanError
from planner.search import make_plan
from planner.validate import start_problems
from stages.files import wait_for, write_bytes_atomic
from stages.rundir import NotPrivateError, RunDir, RunInUseError
from stages.warmup.key import damage

if TYPE_CHECKING:
    from launch.submission import Submission

__all__ = ["Prepared", "check_machine", "create_run", "dry_run_text", "launch", "prepare", "show", "warm_up"]

WARMUP_FAILED = (
    "the warm-up failed (exit code {code}); its output is above. Change warmup.* or set model_path and warmup.steps=0"
)
INTERRUPTED = "interrupted; what was written stays in {root}"

HERE = {
    "local": "here. The same run on a Slurm cluster",
    "allocation": "in the job that this shell has. The same run as a job of its own",
}
"""The modes in which nothing is submitted."""

LOCAL_STOP_DEADLINE_S = 20.0
"""How long an interrupted local run may take to end, beyond the grace of its stages."""


def dry_run_text(prepared: Prepared) -> str:
    """The plan and the job script; for a run that no script starts, the one that the same options would make on Slurm."""
    from launch.hetjob import render_job

    config, plan = prepared.config, prepared.plan
    noted = "".join(f"note       {note}\n" for note in prepared.notes)
    noted += "".join(f"cannot start yet: {problem}\n" for problem in start_problems(config, prepared.architecture))
    header = f"run directory  {prepared.run_dir}\n{describe(plan)}\n{noted}"
    if config.launch.mode in HERE:
        header += f"\nlaunch.mode={config.launch.mode} starts these stages {HERE[config.launch.mode]} would be "
        config = replace(config, launch=replace(config.launch, mode="slurm"))
        try:
            plan = make_plan(config, prepared.architecture)
        except PlanError as error:
            return f"{header}refused: {error}\n"
        config = adopt(config, plan)
        header += "this job:\n"
    return f"{header}\n# ---- job.sbatch ----\n{render_job(config, plan, prepared.run_dir)}"


def warm_up(config: LibraConfig) -> None:
    """Make the starter policy when the cache does not hold it. Raises LibraError when that fails."""
    if not config.warmup.steps or not damage(Path(config.model_path)):
        return
    text = dump(config, {}).encode()
    folder = Path(config.launch.cache_dir)
    request = folder / f"warmup-{secrets.token_hex(4)}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(request, text)
    except OSError as error:
        raise ConfigError([f"launch.cache_dir={folder} cannot hold the starter policy: {error}; change it"]) from error
    try:
        command = [*surroundings(config).prefix("trainer"), config.launch.python, "-m", "stages.warmup"]
        command += ["--config", str(request), "--out", config.model_path]
        done = subprocess.run(command, check=False)
    finally:
        request.unlink(missing_ok=True)
    if done.returncode != 0:
        raise LibraError(WARMUP_FAILED.format(code=done.returncode))


def create_run(prepared: Prepared) -> RunDir:
    """Make the run directory with what the stages read; `submit` adds the desired state and the job script."""
    config = prepared.config
    about = {"git": git_state(), "launcher": occupancy.launcher_mark()}
    with about_run_dir(prepared.run_dir):
        with occupancy.claimed(prepared.run_dir, replace_finished=config.launch.replace_finished) as aside:
            try:
                run = RunDir.create(prepared.run_dir, extra=about)
            except (RunInUseError, NotPrivateError) as error:
                raise ConfigError([f"launch.run_dir: {error}"]) from error
        if aside is not None:
            print(f"the earlier run was moved to {aside}", flush=True)
        write_bytes_atomic(run.token_file, new_token())
        write_bytes_atomic(run.config_yaml, config_text(prepared).encode())
        run.write(run.plan_json, prepared.plan.to_dict())
    return run


def new_token() -> bytes:
    """What the run's servers ask for, on one line."""
    return f"{secrets.token_urlsafe(32)}\n".encode()


def git_state() -> str:
    """Commit of the code that runs, with "-dirty" when files differ; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def config_text(prepared: Prepared, section: str = "") -> str:
    """config.yaml: every option with the source of its value."""
    return dump(prepared.config, prepared.sources, section)


def show(overrides: Sequence[str], tree: Tree = HOUSE, section: str = "") -> None:
    """Print what config.yaml would hold. Raises ConfigError after that when the run could not be started with it."""
    composed = settled(overrides, tree)
    try:
        print(config_text(complete(composed), section), end="")
    except ConfigError:
        print(dump(composed.config, composed.sources, section), end="", flush=True)
        raise


def explain(composed: Composed) -> str:
    """The answer to launch.explain; with the planner's choices where there is a plan. Raises ConfigError."""
    from launch.explain import explain_text

    name = composed.config.launch.explain
    try:
        prepared = complete(composed)
    except ConfigError:
        if composed.problems:
            raise
        return explain_text(name, composed.config, composed.sources)
    return explain_text(name, prepared.config, prepared.sources)


def launch(overrides: Sequence[str], tree: Tree = HOUSE) -> None:
    """The whole way. Raises LibraError kinds; returns when the run has succeeded (or was submitted, without follow)."""
    composed = settled(overrides, tree)
    if composed.config.launch.explain:
        print(explain(composed))
        return
    for sentence in composed.said:
        print(sentence, flush=True)
    prepared = complete(composed)
    warn(prepared.warnings)
    if prepared.config.launch.dry_run:
        print(dry_run_text(prepared))
        return
    if _goes_on(prepared):
        return
    check_machine(prepared)
    warn(prepared.notes)
    warm_up(prepared.config)
    run = create_run(prepared)
    submission = start(run, prepared)
    if prepared.config.launch.follow:
        stay(run, submission, prepared)


def _goes_on(prepared: Prepared) -> bool:
    """True when this is a batch script that Slurm runs again: its run has gone on to the end. Raises LibraError kinds."""
    if prepared.config.launch.mode != "allocation":
        return False
    from launch.again import go_on

    return go_on(prepared, stay)


def warn(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def start(run: RunDir, prepared: Prepared) -> Submission:
    """Submit; a run that nobody accepted leaves no directory. Raises LibraError kinds."""
    from launch.executors import SubmitError, submit

    try:
        submission = submit(prepared.config, prepared.plan, run)
    except SubmitError:
        shutil.rmtree(run.root)
        raise
    except OSError:
        if not scripts(run.submitit):
            shutil.rmtree(run.root)
        raise
    except KeyboardInterrupt:
        raise InterruptedRunError(interrupted_words(run)) from None
    run.write(run.submission_json, {"mode": submission.mode, "job_id": submission.job_id})
    print(f"{run.root}: {submission.mode} job {submission.job_id}", flush=True)
    return submission


def interrupted_words(run: RunDir) -> str:
    """What became of a submission that Ctrl-C interrupted."""
    shown = from_here(run.root)
    known = run.read(run.submission_json)
    if known is None and not scripts(run.submitit):
        return INTERRUPTED.format(root=run.root)
    said = f"job {known['job_id']} is submitted" if known else "interrupted while sbatch ran, which may go on"
    return (
        f"{said}\nto see it:       python -m launch.{'follow' if known else 'status'} {shown}"
        f"\nto end it:       python -m launch.cancel {shown}"
    )


def stay(run: RunDir, submission: Submission, prepared: Prepared) -> None:
    """Follow to the end, over all attempts. Raises RunFailedError, and InterruptedRunError after Ctrl-C.

    A Slurm run goes on then, unless there was a second Ctrl-C; a run that cannot live without this process is stopped.
    """
    from launch.display import choose_display
    from launch.follow import final_words, follow
    from launch.life import HandedOverError
    from launch.unread import warning

    try:
        with choose_display(run.root.name) as display:
            follow(run, submission.life(), display)
    except KeyboardInterrupt:
        leave(run, submission, prepared.config)
    except HandedOverError as over:
        print(over, flush=True)
        return
    print(final_words(run), flush=True)
    unread = warning(run, prepared.sources, reads_of(prepared.config))
    if unread:
        print(unread, file=sys.stderr, flush=True)


def leave(run: RunDir, submission: Submission, config: LibraConfig) -> NoReturn:
    """After Ctrl-C. Raises InterruptedRunError."""
    if not submission.is_own:
        from launch.detach import interrupted

        interrupted(run, submission.mode)
    print("stopping the run, which ends with its launcher; this takes a few seconds", file=sys.stderr, flush=True)
    submission.cancel()
    wait_for(
        lambda: submission.poll()[0] in ("succeeded", "failed") or None,
        deadline_s=config.launch.stop_grace_s + LOCAL_STOP_DEADLINE_S,
        awaited="the end of the interrupted run",
        from_whom=f"supervisor {submission.job_id}",
    )
    raise InterruptedRunError(INTERRUPTED.format(root=run.root))
