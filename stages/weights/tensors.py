"""Torch tensors as owners' slices and as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stages.weights.boxes import Box
from stages.weights.errors import PublishError
from stages.weights.layout import Slice

TORCH_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""safetensors name -> torch dtype."""
SAFETENSORS_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""torch and HF name (as in weights.dtype and config.json) -> safetensors name."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LocalTensor:
    """What one trainer rank owns of the HF tensor `name`: the box of `tensor`'s shape that begins at `start`.

    Any device and any floating format; a view of a parameter is welcome, publishing copies what it must.
    """

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> LocalTensor:
        return cls(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)

    @classmethod
    def along(cls, name: str, full_shape: Sequence[int], dim: int, start: int, tensor: torch.Tensor) -> LocalTensor:
        """[start : start + n] of dimension `dim`, all of the others."""
        return cls(name, tuple(full_shape), tuple(start if d == dim else 0 for d in range(len(full_shape))), tensor)

    def slice(self, dtype: str) -> Slice:
        """Its description for the layout, published as `dtype` (safetensors name). Raises PublishError when unsound."""
        box, full = Box(tuple(self.start), tuple(self.tensor.shape)), tuple(self.full_shape)
        if not self.tensor.dtype.is_floating_point:
            raise PublishError(f"tensor {self.name} has dtype {self.tensor.dtype}; only floating formats are published")
        if not box.fits(full):
            raise PublishError(
                f"tensor {self.name}: {list(box.shape)} from {list(box.start)} on is no part of {list(full)}"
            )
        return Slice(self.name, dtype, full, box)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The bytes of a contiguous CPU tensor, shared, as uint8[n]."""
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def empty_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised CPU tensor to read into; `dtype` is a safetensors name."""
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
