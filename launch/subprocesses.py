"""Steps as plain subprocesses on this machine: what replaces srun where there is no Slurm."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Mapping, Sequence

from launch.containers import BARE, Surroundings
from launch.steps import Incarnation, Step, StepRunner, StepStartError, StepStatus, step_command, step_environment
from stages.process import die_with_parent


class GpuPool:
    """Hands the visible GPUs of this machine to steps, each GPU to one step at a time."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._free = list(devices)
        self.total = len(self._free)

    def take(self, count: int, who: str) -> list[str]:
        """Raises StepStartError when fewer than `count` are free."""
        if count > len(self._free):
            raise StepStartError(
                f"{who} wants {count} GPUs, free {len(self._free)} of {self.total} visible on this machine;"
                f" lower train_gpus or rollout_gpus, or use a Slurm cluster (cluster=slurm)"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, devices: Sequence[str]) -> None:
        self._free = sorted([*self._free, *devices], key=lambda name: (len(name), name))


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES when set, else one number for each NVIDIA device file."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]


class SubprocessStep(Step):
    def __init__(self, incarnation: Incarnation, tasks: list[subprocess.Popen[bytes]], devices: list[str]) -> None:
        super().__init__(incarnation)
        self.tasks = tasks
        self.devices = devices

    @property
    def pid(self) -> int:
        return self.tasks[0].pid

    def status(self) -> StepStatus:
        codes = {rank: task.poll() for rank, task in enumerate(self.tasks)}
        exits = {rank: code for rank, code in codes.items() if code is not None}
        return StepStatus(ended=len(exits) == len(self.tasks), exits=exits)


class SubprocessRunner(StepRunner):
    """`gpus` is None on a machine whose "GPUs" are CPU worker slots: nothing is handed out and CUDA stays hidden."""

    def __init__(self, python: str, gpus: GpuPool | None, around: Surroundings = BARE) -> None:
        self._python = python
        self._around = around
        self._gpus = gpus

    def start(self, incarnation: Incarnation) -> Step:
        spec = incarnation.spec
        devices = self._gpus.take(spec.gpus_per_node * spec.nodes, spec.name) if self._gpus else []
        step = SubprocessStep(incarnation, [], devices)
        try:
            for rank in range(spec.tasks):
                step.tasks.append(self._start_task(incarnation, rank, devices))
        except (OSError, subprocess.SubprocessError) as error:
            self.kill([step])
            raise StepStartError(f"{spec.name} could not be started: {error}") from error
        return step

    def _start_task(self, incarnation: Incarnation, rank: int, devices: list[str]) -> subprocess.Popen[bytes]:
        environment = step_environment(incarnation, os.environ)
        environment.update(
            {
                "CUDA_VISIBLE_DEVICES": ",".join(devices),
                "SUBMITIT_EXECUTOR": "local",
                "SUBMITIT_LOCAL_JOB_ID": incarnation.job_id,
                "SUBMITIT_LOCAL_NTASKS": str(incarnation.spec.tasks),
                "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
                "SUBMITIT_LOCAL_NODEID": "0",
                "SUBMITIT_LOCAL_GLOBALID": str(rank),
                "SUBMITIT_LOCAL_LOCALID": str(rank),
            }
        )
        supervisor = os.getpid()
        with incarnation.log(rank).open("ab") as log:
            return subprocess.Popen(
                step_command(self._python, incarnation, self._around.prefix(incarnation.spec.role)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A session of its own keeps the terminal's Ctrl-C for the launcher, which ends the run in order.
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(supervisor),
            )

    def ask_to_stop(self, steps: Sequence[Step]) -> None:
        for task in _tasks(steps):
            if task.poll() is None:
                task.terminate()

    def kill(self, steps: Sequence[Step]) -> None:
        for task in _tasks(steps):
            if task.poll() is None:
                task.kill()

    def release(self, step: Step) -> None:
        if isinstance(step, SubprocessStep) and self._gpus:
            self._gpus.give_back(step.devices)
            step.devices = []


def _tasks(steps: Sequence[Step]) -> list[subprocess.Popen[bytes]]:
    return [task for step in steps if isinstance(step, SubprocessStep) for task in step.tasks]
