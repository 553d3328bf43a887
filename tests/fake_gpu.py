"""A pretended GPU in a process without one: enough for megatron-core's offloading optimizer to tell two memories apart.

Every tensor counts as one of the GPU, except what `Tensor.cpu` made and what was made of that. Streams do nothing: work
happens at once. A test double; what a real GPU does is in tests/integration/test_trainer_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FakeStream:
    """Stream and event in one."""

    def wait_stream(self, _other: FakeStream) -> None:
        """Nothing is ever behind."""

    def record_event(self) -> FakeStream:
        return self

    def wait(self, _stream: FakeStream) -> None:
        """As `wait_stream`."""

    def synchronize(self) -> None:
        """As `wait_stream`."""


def install_streams() -> None:
    """For the rest of the process."""
    torch.cuda.Stream = FakeStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda device=None: FakeStream()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment,return-value]


class FakeGpu(TorchFunctionMode):
    """`pinned_bytes` counts what was ever put into pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.host: set[int] = set()
        self.pinned: set[int] = set()
        self.pinned_bytes = 0
        self._kept: list[torch.Tensor] = []  # an address must never be given out again

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]  # made anew by each access
            return args[0].data_ptr() not in self.host
        if func is torch.Tensor.is_pinned:
            return args[0].data_ptr() in self.pinned
        if func is torch.Tensor.cpu:
            return self._on_host(args[0].clone())
        if func is torch.Tensor.pin_memory:
            return self._pin(self._on_host(args[0].clone()))
        if func in (torch.Tensor.clone, torch.Tensor.float) and args[0].data_ptr() in self.host:
            return self._on_host(func(*args))
        if func is torch.empty and kwargs.pop("pin_memory", False):
            return self._pin(self._on_host(func(*args, **kwargs)))
        return func(*args, **kwargs)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.host.add(tensor.data_ptr())
        self._kept.append(tensor.detach())  # another view: `tensor.data` may be replaced
        return tensor

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.add(tensor.data_ptr())
        self.pinned_bytes += tensor.numel() * tensor.element_size()
        return tensor
