"""The doctor's own job: whether one could be submitted, and how long it waited."""

from __future__ import annotations

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.wording import nodes, seconds

NAME = "a job"
REFUSED = "REFUSED"
PENDING = "PENDING"


def judge(evidence: Evidence) -> list[Finding]:
    if evidence.slurm is None:
        return []
    story = evidence.job
    if story.state == REFUSED:
        return [
            problem(NAME, story.trouble, "be refused too; give slurm.account=..., slurm.partition=... and the like")
        ]
    if story.state == PENDING:
        return [
            not_tried(NAME, story.trouble, "wait in the queue as well; nothing was measured on nodes (--queue-wait)")
        ]
    if story.trouble:
        return [
            problem(
                NAME, f"job {story.job_id}: {story.trouble}", "probably fail the same way; what was measured is below"
            )
        ]
    seen = f"job {story.job_id} waited {seconds(story.waited_s)} and ran on {nodes(story.nodes)}"
    if story.state != "COMPLETED":
        return [note(NAME, f"{seen}; it ended as {story.state}", "submit the same way")]
    return [ok(NAME, seen, "submit the same way")]
