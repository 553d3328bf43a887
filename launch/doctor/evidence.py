"""Everything that was found out, as the probes get it. Reports are plain JSON; their keys are documented where they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.doctor.slurm_facts import SlurmFacts

Report = Mapping[str, Any]


@dataclass(frozen=True)
class JobStory:
    """How the doctor's job went. `state` is Slurm's word for it, or REFUSED (sbatch did not take it).

    `trouble` says why the nodes told nothing, or not everything; empty when all went well.
    """

    job_id: int = 0
    state: str = ""
    nodes: tuple[str, ...] = ()
    waited_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True)
class HetjobStory:
    """`allowed`: what `sbatch --test-only` of two components said (None: not asked). `state`: how a real one ended."""

    allowed: bool | None = None
    said: str = ""
    state: str = ""
    waited_s: float = 0.0


@dataclass(frozen=True)
class GpuAsking:
    """How the job asked for GPUs: `count` on each node. `flag` is what sbatch took; `refused` what it said to others."""

    count: int = 0
    flag: str = "gpus-per-node"
    configured: str = "gpus-per-node"
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """`nodes`, `steps` and `programs` are reports by name.

    `here` are the answers of the interpreter that runs the doctor. `absent` says why there is no `slurm`; `silent`: there
    should be one, and it does not answer. `configured` are the rates that the planner would use, by option.
    """

    mode: str
    quick: bool
    asking: GpuAsking = GpuAsking()
    configured: Mapping[str, float] = field(default_factory=dict)
    here: Report = field(default_factory=dict)
    slurm: SlurmFacts | None = None
    absent: str = ""
    silent: bool = False
    job: JobStory = JobStory()
    hetjob: HetjobStory = HetjobStory()
    nodes: Mapping[str, Report] = field(default_factory=dict)
    steps: Mapping[str, Report] = field(default_factory=dict)
    programs: Mapping[str, Report] = field(default_factory=dict)

    def answers(self, key: str) -> dict[str, Report]:
        """Node -> what it measured for `key`; nodes without an answer are left out."""
        return {
            name: report[key] for name, report in self.nodes.items() if key in report and "error" not in report[key]
        }

    def errors(self, key: str) -> dict[str, str]:
        """Node -> why it has no answer, where it tried."""
        return {
            name: str(report[key]["error"])
            for name, report in self.nodes.items()
            if key in report and "error" in report[key]
        }

    def why_not(self, key: str) -> str:
        """Why nobody answered `key`."""
        errors = self.errors(key)
        if errors:
            node, error = next(iter(errors.items()))
            return f"{node}: {error}"
        return self.no_step

    @property
    def no_step(self) -> str:
        """Why a program of the job has no answer, when it has none."""
        return (
            "nothing ran on nodes, see 'a job'" if not self.nodes and self.job.trouble else "the job did not get so far"
        )
