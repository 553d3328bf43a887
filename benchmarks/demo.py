"""The demo over several seeds, beside what supervised steps reach in the time that its RL steps took.

`python -m benchmarks.demo --seeds 0 1 2 --folder runs/benchmark` runs `+experiment=demo` once for each seed (about four
minutes each on two cores), then continues the same starter policy with supervised steps for as long, once on the labels
that the warm-up had and once on new ones for every step, and prints one row for each seed. Runs that are already in the
folder are taken as they are. All seeds are shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HEADER = (
    "| seed | greedy before | greedy after | sampled before | sampled after | steps s | wall s "
    "| supervised, same labels (greedy / sampled) | supervised, new labels |\n|" + " --- |" * 9
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"))
    options = parser.parse_args()
    print(HEADER)
    for seed in options.seeds:
        run_dir = options.folder / f"seed{seed}"
        if not (run_dir / "summary.json").is_file():
            train(seed, run_dir)
        print(row(seed, run_dir), flush=True)
    return 0


def train(seed: int, run_dir: Path) -> None:
    command = [sys.executable, "-m", "launch", "+experiment=demo", f"seed={seed}", f"launch.run_dir={run_dir}"]
    subprocess.run([*command, "launch.replace_finished=true"], check=True, stdout=sys.stderr)


def row(seed: int, run_dir: Path) -> str:
    summary = json.loads((run_dir / "summary.json").read_text())
    seconds = summary["phase_s"]["steps"]
    same, fresh = (supervised(run_dir, seconds, fresh=fresh) for fresh in (False, True))
    cells = [f"{seed}", *(f"{summary[name]:.3f}" for name in ("reward_before", "reward_after"))]
    cells += [f"{summary[name]:.3f}" for name in ("sampled_before", "sampled_after")]
    cells += [f"{seconds:.0f}", f"{summary['wall_s']:.0f}", rewards(same), rewards(fresh)]
    return "| " + " | ".join(cells) + " |"


def supervised(run_dir: Path, seconds: float, *, fresh: bool) -> dict[str, Any]:
    """The starter policy of a run, `seconds` of supervised steps later; see `stages.warmup.compare`."""
    command = [sys.executable, "-m", "stages.warmup", "--config", str(run_dir / "config.yaml")]
    command += ["--continue-supervised", f"{seconds:.0f}", *(["--fresh-labels"] if fresh else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rewards(result: dict[str, Any]) -> str:
    return f"{result['after']['greedy_reward']:.3f} / {result['after']['sampled_reward']:.3f}"


if __name__ == "__main__":
    sys.exit(main())
