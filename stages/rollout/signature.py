"""Names, shapes and number formats that a published version must have to fit the model an engine was started with."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.files import list_names
from stages.rollout.errors import UnfitWeightsError
from stages.weights.manifest import model_config_digest

Signature = dict[str, tuple[str, tuple[int, ...]]]

_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16"}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NOT_WEIGHTS = ".rotary_emb.inv_freq"  # a constant that old checkpoints carry along
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit


@dataclass(frozen=True)
class StartModel:
    """What says of the HF folder that an engine was started with whether a version fits: read once, because the folder may be
    collected, or cleaned up by its owner, while the engine serves."""

    shapes: dict[str, tuple[int, ...]]
    is_tied: bool
    config_digest: str

    @classmethod
    def of(cls, folder: Path) -> StartModel:
        """Raises UnfitWeightsError when the folder has no safetensors files, or damaged ones, OSError."""
        config = _config(folder)
        shapes = {name: shape for name, shape in _shapes(folder).items() if not name.endswith(_NOT_WEIGHTS)}
        return cls(shapes, bool(config.get("tie_word_embeddings", False)), model_config_digest(config))

    def signature(self, weights_dtype: str, published: Collection[str]) -> Signature:
        """With `weights_dtype` (weights.dtype) as the format that versions are published in.

        With tied embeddings the head may be `published` or not, whatever the folder does.
        """
        shapes = dict(self.shapes)
        if self.is_tied and _EMBEDDING in shapes:
            shapes.pop(_HEAD, None)
            if _HEAD in published:
                shapes[_HEAD] = shapes[_EMBEDDING]
        return {name: (_SAFETENSORS_NAMES[weights_dtype], shape) for name, shape in shapes.items()}


def model_signature(folder: Path, weights_dtype: str, published: Collection[str]) -> Signature:
    """`StartModel.signature` of the HF model in `folder`; raises what `StartModel.of` raises."""
    return StartModel.of(folder).signature(weights_dtype, published)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise UnfitWeightsError(f"{path} is damaged: {problem}") from problem
    return config


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
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise UnfitWeightsError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        except (struct.error, ValueError) as problem:
            raise UnfitWeightsError(f"{path} is not a safetensors file: {problem}") from problem
    return header
