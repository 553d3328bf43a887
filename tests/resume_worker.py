"""Trainer ranks, attempt after attempt: `python -m tests.resume_worker` reads lines {"run", "ranks"} and answers each.

The ranks of an attempt are forked from this process, whose imports take longer than their work; what they print goes to
attempts/N/logs/ranks.log of the run. The answer is a line {"results": [rank 0's result or error, ...]}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from stages.context import open_context
from stages.process import die_with_parent
from stages.rundir import RunDir
from stages.trainer import stage


def main() -> None:
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        order = json.loads(line)
        run = RunDir.open(Path(order["run"]), writer="test")
        ends = [context.Pipe(duplex=False) for _ in range(order["ranks"])]
        processes = [
            context.Process(target=run_rank, args=(run, rank, len(ends), sender))
            for rank, (_, sender) in enumerate(ends)
        ]
        for process, (_, sender) in zip(processes, ends, strict=True):
            process.start()
            sender.close()
        results = [_received(receiver) for receiver, _ in ends]
        for process in processes:
            process.join()
        print(json.dumps({"results": results}), flush=True)


def _received(receiver: Connection) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        return {"error": "it died without a word"}


def run_rank(run: RunDir, rank: int, ranks: int, answer: Connection) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    log = os.open(run.logs / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with open_context(
        "trainer", run.root, name="trainer", attempt=run.attempt, rank=rank, world_size=ranks, local_rank=rank
    ) as context:
        try:
            answer.send(stage.run(context))
        except Exception as error:
            answer.send({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
