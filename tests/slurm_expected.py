"""What a message about each recorded job must say, and the phase that it is in."""

from __future__ import annotations

from launch.slurm import JobPhase

PENDING, RUNNING, SUCCEEDED, FAILED = JobPhase.PENDING, JobPhase.RUNNING, JobPhase.SUCCEEDED, JobPhase.FAILED

JOBS: dict[str, tuple[JobPhase, str]] = {
    # phase of the whole job, and what a message about it contains
    "pending_held_user": (PENDING, "PENDING, JobHeldUser"),
    "pending_held_admin": (PENDING, "PENDING, JobHeldAdmin"),
    "pending_dependency": (PENDING, "PENDING, Dependency"),
    "pending_never": (PENDING, "PENDING, DependencyNeverSatisfied"),
    "pending_begin": (PENDING, "PENDING, BeginTime"),
    "pending_resources": (PENDING, "PENDING, Resources"),
    "pending_priority": (PENDING, "PENDING, Priority"),
    "pending_partition_down": (PENDING, "PENDING, PartitionDown"),
    "pending_partition_inactive": (PENDING, "PENDING, PartitionInactive"),
    "pending_partition_node_limit": (PENDING, "PENDING, PartitionNodeLimit"),
    "pending_partition_time_limit": (PENDING, "PENDING, PartitionTimeLimit"),
    "pending_node_drained": (PENDING, "PENDING, ReqNodeNotAvail"),
    "running": (RUNNING, "RUNNING"),
    "running_unlimited": (RUNNING, "RUNNING"),
    "running_again": (RUNNING, "RUNNING"),
    "suspended": (RUNNING, "SUSPENDED"),
    "completing": (RUNNING, "COMPLETING"),
    "requeued": (PENDING, "PENDING, BeginTime"),
    "special_exit": (PENDING, "SPECIAL_EXIT, job requeued in held state"),
    "preempted_requeued": (PENDING, "PENDING"),
    "completed": (SUCCEEDED, "COMPLETED"),
    "failed": (FAILED, "FAILED, exit code 7"),
    "failed_signal": (FAILED, "FAILED, killed by SIGKILL"),
    "cancelled": (FAILED, "CANCELLED"),
    "cancelled_pending": (FAILED, "CANCELLED"),
    "ordinary_timeout": (FAILED, "TIMEOUT"),
    "deadline": (FAILED, "DEADLINE, DeadLine"),
    "preempted": (FAILED, "PREEMPTED"),
    "node_fail": (FAILED, "NODE_FAIL, NodeDown"),
    "out_of_memory": (FAILED, "OUT_OF_MEMORY, OutOfMemory"),
    "boot_fail": (FAILED, "BOOT_FAIL"),
    "het_submitted": (PENDING, "PENDING"),
    "het_pending_begin": (PENDING, "PENDING, BeginTime"),
    "het_pending_resources": (PENDING, "PENDING, Resources"),
    "het_running": (RUNNING, "RUNNING"),
    "het_component_cancelled": (RUNNING, "component 0 is RUNNING"),
    "het_cancelled": (FAILED, "CANCELLED"),
    "het_completed": (SUCCEEDED, "COMPLETED"),
    "het_failed": (FAILED, "component 0 is FAILED, exit code 7"),
    "het_timeout": (FAILED, "component 0 is TIMEOUT"),
    "het_node_fail": (FAILED, "component 0 is NODE_FAIL, NodeDown"),
}
