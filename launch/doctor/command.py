"""The command line of the doctor. Exit code 0 without problems, 1 with some, 2 for wrong use, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from conf.schema import LibraConfig
from launch.compose import compose
from launch.doctor import profile, report
from launch.doctor.examine import Wish, examine
from launch.doctor.finding import has_problems
from launch.doctor.probes import judge_all
from launch.errors import ConfigError, LibraError
from launch.tree import tree_at

INTERRUPTED = 130
BROKEN_PIPE = 141
EPILOG = """\
overrides are those of `python -m launch`: slurm.account=mylab slurm.qos=normal launch.setup='[module load cuda]'

  python -m launch.doctor --quick                        what can be learnt in seconds
  python -m launch.doctor --partition gpu --run-root /shared/me/runs slurm.account=mylab
  python -m launch --config-dir libra_site cluster=site +experiment=...      use the profile that it wrote

Exit code 0 without problems, 1 with some, 2 for wrong use, 130 after Ctrl-C.
"""


def run(words: Sequence[str]) -> int:
    asked = _parser().parse_intermixed_args(list(words))
    try:
        with _interruptible():
            return _run(asked)
    except LibraError as error:
        print(f"launch.doctor: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the job was cancelled and nothing is left", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `... | head`; otherwise the interpreter complains once more when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(asked: argparse.Namespace) -> int:
    started_s = time.monotonic()
    profile.check_place(asked.write)
    config = _config(asked)
    wish = Wish(config, asked.quick, asked.nodes, _run_root(asked, config), asked.queue_wait)
    evidence = examine(wish, _say)
    findings = judge_all(evidence)
    if not evidence.silent:
        profile.write(asked.write, profile.text_of(evidence, findings, config, datetime.date.today()))
    took_s = time.monotonic() - started_s
    if asked.json:
        print(report.as_json(evidence, findings, took_s, "" if evidence.silent else str(asked.write)))
    else:
        report.table(findings, sys.stdout)
        print(report.summary(evidence, findings, took_s))
        if not evidence.silent:
            print(f"profile: {asked.write}    {profile.usage(asked.write)}")
    return 1 if has_problems(findings) else 0


def _config(asked: argparse.Namespace) -> LibraConfig:
    """Raises ConfigError for unknown or wrong overrides."""
    overrides = list(asked.overrides)
    if asked.partition:
        overrides.append(f"slurm.partition={asked.partition}")
    if asked.nodes < 0 or asked.queue_wait <= 0:
        raise ConfigError([f"--nodes={asked.nodes} --queue-wait={asked.queue_wait:g}: wanted are positive numbers"])
    return compose(overrides, tree_at(None, None, asked.config_dir))


def _run_root(asked: argparse.Namespace, config: LibraConfig) -> Path:
    """Where runs will be: --run-root, else the parent of launch.run_dir, else the launcher's default."""
    if asked.run_root is not None:
        return Path(asked.run_root)
    return Path(config.launch.run_dir).parent if config.launch.run_dir else Path("runs")


def _say(text: str) -> None:
    """Progress; standard output has only the answer."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """TERM and HUP (the terminal is gone) end the doctor as Ctrl-C does: with the job cancelled and the folder removed."""

    def leave(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.doctor",
        description="Learn what this site does, say what Libra will do about it, and write a site profile.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options of a run that the job needs too")
    parser.add_argument("--quick", action="store_true", help="no vLLM, no collectives, small files: under 20 s")
    parser.add_argument("--partition", default="", help="short for slurm.partition=...")
    parser.add_argument("--nodes", type=int, default=0, help="nodes to look at (default: two where there are two)")
    parser.add_argument(
        "--run-root", default=None, metavar="DIR", help="folder that will hold run directories (default: runs)"
    )
    parser.add_argument(
        "--queue-wait", type=float, default=300.0, metavar="S", help="how long the job may wait (default: 300)"
    )
    parser.add_argument(
        "--write", type=Path, default=profile.DEFAULT_FILE, metavar="FILE", help="profile (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON on standard output")
    parser.add_argument(
        "--config-dir", default=None, metavar="DIR", help="one more folder of groups, as for python -m launch"
    )
    return parser
