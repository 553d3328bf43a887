"""Ask a Slurm and keep its answers in tests/golden/slurm/<version>/<situation>.txt; `tests.slurm_situations` says when."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable

from launch import slurm, waiting
from launch.devcluster import cluster
from tests.slurm_recordings import FOLDER, Said, version_of, write

PATIENCE_S = 150.0
SLOW_COMMAND_S = 300.0
"""Without a controller squeue tries again for SlurmctldTimeout (two minutes) before it says so."""
QUERIES = (
    ("squeue", "-h", "-t", "all", "-j", "{job}", "-o", slurm.SQUEUE_FORMAT),
    ("scontrol", "-o", "show", "job", "{job}"),
    ("squeue", "-h", "-t", "all", "-j", "{job}", "-o", waiting.FORMAT),
    ("squeue", "-h", "-t", "all", "-j", "{job}", "-o", "%i|%t"),
)


class Recorder:
    """Runs commands on one cluster; `made_up` replaces what belongs to this machine."""

    def __init__(self, running: cluster.DevCluster) -> None:
        self.env = running.env() | {"LC_ALL": "C"}
        self.home = running.root / "home"
        self.home.mkdir()
        self.version = version_of(self.run("sinfo", "--version").out)
        self._made_up = {str(self.home): "/home/user", str(running.root): "/cluster", socket.gethostname(): "login"}
        plugins = re.search(r"PluginDir\s*= (\S+)", self.run("scontrol", "show", "config").out)
        if plugins is not None:
            self._made_up[plugins[1]] = (
                "/usr/lib/slurm"  # of a release that somebody built for himself it may be anywhere
            )

    def run(self, *words: str) -> Said:
        done = subprocess.run(
            words,
            env=self.env,
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=SLOW_COMMAND_S,
            stdin=subprocess.DEVNULL,
        )
        return Said(words, done.returncode, done.stdout, done.stderr)

    def start(self, *words: str) -> Callable[[], Said]:
        """Begin a command; the result waits for its end."""
        child = subprocess.Popen(
            words, env=self.env, cwd=self.home, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, text=True
        )

        def end() -> Said:
            out, err = child.communicate(timeout=SLOW_COMMAND_S)
            return Said(words, child.returncode, out, err)

        return end

    def submit(self, *words: str) -> str:
        """The job's id; a leader's for a hetjob."""
        said = self.run("sbatch", "--parsable", "-o", "/dev/null", *words)
        if said.code:
            raise RuntimeError(f"{' '.join(said.words)}: {said.err}")
        return said.out.strip()

    def wrapped(self, script: str, *words: str) -> str:
        return self.submit("-N1", "-t", "10", "--mem=100", *words, "--wrap", script)

    def het(self, script: str, *words: str, more: tuple[str, ...] = ()) -> str:
        path = self.home / "job.sh"
        path.write_text(script)
        return self.submit("-N1", "-t", "10", *words, ":", "-N1", "-t", "10", *more, str(path))

    def states(self, job: str) -> list[str]:
        """Of the components by offset; squeue lists them in any order."""
        found = slurm.parse_squeue(self.run(*(word.format(job=job) for word in QUERIES[0])).out)
        return [part.state for part in sorted(found, key=lambda part: part.offset)]

    def until(self, job: str, *wanted: str) -> None:
        """Wait until the components' states are these."""
        self.wait(lambda: self.states(job) == list(wanted), f"{job} is {' '.join(wanted)}")

    def until_reason(self, job: str, word: str) -> None:
        self.wait(lambda: word in self.run("squeue", "-h", "-j", job, "-o", "%r").out, f"{job} waits for {word}")

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > deadline_s:
                raise TimeoutError(what)
            time.sleep(0.2)

    def keep(self, name: str, *said: Said) -> None:
        print(f"{self.version}: {name}", flush=True)
        write(FOLDER / self.version / f"{name}.txt", said, self._made_up)

    def keep_job(self, name: str, job: str) -> None:
        """Ask until nothing changed between the first and the last question: the answers describe one moment."""
        while True:
            before = self.states(job)
            said = [self.run(*(word.format(job=job) for word in words)) for words in QUERIES]
            if self.states(job) == before:
                return self.keep(name, *said)

    def clear(self) -> None:
        """No job is left pending or running, and all nodes take work again."""
        self.run("scancel", "-u", "root")
        self.wait(lambda: not self.run("squeue", "-h").out, "all jobs ended")
