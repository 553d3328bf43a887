"""Go on with a run that has ended, from its newest checkpoint, as a new attempt in the same run directory.

    python -m launch.resume RUN                                     with the options that it had
    python -m launch.resume RUN slurm.time_min=720 total_steps=500  with some that may change (launch/resumable.py, docs/runs.md)
    python -m launch.resume RUN launch.dry_run=true                 show what would happen; changes nothing

Exit code: that of the run; 2 when it cannot go on: it still runs, has no checkpoint, nothing left to train, or an option may not
change. Then nothing was changed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from conf.dump import dump
from conf.load import load
from conf.options import walk
from conf.schema import LibraConfig
from conf.typed import assemble
from launch import occupancy, pipeline
from launch.compose import Composed, draft
from launch.config_file import sources_in
from launch.errors import ConfigError, InterruptedRunError, LibraError
from launch.exclusions import excluded_nodes
from launch.hetjob import render_job
from launch.metrics import from_here
from launch.people import command
from launch.prepare import Prepared, complete, settled
from launch.resumable import Change, refusals
from launch.runs import FOLDERS
from launch.settle import changes
from launch.sources import COMMAND_LINE
from launch.steps import Entry
from launch.submission import Submission
from launch.tree import Tree
from launch.truth import Truth, tell_one
from planner.describe import describe
from planner.plan import Plan
from stages.checkpoint import Checkpoint, newest
from stages.checkpoint.over import is_over, nothing_left
from stages.entry import run_stage
from stages.files import list_names, make_directory, write_bytes_atomic
from stages.rundir import RunDir

CHANGED = "resume (attempt {attempt})"
KEPT = ("config.yaml", "plan.json", "desired.json", "job.sbatch")
"""Written anew for the next attempt; put back when Slurm does not take it."""
RENEWED = ("attempts/", "desired.json", "summary.json", "instances/", "weights/", "control/")
"""What may be missing: an attempt makes its own."""


class ResumeError(LibraError):
    """The run cannot go on. Nothing was changed."""

    exit_code = 2


@dataclass(frozen=True)
class Resumption:
    """A checked next attempt; nothing was written yet. `prepared.sources` has the new source of what changes."""

    run: RunDir
    attempt: int
    checkpoint: Checkpoint
    changes: tuple[Change, ...]
    prepared: Prepared

    def text(self) -> str:
        config, shown = self.prepared.config, from_here(self.run.root)
        lines = [
            f"{shown} goes on as attempt {self.attempt} from step {self.checkpoint.step} of {config.total_steps}"
            f" ({self.checkpoint.path.name})"
        ]
        lines += [f"  {change}" for change in self.changes if change.name != "launch.dry_run"]
        return "\n".join(lines)


def prepare(root: Path, words: Sequence[str], *, certainly_over: bool = False) -> Resumption:
    """Raises NotARunError, ResumeError and ConfigError; changes nothing."""
    truth = tell_one(root)
    check_over(truth, certainly_over)
    run = truth.run
    old = _load(run)
    typed = _typed_names(words, run)
    is_moved = "launch.run_dir" in typed
    composed = settled(words, Tree(str(run.root)), lambda given, _: given if is_moved else str(run.root))
    if composed.problems:
        raise ConfigError(composed.problems)
    config, changed = _changed(old, composed, typed)
    refused = refusals(changed)
    if refused:
        new = f"python -m launch --config-path {shlex.quote(from_here(run.root))} launch.run_dir=NEW"
        refused[-1] += f"; for a new run with it: {new}"
    if refused or composed.conflicts:
        raise ConfigError([*refused, *composed.conflicts])
    checkpoint = find_checkpoint(run, config)
    attempt = run.newest_attempt() + 1
    old_sources = sources_in(run.config_yaml.read_text(encoding="utf-8"))
    sources = old_sources | {change.name: CHANGED.format(attempt=attempt) for change in changed}
    prepared = _plan(replace(composed, config=config, sources=sources), run)
    return Resumption(run, attempt, checkpoint, tuple(changed), prepared)


def check_over(truth: Truth, certainly_over: bool) -> None:
    """Raises ResumeError when the run may still live, or when something is missing without which it cannot go on."""
    shown = from_here(truth.folder.root)
    if truth.is_alive:
        raise ResumeError(
            f"{shown} is {truth.state}, it cannot be resumed; to see it: python -m launch.status {shown};"
            f" to end it with a checkpoint: python -m launch.cancel {shown} --checkpoint"
        )
    if truth.state == "unknown" and not certainly_over:
        raise ResumeError(
            f"nobody can say whether {shown} still runs: {truth.why}; where that can be seen, resume it there, or add"
            " --certainly-over when you know that it does not"
        )
    lacking = [entry for entry in truth.damage if not entry.startswith(RENEWED)]
    if lacking:
        raise ResumeError(f"{shown} is not whole: {', '.join(lacking)}; put that back first, or start a new run")


def find_checkpoint(run: RunDir, config: LibraConfig) -> Checkpoint:
    """The newest sound one. Raises ResumeError when there is none, or when nothing is left to train from it."""
    shown = from_here(run.root)
    checkpoint = newest(run, tell=lambda text: print(text, file=sys.stderr, flush=True))
    if checkpoint is None:
        damaged = run.published_checkpoints()
        has = f"has only damaged checkpoints ({len(damaged)})" if damaged else "has no checkpoint to go on from"
        raise ResumeError(
            f"{shown} {has} (save_interval={config.save_interval}); what it has trained is lost."
            f" To start it over, with this one moved aside: python -m launch --config-path {shown}"
            f" launch.run_dir={shown} launch.replace_finished=true"
        )
    if is_over(run, config, checkpoint.step):
        raise ResumeError(
            f"{shown}: {nothing_left(config, checkpoint.step)}; to train on: total_steps={2 * checkpoint.step}"
        )
    return checkpoint


def _load(run: RunDir) -> LibraConfig:
    """The options of the run, wherever it has been moved to."""
    try:
        config = load(run.config_yaml)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ResumeError(f"{run.config_yaml} cannot be read: {error}") from error
    return replace(config, launch=replace(config.launch, run_dir=str(run.root)))


def _typed_names(words: Sequence[str], run: RunDir) -> frozenset[str]:
    """Options that the command line sets, before the launcher settles what "" or "auto" means. Raises ConfigError."""
    typed = draft(words, Tree(str(run.root)))
    return frozenset(name for name, source in typed.sources.items() if source == COMMAND_LINE)


def _changed(old: LibraConfig, composed: Composed, typed: frozenset[str]) -> tuple[LibraConfig, list[Change]]:
    """What somebody asked to change, on the command line or by the environment. What the launcher would choose otherwise today
    (another Python, another cache) is no wish: the run keeps what it had."""
    wished = typed | {name for name, source in composed.sources.items() if source.startswith("environment ")}
    found = [Change(name, before, after) for name, before, after in changes(old, composed.config) if name in wished]
    values: dict[str, Any] = {name: value for name, _, value in walk(old)}
    return assemble(values | {change.name: change.after for change in found}), found


def _plan(composed: Composed, run: RunDir) -> Prepared:
    """The plan with the layout that the run has, whatever the planner would choose today. Raises ConfigError, ResumeError."""
    planner = composed.config.global_resource_planner
    fixed = replace(planner, initial_allocation_strategy="configured")
    prepared = complete(replace(composed, config=replace(composed.config, global_resource_planner=fixed), conflicts=()))
    record = run.read(run.plan_json, any_attempt=True)
    if record is None:
        raise ResumeError(f"{run.plan_json} is missing; put it back first, or start a new run")
    before, after = _layout(Plan.from_dict(record)), _layout(prepared.plan)
    if before != after:
        raise ConfigError(
            [f"the run was laid out as {before}; with these options it would be {after}; change hardware.* or slurm.*"]
        )
    return replace(prepared, config=replace(prepared.config, global_resource_planner=planner), run_dir=run.root)


def _layout(plan: Plan) -> str:
    train = plan.train
    instances = ", ".join(f"{one.name} on {one.tp} GPU(s)" for one in plan.rollout.instances)
    return f"TP {train.tp} x PP {train.pp} x CP {train.cp} x DP {train.dp} and {instances}"


# ---- starting it -----------------------------------------------------------------------------------------------------


def start(resumption: Resumption, entry: Entry = run_stage) -> tuple[RunDir, Submission]:
    """Make the attempt and submit it. When nobody takes it the run is as it was before. Raises LibraError kinds."""
    from launch.executors import submit

    run, prepared = resumption.run, resumption.prepared
    with occupancy.name_lock(run.root, f"{from_here(run.root)} is being started by another launcher right now"):
        if run.newest_attempt() >= resumption.attempt:
            raise ResumeError(f"{from_here(run.root)} has got another attempt meanwhile; look at its launch.status")
        with _as_before_if_refused(run, resumption.attempt):
            run.start_attempt(resumption.attempt)
            run = RunDir(run.root, run.run_id, resumption.attempt, "launcher")
            _write(run, resumption)
            submission = submit(prepared.config, prepared.plan, run, entry=entry)
        run.write(run.attempt_json, _about(resumption, submission.job_id))
        run.write(run.submission_json, {"mode": submission.mode, "job_id": submission.job_id})
    return run, submission


def _write(run: RunDir, resumption: Resumption) -> None:
    prepared = resumption.prepared
    for name in FOLDERS:
        make_directory(run.root / name)
    if run.token_file.name not in list_names(run.root):
        write_bytes_atomic(run.token_file, pipeline.new_token())
    write_bytes_atomic(run.config_yaml, dump(prepared.config, prepared.sources).encode())
    run.write(run.plan_json, prepared.plan.to_dict())
    run.write(run.attempt_json, _about(resumption, ""))


def _about(resumption: Resumption, job_id: str) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "resumed_step": resumption.checkpoint.step,
        "reason": "resume",
        "previous": resumption.attempt - 1,
        "launcher": occupancy.launcher_mark(),
    }


@contextmanager
def _as_before_if_refused(run: RunDir, attempt: int) -> Iterator[None]:
    """Nothing of an attempt that was not submitted stays, so that the run is not fenced by one that never was."""
    before = {name: (run.root / name).read_bytes() for name in KEPT if (run.root / name).is_file()}
    try:
        yield
    except (LibraError, OSError):
        shutil.rmtree(run.root / "attempts" / str(attempt))
        for name in KEPT:
            if name in before:
                write_bytes_atomic(run.root / name, before[name])
            else:
                (run.root / name).unlink(missing_ok=True)
        raise


def main(words: Sequence[str] | None = None) -> int:
    asked = _parser().parse_intermixed_args(words)
    resumption = prepare(asked.run, asked.overrides, certainly_over=asked.certainly_over)
    print(resumption.text(), flush=True)
    prepared = resumption.prepared
    if prepared.config.launch.dry_run:
        run, exclude = resumption.run, sorted(excluded_nodes(resumption.run))
        script = render_job(prepared.config, prepared.plan, run.root, resumption.attempt, exclude)
        print(f"{describe(prepared.plan)}\n\n# ---- job.sbatch ----\n{script}")
        return 0
    pipeline.warn(prepared.notes)
    pipeline.warm_up(prepared.config)
    try:
        run, submission = start(resumption)
    except KeyboardInterrupt:
        run = replace(resumption.run, attempt=resumption.run.newest_attempt())
        raise InterruptedRunError(pipeline.interrupted_words(run)) from None
    print(f"{run.root}: {submission.mode} job {submission.job_id}, attempt {run.attempt}", flush=True)
    if prepared.config.launch.follow:
        pipeline.stay(run, submission, prepared)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.resume", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("overrides", metavar="OPTION=VALUE", nargs="*", help="options that change")
    parser.add_argument(
        "--certainly-over", action="store_true", help="the run does not live any more, although nobody can be asked"
    )
    return parser


if __name__ == "__main__":
    sys.exit(command(main))
