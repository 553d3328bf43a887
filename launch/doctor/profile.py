"""The site profile: a file of the `cluster` group with what this site is known to need. Comments hold what was measured."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conf.dump import flow
from conf.options import walk
from conf.schema import LibraConfig
from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, Status
from launch.doctor.probes import bandwidth, collective, cpus, gpus, hetjob
from launch.errors import ConfigError
from stages.files import make_directory, write_bytes_atomic

MARK = "# Written by `python -m launch.doctor`"
DEFAULT_FILE = Path("libra_site/cluster/site.yaml")
GROUP = "cluster"
SURROUNDINGS = (
    "launch.python",
    "launch.supervisor_python",
    "launch.setup",
    "launch.prefix",
    "launch.trainer_prefix",
    "launch.rollout_prefix",
    "launch.controller_prefix",
)
CLEARLY_BETTER = 1.25
MOST_THREADS = 16


def check_place(file: Path) -> None:
    """Raises ConfigError for a file that Hydra would not find, or that is not the doctor's to replace."""
    if file.suffix != ".yaml" or file.absolute().parent.name != GROUP:
        raise ConfigError(
            [f"--write={file}: a profile is a .yaml file in a folder named {GROUP}, such as {DEFAULT_FILE}"]
        )
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError([f"--write={file}: {error.strerror}; choose another file"]) from error
    if MARK not in text:
        raise ConfigError(
            [f"--write={file} exists and was not written by the doctor; move it, or choose another --write"]
        )


def write(file: Path, text: str) -> None:
    make_directory(file.absolute().parent)
    write_bytes_atomic(file.absolute(), text.encode())


def usage(file: Path) -> str:
    return f"python -m launch --config-dir {file.parent.parent} {GROUP}={file.stem} +experiment=..."


def text_of(evidence: Evidence, findings: list[Finding], config: LibraConfig, today: datetime.date) -> str:
    """The file. Only options that some code reads; everything else that was measured is a comment."""
    lines = [
        "# @package _global_",
        f"{MARK}, {today.isoformat()}, {_where(evidence)}. It replaces this file when it runs again.",
    ]
    lines += _tree(settings(evidence, config))
    lines += ["", "# What was found:", *(f"# {_line(finding)}" for finding in findings)]
    return "\n".join(lines) + "\n"


def _tree(values: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """Dotted names as nested YAML, in the order of the schema, so that each group opens once."""
    order = {name: number for number, (name, _, _) in enumerate(walk(LibraConfig()))}
    opened: list[str] = []
    for name in sorted(values, key=lambda name: order[name]):
        *groups, leaf = name.split(".")
        for depth, group in enumerate(groups):
            if opened[: depth + 1] != groups[: depth + 1]:
                yield f"{'  ' * depth}{group}:"
        opened = groups
        value, comment = values[name]
        if comment:
            yield f"{'  ' * len(groups)}# {comment}"
        yield f"{'  ' * len(groups)}{leaf}: {flow(value)}"


def settings(evidence: Evidence, config: LibraConfig) -> dict[str, tuple[Any, str]]:
    """Option -> (value, what it comes from)."""
    found: dict[str, tuple[Any, str]] = {"launch.mode": (evidence.mode, "")}
    found |= _given(config)
    if hetjob.must_be_single(evidence):
        found["slurm.layout"] = ("single", "heterogeneous jobs do not work here")
    asking = evidence.asking
    if evidence.job.job_id and asking.flag != asking.configured:
        found["slurm.gpu_flag"] = (asking.flag, f"sbatch refuses {asking.configured}")
    found |= {
        name: value
        for name, value in (*_hardware(evidence, config.slurm.gpu_type), *_rates(evidence), *_threads(evidence))
    }
    return found


def _given(config: LibraConfig) -> dict[str, tuple[Any, str]]:
    """What the doctor was told: every option of the slurm group and of the job's surroundings that is not the default."""
    defaults = {name: value for name, _, value in walk(LibraConfig())}
    return {
        name: (value, "as given")
        for name, _, value in walk(config)
        if (name.startswith("slurm.") or name in SURROUNDINGS) and value != defaults[name]
    }


def _hardware(evidence: Evidence, gpu_type: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    nodes = evidence.slurm.nodes if evidence.slurm else ()
    cards = [gpus.usable(facts) for facts in evidence.answers(gpus.KEY).values()]
    count = min(node.gpus(gpu_type) for node in nodes) if nodes else min(cards, default=0)
    if count:
        source = "Slurm's count for the smallest node" if nodes else "nvidia-smi"
        yield "hardware.gpus_per_node", (count, source)
    if nodes:
        yield "hardware.cpus_per_node", (min(node.cpus for node in nodes), "Slurm's count for the smallest node")
        yield "hardware.threads_per_core", (max(node.threads for node in nodes), "Slurm's ThreadsPerCore")
    else:
        seen = [int(facts["seen"]) for facts in evidence.answers(cpus.KEY).values()]
        if seen:
            yield "hardware.cpus_per_node", (min(seen), "processors that this machine lets us use")
    memory = [int(card["memory_bytes"]) for card in gpus.cards(evidence) if card["memory_bytes"]]
    if memory:
        yield (
            "hardware.gpu_memory_bytes",
            (_rounded_down(min(memory)), f"nvidia-smi: {gpus.cards(evidence)[0]['name']}"),
        )


def _rates(evidence: Evidence) -> Iterator[tuple[str, tuple[Any, str]]]:
    for option, rate in collective.corrected_rates(evidence).items():
        yield (
            option,
            (_rounded_down(rate), "reached by an NCCL all-reduce; the configured rate cannot be this hardware's"),
        )


def _threads(evidence: Evidence) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Fewer threads than the usual 16 where they are clearly faster both ways; never from the quick mode's small file."""
    both: list[Mapping[int, float]] = [bandwidth.rates(evidence, way) for way in ("write", "read")]
    if evidence.quick or not all(both):
        return
    total = {threads: 1 / sum(1 / rates[threads] for rates in both) for threads in bandwidth.THREADS}
    best = max(total, key=lambda threads: total[threads])
    if best != MOST_THREADS and total[best] > CLEARLY_BETTER * total[MOST_THREADS]:
        yield "weights.io_threads", (best, "clearly faster here than 16 threads, writing and reading")


def _rounded_down(value: float) -> float:
    """Four digits, so that nothing is promised that is not there."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.floor(value / unit) * unit


def _where(evidence: Evidence) -> str:
    if evidence.slurm is None:
        return "without Slurm"
    config = evidence.slurm.config
    return (
        f"Slurm {config.get('SLURM_VERSION', 'of unknown version')}, cluster {config.get('ClusterName', '(unnamed)')}"
    )


def _line(finding: Finding) -> str:
    status = "" if finding.status is Status.OK else f" [{finding.status.value}]"
    return f"{finding.name}{status}: {' '.join(finding.seen.split())}"
