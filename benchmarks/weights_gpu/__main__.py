"""New weights from a trainer's parameters into a real vLLM server that generates meanwhile, on one machine.

    python -m benchmarks.weights_gpu                                        # Qwen2-7B shape, 15.2 GB, through /dev/shm and /tmp
    python -m benchmarks.weights_gpu --device cpu                           # a tiny model, to see that it runs
    python -m benchmarks.weights_gpu --folders /dev/shm --rows inplace      # the rows that matter most

Random weights, made on the spot. The trainer's side: parameters on the GPU, published by the product; the engine's side: the
product's agent and server, on the same GPU unless --trainer-gpu says otherwise, with requests in flight. Rows:

    inplace      the product's refresh, while the engine is busy          idle      the same without requests
    vllm_reload  the product's publishing, vLLM's own reload_weights      restart   the product's method restart

`snapshot_s` blocks training, `publish_s` is until the version is visible (snapshot included), `prepare_s` reading and verifying
beside the generation, `paused_s` from the pause to the proved version, `total_s` from the end of the optimizer step (which is
not measured) until all serve. The first folder gets all rows, the others `inplace` alone. In folders on a disk --interval-s passes
between two refreshes, as training takes it, and `dirty_bytes` is what the disk had yet to take when a refresh began. A row that fails is printed with the
ends of the logs, and the next one goes on; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.weights_gpu.disk import Interval
from benchmarks.weights_gpu.limits import Budget, limited
from benchmarks.weights_gpu.load import Load
from benchmarks.weights_gpu.model import SHAPES, Parameters, write_source
from benchmarks.weights_gpu.report import Table, environment, say
from benchmarks.weights_gpu.scene import Scene, publish_model, rollout_config, scene
from conf.schema import LibraConfig

ROWS = ("inplace", "idle", "vllm_reload", "restart")
LOADS = {"cuda": (16, 8, 512, 256), "cpu": (2, 2, 16, 64)}
"""Requests, answers to each, prompt tokens, answer tokens."""
MODEL_LEN = {"cuda": 2048, "cpu": 256}
DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
START_LIMIT_S, REFRESH_LIMIT_S, RESTART_LIMIT_S = 240.0, 40.0, 240.0
WARM_UPS = 3
"""First touches of memory: pinned buffers, staging, pages of a folder. The fourth version is the first over files of a collected one."""


def main() -> int:
    options = parse()
    faulthandler.dump_traceback_later(options.budget_s + 60.0, exit=True)  # for a call into C that never returns
    measurement = Measurement(options)
    try:
        measurement.run()
    finally:
        measurement.table.print()
        faulthandler.cancel_dump_traceback_later()
    return 1 if measurement.failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weights_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(SHAPES), help="default: 7b on a GPU, tiny on a CPU")
    parser.add_argument(
        "--folders", nargs="+", default=["/dev/shm", "/tmp"], help="where runs are (default: %(default)s)"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="of the first folder")
    parser.add_argument("--repeat", type=int, default=5, help="refreshes in a row that count (default %(default)s)")
    parser.add_argument("--restarts", type=int, default=1, help="of row restart (default %(default)s)")
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the GPU for vLLM (default %(default)s)")
    parser.add_argument("--trainer-gpu", type=int, default=0, help="number of the GPU with the parameters")
    parser.add_argument(
        "--interval-s",
        type=float,
        default=0.0,
        help="least time between two refreshes in a folder on a disk (default %(default)s)",
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: starts faster")
    parser.add_argument(
        "--budget-s", type=float, default=440.0, help="no row begins after so long (default %(default)s)"
    )
    options = parser.parse_args()
    options.model = options.model or {"cuda": "7b", "cpu": "tiny"}[options.device]
    return options


class Measurement:
    """`failures` names the parts that failed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.table = Table()
        self.failures: list[str] = []
        self._budget = Budget(options.budget_s)
        self._config: LibraConfig
        self._parameters: Parameters
        self._interval: Interval
        on_gpu = options.device == "cuda"
        self._device = torch.device("cuda", options.trainer_gpu) if on_gpu else torch.device("cpu")

    def run(self) -> None:
        options = self.options
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        say(environment=environment(self._device, options.folders), options=vars(options))
        with ExitStack() as stack:
            places = {
                folder: Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="libra-weights-")))
                for folder in dict.fromkeys(options.folders)
            }
            for number, (folder, place) in enumerate(places.items()):
                if number == 0 and not self._has_model(place):
                    return
                self._interval = Interval(place, options.interval_s)
                with self._attempt(f"folder {folder}", None):
                    with scene(place, folder, self._config, self._parameters, self._device) as made:
                        self._measure(made, self.options.rows if number == 0 else ["inplace"])

    def _has_model(self, place: Path) -> bool:
        with self._attempt("model", START_LIMIT_S):
            self._make_model(place)
        return not self.failures

    def _make_model(self, place: Path) -> None:
        """The parameters, and in `place` what the server starts from."""
        options, dtype = self.options, DTYPE[self.options.device]
        shape, began_s = SHAPES[options.model], time.monotonic()
        config = rollout_config(
            options.device,
            dtype,
            place,
            MODEL_LEN[options.device],
            eager=options.eager or options.device == "cpu",
            share=options.memory_share,
        )
        parameters = Parameters(shape, dtype, self._device, config.weights.probe_tokens)
        write_source(place / "source", shape, dtype)
        made_s = time.monotonic()
        publish_model(place, parameters, config)
        published_s = time.monotonic()
        say(model=options.model, bytes=parameters.num_bytes, make_s=made_s - began_s, publish_s=published_s - made_s)
        self._config, self._parameters = config, parameters
        gc.freeze()  # as the trainer does

    # ---- rows ----------------------------------------------------------------------------------------------------

    def _measure(self, made: Scene, rows: list[str]) -> None:
        limit_s = START_LIMIT_S + WARM_UPS * (REFRESH_LIMIT_S + self._interval.interval_s)
        with self._attempt(f"warm-up in {made.name}", limit_s, made):
            self._ensure_ready(made)
        for row in rows:
            if self._budget.left_s < REFRESH_LIMIT_S:
                self.failures.append(f"{row} in {made.name}")
                say(skipped=row, folder=made.name, why=f"{self._budget.left_s:.0f} s of --budget-s are left")
                continue
            restarts = row == "restart"
            count = self.options.restarts if restarts else self.options.repeat
            limit_s = START_LIMIT_S + count * self._limit_s(row)
            with self._attempt(f"{row} in {made.name}", limit_s, made):
                self._ensure_ready(made)
                self._measure_row(made, row, count)

    def _measure_row(self, made: Scene, row: str, count: int) -> None:
        if row == "idle":
            made.instance.stop_load()
        else:
            made.instance.ensure_busy(self._load())
        action: Callable[[], dict[str, Any]]
        action = (
            made.vllm_reload if row == "vllm_reload" else lambda: made.refresh(row if row == "restart" else "inplace")
        )
        for _ in range(count):
            with limited(self._limit_s(row), f"one {row}"):
                self._take(made, row, action)
        say(row=row, folder=made.name, load=vars(made.instance.counts))

    def _limit_s(self, row: str) -> float:
        return self._interval.interval_s + (RESTART_LIMIT_S if row == "restart" else REFRESH_LIMIT_S)

    def _take(self, made: Scene, row: str, action: Callable[[], dict[str, Any]], *, warm_up: bool = False) -> None:
        facts = self._interval.begin()
        in_flight = made.instance.counts.in_flight
        measured = action()
        self._interval.end()
        self.table.add(row, made.name, measured, warm_up=warm_up, requests_in_flight=in_flight, **facts)
        made.clean()

    def _load(self) -> Load:
        return Load(*LOADS[self.options.device], vocab_size=SHAPES[self.options.model].vocab_size)

    def _ensure_ready(self, made: Scene) -> None:
        seconds = made.instance.ensure_ready(min(START_LIMIT_S, max(self._budget.left_s, 1.0)))
        status = made.instance.status
        if status is None or status.version < 0:
            say(started=made.name, seconds=seconds)
            for _ in range(WARM_UPS):
                self._take(made, "inplace", lambda: made.refresh("inplace"), warm_up=True)

    @contextmanager
    def _attempt(self, what: str, limit_s: float | None, made: Scene | None = None) -> Iterator[None]:
        """A part whose failure is told, and does not take the others along."""
        try:
            with ExitStack() as stack:
                if limit_s is not None:
                    stack.enter_context(limited(limit_s, what))
                yield
        except Exception:
            self.failures.append(what)
            logging.exception("%s failed", what)
            if made is not None:
                print(made.instance.log_tails(), flush=True)
            say(failed=what)


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    torch.set_num_threads(1)
    sys.exit(main())
