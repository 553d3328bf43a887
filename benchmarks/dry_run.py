"""How long a dry run takes, beside what Python and Hydra take alone.

`python -m benchmarks.dry_run [--repeat 10] [--json]` runs `python -m launch +experiment=grpo_7b launch.dry_run=true`, a Hydra
app that composes one file of one line, and `python -c pass`, each in fresh processes and in turn, so that a busy machine
slows all three. Times are wall clock from start to exit. Exit code 1 when the dry run imports torch or vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
TARGET_S = 1.5
TIMEOUT_S = 120.0
DRY_RUN = ("-m", "launch", "+experiment=grpo_7b", "launch.dry_run=true")
HEAVY = frozenset({"torch", "vllm"})
PACKAGES = ("hydra-core", "omegaconf", "submitit")
HYDRA_APP = """\
import hydra


@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    print(config.answer)


main()
"""
HYDRA_CONFIG = """\
answer: 42
defaults: [_self_, {override hydra/job_logging: disabled}, {override hydra/hydra_logging: disabled}]
hydra: {output_subdir: null, run: {dir: .}}
"""


@dataclass(frozen=True)
class Case:
    """`arguments` for the interpreter, started in `folder`."""

    name: str
    arguments: tuple[str, ...]
    folder: Path


@dataclass(frozen=True)
class Import:
    """One line of -X importtime; `own_s` is without what the module imports in turn."""

    module: str
    own_s: float


def main() -> int:
    """Print the table, or the same as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dry_run", description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="measured runs of each (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("--repeat has to be at least 1")
    with tempfile.TemporaryDirectory(prefix="libra-dry-run-") as folder:
        measured = measure(_cases(Path(folder)), options.repeat)
    imports = list(imported_by(DRY_RUN))
    result = summary(measured, imports)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 1 if result["heavy"] else 0


def _cases(folder: Path) -> tuple[Case, ...]:
    (folder / "app.py").write_text(HYDRA_APP)
    (folder / "app.yaml").write_text(HYDRA_CONFIG)
    return (
        Case("dry run of grpo_7b", DRY_RUN, PROJECT),
        Case("empty Hydra app", ("app.py",), folder),
        Case("python -c pass", ("-c", "pass"), folder),
    )


def measure(cases: Sequence[Case], repeat: int) -> dict[str, list[float]]:
    """Wall seconds of each case, one of each in turn; the first round only warms the file cache."""
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for round_ in range(repeat + 1):
        for case in cases:
            start = time.perf_counter()
            _run(case.arguments, case.folder)
            if round_ > 0:
                seconds[case.name].append(time.perf_counter() - start)
    return seconds


def _run(arguments: Sequence[str], folder: Path) -> str:
    """stderr of a Python that succeeded. Raises RuntimeError with it for one that did not."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stderr


def imported_by(arguments: Sequence[str]) -> Iterator[Import]:
    """Every module that a fresh interpreter imports for `arguments`, as Python itself reports it."""
    for line in _run(("-X", "importtime", *arguments), PROJECT).splitlines():
        own_us, _, rest = line.removeprefix("import time:").partition("|")
        module = rest.rpartition("|")[2].strip()
        if line.startswith("import time:") and own_us.strip().isdigit():
            yield Import(module, int(own_us) / 1e6)


def summary(measured: Mapping[str, Sequence[float]], imports: Sequence[Import]) -> dict[str, Any]:
    """What the table and the JSON show; times in seconds."""
    by_package: dict[str, float] = {}
    for found in imports:
        package = found.module.partition(".")[0]
        by_package[package] = by_package.get(package, 0.0) + found.own_s
    medians = {name: median(seconds) for name, seconds in measured.items()}
    dry_run = next(iter(medians.values()))
    return {
        "command": f"python {' '.join(DRY_RUN)}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "processors": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "target_s": TARGET_S,
        "met": dry_run < TARGET_S,
        "cases": {
            name: {
                "median_s": medians[name],
                "least_s": min(seconds),
                "most_s": max(seconds),
                "dry_run_is_times": dry_run / medians[name],
            }
            for name, seconds in measured.items()
        },
        "modules": len(imports),
        "heavy": sorted(HEAVY & set(by_package)),
        "imports_s": dict(sorted(by_package.items(), key=lambda pair: -pair[1])[:10]),
    }


def table(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in result["packages"].items())
    lines = [
        f"{result['command']}: Python {result['python']}, {versions}",
        f"{result['processors']} processors, load average {result['load_average']:.1f}",
        "",
        f"{'wall seconds':<22}{'median':>8}{'least':>8}{'most':>8}{'dry run is':>13}",
    ]
    for name, case in result["cases"].items():
        times = "".join(f"{case[key]:8.3f}" for key in ("median_s", "least_s", "most_s"))
        lines.append(f"{name:<22}{times}{case['dry_run_is_times']:>11.1f} x")
    verdict = "met" if result["met"] else "not met"
    imports = ", ".join(f"{name} {seconds * 1000:.0f}" for name, seconds in result["imports_s"].items())
    lines += [
        "",
        f"target: under {result['target_s']} s in the median: {verdict}",
        f"the dry run imports {result['modules']} modules; torch and vllm: {', '.join(result['heavy']) or 'neither'}",
        f"longest imports by package, ms, slowed by measuring them: {imports}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
