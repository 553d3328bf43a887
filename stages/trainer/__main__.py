"""`python -m stages.trainer RUN [--replay step_000012 [--weights v000012]]`: the trainer alone on a run directory."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from stages.batches import BatchError
from stages.checkpoint.errors import CheckpointError
from stages.context import StoppedError, open_context
from stages.files import DamagedRecordError
from stages.process import install_stop_handlers
from stages.rundir import RunDirectoryError
from stages.trainer.architecture import ModelError


def main(arguments: list[str] | None = None) -> int:
    """Replay one batch, or be the only trainer rank of a run; 2 for a mistake of the caller."""
    options = _parse(arguments)
    name = "trainer" if options.replay is None else "trainer-replay"
    try:
        with open_context("trainer", options.run, name=name, alone=True) as context:
            if options.replay is not None:
                from stages.trainer.replay import replay

                print(json.dumps(replay(context, options.replay, options.weights), indent=1))
                return 0
            if context.plan.train.gpus != 1:
                raise RunDirectoryError(
                    f"the plan has {context.plan.train.gpus} trainer ranks; this command is one: use the launcher"
                )
            from stages.trainer.stage import run

            install_stop_handlers(context.stop)
            print(json.dumps(run(context), indent=1))
    except StoppedError as stopped:
        print(stopped, file=sys.stderr)
        return 1
    except (RunDirectoryError, DamagedRecordError, BatchError, ModelError, CheckpointError) as mistake:
        print(f"{type(mistake).__name__}: {mistake}", file=sys.stderr)
        return 2
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.trainer", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--replay", type=_number("step"), metavar="step_N", help="train this recorded batch, write nothing"
    )
    parser.add_argument(
        "--weights", type=_number("v"), metavar="vN", help="weights to replay with (default: those of the step)"
    )
    options = parser.parse_args(arguments)
    if options.weights is not None and options.replay is None:
        parser.error("--weights needs --replay")
    return options


def _number(prefix: str) -> Callable[[str], int]:
    """Parse names as they stand in the run directory: step_000012, v000012, or the plain number."""

    def parse(text: str) -> int:
        match = re.fullmatch(rf"(?:{prefix}_?)?(\d+)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like {prefix}_000012 or 12")
        return int(match[1])

    return parse


if __name__ == "__main__":
    sys.exit(main())
