"""`python -m stages.controller RUN`: run the controller of a run directory by hand.

Without options it is the stage itself. `--no-train` generates and scores only, `--evaluate` answers the held-out
problems; both use the instances that serve now (`python -m stages.rollout RUN`) and write nothing but traces.
"""

from __future__ import annotations

import argparse
import sys

from stages.context import StoppedError, open_context
from stages.files import DamagedRecordError
from stages.process import install_stop_handlers
from stages.rundir import RunDirectoryError


def main() -> int:
    """Exit code 1 when it was stopped, 2 when the run directory or its options can not be used."""
    parser = argparse.ArgumentParser(prog="python -m stages.controller", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--no-train", action="store_true", help="generate and score only")
    mode.add_argument("--evaluate", action="store_true", help="answer the held-out problems only")
    parser.add_argument("--steps", type=int, default=1, help="with --no-train: how many batches' worth (default 1)")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except (RunDirectoryError, DamagedRecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from stages.controller import alone, stage
    from stages.controller.staleness import UnusableBoundsError
    from stages.controller.tasks import TaskError
    from stages.controller.tokenizer import TokenizerError

    name = "controller_alone" if arguments.no_train or arguments.evaluate else "controller"
    with open_context("controller", arguments.run_dir, name=name, alone=True) as context:
        install_stop_handlers(context.stop)
        try:
            if arguments.no_train:
                alone.generate_only(context, arguments.steps)
            elif arguments.evaluate:
                alone.evaluate_only(context)
            else:
                stage.run(context)
        except StoppedError as error:
            print(error, file=sys.stderr)
            return 1
        except (UnusableBoundsError, TaskError, TokenizerError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
