"""`python -m benchmarks.weights_gpu.load RUN ...`: keeps requests in flight on the run's instance, as the controller would.

Counts go to a file: requests in flight, finished and failed, and tokens of the finished ones. An instance that is away (or holds
its answers back) makes requests fail; they are sent again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.weights_gpu.agent import INSTANCE
from stages.controller.client import CompletionClient, GenerationError, Sampling
from stages.files import write_json_atomic
from stages.process import die_with_parent
from stages.rundir import RunDir
from stages.weights.instances import read_status

REPORT_S = 0.2
RETRY_S = 0.2
TIMEOUT_S = 120.0


@dataclass
class Counts:
    in_flight: int = 0
    finished: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Load:
    """`requests` at a time, each of one prompt and `n` answers."""

    requests: int
    n: int
    prompt_tokens: int
    max_tokens: int
    vocab_size: int

    def arguments(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in asdict(self).items()]


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights_gpu.load")
    parser.add_argument("run", type=Path)
    parser.add_argument("counts", type=Path)
    for name in Load.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    options = parser.parse_args()
    load = Load(**{name: getattr(options, name) for name in Load.__dataclass_fields__})
    asyncio.run(keep_busy(RunDir.open(options.run, writer="load"), load, options.counts))


async def keep_busy(run: RunDir, load: Load, path: Path) -> None:
    """Until the process is ended."""
    counts = Counts()
    async with CompletionClient(run.token_file.read_text(encoding="ascii").strip(), TIMEOUT_S) as client:
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.requests):
                tasks.create_task(_ask(run, client, load, counts, seed=number))
            tasks.create_task(_report(counts, path))


async def _ask(run: RunDir, client: CompletionClient, load: Load, counts: Counts, *, seed: int) -> None:
    random = np.random.default_rng(seed)
    sampling = Sampling(n=load.n, max_tokens=load.max_tokens, temperature=1.0)
    while True:
        prompt = [int(token) for token in random.integers(4, load.vocab_size, size=load.prompt_tokens)]
        status = read_status(run, INSTANCE)
        if status is None or not status.base_url:
            await asyncio.sleep(RETRY_S)
            continue
        counts.in_flight += 1
        try:
            (answers,) = await client.complete(status.base_url, [prompt], sampling)
        except GenerationError as error:
            counts.failed += 1
            print(error, file=sys.stderr, flush=True)
            await asyncio.sleep(RETRY_S)
        else:
            counts.finished += 1
            counts.tokens += sum(len(answer.token_ids) for answer in answers)
        finally:
            counts.in_flight -= 1


async def _report(counts: Counts, path: Path) -> None:
    while True:
        write_json_atomic(path, asdict(counts))
        await asyncio.sleep(REPORT_S)


if __name__ == "__main__":
    main()
