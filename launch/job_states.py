"""Every job state that Slurm documents from 22.05 to 26.05, and what it means for someone who waits for the job.

Sources: squeue(1) "JOB STATE CODES" and the page "Job State Codes" of the manual. A job has one base state and any number of
flags. squeue, scontrol and sacct print one word: a flag that they know comes before the base state.
"""

from __future__ import annotations

from enum import Enum


class JobPhase(Enum):
    """What a state means for someone who waits for the job."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def is_over(self) -> bool:
        return self in (JobPhase.SUCCEEDED, JobPhase.FAILED)


BASE_STATES: dict[str, JobPhase] = {
    "PENDING": JobPhase.PENDING,
    "RUNNING": JobPhase.RUNNING,
    "SUSPENDED": JobPhase.RUNNING,
    "COMPLETED": JobPhase.SUCCEEDED,
    "CANCELLED": JobPhase.FAILED,
    "FAILED": JobPhase.FAILED,
    "TIMEOUT": JobPhase.FAILED,
    "NODE_FAIL": JobPhase.FAILED,
    "PREEMPTED": JobPhase.FAILED,
    "BOOT_FAIL": JobPhase.FAILED,
    "DEADLINE": JobPhase.FAILED,
    "OUT_OF_MEMORY": JobPhase.FAILED,
}
STATE_FLAGS: dict[str, JobPhase] = {
    "COMPLETING": JobPhase.RUNNING,
    "CONFIGURING": JobPhase.PENDING,
    "EXPEDITING": JobPhase.PENDING,  # since 25.11
    "LAUNCH_FAILED": JobPhase.FAILED,
    "POWER_UP_NODE": JobPhase.PENDING,
    "RECONFIG_FAIL": JobPhase.FAILED,
    "REQUEUED": JobPhase.PENDING,
    "REQUEUE_FED": JobPhase.PENDING,
    "REQUEUE_HOLD": JobPhase.PENDING,
    "RESIZING": JobPhase.RUNNING,
    "RESV_DEL_HOLD": JobPhase.PENDING,
    "REVOKED": JobPhase.UNKNOWN,  # a federation runs it on another cluster
    "SIGNALING": JobPhase.RUNNING,
    "SPECIAL_EXIT": JobPhase.PENDING,  # requeued and held
    "STAGE_OUT": JobPhase.RUNNING,
    "STOPPED": JobPhase.RUNNING,
    "UPDATE_DB": JobPhase.RUNNING,
}
JOB_STATES: dict[str, JobPhase] = BASE_STATES | STATE_FLAGS

SHORT_CODES: dict[str, str] = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}
"""squeue's %t. EXPEDITING has none that squeue accepts (26.05), and squeue shows the flags that are missing here under no name."""


def job_phase(state: str) -> JobPhase:
    """The meaning of a state as printed ("CANCELLED by 1000", "CANCELLED+" and "CA" included); unknown words are UNKNOWN."""
    words = state.split()
    name = words[0].rstrip("+").upper() if words else ""
    return JOB_STATES.get(SHORT_CODES.get(name, name), JobPhase.UNKNOWN)
