"""Whether heterogeneous jobs are allowed: asked of sbatch, and in the full mode tried."""

from __future__ import annotations

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.slurm_facts import SlurmFacts
from launch.doctor.wording import seconds

SINGLE = "use slurm.layout=single: one ordinary job with exact steps (the profile says so)"


def judge(evidence: Evidence) -> list[Finding]:
    if evidence.slurm is None:
        return []
    story = evidence.hetjob
    if story.allowed is None:
        return [not_tried("heterogeneous jobs", story.said or "not asked", "try slurm.layout=hetjob as configured")]
    if not story.allowed:
        return [note("heterogeneous jobs", f"refused: {story.said}", SINGLE)]
    if not _can_start(evidence.slurm):
        return [note("heterogeneous jobs", "accepted, but without sched/backfill they never start", SINGLE)]
    return [
        ok("heterogeneous jobs", f"accepted (sbatch --test-only): {story.said}", "use slurm.layout as configured"),
        _real(evidence),
    ]


def must_be_single(evidence: Evidence) -> bool:
    """Are heterogeneous jobs known not to work here?"""
    story = evidence.hetjob
    if evidence.slurm is None or story.allowed is None:
        return False
    return not story.allowed or story.state == "FAILED" or not _can_start(evidence.slurm)


def _can_start(facts: SlurmFacts) -> bool:
    return facts.config.get("SchedulerType", "sched/backfill") == "sched/backfill"


def _real(evidence: Evidence) -> Finding:
    name = "a real heterogeneous job"
    story = evidence.hetjob
    if evidence.quick:
        return not_tried(name, "--quick", "find out with the first run")
    if story.state == "COMPLETED":
        seen = f"two components started {seconds(story.waited_s)} after submission, a step ran on each"
        return ok(name, seen, "start one step per stage with --het-group")
    if story.state == "FAILED":
        return problem(name, story.said, f"fail with slurm.layout=hetjob; {SINGLE}")
    return not_tried(name, story.said or story.state, "find out with the first run")
