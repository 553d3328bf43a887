"""The tensors of a HF folder on disk, which anybody may have written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stages.weights.errors import PublishError
from stages.weights.layout import INDEX_FILE

SINGLE_FILE = "model.safetensors"
HEAD = "lm_head.weight"
_DERIVED = ".inv_freq"
"""Rotary frequencies, which old files carry along, follow from config.json."""


class HfFolderError(PublishError):
    """The folder is no HF model that can be read."""


@dataclass(frozen=True)
class HfTensors:
    """`files` holds, for each tensor, the open safetensors file that it lies in."""

    folder: Path
    files: Mapping[str, safe_open]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self.files.items()}

    def read(self, name: str) -> torch.Tensor:
        """On the CPU, in the stored number format; its bytes stay in the page cache, they are mapped, not copied."""
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        return tensor


@contextmanager
def opened(folder: Path, *, is_tied: bool) -> Iterator[HfTensors]:
    """The tensors that a model is made of: without rotary frequencies, and with tied embeddings without the head.

    Raises HfFolderError when the folder holds no readable safetensors files.
    """
    with ExitStack() as stack:
        places = {
            name: path
            for name, path in _places(folder, stack).items()
            if not name.endswith(_DERIVED) and not (is_tied and name == HEAD)
        }
        files = {path: stack.enter_context(_open(path)) for path in sorted(set(places.values()))}
        for name, path in places.items():
            if name not in files[path].keys():  # noqa: SIM118 (a safetensors file is no mapping)
                raise HfFolderError(f"{folder / INDEX_FILE} says that {name} lies in {path.name}; it does not")
        yield HfTensors(folder, {name: files[path] for name, path in places.items()})


def _places(folder: Path, stack: ExitStack) -> dict[str, Path]:
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / Path(str(file)).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise HfFolderError(f"{index} is not a safetensors index: {problem!r}") from problem
    if single.is_file():
        return dict.fromkeys(stack.enter_context(_open(single)).keys(), single)
    raise HfFolderError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as problem:
        raise HfFolderError(f"{path} is missing or not a safetensors file: {problem}") from problem
