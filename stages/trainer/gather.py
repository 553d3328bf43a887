"""An all-gather of bytes, made of two of tensors: torch's own gathers objects as pickles."""

from __future__ import annotations

import torch
import torch.distributed as dist

from stages.exchange import check_size


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, in rank order, on every rank of `group` (gloo; None is the default group); collective.

    Raises ExchangeError on all ranks when one of them announces more than ranks send, before anything of it is received.
    """
    length = torch.tensor([len(data)], dtype=torch.int64)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(one.item()) for one in lengths]
    for size in sizes:
        check_size(size)
    padded = bytearray(data.ljust(max(1, *sizes), b"\0"))
    mine = torch.frombuffer(padded, dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(gathered, mine, group=group)
    return [one[:size].numpy().tobytes() for one, size in zip(gathered, sizes, strict=True)]
