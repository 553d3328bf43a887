"""`python -m launch.setup.lock`: resolve the extras `cpu` and `dev` of setup.cfg anew and write requirements/cpu.lock.

For maintainers. Makes a new environment in build/lock, installs the newest versions that setup.cfg allows,
and writes down what came out, without the packages that set-up must not install.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv as standard_venv
from pathlib import Path

from launch.setup.errors import SetupError
from launch.setup.install import TORCH_VARIABLE
from launch.setup.pip import PipError, run_pip
from launch.setup.requirements import UNWANTED, normalised

PROJECT = Path(__file__).resolve().parents[2]
# pip belongs to the environment, libra-slurm is what the lock is for.
NOT_LOCKED = (*UNWANTED, "pip", "libra-slurm")
HEADER = """\
# Versions that work together on the CPU machine (Linux, Python 3.11). Written by `make lock` from the extras
# `cpu` and `dev` of setup.cfg; installed by `make venv` with --no-deps, so nothing outside this list comes in.
# Left out: torchvision, torchaudio, torchcodec (launch/setup/requirements.py says why).
"""


def lock_text(frozen: str) -> str:
    """`pip freeze --all` output -> lock file. Raises SetupError where torch is not a CPU build."""
    lines = [line for line in frozen.splitlines() if "==" in line and not line.startswith("#")]
    kept = [line for line in lines if normalised(line.partition("==")[0]) not in NOT_LOCKED]
    torch = [line for line in kept if line.startswith("torch==")]
    if len(torch) != 1 or not torch[0].endswith("+cpu"):
        raise SetupError(
            f"the lock needs one CPU build of torch, found {torch}: set {TORCH_VARIABLE} (make venv says how)"
        )
    return HEADER + "\n".join(sorted(kept, key=str.lower)) + "\n"


def main() -> int:
    venv = PROJECT / "build/lock"
    standard_venv.create(venv, clear=True, with_pip=True, symlinks=True)
    index = ["--extra-index-url", url] if (url := os.environ.get(TORCH_VARIABLE)) else []
    try:
        run_pip(venv, ["install", *index, "setuptools", f"{PROJECT}[cpu,dev]"], venv / "libra-install.log", total=1000)
        freeze = [str(venv / "bin/python"), "-m", "pip", "freeze", "--all"]
        frozen = subprocess.run(
            freeze, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=120
        )
        text = lock_text(frozen.stdout)
    except (PipError, SetupError) as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    (PROJECT / "requirements/cpu.lock").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
