"""How the tensors of a HF checkpoint land in an engine's parameters, recorded once from the engine's own loader.

The loader is run on tensors that nobody reads: every copy into a parameter is written down instead of carried out. What
the engine makes of a tensor (fused qkv and gate/up, a rank's share under tensor parallelism) is then a list of
straight copies from views of HF tensors to views of parameters, which can be done again and again without the loader.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stages.rollout.errors import RolloutError

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class PlanError(RolloutError):
    """Loading this model is more than copying; the message names what is in the way."""


@dataclass(frozen=True)
class View:
    """Elements of a contiguous tensor, as in `torch.as_strided`; all counts in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().view(-1)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copy:
    """`source` of the HF tensor `name` goes to `target` of `parameter` (its name in the engine); `target` is contiguous."""

    name: str
    source: View
    parameter: str
    target: View


class _Places:
    """Finds the tensor that a view belongs to, by address."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._found = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
        self._starts = [start for start, _ in self._found]
        self._tensors = tensors

    def find(self, view: torch.Tensor) -> tuple[str, View] | None:
        place = bisect_right(self._starts, view.data_ptr()) - 1
        if place < 0 or view.numel() == 0:
            return None
        start, name = self._found[place]
        owner = self._tensors[name]
        offset = view.data_ptr() - start
        if view.device != owner.device or offset >= owner.numel() * owner.element_size():
            return None
        if view.dtype != owner.dtype:
            raise PlanError(f"{name} is seen as {view.dtype} while it is loaded, and is {owner.dtype}")
        shape, stride = (tuple(view.shape), tuple(view.stride())) if view.ndim else ((1,), (1,))
        return name, View(shape, stride, offset // owner.element_size())


class _Recorder(TorchDispatchMode):
    """Writes down what would be written into parameters, and keeps it from happening."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.constants: list[tuple[str, View]] = []
        self._sources = _Places(tensors)
        self._targets = _Places(parameters)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = [value for value, spec in zip(args, func._schema.arguments, strict=False) if _is_written(spec)]
        targets = [target for value in written if (target := self._target(value)) is not None]
        if not targets:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copy(targets[0], args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.constants.append(targets[0])
        else:
            raise PlanError(f"{targets[0][0]} is changed by {func} while it is loaded")
        return args[0]

    def _target(self, value: Any) -> tuple[str, View] | None:
        return self._targets.find(value) if isinstance(value, torch.Tensor) else None

    def _copy(self, target: tuple[str, View], source: torch.Tensor) -> None:
        parameter, view = target
        found = self._sources.find(source)
        if found is None:
            raise PlanError(f"{parameter} is loaded with values that are computed, not copied")
        if found[1].shape != view.shape:
            raise PlanError(f"{parameter}: {found[0]} of shape {found[1].shape} is spread over {view.shape}")
        self.copies.append(Copy(found[0], found[1], parameter, view))


def _is_written(spec: Any) -> bool:
    return spec.alias_info is not None and spec.alias_info.is_write


@torch.no_grad()
def record(load: Load, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> list[Copy]:
    """The copies that `load` makes of `tensors`, in its order; nothing is written into `parameters`.

    `tensors` have the names, shapes and number formats of the checkpoint, their content does not matter; `parameters` are
    all of the engine's. Raises PlanError unless the copies set every element of every parameter exactly once.
    """
    for name, parameter in parameters.items():
        if not parameter.is_contiguous():
            raise PlanError(f"{name} does not lie in one piece: strides {parameter.stride()}")
    recorder = _Recorder(tensors, parameters)
    try:
        with recorder:
            load([(name, tensor.detach()) for name, tensor in tensors.items()])
    except (AssertionError, AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"the model's loader does not run a second time: {error!r}") from error
    _check(recorder, tensors, parameters)
    return recorder.copies


def _check(recorder: _Recorder, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
    for copy in recorder.copies:
        source, target = tensors[copy.name], parameters[copy.parameter]
        if source.dtype != target.dtype:
            raise PlanError(f"{copy.parameter} is {target.dtype}, {copy.name} is published as {source.dtype}")
    for name, view in [*((copy.parameter, copy.target) for copy in recorder.copies), *recorder.constants]:
        if not torch.empty(0, device="meta").as_strided(view.shape, view.stride).is_contiguous():
            raise PlanError(f"{name} is loaded in pieces that do not lie in a row: shape {view.shape} {view.stride}")
        pieces[name].append((view.offset, torch.Size(view.shape).numel()))
    for name, parameter in parameters.items():
        end = 0
        for offset, length in sorted(pieces[name]):
            if offset != end:
                raise PlanError(
                    f"{name}: element {min(offset, end)} is {'never loaded' if offset > end else 'loaded twice'}"
                )
            end += length
        if end != parameter.numel():
            raise PlanError(f"{name}: {parameter.numel() - end:,} of {parameter.numel():,} elements are never loaded")
