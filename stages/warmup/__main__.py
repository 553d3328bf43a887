"""`python -m stages.warmup --config config.yaml --out FOLDER`: make the starter policy of a configuration.

With `--continue-supervised SECONDS` nothing is made: the policy in model_path (or --start) gets supervised steps for
that long, and its rewards on the held-out problems before and after are printed as one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from conf.load import load
from stages.controller.tasks.base import TaskError
from stages.warmup.errors import WarmupBusyError, WarmupError
from stages.warmup.key import cached_policy_path


def main() -> int:
    """Exit code 2 for options that can not make a policy."""
    # Read when torch is imported: spinning OpenMP threads cost a busy two-core machine a factor of ten.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    arguments = _parse()
    config = load(arguments.config)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        if arguments.continue_supervised is not None:
            from stages.warmup.compare import continue_supervised

            start = arguments.start or Path(config.model_path)
            result = continue_supervised(config, start, arguments.continue_supervised, fresh=arguments.fresh_labels)
            print(json.dumps(result), flush=True)
        else:
            from stages.warmup.make import ensure_policy

            folder = arguments.out or cached_policy_path(config, arguments.cache_dir)
            made = ensure_policy(config, folder.absolute())
            print(f"warm-up: {'made' if made else 'found'} {folder}", flush=True)
    except (WarmupError, TaskError, WarmupBusyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m stages.warmup", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="resolved config.yaml of a run")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="HF folder to make")
    where.add_argument("--cache-dir", type=Path, help="folder of made policies; the name follows from the options")
    where.add_argument("--continue-supervised", type=float, metavar="SECONDS", help="compare instead of making")
    parser.add_argument("--start", type=Path, help="policy to continue from (default: model_path)")
    parser.add_argument("--fresh-labels", action="store_true", help="continue with new labelled problems in every step")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
