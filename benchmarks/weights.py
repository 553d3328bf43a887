"""Publish and prepare a version of the weights on this machine, beside plain copies and other ways to save.

    python -m benchmarks.weights                                  # 1.5 GB in bfloat16, through /dev/shm
    python -m benchmarks.weights --folder /lustre/me --threads 8 --json
    python -m benchmarks.weights --no-engine                      # without vLLM, which takes minutes

The trainer's own `Publisher`, kept from version to version, and a rollout worker's own staging, one process, parameters in host
memory. `publish_s` is from `begin` to the end of `finish`; for `snapshot_s` of it training is blocked. `publish_lent_s` is the
same without the snapshot, training blocked all the while. Both write as the third and every later version of a run is written: where
that is quicker (`recycled`) over the files of an older version that nobody uses. `publish_new_s` writes to new files, as the
first versions do. `prepare_s` reads and verifies into the node's segment and takes the
sums that prove the swap; `verify_s` leaves these sums out. `copy_s` copies the files of the published folder into new ones beside
it, with as many threads; `write_s` and `read_s` are the halves of that (memory to new files, files to used memory). All that
write flush their files or not as --fsync (option weights.fsync) says for the folder.

Everything runs once in each round, in turn; seconds are medians over the rounds, ratios medians of the ratios within a round.
`peak_extra_host_bytes` is what the first publication, which allocates, added to the resident memory of the process.

`paused_s` is how long a real vLLM engine on the CPU, busy with requests, stands still for a refresh of the product, proof
included; its model has `engine_bytes` (--engine-gigabytes), which are fewer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.weights_exchange import Exchange
from benchmarks.weights_gpu.pause import measure_pause
from benchmarks.weights_model import shape_of_bytes
from benchmarks.weights_rivals import Pieces, save_distributed, save_safetensors, save_torch
from stages.rollout.memory_folder import sweep_memory_folders
from stages.weights.filesystems import LOCAL, POLICIES, filesystem_magic, is_quicker_written_over, must_flush
from stages.weights.parallel import thread_count

WIDTHS = {"bfloat16": 2, "float32": 4}


def main() -> int:
    options = parse()
    with redirect_stdout(sys.stderr):  # of the product's messages
        result = measure_exchange(options)
        if options.engine:
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="libra-weights-") as folder:
                shape = shape_of_bytes(options.engine_gigabytes * 1e9, WIDTHS[options.dtype])
                result |= measure_pause(Path(folder), options.folder, shape, options.dtype, options.repeat)
    print(json.dumps(result, indent=None if options.json else 1), flush=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of weights, about (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(WIDTHS))
    parser.add_argument("--threads", type=int, default=0, help="weights.io_threads; 0: this process's processors")
    parser.add_argument("--folder", default="/dev/shm", help="where to write (default %(default)s)")
    parser.add_argument("--fsync", default="auto", choices=POLICIES, help="weights.fsync (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, and refreshes (default %(default)s)")
    parser.add_argument("--no-engine", dest="engine", action="store_false", help="leave paused_s out")
    parser.add_argument(
        "--engine-gigabytes", type=float, default=0.1, help="of weights in the engine, about (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one line")
    return parser.parse_args()


def measure_exchange(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: its staged weights and its other memory go with it."""
    try:
        with (
            tempfile.TemporaryDirectory(dir=options.folder, prefix="libra-weights-") as folder,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            return process.submit(_measure, Path(folder), options).result()
    finally:
        sweep_memory_folders()


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # what is compared has threads of its own, and as many
    shape = shape_of_bytes(options.gigabytes * 1e9, WIDTHS[options.dtype])
    with Exchange(folder, shape, options.dtype, options.threads, options.fsync) as exchange:
        before_bytes = reset_peak()
        manifest = exchange.publish()
        peak_bytes = peak_resident() - before_bytes
        threads = thread_count(options.threads, manifest.weight_bytes)
        durable = must_flush(options.fsync, folder)
        pieces, seconds = Pieces(exchange.folder, threads), _Seconds(folder / "other")
        for round_number in range(options.repeat + 1):  # the first one, for first touches of memory, is not counted
            counted = seconds if round_number else _Seconds(folder / "other")
            _measure_round(exchange, pieces, threads, counted, durable=durable)
        return {
            "bytes": manifest.total_bytes,
            "parameters": shape.parameters,
            "tensors": len(manifest.tensors),
            "files": len(manifest.files),
            "threads": threads,
            "folder": options.folder,
            "filesystem": LOCAL.get(filesystem_magic(folder), "not local"),
            "flushed": durable,
            "recycled": is_quicker_written_over(folder),
            "staging": exchange.staging.why_private or "shared",
            "rounds": options.repeat,
            **seconds.medians(),
            "publish_ratio": seconds.ratio("publish_s", "copy_s"),
            "publish_new_ratio": seconds.ratio("publish_new_s", "copy_s"),
            "publish_lent_ratio": seconds.ratio("publish_lent_s", "copy_s"),
            "snapshot_ratio": seconds.ratio("snapshot_s", "copy_s"),
            "prepare_ratio": seconds.ratio("prepare_s", "copy_s"),
            "verify_ratio": seconds.ratio("verify_s", "copy_s"),
            "publish_to_write_ratio": seconds.ratio("publish_s", "write_s"),
            "prepare_to_read_ratio": seconds.ratio("prepare_s", "read_s"),
            "peak_extra_host_bytes": peak_bytes,
        }


def _measure_round(exchange: Exchange, pieces: Pieces, threads: int, seconds: _Seconds, *, durable: bool) -> None:
    """Pairs that are compared stand next to each other."""
    tensors, other = exchange.tensors, seconds.folder
    exchange.recycle()
    seconds.take("publish_lent_s", partial(exchange.publish, lend=True))
    seconds.take("copy_s", partial(pieces.copy, exchange.folder, other, durable=durable))
    seconds.take("publish_new_s", exchange.publish_new)
    exchange.remove_new()
    exchange.recycle()
    seconds.take("publish_s", exchange.publish)
    seconds.add("snapshot_s", exchange.snapshot_s)
    seconds.take("write_s", partial(pieces.write, other, durable=durable))
    seconds.take("prepare_s", exchange.prepare)
    seconds.take("verify_s", partial(exchange.prepare, sums=False))
    seconds.take("read_s", partial(pieces.read, exchange.folder))
    seconds.take("safetensors_save_s", partial(save_safetensors, tensors, other, durable=durable))
    seconds.take("torch_save_s", partial(save_torch, tensors, other, durable=durable))
    seconds.take("distributed_checkpoint_s", partial(save_distributed, tensors, other, threads, durable=durable))


class _Seconds:
    """Wall seconds of every action in every round. What an action writes to `folder` is removed after the clock stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: dict[str, list[float]] = {}

    def take(self, name: str, action: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        action()
        self.add(name, time.perf_counter() - started_s)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, name: str, seconds: float) -> None:
        self._taken.setdefault(name, []).append(seconds)

    def medians(self) -> dict[str, float]:
        return {name: round(median(values), 4) for name, values in self._taken.items()}

    def ratio(self, name: str, other: str) -> float:
        pairs = zip(self._taken[name], self._taken[other], strict=True)
        return round(median(one / two for one, two in pairs), 3)


def reset_peak() -> int:
    """Resident bytes now, and the kernel's record of the peak starts here (proc(5), clear_refs: 5)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_resident() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    sys.exit(main())
