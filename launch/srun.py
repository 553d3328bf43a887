"""Steps of a Slurm allocation, each started by an srun of its own.

The flags follow runs on Slurm 22.05 (`CR_Core_Memory` and others): everything explicit, `--exact`, and a scrubbed environment
with `--jobid` of the leader. A CPU-only step needs `--gpus-per-node=0`: without a GPU flag `--exact` waits for all GPUs.

`--kill-on-bad-exit=0 --wait=0`: with 1, srun sends TERM to the other ranks and, when one ignores it (it hangs in a collective),
nothing can end the step before KillWait (30 s by default): tried, neither scancel nor killing srun helps. So srun only
reports the bad rank on stderr, within about 0.1 s, and the supervisor stops the step as it stops any other.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch import slurm
from launch.containers import BARE, Surroundings
from launch.job_environment import JobEnvironment
from launch.steps import Incarnation, Step, StepRunner, StepStartError, StepStatus, step_command, step_environment
from stages.desired import StepSpec
from stages.process import die_with_parent

INTO_OWN_LOG = 'exec "$@" >>"$0.$SLURM_PROCID.log" 2>&1'
"""srun's own `--output=NAME.%t.log` counts from -1 in steps of a hetjob (24.11.5, 26.05.5): rank 0 writes to
NAME.4294967295.log and rank 1 to NAME.0.log. slurmstepd's words go to srun's stderr."""
IMMEDIATE_S = 60
"""How long srun may wait for the step's resources. They belong to the job, so a longer wait means a wrong plan."""


@dataclass(frozen=True)
class Allocation:
    """The job that the supervisor runs in: leader id, and for each component its id and its hosts in Slurm's order."""

    job_id: int
    component_ids: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    is_het: bool

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Allocation:
        """From the batch shell's variables. Components of a hetjob are SLURM_*_HET_GROUP_<n>. Raises AllocationError."""
        told = JobEnvironment(environment)
        job_id, suffixes = told.job_id(), told.components()
        hosts = tuple(tuple(told.hosts(suffix)) for suffix in suffixes)
        if suffixes == [""]:
            return cls(job_id, (job_id,), hosts, False)
        return cls(job_id, tuple(told.job_id(f"SLURM_JOB_ID{suffix}") for suffix in suffixes), hosts, True)


def srun_command(
    incarnation: Incarnation, allocation: Allocation, python: str, around: Surroundings = BARE
) -> list[str]:
    """The whole command line of one step. Raises StepStartError when the allocation lacks the step's place."""
    command = step_command(python, incarnation, around.prefix(incarnation.spec.role))
    return [*srun_words(incarnation, allocation, around), *into_own_log(incarnation, command)]


def into_own_log(incarnation: Incarnation, command: Sequence[str]) -> list[str]:
    """`command` for srun: each task writes to its own log."""
    return ["/bin/sh", "-c", INTO_OWN_LOG, str(incarnation.log_stem), *command]


def srun_words(incarnation: Incarnation, allocation: Allocation, around: Surroundings = BARE) -> list[str]:
    """srun with its options, without the command. Raises StepStartError when the allocation lacks the step's place."""
    spec = incarnation.spec
    hosts = _hosts(spec, allocation)
    return [
        "srun",
        f"--jobid={allocation.job_id}",
        *([f"--het-group={spec.component}"] if allocation.is_het else []),
        f"--nodelist={','.join(hosts)}",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.tasks}",
        f"--ntasks-per-node={spec.tasks_per_node}",
        f"--cpus-per-task={spec.cpus_per_task}",
        *([f"--gpus-per-node={spec.gpus_per_node}"] if around.asks_for_gpus else []),
        f"--mem={f'{spec.mem_bytes // 2**20}M' if spec.mem_bytes else '0'}",
        "--exact",
        f"--immediate={IMMEDIATE_S}",
        "--mpi=none",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--job-name={incarnation.unique_name}",
        *around.srun_words(spec.role),
    ]


def _hosts(spec: StepSpec, allocation: Allocation) -> tuple[str, ...]:
    if spec.component >= len(allocation.hosts):
        raise StepStartError(f"{spec.name} belongs on component {spec.component}, the job has {len(allocation.hosts)}")
    hosts = allocation.hosts[spec.component][spec.node : spec.node + spec.nodes]
    if len(hosts) < spec.nodes:
        available = len(allocation.hosts[spec.component])
        raise StepStartError(
            f"{spec.name} wants nodes {spec.node}..{spec.node + spec.nodes - 1} of component {spec.component}, it has {available}"
        )
    return hosts


_BAD_TASKS = re.compile(r"^srun: error: [^:]+: tasks? ([\d,\-]+): (.*)$", re.MULTILINE)
_EXIT_CODE = re.compile(r"exit(?:ed with)? (?:exit )?code (\d+)", re.IGNORECASE)
_NODE_FAILURE = re.compile(r"^srun: (?:error: )?(.*[Nn]ode failure(?: on (\S+))?.*)$", re.MULTILINE)
_SIGNALS = {text: number for number in signal.valid_signals() if (text := signal.strsignal(number))}


def parse_srun_errors(text: str) -> dict[int, int]:
    """rank -> exit status (-n: signal n) from srun's stderr.

    Lines look like "srun: error: node0: task 1: Exited with exit code 7" or "srun: error: node0: tasks 0-1,3: Killed".
    An unknown phrase counts as exit code 1.
    """
    exits: dict[int, int] = {}
    for ranks, what in _BAD_TASKS.findall(text):
        for rank in _ranks(ranks):
            exits.setdefault(rank, _status(what))
    return exits


