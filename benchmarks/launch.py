"""What Libra adds to a bare `sbatch` and `srun`: before the job is accepted, and from its start to that of all steps.

`python -m benchmarks.launch [--nodes 2 16 64] [--repeat 5] [--json]` starts a private Slurm of as many fake nodes (one fake GPU
each, all on this machine), and in turn, so that a busy machine slows all of them:

- bare shell: `sbatch` of a script with the same components and as many `srun ... &` lines, whose tasks are `date`
- bare Python: the same, whose tasks are a Python that imports what Libra's steps import
- bare submitit: the same, whose tasks are `python -m submitit.core._submit` with a pickle; those of Libra do the same without numpy
  (`stages.start`)
- Libra: `python -m launch`, whose stages only say that they have started (`benchmarks.starting`)

"accepted" is from the start of the command to its end, with the job in the queue. "started" is from the first line of the job's
script to the first line of the last task. Every task of every node runs on this machine's processors, which pay its start-up as
often as there are nodes: what Libra adds on a cluster is what it adds here to bare submitit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from submitit.core.utils import DelayedSubmission, JobPaths

from benchmarks.starting import STARTED, say
from launch import pipeline, slurm
from launch.desired_steps import desired_steps
from launch.devcluster import cluster
from launch.hetjob import job_spec, render
from launch.prepare import Prepared
from stages.desired import StepSpec

TARGET_S = 2.0
TIMEOUT_S = 300.0
LOOK_S = 0.05
SHELL, PYTHON, SUBMITIT, LIBRA = "bare shell", "bare Python", "bare submitit", "Libra"
BARE = (SHELL, PYTHON, SUBMITIT)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Times:
    """Seconds; see the module's text."""

    accepted_s: float
    started_s: float


@dataclass(frozen=True)
class Bench:
    """One cluster, and the configuration that fills it."""

    folder: Path
    words: tuple[str, ...]
    prepared: Prepared

    @property
    def steps(self) -> tuple[StepSpec, ...]:
        return desired_steps(self.prepared.config, self.prepared.plan).steps

    @property
    def tasks(self) -> int:
        return sum(step.tasks for step in self.steps)

    # ---- without Libra ----------------------------------------------------------------------------------------------

    def bare(self, name: str, number: int) -> Times:
        """The job is held until its pickles are there, as submitit names them by its id."""
        place = self.folder / f"{name.replace(' ', '-')}-{number}"
        (place / STARTED).mkdir(parents=True)
        script = place / "job.sbatch"
        script.write_text(self._script(name, place))
        begin_s = time.monotonic()
        job_id = int(_output(["sbatch", "--parsable", "--hold", str(script)]))
        accepted_s = time.monotonic() - begin_s
        for step in self.steps if name == SUBMITIT else ():
            self._pickle(place, step, job_id)
        _output(["scontrol", "release", str(job_id)])
        return Times(accepted_s, self._started_s(place, job_id))

    def _pickle(self, place: Path, step: StepSpec, job_id: int) -> None:
        folder = place / step.name
        folder.mkdir()
        submission = DelayedSubmission(say, place / STARTED, step.name)
        submission.set_timeout(60, 0)
        submission.dump(JobPaths(folder, str(job_id)).submitted_pickle)

    def _script(self, name: str, place: Path) -> str:
        spec = job_spec(self.prepared.config, self.prepared.plan, place)
        head = render(spec, "true").partition("\n\n")[0].replace(spec.output, str(place / "log"))
        lines = ["export SUBMITIT_EXECUTOR=slurm", f"date +%s.%N > {shlex.quote(str(place / 'begin'))}"]
        for step in self.steps:
            group = [f"--het-group={step.component}"] if len(spec.components) > 1 else []
            words = ["srun", *group, *_size(step), *_task(name, place, step)]
            lines.append(f"{shlex.join(words)} &")
        return "\n".join([head, "", *lines, "wait", ""])

    # ---- with Libra -------------------------------------------------------------------------------------------------

    def libra(self, number: int) -> Times:
        place = self.folder / f"libra-{number}"
        place.mkdir()
        words = [*self.words, f"launch.run_dir={place}/run", "launch.follow=false"]
        words += [f'launch.setup=["date +%s.%N > {place}/begin"]']
        begin_s = time.monotonic()
        printed = _output([sys.executable, "-m", "benchmarks.starting", "--launch", *words])
        accepted_s = time.monotonic() - begin_s
        return Times(accepted_s, self._started_s(place, int(printed.split()[-1]), place / "run"))

    def _started_s(self, place: Path, job_id: int, root: Path | None = None) -> float:
        """Waits for the end of the job. Raises RuntimeError for one that did not start all its tasks."""
        folder = (root or place) / STARTED
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and not slurm.fold(slurm.query(job_id)).phase.is_over:
            time.sleep(LOOK_S)
        files = list(folder.iterdir())
        if len(files) != self.tasks:
            raise RuntimeError(f"job {job_id} in {place}: {len(files)} of {self.tasks} tasks have started")
        return max(float(file.read_text()) for file in files) - float((place / "begin").read_text())


