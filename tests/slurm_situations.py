"""Record what the installed Slurm prints in every phase of a job's life: python -m tests.slurm_situations.

It starts a development cluster of its own with a few partitions more, plays the situations and keeps the answers: six
minutes, two of them for a controller that is dead. To record another release, put its programs first on PATH.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch import waiting
from launch.devcluster import cluster, daemons
from launch.devcluster.record import read_record
from launch.devcluster.render import render_slurm_conf
from launch.devcluster.topology import Site
from tests.slurm_recorder import QUERIES, Recorder
from tests.slurm_recordings import Said

PARTITIONS = """\
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL
PartitionName=spare Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF
PartitionName=small Nodes=node0 MaxNodes=1 MaxTime=5
PartitionName=closing Nodes=ALL
PartitionName=closed Nodes=ALL State=INACTIVE
PartitionName=down Nodes=ALL State=DOWN
"""
HET_SCRIPT = "#!/bin/bash\nsrun --het-group=0 -J trainer.0 {0} & srun --het-group=1 -J rollout_000.0 {0} & wait\n{1}\n"


def main() -> int:
    with _cluster() as running:
        recorder = Recorder(running)
        limited = start_timeouts(recorder)
        for play in (jobs_that_wait, living, ended, refused, hetjobs, bad_ends, environments, about):
            play(recorder)
        timeouts(recorder, limited)
        recorder.clear()
        for play in (preempted, nodes_lost):
            play(recorder)
            recorder.clear()
        silent(recorder, running)
    return 0


@contextmanager
def _cluster() -> Iterator[cluster.DevCluster]:
    def with_partitions(site: Site) -> str:
        return render_slurm_conf(site) + PARTITIONS

    daemons.render_slurm_conf = with_partitions  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="libra-") as folder:
        root = Path(folder) / "slurm"
        try:
            yield cluster.up(root)
        finally:
            cluster.down(root)


def start_timeouts(recorder: Recorder) -> dict[str, str]:
    """A limit is a minute at least: these run while the rest is recorded, on nodes that they share."""
    het = recorder.het(HET_SCRIPT.format("sleep 300", "exit 0"), "-t", "1", "--mem=100", more=("--mem=100",))
    return {"ordinary_timeout": recorder.wrapped("sleep 300", "-t", "1"), "het_timeout": het}


def timeouts(recorder: Recorder, jobs: dict[str, str]) -> None:
    recorder.until(jobs["ordinary_timeout"], "TIMEOUT")
    recorder.wait(lambda: recorder.states(jobs["het_timeout"])[0] == "TIMEOUT", "the hetjob's limit")
    recorder.wait(lambda: "COMPLETING" not in recorder.states(jobs["het_timeout"]), "the hetjob's end")
    for name, job in jobs.items():
        recorder.keep_job(name, job)


def jobs_that_wait(recorder: Recorder) -> None:
    begin = recorder.wrapped("true", "--begin=now+1hour")
    for name, words, reason in (
        ("held_user", ("-H",), "JobHeldUser"),
        ("dependency", (f"--dependency=afterok:{begin}",), "Dependency"),
        ("partition_down", ("-p", "down"), "PartitionDown"),
        ("partition_node_limit", ("-N2", "-p", "small"), "PartitionNodeLimit"),
        ("partition_time_limit", ("-t", "1000", "-p", "small"), "PartitionTimeLimit"),
    ):
        job = recorder.wrapped("true", *words)
        recorder.until_reason(job, reason)
        recorder.keep_job(f"pending_{name}", job)
    inactive = recorder.wrapped("true", "-H", "-p", "closing")
    recorder.run("scontrol", "update", "PartitionName=closing", "State=INACTIVE")
    recorder.run("scontrol", "release", inactive)
    recorder.until_reason(inactive, "PartitionInactive")
    recorder.keep_job("pending_partition_inactive", inactive)
    recorder.run("scontrol", "hold", begin)
    recorder.until_reason(begin, "JobHeldAdmin")
    recorder.keep_job("pending_held_admin", begin)
    failed = recorder.wrapped("exit 3")
    never = recorder.wrapped("true", f"--dependency=afterok:{failed}")
    recorder.until_reason(never, "DependencyNeverSatisfied")
    recorder.keep_job("pending_never", never)
    recorder.keep_job("pending_array", recorder.wrapped("true", "-H", "--array=0-2"))
    later = recorder.wrapped("true", "--begin=now+2hours")
    recorder.until_reason(later, "BeginTime")
    recorder.keep_job("pending_begin", later)
    recorder.keep("ahead", recorder.run("squeue", "-h", "-t", "PENDING", "-p", "dev", "-o", waiting.AHEAD_FORMAT))


def living(recorder: Recorder) -> None:
    job = recorder.wrapped("srun -J trainer.0 sleep 300", "--no-requeue")
    recorder.until(job, "RUNNING")
    steps = ("squeue", "-s", "-h", "-j", job, "-o", "%i|%j")
    recorder.wait(lambda: "trainer.0" in recorder.run(*steps).out, "the step")
    recorder.keep_job("running", job)
    recorder.keep("running_steps", recorder.run(*steps))
    recorder.keep("requeue_forbidden", recorder.run("scontrol", "requeue", job))
    recorder.run("scontrol", "suspend", job)
    recorder.until(job, "SUSPENDED")
    recorder.keep_job("suspended", job)
    recorder.run("scontrol", "resume", job)
    recorder.run("scancel", job)
    unlimited = recorder.wrapped("sleep 300", "-t", "UNLIMITED")
    recorder.until(unlimited, "RUNNING")
    recorder.keep_job("running_unlimited", unlimited)
    recorder.run("scontrol", "requeuehold", "State=SpecialExit", unlimited)
    recorder.until(unlimited, "SPECIAL_EXIT")
    recorder.keep_job("special_exit", unlimited)
    again = recorder.wrapped("sleep 300", "--requeue")
    recorder.until(again, "RUNNING")
    recorder.keep("requeue", recorder.run("scontrol", "requeue", again))
    recorder.keep("requeue_twice", recorder.run("scontrol", "requeue", again))
    recorder.until_reason(again, "BeginTime")
    recorder.keep_job("requeued", again)
    recorder.until(again, "RUNNING")
    recorder.keep_job("running_again", again)
    stubborn = recorder.wrapped("srun bash -c 'trap \"\" TERM; while true; do sleep 1; done'")
    recorder.until(stubborn, "RUNNING")
    recorder.wait(lambda: "bash" in recorder.run("squeue", "-s", "-h", "-j", stubborn, "-o", "%i|%j").out, "the step")
    recorder.run("scancel", stubborn)
    recorder.until(stubborn, "COMPLETING")
    recorder.keep_job("completing", stubborn)


def ended(recorder: Recorder) -> None:
    jobs = {
        "completed": recorder.wrapped("true"),
        "failed": recorder.wrapped("exit 7"),
        "failed_signal": recorder.wrapped("kill -KILL $$"),
        "cancelled_pending": recorder.wrapped("true", "-H"),
        "cancelled": recorder.wrapped("sleep 300"),
    }
    recorder.until(jobs["cancelled"], "RUNNING")
    recorder.run("scancel", jobs["cancelled_pending"], jobs["cancelled"])
    for name, state in (
        ("completed", "COMPLETED"),
        ("failed", "FAILED"),
        ("failed_signal", "FAILED"),
        ("cancelled_pending", "CANCELLED"),
        ("cancelled", "CANCELLED"),
    ):
        recorder.until(jobs[name], state)
        recorder.keep_job(name, jobs[name])


def refused(recorder: Recorder) -> None:
    (recorder.home / "job.sh").write_text("#!/bin/bash\ntrue\n")
    for name, words in {
        "test_only": ("-N2", "job.sh"),
        "test_only_het": ("-N1", ":", "-N1", "job.sh"),
        "test_only_too_many": ("-N9", "job.sh"),
        "test_only_het_too_many": ("-N1", ":", "-N9", "job.sh"),
    }.items():
        recorder.keep(name, recorder.run("sbatch", "--test-only", *words))
    for name, words in {
        "sbatch_partition": ("-p", "nowhere", "job.sh"),
        "sbatch_partition_inactive": ("-p", "closed", "job.sh"),
        "sbatch_memory": ("--mem=900G", "job.sh"),
        "sbatch_gpus": ("--gpus-per-node=9", "job.sh"),
        "sbatch_array_het": ("--array=0-1", "-N1", ":", "-N1", "job.sh"),
        "sbatch_no_script": ("missing.sh",),
        "sbatch_option": ("--sparkle", "job.sh"),
        "sbatch_dependency": ("--dependency=afterok:99999999", "job.sh"),
    }.items():
        recorder.keep(name, recorder.run("sbatch", "-o", "/dev/null", *words))
    unknown = [tuple(word.format(job=99999999) for word in words) for words in QUERIES[:2]]
    recorder.keep("unknown_job", *(recorder.run(*words) for words in unknown))
    several = ("squeue", "-h", "-t", "all", "-j", "99999998,99999999", "-o", waiting.FORMAT)
    recorder.keep("unknown_jobs", recorder.run(*several))
    for name, words in {"scancel": ("scancel",), "requeue": ("scontrol", "requeue")}.items():
        recorder.keep(f"{name}_unknown", recorder.run(*words, "99999999"))


def hetjobs(recorder: Recorder) -> None:
    job = recorder.het(HET_SCRIPT.format("sleep 300", "exit 0"), "--mem=100", more=("--mem=100",))
    recorder.keep_job("het_submitted", job)
    second = str(int(job) + 1)
    recorder.until(job, "RUNNING", "RUNNING")
    steps = ("squeue", "-s", "-h", "-j", f"{job},{second}", "-o", "%i|%j")
    recorder.wait(lambda: recorder.run(*steps).out.count(".0\n") == 2, "both steps")
    recorder.keep_job("het_running", job)
    recorder.keep("het_steps", recorder.run(*steps))
    recorder.keep("requeue_component", recorder.run("scontrol", "requeue", second))
    recorder.run("scancel", second)
    recorder.wait(lambda: recorder.states(job)[1] == "CANCELLED", "the component's end")
    recorder.keep_job("het_component_cancelled", job)
    recorder.run("scancel", job)
    recorder.wait(lambda: recorder.states(job)[0] == "CANCELLED", "the job's end")
    recorder.keep_job("het_cancelled", job)
    for name, script, state in (("completed", "exit 0", "COMPLETED"), ("failed", "exit 7", "FAILED")):
        job = recorder.het(HET_SCRIPT.format("true", script), "--mem=100", more=("--mem=100",))
        recorder.until(job, state, state)
        recorder.keep_job(f"het_{name}", job)
    held = recorder.het("#!/bin/bash\ntrue\n", "--mem=100", "--begin=now+1hour", more=("--mem=100",))
    recorder.until_reason(held, "BeginTime")
    recorder.keep_job("het_pending_begin", held)
    recorder.keep("scancel_component", recorder.run("scancel", str(int(held) + 1)))


def bad_ends(recorder: Recorder) -> None:
    """What srun says of tasks that end badly, with the flags that Libra gives it."""
    flags = (
        "srun",
        "-N2",
        "-n4",
        "-t",
        "5",
        "--mem=100",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "bash",
        "-c",
    )
    for name, script in {
        "exit_code": "exit $((SLURM_PROCID == 1 ? 7 : 0))",
        "exit_codes": "exit $((SLURM_PROCID == 1 ? 0 : SLURM_PROCID + 2))",
        "killed": "[ $SLURM_PROCID = 2 ] && kill -KILL $$; true",
        "terminated": "[ $SLURM_PROCID -ge 2 ] && kill -TERM $$; true",
        "segfault": "[ $SLURM_PROCID = 3 ] && kill -SEGV $$; true",
        "not_found": "exec /nowhere/program",
    }.items():
        recorder.keep(f"srun_{name}", recorder.run(*flags, script))
    recorder.keep("srun_no_program", recorder.run(*flags[:-2], "/nowhere/program"))
    recorder.keep("srun_too_many", recorder.run("srun", "-N9", "--immediate=2", "true"))
    recorder.keep("srun_unknown_job", recorder.run("srun", "--jobid=99999999", "true"))


def environments(recorder: Recorder) -> None:
    """What Slurm puts into the environment of a batch script and of a step, in an ordinary job and in a hetjob."""
    script, out = recorder.home / "env.sh", recorder.home / "env.out"
    size = ("-N1", "-n1", "-c2", "--mem=100", "--gpus-per-node=1", "-t", "5")
    for name, words, step in (("", size, "srun"), ("_het", (*size, ":", *size), "srun --het-group=1")):
        for where, command in (("batch", "env"), ("step", f"{step} --gpus-per-node=1 --mem=100 env")):
            script.write_text(f"#!/bin/bash\n{command} | grep -E '^(SLURM|CUDA)' | sort\n")
            recorder.run("sbatch", "-W", "-o", str(out), *words, str(script))
            recorder.keep(f"environment{name}_{where}", Said(("env",), 0, out.read_text()))


def about(recorder: Recorder) -> None:
    recorder.keep("config", recorder.run("scontrol", "show", "config"))
    recorder.keep("nodes", recorder.run("scontrol", "-o", "show", "node"))
    recorder.keep("partitions", recorder.run("scontrol", "-o", "show", "partition"))
    recorder.keep("sinfo", recorder.run("sinfo"), recorder.run("sinfo", "--noheader", "--Node", "--format=%N %T"))
    recorder.keep("versions", *(recorder.run(name, "--version") for name in ("sinfo", "srun", "scontrol", "sbatch")))
    recorder.keep("job_states", recorder.run("squeue", "-h", "-t", "SPARKLING"))
    recorder.keep("sacct_off", recorder.run("sacct", "-n", "-X", "-P", "-j", "1", "-o", "State,ExitCode"))


def preempted(recorder: Recorder) -> None:
    jobs = {
        name: recorder.submit("-N2", "--exclusive", "-t", "10", "-p", name, "--wrap", "sleep 300")
        for name in ("low", "spare")
    }
    for job in jobs.values():
        recorder.until(job, "RUNNING")
    waits = recorder.submit("-N4", "--exclusive", "-t", "10", "-p", "low", "--wrap", "true")
    behind = recorder.submit("-N4", "--exclusive", "-t", "10", "-p", "low", "--wrap", "true")
    het = recorder.het("#!/bin/bash\ntrue\n", "--exclusive", "-p", "low", more=("--exclusive", "-p", "low"))
    for job, reason in ((waits, "Resources"), (behind, "Priority"), (het, "Resources")):
        recorder.until_reason(job, reason)
    recorder.keep_job("pending_resources", waits)
    recorder.keep_job("pending_priority", behind)
    recorder.keep_job("het_pending_resources", het)
    recorder.keep("start_estimates", recorder.run("squeue", "--start"))
    late = recorder.wrapped("true", "-t", "1", "--deadline=now+62seconds")
    recorder.until(late, "DEADLINE")
    recorder.keep_job("deadline", late)
    recorder.run("scancel", waits, behind, het)
    winner = recorder.submit("-N4", "--exclusive", "-t", "10", "-p", "high", "--wrap", "sleep 300")
    recorder.until(jobs["low"], "PREEMPTED")
    recorder.keep_job("preempted", jobs["low"])
    recorder.until(jobs["spare"], "PENDING")
    recorder.keep_job("preempted_requeued", jobs["spare"])
    recorder.run("scancel", winner)


def nodes_lost(recorder: Recorder) -> None:
    ordinary = recorder.submit("-N1", "-w", "node3", "-t", "10", "--mem=100", "--no-requeue", "--wrap", "sleep 300")
    het = recorder.het(
        HET_SCRIPT.format("sleep 300", "exit 0"),
        "-w",
        "node0",
        "--mem=100",
        "--no-requeue",
        more=("-w", "node2", "--mem=100", "--no-requeue"),
    )
    step = recorder.start(
        "srun", "-J", "lost", "-N2", "-w", "node0,node3", "-t", "5", "--mem=100", "--no-kill", "sleep", "60"
    )
    recorder.until(ordinary, "RUNNING")
    recorder.until(het, "RUNNING", "RUNNING")
    recorder.wait(lambda: "lost" in recorder.run("squeue", "-s", "-h", "-o", "%j").out, "the step")
    recorder.run("scontrol", "update", "NodeName=node2,node3", "State=DOWN", "Reason=tried")
    recorder.until(ordinary, "NODE_FAIL")
    recorder.wait(lambda: "NODE_FAIL" in recorder.states(het), "the hetjob's end")
    recorder.wait(lambda: "COMPLETING" not in recorder.states(het), "the hetjob's end")
    recorder.run("scancel", "-n", "lost")
    recorder.keep("srun_node_fail", step())
    recorder.keep_job("node_fail", ordinary)
    recorder.keep_job("het_node_fail", het)
    # ReturnToService=2 takes a DOWN node back as soon as it registers; a drained one stays away.
    recorder.run("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=tried")
    wants = recorder.submit("-N1", "-w", "node3", "-t", "10", "--wrap", "true")
    recorder.until_reason(wants, "ReqNodeNotAvail")
    recorder.keep_job("pending_node_drained", wants)
    recorder.keep("sinfo_drained", recorder.run("sinfo", "--noheader", "--Node", "--format=%N %T"))
    recorder.run("scontrol", "update", "NodeName=node3", "State=RESUME")


def silent(recorder: Recorder, running: cluster.DevCluster) -> None:
    record = read_record(running.root)
    assert record is not None
    controller = next(process for process in record.daemons if process.name == "slurmctld")
    os.kill(controller.pid, 9)
    recorder.keep("silent", recorder.run("squeue", "-h"))


if __name__ == "__main__":
    sys.exit(main())
