"""`python -m launch.devcluster up|down|status`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.devcluster import cluster
from launch.devcluster.topology import Topology
from launch.errors import LibraError

NOT_RUNNING = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; `status` gives 3 when nothing or not everything runs; else that of the error."""
    options = _parser().parse_args(arguments)
    try:
        return {"up": _up, "down": _down, "status": _status}[options.command](options)
    except LibraError as error:
        print(f"launch.devcluster: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    default = Topology()
    parser = argparse.ArgumentParser(prog="python -m launch.devcluster", description="A private Slurm on this machine.")
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--root", type=Path, default=None, help=f"its folder (default: {cluster.default_root()})")
    parser.add_argument("--nodes", type=int, default=default.nodes, help="nodes, for `up` (default: %(default)s)")
    parser.add_argument(
        "--gpus-per-node", type=int, default=default.gpus_per_node, help="fake GPUs, for `up` (default: %(default)s)"
    )
    return parser


def _up(options: argparse.Namespace) -> int:
    """The export line alone goes to standard output, for `eval "$(python -m launch.devcluster up)"`."""
    running = cluster.up(options.root, options.nodes, options.gpus_per_node)
    topology = running.site.topology
    shape = f"{topology.nodes} nodes with {topology.gpus_per_node} fake GPUs each"
    print(f"Slurm is up: {shape}, partition {running.partition}, in {running.root}", file=sys.stderr)
    print(running.export_line)
    return 0


def _down(options: argparse.Namespace) -> int:
    root = options.root or cluster.default_root()
    print(f"stopped, and deleted {root}" if cluster.down(options.root) else f"no development cluster in {root}")
    return 0


def _status(options: argparse.Namespace) -> int:
    found = cluster.status(options.root)
    if found is None:
        print(f"no development cluster in {options.root or cluster.default_root()}")
        return NOT_RUNNING
    print(f"development cluster in {found.root}")
    for name, runs in found.daemons.items():
        print(f"  {name:16} {'runs' if runs else 'ended'}")
    for name, state in found.nodes.items():
        print(f"  {name:16} {state}")
    print(f"  jobs             {', '.join(found.jobs) or 'none'}")
    return 0 if found.healthy else NOT_RUNNING


if __name__ == "__main__":
    sys.exit(main())
