"""The settings of the controller that decide how a job starts, ends and is stopped."""

from __future__ import annotations

from collections.abc import Callable

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.slurm_facts import SlurmFacts

DEFAULT_BACKFILL_INTERVAL_S = 30
SHORT_KILL_WAIT_S = 30
SHORT_JOB_AGE_S = 60


def judge(evidence: Evidence) -> list[Finding]:
    facts = evidence.slurm
    if facts is None:
        return []
    if not facts.config:
        return [not_tried("settings of the controller", facts.trouble, "assume Slurm's defaults")]
    return [rule(facts) for rule in _RULES]


def _scheduler(facts: SlurmFacts) -> Finding:
    kind = facts.config.get("SchedulerType", "")
    if kind != "sched/backfill":
        return note(
            "scheduler",
            kind or "unknown",
            "need slurm.layout=single: heterogeneous jobs start from sched/backfill only",
        )
    text = facts.parameter("SchedulerParameters", "bf_interval")
    interval_s = int(text) if text and text.isdigit() else DEFAULT_BACKFILL_INTERVAL_S
    seen = f"{kind}, bf_interval {interval_s} s{'' if text else ' (the default)'}"
    if facts.parameter("SchedulerParameters", "bf_hetjob_immediate") is not None:
        return ok("scheduler", f"{seen}, bf_hetjob_immediate", "start as soon as all components fit")
    return ok("scheduler", seen, f"wait up to {2 * interval_s} s longer for a hetjob than for an ordinary job")


def _select(facts: SlurmFacts) -> Finding:
    kind = facts.config.get("SelectType", "")
    if kind == "select/cons_tres":
        return ok("resource selection", kind, "share nodes between steps with --exact and --gpus-per-node")
    if kind == "select/linear":
        return note("resource selection", f"{kind}: whole nodes only", "get whole nodes; steps inside share them")
    return problem(
        "resource selection",
        kind or "unknown",
        "not be able to ask for GPUs: --gpus-per-node needs select/cons_tres; ask the administrators",
    )


def _kill_wait(facts: SlurmFacts) -> Finding:
    wait_s = facts.seconds("KillWait")
    if wait_s is None:
        return not_tried("KillWait", "Slurm does not say", "assume 30 s")
    seen = f"{wait_s} s from TERM to KILL at a time limit, cancel or preemption"
    if wait_s < SHORT_KILL_WAIT_S:
        return note("KillWait", seen, "not save a checkpoint after TERM; --signal=B:USR1 comes early enough for that")
    return ok("KillWait", seen, "stop its steps within it; checkpoints are saved earlier, at --signal=B:USR1")


def _job_age(facts: SlurmFacts) -> Finding:
    age_s = facts.seconds("MinJobAge")
    if age_s is None:
        return not_tried("MinJobAge", "Slurm does not say", "read the end of a run from its run directory")
    seen = f"finished jobs are forgotten after {age_s} s"
    libra = "read the end of a run from its run directory, which stays"
    return note("MinJobAge", seen, libra) if age_s < SHORT_JOB_AGE_S else ok("MinJobAge", seen, libra)


def _preemption(facts: SlurmFacts) -> Finding:
    kind, mode = facts.config.get("PreemptType", ""), facts.config.get("PreemptMode", "")
    if kind in ("", "preempt/none") or mode == "OFF":
        return ok("preemption", f"{kind or 'unknown'}, {mode or 'unknown'}", "not be preempted")
    warned = (
        facts.parameter("PreemptParameters", "send_user_signal") is not None
        or facts.parameter("SchedulerParameters", "preempt_send_user_signal") is not None
    )
    if warned:
        return ok("preemption", f"{kind}, {mode}, send_user_signal", "save a checkpoint when it is preempted")
    return note(
        "preemption",
        f"{kind}, {mode}, without send_user_signal",
        "get only TERM when it is preempted, and resume from the last save_interval checkpoint",
    )


def _requeue(facts: SlurmFacts) -> Finding:
    allowed = facts.config.get("JobRequeue")
    if allowed is None:
        return not_tried("requeue", "Slurm does not say", "state --requeue or --no-requeue in every script")
    seen = f"JobRequeue={allowed}: jobs that say nothing are {'requeued' if allowed == '1' else 'not requeued'}"
    return ok("requeue", seen, "state --requeue or --no-requeue in every script")


def _accounting(facts: SlurmFacts) -> Finding:
    kind = facts.config.get("AccountingStorageType", "")
    if kind in ("", "accounting_storage/none"):
        return ok("accounting", f"{kind or 'unknown'}: sacct knows nothing", "not ask sacct in any case")
    enforced = facts.config.get("AccountingStorageEnforce", "none")
    limits = f", enforces {enforced}" if enforced not in ("none", "(null)", "") else ""
    return ok("accounting", f"{kind}{limits}", "need slurm.account and slurm.qos where they are enforced")


def _tracking(facts: SlurmFacts) -> Finding:
    kind = facts.config.get("ProctrackType", "")
    if kind == "proctrack/cgroup":
        return ok("process tracking", kind, "leave nothing behind: Slurm ends what a step started")
    return note(
        "process tracking",
        f"{kind or 'unknown'}: a process that leaves its session outlives its step",
        "end its own processes itself (each dies with its parent)",
    )


def _task_plugin(facts: SlurmFacts) -> Finding:
    kinds = facts.config.get("TaskPlugin", "")
    if "task/cgroup" in kinds or "task/affinity" in kinds:
        return ok("task plugin", kinds, "pass --cpu-bind=none: a step keeps its processors, tasks share them")
    return note(
        "task plugin",
        kinds or "unknown",
        "set OMP_NUM_THREADS for every stage: Slurm confines no step to its processors",
    )


def _restart_exit(facts: SlurmFacts) -> Finding:
    """A site may requeue or hold jobs by exit code; ours are the stages' own."""
    codes = [facts.config.get(name, "") for name in ("RequeueExit", "RequeueExitHold")]
    if all(code in ("", "(null)") for code in codes):
        return ok("exit codes", "none makes Slurm requeue a job", "end a job with its first failing stage's own code")
    return note(
        "exit codes",
        f"RequeueExit={codes[0]}, RequeueExitHold={codes[1]}",
        "end a job with its first failing stage's own code; Slurm may requeue it once more",
    )


_RULES: tuple[Callable[[SlurmFacts], Finding], ...] = (
    _scheduler,
    _select,
    _kill_wait,
    _job_age,
    _preemption,
    _requeue,
    _accounting,
    _tracking,
    _task_plugin,
    _restart_exit,
)
