"""Pages of shared memory, pinned so that a GPU copies to and from them directly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress

import torch

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable


def pin(memory: torch.Tensor, device: torch.device | None = None) -> None:
    """Pin uint8[n] for this process; `device` for a thread whose current one is another. Raises torch.cuda.CudaError."""
    with _on(device):
        try:
            _check(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _HOST_REGISTER_PORTABLE))
        except torch.cuda.CudaError:
            _forget_error()
            raise


def unpin(memory: torch.Tensor, device: torch.device | None = None) -> None:
    """Undo `pin`. Raises torch.cuda.CudaError."""
    with _on(device):
        _check(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def _on(device: torch.device | None) -> AbstractContextManager[object]:
    """A thread begins with device 0, and would make a context there."""
    return nullcontext() if device is None else torch.cuda.device(device)


def _check(result: int) -> None:
    torch.cuda.check_error(result)


def _forget_error() -> None:
    """The runtime keeps the error of the call that failed, and the next kernel would be blamed for it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
