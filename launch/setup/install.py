"""Bring one virtual environment to the state of the lock file."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
import venv as standard_venv
from pathlib import Path

from launch.setup import stamp
from launch.setup.errors import SetupError
from launch.setup.pip import PipError, run_pip
from launch.setup.requirements import UNWANTED, installed_unwanted, read_lock

PYTHON = (3, 11)
NEEDED_BYTES = 5_000_000_000
CHECK_DEADLINE_S = 300
DELETE_PATIENCE_S = 30
TORCH_VARIABLE = "LIBRA_TORCH_INDEX"
# What a broken mixture of packages breaks first; vLLM itself takes tens of seconds to import and is left to the tests.
CHECK = """
import torch
if torch.version.cuda is not None:
    raise SystemExit(f"torch {torch.__version__} is a CUDA build")
import transformers, megatron.core, submitit, hydra, launch
"""


def install(project: Path, venv: Path, torch_index: str | None) -> bool:
    """Install what is missing. False when nothing was, which takes milliseconds.

    Safe to interrupt and to run twice at once. `torch_index` is an additional package index.
    Raises SetupError.
    """
    wanted = stamp.fingerprint(project)
    if stamp.is_current(venv, wanted):
        return False
    lock_file = project / "requirements/cpu.lock"
    with lock_file.open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if stamp.is_current(venv, wanted):
            return False
        _check_machine(project, venv)
        _make_venv(venv)
        _install_packages(project, venv, read_lock(lock_file), torch_index)
        _check_result(project, venv)
        stamp.finish(venv, wanted)
    return True


def _check_machine(project: Path, venv: Path) -> None:
    if sys.version_info[:2] != PYTHON:
        raise SetupError(
            f"requirements/cpu.lock is made for Python {PYTHON[0]}.{PYTHON[1]}, this is {sys.version.split()[0]}: "
            "install it, or name it with `make venv PYTHON=/path/to/python3.11`"
        )
    free = shutil.disk_usage(project).free
    if free < NEEDED_BYTES and not (venv / stamp.STAMP).exists():
        raise SetupError(
            f"the packages need about {NEEDED_BYTES / 1e9:.0f} GB in {venv}, {free / 1e9:.1f} GB are free there: "
            "make room, or put the environment elsewhere with `make venv VENV=/other/place`"
        )


def _make_venv(venv: Path) -> None:
    """An environment that is marked as unfinished. One that was left so, or lost its Python, is made anew."""
    had_python = (venv / "bin/python").exists()
    was_unfinished = stamp.is_unfinished(venv)
    is_broken = was_unfinished or (venv.exists() and not had_python)
    if is_broken and not was_unfinished and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise SetupError(f"{venv} exists and is not a Python environment: name another place with `make venv VENV=...`")
    venv.mkdir(parents=True, exist_ok=True)
    stamp.begin(venv)
    if is_broken:
        print(f"{venv} was left half installed: starting it anew", flush=True)
        _empty(venv)
    if is_broken or not had_python:
        standard_venv.create(venv, with_pip=True, symlinks=True)


def _empty(venv: Path) -> None:
    """Delete everything but the mark that it is unfinished: this may be interrupted as well.

    Where a killed set-up left a child behind, that may still write for some seconds: try until it has ended.
    """
    deadline = time.monotonic() + DELETE_PATIENCE_S
    while children := [path for path in venv.iterdir() if path.name != stamp.UNFINISHED]:
        try:
            for path in children:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"{venv} is half installed and cannot be deleted ({error}): delete it by hand"
                ) from error
            time.sleep(0.5)


def _install_packages(project: Path, venv: Path, pins: dict[str, str], torch_index: str | None) -> None:
    log = venv / "libra-install.log"
    log.write_text("")
    index = ["--extra-index-url", torch_index] if torch_index else []
    print(f"bringing {venv} to the {len(pins)} packages of the lock; log: {log}", flush=True)
    print("  (the first time about 1 GB to fetch, and a few minutes)", flush=True)
    try:
        # The build tool first, at its pin: packages without a wheel are built with it, not with whatever is newest.
        run_pip(venv, ["install", "--no-deps", f"setuptools=={pins['setuptools']}"], log)
        _install_torch(venv, pins["torch"], index, log)
        lock = ["-r", str(project / "requirements/cpu.lock")]
        run_pip(venv, ["install", "--no-deps", "--no-build-isolation", *index, *lock], log, total=len(pins))
        if unwanted := installed_unwanted(venv):
            run_pip(venv, ["uninstall", "--yes", *unwanted], log)
        run_pip(venv, ["install", "--no-deps", "--no-build-isolation", "--editable", str(project)], log)
    except PipError as error:
        raise SetupError(f"pip failed; the whole log is {log}\n{error.tail}{_hint(error.tail)}") from error


def _install_torch(venv: Path, version: str, index: list[str], log: Path) -> None:
    """torch alone and first: it is the one package that a public index may have in the wrong build only."""
    try:
        run_pip(venv, ["install", "--no-deps", *index, f"torch=={version}"], log)
    except PipError as error:
        # With a constraints file in pip's configuration, the same absence reads as a conflict with it.
        if not any(text in error.tail for text in ("No matching distribution found", "ResolutionImpossible")):
            raise
        raise SetupError(
            f"none of the package indexes that pip uses here has the CPU build of torch, {version}. (The public "
            "index has the CUDA build, which is several GB and of no use on this machine.) The PyTorch project "
            f"publishes an index of CPU builds: set {TORCH_VARIABLE} to its URL and run this again. "
            "PIP_EXTRA_INDEX_URL, or PIP_FIND_LINKS with a folder that holds the wheel, do as well"
        ) from error


def _hint(tail: str) -> str:
    if "Failed building wheel" in tail or "Python.h" in tail:
        return "\nA package had to be compiled: that needs a C compiler and Python's headers (gcc, python3-dev)."
    if "No space left" in tail:
        return "\nThe disk is full: make room and run this again."
    return ""


def _check_result(project: Path, venv: Path) -> None:
    """Import what must work together. Raises SetupError with the last lines of the failure."""
    done = subprocess.run(
        [str(venv / "bin/python"), "-c", CHECK],
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=CHECK_DEADLINE_S,
    )
    if done.returncode != 0:
        reason = "\n".join(done.stderr.splitlines()[-8:])
        raise SetupError(
            f"the packages in {venv} do not work together ({', '.join(UNWANTED)} must not be there, torch must be a "
            f"CPU build; {TORCH_VARIABLE} adds an index that has one):\n{reason}"
        )
