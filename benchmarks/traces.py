"""What recording costs: `python -m benchmarks.traces [--directory DIR] [--count N]` prints CPU nanoseconds per call.

Each number is the median over rounds, on the file system of --directory (default: a temporary folder). Not a test: a
loaded machine must not fail anyone's commit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from traces import Recorder
from traces.chrome import export
from traces.run import RunTrace

ROUNDS = 7


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traces", description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the trace files go (try the run's file system)")
    parser.add_argument("--count", type=int, default=20_000, help="calls per round (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        _measure(Path(folder), options.count)
    return 0


def _measure(folder: Path, count: int) -> None:
    with Recorder(folder, "trainer", 0, 1, "benchmark") as recorder:
        cases: dict[str, Callable[[], object]] = {
            "span": lambda: _span(recorder),
            "span with details, and add()": lambda: _span_with_details(recorder),
            "span around a span": lambda: _nested(recorder),
            "counter": lambda: recorder.counter("queue", 3.5, step=1),
            "flow": lambda: recorder.flow_step("version", 12),
        }
        for name, call in cases.items():
            print(f"{name:<32}{_ns_per_call(call, count):>9.0f} ns")
        in_threads = _ns_per_call(lambda: _in_threads(recorder, 4, 250), 4) / 1000
        print(f"{'span, 4 threads at once':<32}{in_threads:>9.0f} ns")
    with Recorder(folder / "off", "trainer", 0, 1, "benchmark", enabled=False) as off:
        print(f"{'span, recorder disabled':<32}{_ns_per_call(lambda: _span(off), count):>9.0f} ns")
    size_bytes = recorder.path.stat().st_size
    start_s = time.process_time()
    exported = export(RunTrace(folder), folder / "trace.json")
    spent_s = time.process_time() - start_s
    print(f"{'export, per event':<32}{spent_s / exported.num_events * 1e9:>9.0f} ns  ({size_bytes / 1e6:.0f} MB read)")


def _ns_per_call(call: Callable[[], object], count: int) -> float:
    rounds = []
    for _ in range(ROUNDS):
        start_ns = time.process_time_ns()
        for _ in range(count):
            call()
        rounds.append((time.process_time_ns() - start_ns) / count)
    return median(rounds)


def _span(recorder: Recorder) -> None:
    with recorder.span("grpo_update", step=12, version=12):
        pass


def _span_with_details(recorder: Recorder) -> None:
    with recorder.span("grpo_update", step=12, version=12, samples=512) as span:
        span.add(tokens=4096, loss=0.25)


def _nested(recorder: Recorder) -> None:
    with recorder.span("step", step=12), recorder.span("grpo_update"):
        pass


def _in_threads(recorder: Recorder, num_threads: int, count: int) -> None:
    def work() -> None:
        for _ in range(count):
            _span(recorder)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
