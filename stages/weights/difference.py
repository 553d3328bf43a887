"""Lines of text about how two versions of the weights differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from stages.rundir import RunDir
from stages.weights.layout import INDEX_FILE
from stages.weights.manifest import Manifest, TensorEntry
from stages.weights.reader import load_manifest
from stages.weights.table import table
from stages.weights.versions import chain_to, read_version

_Sides = list[tuple[Manifest, list[Manifest]]]
"""Two versions, each with the chain that it is read along."""
_PIECE = 1 << 24
"""Elements that are compared at a time, as float64."""


@dataclass(frozen=True)
class _Change:
    """`changed` elements of `elements`; `words`: the largest difference, or why the tensors cannot be compared."""

    name: str
    words: str
    elements: int = 0
    changed: int = 0

    def row(self) -> tuple[str, ...]:
        numbers = (f"{self.elements:,}", f"{self.changed:,}") if self.elements else ("", "")
        return (self.name, *numbers, self.words)


def describe_difference(run: RunDir, first: int, second: int) -> list[str]:
    """Tensors and small files whose bytes differ between two versions; raises what the reader raises."""
    one, two = load_manifest(run, first), load_manifest(run, second)
    names = sorted(one.tensors.keys() | two.tensors.keys())
    sides = [(one, chain_to(run, one)), (two, chain_to(run, two))]
    changes = [change for name in names if (change := _change(run, sides, name))]
    titles = ("tensor", "elements", "changed", "max abs difference")
    lines = table(titles, [change.row() for change in changes]) if changes else []
    lines += _small_files(one, two)
    lines.append(f"{len(changes)} of {len(names)} tensors differ between {first} and {second}")
    if changed := sum(change.changed for change in changes):
        total = sum(math.prod(entry.shape) for entry in two.tensors.values())
        lines.append(f"{changed:,} of {total:,} elements differ ({changed / total:.2%})")
    return lines


def _change(run: RunDir, sides: _Sides, name: str) -> _Change | None:
    """None when the tensors are equal, also when other ranks wrote them."""
    (one, _), (two, _) = sides
    if name not in one.tensors or name not in two.tensors:
        return _Change(name, f"only in version {one.version if name in one.tensors else two.version}")
    first, second = one.tensors[name], two.tensors[name]
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return _Change(name, f"{_kind(first)} became {_kind(second)}")
    if first.xxh3_128 == second.xxh3_128 and [p.box for p in first.parts] == [p.box for p in second.parts]:
        return None
    before, after = (read_version(run, manifest, [name], threads=1, chain=chain)[name] for manifest, chain in sides)
    changed, largest = 0, 0.0
    for old, new in zip(before.reshape(-1).split(_PIECE), after.reshape(-1).split(_PIECE), strict=True):
        changed += int((_by_element(old) != _by_element(new)).any(dim=1).sum())
        largest = max(largest, (new.double() - old.double()).abs().max().item() if old.numel() else 0.0, key=_nan_last)
    return _Change(name, f"{largest:.3e}", before.numel(), changed) if changed else None


def _by_element(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of each element, uint8[elements, width]: a NaN equals itself, -0.0 differs from 0.0."""
    return tensor.reshape(-1, 1).view(torch.uint8)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _weight_files(manifest: Manifest) -> set[str]:
    if manifest.delta is None:
        return {entry.file for entry in manifest.tensors.values()}
    return {part.file for parts in manifest.delta.parts.values() for part in parts}


def _small_files(one: Manifest, two: Manifest) -> list[str]:
    """Configuration, tokenizer, index: files without tensors."""
    weights = {name for manifest in (one, two) for name in _weight_files(manifest)}
    if one.delta is not None or two.delta is not None:
        weights.add(INDEX_FILE)  # a delta has none
    lines = []
    for name in sorted((one.files.keys() | two.files.keys()) - weights):
        if name not in one.files or name not in two.files:
            lines.append(f"file {name}: only in version {one.version if name in one.files else two.version}")
        elif one.files[name] != two.files[name]:
            lines.append(
                f"file {name}: {one.files[name].bytes:,} bytes became {two.files[name].bytes:,}, or other ones"
            )
    return lines
