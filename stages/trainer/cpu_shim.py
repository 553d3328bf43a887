"""What lets megatron-core 0.16.1 train on a machine without CUDA. Imported only there; a GPU run never sees this file.

Found by running each call on a torch built without CUDA:

- `torch.cuda.current_device()` is where RotaryEmbedding and the gradient buffers of DistributedDataParallel ask for
  their device, so it must answer "cpu" for as long as the model lives: `install`.
- The optimizer makes scratch tensors with `device="cuda"` and checks `Tensor.type()` for the CUDA names of the dtypes
  (optimizer.py, distrib_optimizer.py, clip_grads.py). `cuda_names` redirects both, only while the optimizer is built or
  steps, because a TorchFunctionMode costs Python time on every operation.

Dropout is 0 and weights are loaded, never drawn, so the CUDA random state tracker is not reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def install() -> None:
    """Make `torch.cuda.current_device()` answer the CPU device, for the rest of the process."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU shim must not be installed where CUDA works: set hardware.device=cuda")
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


@contextmanager
def cuda_names() -> Iterator[None]:
    """Inside, `device="cuda"` means the CPU and `Tensor.type()` gives the CUDA name of the dtype."""
    with _CudaNames():
        yield


class _CudaNames(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)
