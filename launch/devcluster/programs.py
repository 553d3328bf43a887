"""The Slurm and munge programs: find them, or install Debian's packages where that is ours to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.devcluster.errors import DevClusterError, SlurmMissingError

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "squeue", "sbatch", "srun", "scancel", "scontrol")
PACKAGES = ("slurm-wlm", "munge")
INSTALL_COMMAND = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
APT_DEADLINE_S = 900
# Daemons live here, and an ordinary user's PATH often leaves it out.
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
POLICY = Path("/usr/sbin/policy-rc.d")


def find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *SYSTEM_FOLDERS]))


def require(program: str) -> str:
    """Absolute path of `program`; raises SlurmMissingError."""
    path = find(program)
    if path is None:
        raise SlurmMissingError(f"the program {program} is missing. An administrator can install it: {INSTALL_COMMAND}")
    return path


def missing() -> list[str]:
    return [program for program in PROGRAMS if find(program) is None]


def why_not_installable() -> str:
    """Why `ensure` could not provide the missing programs, or "" when it can or need not."""
    absent = missing()
    if not absent:
        return ""
    if any(program not in absent for program in PROGRAMS if program != "munged"):
        # The client programs of a real cluster, say: the distribution's package could overwrite them.
        return "a part of Slurm is installed here already, and another one beside it could replace it"
    if os.geteuid() != 0:
        return "installing packages needs root"
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    return ""


def ensure() -> None:
    """Install Slurm when it is missing and this is root on a Debian-like machine.

    Raises SlurmMissingError with the command for an administrator, or DevClusterError when apt-get fails.
    """
    absent = missing()
    if not absent:
        return
    if reason := why_not_installable():
        raise SlurmMissingError(
            f"the development cluster needs {', '.join(absent)}: {reason}. On Debian or Ubuntu an administrator "
            f"installs them with: {INSTALL_COMMAND}"
        )
    with _services_not_started():
        _apt_get("update")
        _apt_get("install", "-y", "--no-install-recommends", *PACKAGES)
    if absent := missing():
        raise DevClusterError(f"apt-get installed {' and '.join(PACKAGES)}, but {', '.join(absent)} is still missing")


def _apt_get(*arguments: str) -> None:
    """Raises DevClusterError with apt-get's last lines."""
    command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", *arguments]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=APT_DEADLINE_S,
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(f"{' '.join(command)} did not end within {APT_DEADLINE_S} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise DevClusterError(f"{' '.join(command)} failed with exit code {done.returncode}:\n{tail}")


@contextmanager
def _services_not_started() -> Iterator[None]:
    """While packages install: tell their scripts, by Debian's policy layer, to start no system service.

    A policy that exists already (containers have one) is the administrator's and stays.
    """
    try:
        with POLICY.open("x") as policy:
            policy.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        POLICY.chmod(0o755)
        yield
    finally:
        POLICY.unlink(missing_ok=True)