def _status(what: str) -> int:
    code = _EXIT_CODE.search(what)
    if code:
        return int(code[1])
    words = what.split(" (core dumped)")[0].strip()
    if words.lower().startswith("out of memory"):
        return -int(signal.SIGKILL)
    return -int(_SIGNALS[words]) if words in _SIGNALS else 1


def _ranks(text: str) -> list[int]:
    found: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


class SrunStep(Step):
    def __init__(self, incarnation: Incarnation, process: subprocess.Popen[bytes]) -> None:
        super().__init__(incarnation)
        self.process = process
        self.kills = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """srun's stderr."""
        try:
            return self.incarnation.starter_log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def status(self) -> StepStatus:
        code = self.process.poll()
        text = self.said()
        exits = parse_srun_errors(text)
        if code is None:
            return StepStatus(ended=False, exits=exits)
        lost = _NODE_FAILURE.search(text)
        if lost:
            exits.setdefault(0, 1)
        if code != 0 and not exits:
            # srun itself failed or was killed, or reports "128 + signal" of a task that it did not name.
            exits[0] = 128 - code if code > 128 else code
        note = lost[1] if lost else _last_error(text)
        names = tuple(slurm.expand_nodes(lost[2])) if lost and lost[2] else ()
        return StepStatus(True, exits or dict.fromkeys(range(self.spec.tasks), 0), note, names)


def _last_error(text: str) -> str:
    errors = [line for line in text.splitlines() if line.startswith("srun: error") and not _BAD_TASKS.match(line)]
    return errors[-1] if errors else ""


class SrunRunner(StepRunner):
    result_wait_s = 5.0

    def __init__(self, python: str, allocation: Allocation, around: Surroundings = BARE) -> None:
        self._python = python
        self._around = around
        self._allocation = allocation
        self._lost: set[str] = set()

    def start(self, incarnation: Incarnation) -> Step:
        environment = step_environment(incarnation, os.environ)
        environment["SUBMITIT_EXECUTOR"] = "slurm"
        supervisor = os.getpid()
        try:
            with incarnation.starter_log.open("ab") as errors:
                process = subprocess.Popen(
                    srun_command(incarnation, self._allocation, self._python, self._around),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(supervisor),
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise StepStartError(f"{incarnation.spec.name} could not be started: {error}") from error
        return SrunStep(incarnation, process)

    def ask_to_stop(self, steps: Sequence[Step]) -> None:
        """TERM through scancel: TERM to srun itself would give the tasks no time. A step without an id never started."""
        for step in self._not_reached(steps, "TERM"):
            _srun(step).process.terminate()

    def kill(self, steps: Sequence[Step]) -> None:
        """KILL through scancel (0.1 s); at the second call also to srun, whose end takes its step along."""
        missed = self._not_reached(steps, "")
        for step in map(_srun, steps):
            step.kills += 1
            if step in missed or step.kills > 1:
                step.process.kill()

    def _not_reached(self, steps: Sequence[Step], signal_name: str) -> list[Step]:
        """Signal the steps through Slurm; returns those that it does not know, or all when it does not answer."""
        try:
            known = slurm.step_ids(self._allocation.component_ids)
            slurm.cancel_steps(
                [known[s.incarnation.unique_name] for s in steps if s.incarnation.unique_name in known], signal_name
            )
        except slurm.SlurmCommandError as error:
            print(f"signalling srun directly: {error}", flush=True)
            return list(steps)
        return [step for step in steps if step.incarnation.unique_name not in known]

    def release(self, step: Step) -> None:
        """Slurm itself gives the resources of an ended step to the next one."""

    def explain(self, step: Step) -> str:
        """The state of the step's component, when Slurm has ended it."""
        state = self._component(step.spec.component) if self._allocation.is_het else None
        return state.text if state is not None and state.phase is slurm.JobPhase.FAILED else ""

    def hosts(self, step: Step) -> tuple[str, ...]:
        return _hosts(step.spec, self._allocation)

    def find_lost(self, step: Step) -> tuple[str, ...]:
        """A job that survives a node (--no-kill) just has it no more in its list; a hetjob ends with its node."""
        self._lost.update(step.status().lost_nodes)
        state = None if self._allocation.is_het else self._component(step.spec.component)
        if state is not None and state.nodes:
            self._lost.update(set(self.hosts(step)) - set(slurm.expand_nodes(state.nodes)))
        return tuple(host for host in self.hosts(step) if host in self._lost)

    def is_place_gone(self, step: Step) -> bool:
        return bool(self.explain(step)) or bool(self._lost.intersection(self.hosts(step)))

    def usable_nodes(self, component: int) -> dict[int, str]:
        hosts = self._allocation.hosts[component]
        return {number: host for number, host in enumerate(hosts) if host not in self._lost}

    def _component(self, offset: int) -> slurm.ComponentState | None:
        """None when Slurm does not answer."""
        try:
            states = slurm.query(self._allocation.job_id)
        except slurm.SlurmCommandError:
            return None
        return next((state for state in states if state.offset == offset), None)


def _srun(step: Step) -> SrunStep:
    if not isinstance(step, SrunStep):
        raise TypeError(f"{step} is not a step of srun")
    return step
