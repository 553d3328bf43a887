"""The local pair of the Slurm job: submitit's LocalExecutor, made to die with its launcher.

    launcher -> this module as `python -m launch.local FOLDER LAUNCHER` (submitit's controller) -> supervisor -> steps

Each one asks the kernel to be ended with its parent. The controller has a session of its own, so Ctrl-C in the terminal reaches
the launcher only, which ends the run in order. (submitit's own controller would answer it with SIGINT and, one second later,
SIGKILL to the supervisor.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.local.local import Controller, LocalJob

from launch.scrub import scrubbed
from stages.process import die_with_parent

UNLIMITED_S = 10 * 365 * 86400
"""submitit's controller needs a limit; a local run has none."""


class LocalPairJob(LocalJob[Any]):
    """A local run; `cancel` asks the supervisor to end in order (TERM, which submitit's controller passes on)."""

    def cancel(self, check: bool = True) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def exit_status(self) -> int | None:
        """Of the supervisor, as a shell shows it: 128 + n for signal n; None while it runs.

        -n when submitit's controller itself was killed by signal n: the supervisor then ends as well, a little later.
        """
        return None if self._process is None else self._process.poll()


class LocalPairExecutor(submitit.LocalExecutor):
    """Submit from the main thread only: the run dies with the thread that started it."""

    job_class = LocalPairJob

    def _submit_command(self, command: str) -> LocalPairJob:
        environment = {
            **scrubbed(os.environ),
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(UNLIMITED_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.local", str(self.folder), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return LocalPairJob(folder=self.folder, job_id=str(process.pid), process=process)


class DyingController(Controller):
    """submitit's controller, which also remembers how the supervisor ended."""

    codes: Sequence[int | None] = ()

    def wait(self, freq: int = 24) -> Sequence[int | None]:
        self.codes = super().wait(freq)
        return self.codes


def main(folder: Path, launcher: int) -> int:
    """Exit status of the supervisor, 128 + n when signal n killed it."""
    die_with_parent(launcher)
    link_log(folder, str(os.getpid()))
    controller = DyingController(folder)
    controller.run()
    code = next((code for code in controller.codes if code), 0)
    return code if code >= 0 else 128 - code


def link_log(folder: Path, job_id: str) -> None:
    """Let submitit's name of the job's log be the run's logs/supervisor.log, so that `job.stdout()` works too."""
    log = folder.parent / "logs" / "supervisor.log"
    (folder / f"{job_id}_0_log.out").symlink_to(os.path.relpath(log, folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
