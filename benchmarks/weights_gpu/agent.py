"""`python -m benchmarks.weights_gpu.agent RUN`: the product's agent; its server's guard has one more path."""

from __future__ import annotations

import gc
import sys

from stages.context import StoppedError, open_context
from stages.process import die_with_parent, install_stop_handlers
from stages.rollout import command
from stages.rollout.stage import run

GUARD = "benchmarks.weights_gpu.guard.BenchmarkGuard"
INSTANCE = "rollout_000"


def main(run_dir: str) -> None:
    die_with_parent()
    vars(command)["MIDDLEWARE"] = GUARD  # a constant, because nobody else may choose the guard
    with open_context("rollout", run_dir, name=INSTANCE) as context:
        install_stop_handlers(context.stop)
        gc.freeze()  # as stages.entry does
        try:
            run(context)
        except StoppedError:
            print("stopped", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
