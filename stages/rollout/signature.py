"""Names, shapes and number formats that a published version must have to fit the model an engine was started with."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

from stages.files import list_names
from stages.rollout.errors import UnfitWeightsError

Signature = dict[str, tuple[str, tuple[int, ...]]]

_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16"}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NOT_WEIGHTS = ".rotary_emb.inv_freq"  # a constant that old checkpoints carry along
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


def model_signature(folder: Path, weights_dtype: str, published: Collection[str]) -> Signature:
    """Of the HF model in `folder`, with `weights_dtype` (weights.dtype) as the format that versions are published in.

    With tied embeddings the head may be `published` or not, whatever `folder` does. Raises UnfitWeightsError when the
    folder has no safetensors files.
    """
    dtype = _SAFETENSORS_NAMES[weights_dtype]
    shapes = {name: shape for name, shape in _shapes(folder).items() if not name.endswith(_NOT_WEIGHTS)}
    if _is_tied(folder) and _EMBEDDING in shapes:
        shapes.pop(_HEAD, None)
        if _HEAD in published:
            shapes[_HEAD] = shapes[_EMBEDDING]
    return {name: (dtype, shape) for name, shape in shapes.items()}


def _is_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings", False))


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = [name for name in list_names(folder) if name.endswith(".safetensors")]
    if not files:
        raise UnfitWeightsError(f"{folder} has no .safetensors files: its tensors cannot be compared")
    shapes: dict[str, tuple[int, ...]] = {}
    for name in files:
        header = _header(folder / name)
        shapes |= {tensor: tuple(entry["shape"]) for tensor, entry in header.items() if tensor != "__metadata__"}
    return shapes


def _header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: 8 bytes of little-endian length, then the header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise UnfitWeightsError(f"{path} is not a safetensors file: its header would have {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    return header