def _size(step: StepSpec) -> list[str]:
    sizes = {
        "nodes": step.nodes,
        "ntasks": step.tasks,
        "ntasks-per-node": step.tasks_per_node,
        "cpus-per-task": step.cpus_per_task,
        "gpus-per-node": step.gpus_per_node,
        "mem": 0,
    }
    return [*(f"--{name}={value}" for name, value in sizes.items()), "--exact", "--mpi=none", "--cpu-bind=none"]


def _task(name: str, place: Path, step: StepSpec) -> list[str]:
    """The command of one task in a job without Libra."""
    started = place / STARTED
    if name == SHELL:
        return ["sh", "-c", f"date +%s.%N > {shlex.quote(str(started / step.name))}.$SLURM_PROCID"]
    if name == PYTHON:
        return [sys.executable, "-u", "-m", "benchmarks.starting", str(started), step.name]
    return [sys.executable, "-u", "-m", "submitit.core._submit", str(place / step.name)]


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def bench(nodes: int) -> Iterator[Bench]:
    """A cluster of `nodes` nodes, half of them for the trainer; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="libra-") as name:
        folder = Path(name)
        running = cluster.up(folder / "slurm", nodes, gpus_per_node=1)
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(running.slurm_conf)
        try:
            words = _words(folder, nodes)
            prepared = pipeline.prepare([*words, f"launch.run_dir={folder}/plan"])
            yield Bench(folder, tuple(words), prepared)
        finally:
            del os.environ["SLURM_CONF"]
            if before is not None:
                os.environ["SLURM_CONF"] = before
            cluster.down(running.root)


def _words(folder: Path, nodes: int) -> list[str]:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    words = ["+experiment=demo", "cluster=devcluster", "model=from_path", f"model_path={model}", "warmup.steps=0"]
    words += [
        f"launch.cache_dir={folder}/cache",
        "hardware.gpus_per_node=1",
        f"train_gpus={nodes // 2}",
        f"rollout_gpus={nodes - nodes // 2}",
    ]
    return [*words, "launch.mode=slurm", "slurm.requeue=never"]


# ---- the table ------------------------------------------------------------------------------------------------------


def measure(nodes: int, repeat: int) -> dict[str, Any]:
    """The first round of each only warms the file cache, and lets Libra look at the task; it is kept as `first`."""
    times: dict[str, list[Times]] = {name: [] for name in (*BARE, LIBRA)}
    first: Times | None = None
    with bench(nodes) as place:
        for number in range(repeat + 1):
            found = {name: place.bare(name, number) for name in BARE} | {LIBRA: place.libra(number)}
            first = first or found[LIBRA]
            for name, one in found.items() if number else ():
                times[name].append(one)
            _progress(f"{nodes} nodes, round {number} of {repeat}")
        about = {"slurm": _output(["sinfo", "--version"]).split()[-1], "nodes": nodes}
        about |= {"steps": len(place.steps), "tasks": place.tasks, "load_average": os.getloadavg()[0]}
    return {**about, "first": vars(first), **summary(times)}


KEYS = ("accepted_s", "started_s")


def summary(times: Mapping[str, Sequence[Times]]) -> dict[str, Any]:
    """Medians and least, and what Libra adds to bare Python and to bare submitit.

    On a machine that others use at the same time the least is nearer to what the work takes.
    """
    cases = {
        name: {key: median(getattr(one, key) for one in found) for key in KEYS}
        | {f"least_{key}": min(getattr(one, key) for one in found) for key in KEYS}
        | {"all": [vars(one) for one in found]}
        for name, found in times.items()
    }
    both = [*KEYS, *(f"least_{key}" for key in KEYS)]
    added = {name: {key: cases[LIBRA][key] - cases[name][key] for key in both} for name in (PYTHON, SUBMITIT)}
    met = all(values[key] < TARGET_S for values in added.values() for key in KEYS)
    return {"cases": cases, "added": added, "met": met}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"Slurm {results[0]['slurm']}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} processors for all nodes;"
        " seconds: median (least)",
        "",
        "| nodes | steps | tasks | load | accepted: sbatch | Libra | added | started: shell | Python | submitit | Libra"
        " | added to Python | to submitit |",
        "|" + " --- |" * 13,
    ]
    for result in results:
        cases, added = result["cases"], result["added"]
        pairs = [(values, "accepted_s") for values in (cases[PYTHON], cases[LIBRA], added[PYTHON])]
        pairs += [(values, "started_s") for values in (*cases.values(), *added.values())]
        cells = [str(result[key]) for key in ("nodes", "steps", "tasks")] + [f"{result['load_average']:.1f}"]
        cells += [f"{values[key]:.2f} ({values[f'least_{key}']:.2f})" for values, key in pairs]
        lines.append(f"| {' | '.join(cells)} |")
    firsts = ", ".join(f"{result['first']['accepted_s']:.2f}" for result in results)
    lines += ["", f"the first launch with a task, which imports the task's library: accepted after {firsts} s"]
    verdict = "met" if all(result["met"] for result in results) else "not met"
    return "\n".join([*lines, "", f"target: under {TARGET_S:g} s added, each way: {verdict}"])


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64], help="fake nodes (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="measured runs of each (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    options = parser.parse_args()
    if min(options.nodes) < 2 or options.repeat < 1:
        parser.error("--nodes has to be at least 2, --repeat at least 1")
    results = [measure(nodes, options.repeat) for nodes in options.nodes]
    print(json.dumps(results, indent=2) if options.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
