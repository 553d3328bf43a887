"""One of two trainer ranks that meet and wait to be looked at: `python -m tests.meeting_worker RUN RANK`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist

from stages.context import open_context
from stages.exchange import MAX_BYTES, ExchangeError
from stages.files import list_names, wait_for, write_bytes_atomic
from stages.trainer.gather import gather_bytes
from stages.trainer.meeting import meeting

RANKS = 2


def main(root: Path, rank: int) -> None:
    with (
        open_context("trainer", root, name="trainer", rank=rank, world_size=RANKS) as context,
        meeting(context) as store,
    ):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        assert gather_bytes(b"x" * rank * 1000, None) == [b"", b"x" * 1000]
        assert gather_bytes(b"", None) == [b"", b""]
        refuse_too_much(rank)
        write_bytes_atomic(root / f"met.{rank}", b"")
        wait_for(lambda: "go" in list_names(root) or None, deadline_s=60, awaited="go", from_whom="the test")
        dist.destroy_process_group()


def refuse_too_much(rank: int) -> None:
    """Rank 1 announces more than ranks send: both refuse before a byte of it moves, and can go on."""
    lengths = {0: b"", 1: Announced()}
    refused = False
    try:
        gather_bytes(lengths[rank], None)
    except ExchangeError:
        refused = True
    assert refused
    assert gather_bytes(b"y", None) == [b"y", b"y"]


class Announced(bytes):
    def __len__(self) -> int:
        return MAX_BYTES + 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
