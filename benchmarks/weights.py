"""Publish and read a version of the weights on this machine, beside plain copies and other ways to save.

    python -m benchmarks.weights                                  # 1.5 GB in bfloat16, through /dev/shm
    python -m benchmarks.weights --folder /lustre/me --threads 8 --json

One process, parameters in host memory, the trainer's own publishing and the rollout's own reading. `copy_s` copies the files
of the published folder into new files beside it, with as many threads; `write_s` and `read_s` are the halves of that (memory to
new files, files to used memory). Everything runs once in each round, in turn; seconds are medians over the rounds, ratios
medians of the ratios within a round. `peak_extra_host_bytes` is what publishing added to the resident memory of the process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.weights_model import random_tensors, shape_of_bytes, write_config
from benchmarks.weights_rivals import Pieces, save_distributed, save_safetensors, save_torch
from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights.manifest import Manifest, Probe
from stages.weights.parallel import thread_count
from stages.weights.publish import publish
from stages.weights.reader import load_manifest, read_verified
from stages.weights.tensors import SAFETENSORS_NAMES, TORCH_DTYPES, LocalTensor

PROBE = Probe((1, 2, 3), (-1.0, -1.0))
WIDTHS = {"bfloat16": 2, "float32": 4}
DURABLE = True
"""Publishing makes its files durable before it names them; the copies do what it does."""


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="libra-weights-") as folder:
        result = measure(Path(folder), options)
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
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one line")
    return parser.parse_args()


class Exchange:
    """A run whose weights are published again and again; one version exists at a time."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.shape = shape_of_bytes(options.gigabytes * 1e9, WIDTHS[options.dtype])
        self.run = RunDir.create(folder / "run")
        self.source = write_config(folder / "model", self.shape, options.dtype)
        self.options = WeightsConfig(dtype=options.dtype, io_threads=options.threads)
        self.tensors = random_tensors(self.shape, TORCH_DTYPES[SAFETENSORS_NAMES[options.dtype]], "cpu", seed=0)
        self.version = 0

    def publish(self) -> Manifest:
        self.version += 1
        return publish(
            self.run,
            version=self.version,
            step=self.version,
            tensors=[LocalTensor.whole(name, tensor) for name, tensor in self.tensors.items()],
            probe=PROBE,
            source_folder=self.source,
            options=self.options,
        )

    def prepare(self) -> None:
        """As a worker of a rollout instance: manifest, bytes, digests."""
        read_verified(self.run, load_manifest(self.run, self.version), threads=self.options.io_threads)

    @property
    def folder(self) -> Path:
        """Of the one version that exists."""
        return self.run.weights_version(self.version)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    exchange = Exchange(folder, options)
    before_bytes = reset_peak()
    manifest = exchange.publish()  # the first round of everything, not counted, but for its memory
    peak_bytes = peak_resident() - before_bytes
    threads = thread_count(options.threads, manifest.weight_bytes)
    pieces, seconds = Pieces(exchange.folder, threads), _Seconds(folder / "other")
    for round_number in range(options.repeat + 1):
        _measure_round(exchange, pieces, threads, seconds if round_number else _Seconds(folder / "other"))
    return {
        "bytes": manifest.total_bytes,
        "parameters": exchange.shape.parameters,
        "tensors": len(manifest.tensors),
        "files": len(manifest.files),
        "threads": threads,
        "folder": options.folder,
        "rounds": options.repeat,
        **seconds.medians(),
        "publish_ratio": seconds.ratio("publish_s", "copy_s"),
        "prepare_ratio": seconds.ratio("prepare_s", "copy_s"),
        "publish_to_write_ratio": seconds.ratio("publish_s", "write_s"),
        "prepare_to_read_ratio": seconds.ratio("prepare_s", "read_s"),
        "peak_extra_host_bytes": peak_bytes,
    }


def _measure_round(exchange: Exchange, pieces: Pieces, threads: int, seconds: _Seconds) -> None:
    """Pairs that are compared stand next to each other."""
    tensors, other = exchange.tensors, seconds.folder
    seconds.take("copy_s", partial(pieces.copy, exchange.folder, other, durable=DURABLE))
    shutil.rmtree(exchange.folder)
    seconds.take("publish_s", exchange.publish)
    seconds.take("write_s", partial(pieces.write, other, durable=DURABLE))
    seconds.take("prepare_s", exchange.prepare)
    seconds.take("read_s", partial(pieces.read, exchange.folder))
    seconds.take("safetensors_save_s", partial(save_safetensors, tensors, other))
    seconds.take("torch_save_s", partial(save_torch, tensors, other))
    seconds.take("distributed_checkpoint_s", partial(save_distributed, tensors, other, threads, durable=DURABLE))


class _Seconds:
    """Wall seconds of every action in every round. What an action writes to `folder` is removed after the clock stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: dict[str, list[float]] = {}

    def take(self, name: str, action: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        action()
        self._taken.setdefault(name, []).append(time.perf_counter() - started_s)
        shutil.rmtree(self.folder, ignore_errors=True)

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
    torch.set_num_threads(1)
    sys.exit(main())
