"""Weights of a run, for people:

    python -m stages.weights inspect RUN            what is published, who serves what, the last refreshes
    python -m stages.weights verify RUN [VERSION]   read every byte of a version (default: the newest) and compare digests
    python -m stages.weights diff RUN V1 V2         which tensors differ, and by how much
    python -m stages.weights export RUN V FOLDER    write a version, in full or not, as a HF folder
    python -m stages.weights push RUN HF_FOLDER     publish a HF folder as the next version, when no trainer of the run lives

Exit code 0: sound (diff: also when the versions differ); 1: damaged or missing; 2: RUN is no whole run directory, or a push
was refused.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.load import WrongConfigFileError, load
from conf.schema import LibraConfig
from launch.runs import Folder, NotARunError
from launch.truth import OVER, Truth, tell_one
from stages.files import DamagedRecordError
from stages.rundir import FencedError, RunDir, RunDirectoryError
from stages.weights.difference import describe_difference
from stages.weights.errors import VersionNotPublishedError, WeightsError
from stages.weights.export import export
from stages.weights.hf_tensors import HfFolderError
from stages.weights.push import WRITER, PushRefusedError, push
from stages.weights.reader import load_manifest
from stages.weights.report import inspect_lines, newest_version, published_numbers
from stages.weights.versions import faults

_RENEWED = ("weights/LATEST.json ", "weights/v", "instances/", "control/")
"""What a push writes anew, or can do without, when a crash of the host has damaged it."""


class NotNowError(PushRefusedError):
    """A trainer of the run may be publishing."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    commands = {"inspect": _inspect, "verify": _verify, "diff": _diff, "export": _export, "push": _push}
    try:
        return _carried_out(commands[options.command], options)
    except (NotARunError, RunDirectoryError, PushRefusedError, HfFolderError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except (WeightsError, DamagedRecordError, FencedError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1


def _carried_out(command: Callable[[RunDir, argparse.Namespace], int], options: argparse.Namespace) -> int:
    run = _open(options.run)
    try:
        return command(run, options)
    except VersionNotPublishedError as problem:
        there = f"published are {published_numbers(run)}; older ones are collected (weights.keep_versions)"
        raise WeightsError(f"{problem}; {there}") from problem


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what is published, and who serves what")
    verify = commands.add_parser("verify", help="compare every byte of a version with its manifest")
    diff = commands.add_parser("diff", help="compare two versions tensor by tensor")
    export = commands.add_parser("export", help="write a version as a HF folder of its own")
    push = commands.add_parser("push", help="publish a HF folder as the next version")
    for command in (inspect, verify, diff, export, push):
        command.add_argument("run", type=Path, metavar="RUN", help="run directory")
    verify.add_argument(
        "version", type=_version, nargs="?", metavar="VERSION", help="12 or v000012; default: the newest"
    )
    diff.add_argument("first", type=_version, metavar="V1")
    diff.add_argument("second", type=_version, metavar="V2")
    export.add_argument("version", type=_version, metavar="VERSION", help="12 or v000012")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="does not exist yet")
    push.add_argument("folder", type=Path, metavar="HF_FOLDER", help="a model of the run's architecture, safetensors")
    push.add_argument(
        "--no-trainer",
        action="store_true",
        help="you know that no trainer of the run lives, where the files do not tell",
    )
    return parser


def _version(text: str) -> int:
    match = re.fullmatch(r"v?(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 12 or v000012")
    return int(match[1])


def _open(root: Path) -> RunDir:
    """Raises NotARunError, RunDirectoryError: what is missing where a run is half-deleted."""
    folder = Folder.at(root)
    if not folder.identity:
        missing = ", ".join(folder.look_for_damage(is_whole=True))
        raise RunDirectoryError(f"{folder.root} is half-deleted: {missing}; without run.json nothing can be attributed")
    return RunDir.open(root, writer="stages.weights")


def _inspect(run: RunDir, _options: argparse.Namespace) -> int:
    truth = tell_one(run.root, also_over=True)
    print(f"run {run.run_id}, attempt {run.attempt}, {_state(truth)}, {run.root}")
    print("\n".join(inspect_lines(run, truth.beats.instances, is_over=truth.state in OVER)))
    return 0


def _state(truth: Truth) -> str:
    missing = f"; missing or damaged: {', '.join(truth.damage)}" if truth.damage else ""
    return truth.state + (f" ({truth.why}{missing})" if truth.why else missing)


def _verify(run: RunDir, options: argparse.Namespace) -> int:
    version = newest_version(run) if options.version is None else options.version
    if version is None:
        raise WeightsError(f"{run.root} has published no weights yet")
    manifest = load_manifest(run, version)
    started_s = time.monotonic()
    found = faults(run, manifest)
    for fault in found:
        print(fault)
    elapsed_s = time.monotonic() - started_s
    base = "" if manifest.delta is None else f" (and of version {manifest.delta.base.version}, its base)"
    print(
        f"version {version}: {len(manifest.tensors)} tensors in {len(manifest.files)} files, {manifest.total_bytes:,} "
        f"bytes{base} read in {elapsed_s:.2f} s: {f'{len(found)} faults' if found else 'all digests match'}"
    )
    return 1 if found else 0


def _diff(run: RunDir, options: argparse.Namespace) -> int:
    print("\n".join(describe_difference(run, options.first, options.second)))
    return 0


def _export(run: RunDir, options: argparse.Namespace) -> int:
    manifest = load_manifest(run, options.version)
    started_s = time.monotonic()
    export(run, manifest, options.folder)
    print(
        f"version {manifest.version} is in {options.folder}: {manifest.weight_bytes:,} bytes of weights, every digest compared, "
        f"in {time.monotonic() - started_s:.2f} s"
    )
    return 0


def _push(run: RunDir, options: argparse.Namespace) -> int:
    _check_nobody_publishes(tell_one(run.root), sure=options.no_trainer)
    started_s = time.monotonic()
    manifest = push(RunDir.open(run.root, writer=WRITER), _config(run), options.folder)
    print(
        f"version {manifest.version} is published: {len(manifest.tensors)} tensors, {manifest.weight_bytes:,} bytes of "
        f"weights, digest {manifest.digest}, in {time.monotonic() - started_s:.1f} s\n"
        f"`python -m stages.rollout {run.root}` serves it, proved. Training does not go on from it: an attempt that resumes "
        f"this run removes versions that are newer than its checkpoint."
    )
    return 0


def _check_nobody_publishes(truth: Truth, *, sure: bool) -> None:
    """Raises NotNowError while a trainer lives, will come, or nobody can tell; RunDirectoryError for half a run."""
    why = f" ({truth.why})" if truth.why else ""
    root = truth.folder.root
    if damage := [entry for entry in truth.damage if not entry.startswith(_RENEWED)]:
        raise RunDirectoryError(f"{root} is half-deleted: {', '.join(damage)}")
    if truth.is_alive:
        raise NotNowError(
            f"{root} is {truth.state}{why}: its trainer publishes the versions; push when the run is over "
            f"(`python -m launch.cancel {root} --checkpoint` ends it with a checkpoint)"
        )
    if truth.state == "unknown" and not sure:
        raise NotNowError(
            f"nobody can tell whether a trainer of {root} lives{why}; add --no-trainer when you know that none does"
        )


def _config(run: RunDir) -> LibraConfig:
    try:
        return load(run.config_yaml)
    except (WrongConfigFileError, OSError) as problem:
        raise RunDirectoryError(f"{run.config_yaml} cannot be read: {problem}") from problem


if __name__ == "__main__":
    sys.exit(main())
