"""`python -m stages.rollout RUN [--instance rollout_000]`: serve the newest weights of a run, without a job around it."""

from __future__ import annotations

import argparse
import sys

from stages.context import StoppedError, open_context
from stages.files import DamagedRecordError
from stages.process import install_stop_handlers
from stages.rollout.errors import RolloutError, RolloutOptionError
from stages.rollout.stage import run_alone
from stages.rundir import RunDirectoryError
from stages.weights.errors import WeightsError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.rollout", description=__doc__)
    parser.add_argument("run_dir", metavar="RUN", help="run directory")
    parser.add_argument("--instance", default="rollout_000", help="instance of the plan to be (default: rollout_000)")
    options = parser.parse_args()
    try:
        with open_context("rollout", options.run_dir, name=options.instance, alone=True) as context:
            install_stop_handlers(context.stop)
            run_alone(context)
    except StoppedError:
        return 0
    except WeightsError as error:
        publish = f"`python -m launch.resume {options.run_dir}` publishes anew, `python -m stages.weights push` by hand"
        print(f"the newest weights cannot be served: {error}; {publish}", file=sys.stderr)
        return 1
    except (RolloutError, RolloutOptionError, RunDirectoryError, DamagedRecordError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
