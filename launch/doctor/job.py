"""The one job in which everything on the nodes is measured: its script, its way through the queue, its end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from launch import slurm
from launch.containers import outer_python
from launch.doctor.commands import ask
from launch.doctor.evidence import HetjobStory, JobStory
from launch.doctor.inside.driver import longest_s
from launch.doctor.order import Order
from launch.doctor.probes.job import PENDING, REFUSED
from launch.hetjob import Component, HetJobSpec, check_path, render
from launch.steps import tail
from stages.files import read_json, write_bytes_atomic

JOB_NAME = "libra-doctor"
TEST_DEADLINE_S = 60.0
POLL_FIRST_S = 0.2
POLL_LAST_S = 2.0
END_PATIENCE_S = 60.0
"""After its last word, or after scancel: KillWait is 30 s by default."""
GONE = "GONE"
TRIAL_MIN = 2
TRIAL_BYTES = 200 * 2**20

Say = Callable[[str], None]


class Submitted:
    """A job of the doctor. `expected` is what `sbatch --test-only` said. `cancel` may be called at any time, also twice."""

    def __init__(self, job_id: int, expected: str, say: Say) -> None:
        self.job_id = job_id
        self.expected = expected
        self.waited_s = 0.0
        self._say = say

    def state(self) -> tuple[str, str]:
        """(Slurm's word, reason). GONE when Slurm does not know it any more, UNKNOWN when it does not answer."""
        try:
            parts = slurm.query(self.job_id)
        except slurm.SlurmCommandError as error:
            return "UNKNOWN", str(error)
        if not parts:
            return GONE, ""
        folded = slurm.fold(parts)
        return folded.state, folded.reason if folded.reason != "None" else ""

    def is_over(self) -> bool:
        word = self.state()[0]
        return word == GONE or slurm.job_phase(word).is_over

    def wait_start(self, deadline_s: float) -> str:
        """Why it has not started within `deadline_s`; empty when it has (it may be over already)."""
        started_s, said = time.monotonic(), ""
        pause_s = POLL_FIRST_S
        while True:
            word, reason = self.state()
            self.waited_s = time.monotonic() - started_s
            if word not in ("UNKNOWN",) and slurm.job_phase(word) is not slurm.JobPhase.PENDING:
                return ""
            if reason != said:
                said = reason
                self._say(f"job {self.job_id} waits: {reason}")
            if self.waited_s > deadline_s:
                return f"still {word} after {deadline_s:g} s{f' ({reason})' if reason else ''}"
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, POLL_LAST_S)

    def wait_end(self, deadline_s: float, progress: Callable[[], str] = lambda: "") -> bool:
        """Whether it ended within `deadline_s`. `progress` says what it does now; news are shown."""
        started_s, said = time.monotonic(), ""
        pause_s = POLL_FIRST_S
        while not self.is_over():
            if time.monotonic() - started_s > deadline_s:
                return False
            now = progress()
            if now and now != said:
                said = now
                self._say(f"job {self.job_id}: {now}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.1, POLL_LAST_S / 2)
        return True

    def cancel(self) -> None:
        """End it and wait until it is over. What Slurm says against it is shown: then something may be left."""
        if self.is_over():
            return
        try:
            slurm.cancel_job(self.job_id)
        except slurm.SlurmCommandError as error:
            self._say(f"job {self.job_id} could not be cancelled: {error}")
        if not self.wait_end(END_PATIENCE_S):
            self._say(f"job {self.job_id} does not end; scancel {self.job_id}")


def script(order: Order, config: LibraConfig, most_min: int | None = None) -> str:
    """Rendered as a run's script is, for at most `most_min` minutes. Raises JobSpecError for a name that Slurm cannot take."""
    check_path(order.path)
    needed_min = int(longest_s(order.limits) // 60) + 2
    spec = HetJobSpec(
        job_name=JOB_NAME,
        time_min=min(needed_min, most_min or needed_min),
        output=str(order.path / "job.log"),
        components=(_component(config, order, order.nodes, order.cpus, order.gpus, order.mem_bytes),),
        setup=tuple(config.launch.setup),
    )
    return render(
        spec, f"{shlex.quote(outer_python(config))} -u -m launch.doctor.inside.driver {shlex.quote(order.folder)}"
    )


def trial_script(order: Order, config: LibraConfig) -> str:
    """Two components of one node, a step on each."""
    sizes = f"--nodes=1 --ntasks=1 --cpus-per-task={order.threads} --mem=0"
    no_gpus = "" if order.gpu_flag == "none" else "--gpus-per-node=0 "
    step = f"srun --het-group={{}} {sizes} --exact {no_gpus}--mpi=none /bin/true"
    component = _component(config, order, 1, order.threads, 0, TRIAL_BYTES)
    spec = HetJobSpec(
        job_name=f"{JOB_NAME}-het",
        time_min=TRIAL_MIN,
        output=str(order.path / "hetjob.log"),
        components=(component, component),
    )
    return render(spec, f"/bin/sh -c {shlex.quote(f'{step.format(0)} && {step.format(1)}')}")


def _component(config: LibraConfig, order: Order, nodes: int, cpus: int, gpus: int, mem_bytes: int) -> Component:
    options = config.slurm
    return Component(
        roles=("doctor",),
        nodes=nodes,
        cpus=cpus,
        gpus_per_node=gpus,
        mem_bytes=mem_bytes,
        gpu_flag=order.gpu_flag,
        gpu_type=order.gpu_type,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        constraint=options.constraint,
        reservation=options.reservation,
        exclude=options.exclude,
        extra=tuple(options.extra),
    )


def submit(path: Path, text: str, say: Say) -> Submitted | str:
    """The job, or why sbatch does not take it; `--test-only` first, which refuses what would wait for ever."""
    write_bytes_atomic(path, text.encode())
    test = ask(["sbatch", "--test-only", str(path)], TEST_DEADLINE_S)
    if not test.is_ok:
        return test.words
    answer = ask(["sbatch", "--parsable", str(path)], TEST_DEADLINE_S)
    number = answer.out.strip().partition(";")[0]
    if not answer.is_ok or not number.isdigit():
        return answer.words or "sbatch printed no job id"
    return Submitted(int(number), test.words, say)


def follow(job: Submitted, order: Order, queue_wait_s: float) -> JobStory:
    """From the queue to the end. The job is over afterwards, or has been told to end."""
    try:
        late = job.wait_start(queue_wait_s)
        if late:
            told = f"job {job.job_id} was {late}, and was cancelled; before: {job.expected}"
            return JobStory(job.job_id, PENDING, (), job.waited_s, told)
        ended = job.wait_end(longest_s(order.limits) + END_PATIENCE_S, lambda: str(_driver(order).get("doing", "")))
    finally:
        job.cancel()
    state, report = job.state()[0], _driver(order)
    trouble = "" if report.get("done") else _why(order, state, ended, str(report.get("doing", "")))
    return JobStory(job.job_id, state, tuple(report.get("nodes", ())), job.waited_s, trouble)


def _driver(order: Order) -> dict[str, Any]:
    return read_json(order.reports / "driver.json") or {}


def _why(order: Order, state: str, ended: bool, doing: str) -> str:
    lines = [line.strip() for line in tail(order.path / "job.log", 4) if line.strip()]
    words = " | ".join(lines)[:500]
    if not doing:
        seen = words or f"it wrote nothing into {order.path}: is this folder there on the nodes (--run-root)?"
        return f"it ended as {state} before its first word: {seen}"
    return f"it {f'ended as {state}' if ended else 'did not end'} while {doing}{f': {words}' if words else ''}"


def try_hetjob(order: Order, config: LibraConfig, nodes: int, queue_wait_s: float, say: Say) -> HetjobStory:
    """Ask sbatch, and in the full mode run one. `nodes`: how many the partition has that take work."""
    if nodes < 2:
        return HetjobStory(None, "components cannot share a node, and fewer than two nodes take work")
    path = order.path / "hetjob.sbatch"
    write_bytes_atomic(path, trial_script(order, config).encode())
    test = ask(["sbatch", "--test-only", str(path)], TEST_DEADLINE_S)
    if order.quick or not test.is_ok:
        return HetjobStory(test.is_ok, test.words)
    job = submit(path, trial_script(order, config), say)
    if isinstance(job, str):
        return HetjobStory(False, job)
    return _tried(job, order, test.words, queue_wait_s)


def _tried(job: Submitted, order: Order, said: str, queue_wait_s: float) -> HetjobStory:
    try:
        late = job.wait_start(queue_wait_s)
        if late:
            return HetjobStory(True, f"{said}; a real one was {late}", PENDING, job.waited_s)
        ended = job.wait_end(TRIAL_MIN * 60 + END_PATIENCE_S)
        state = job.state()[0]
    finally:
        job.cancel()
    words = " | ".join(tail(order.path / "hetjob.log", 4))[:400]
    if ended and state == "COMPLETED":
        return HetjobStory(True, said, "COMPLETED", job.waited_s)
    return HetjobStory(True, f"a real one ended as {state}: {words}", "FAILED", job.waited_s)


def refused(why: str) -> JobStory:
    return JobStory(state=REFUSED, trouble=f"sbatch refused the doctor's job: {why}")
