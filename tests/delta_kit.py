"""A trainer that publishes with weights.delta=sparse, and steps of it that change little, much, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.sections import WeightsConfig
from stages.rundir import RunDir
from stages.weights import versions
from stages.weights.delta import overwrite as overwrite_all
from stages.weights.manifest import Manifest
from stages.weights.publish import Publisher
from stages.weights.ranks import RankGroup
from stages.weights.tensors import LocalTensor
from tests.weights_kit import PROBE, make_source

SHAPES = {"model.up": (60, 80), "model.down": (80, 60), "model.norm": (80,), "model.scale": ()}
Tensors = dict[str, torch.Tensor]


def sparse_publisher(run: RunDir, ranks: RankGroup | None = None, **options: Any) -> Publisher:
    chosen = WeightsConfig(**{"dtype": "float32", "delta": "sparse", **options})
    return Publisher(run, source_folder=make_source(run.root.parent / "source"), options=chosen, ranks=ranks)


def start_tensors(seed: int = 0, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def step(tensors: Tensors, seed: int, share: float = 0.02) -> None:
    """Change about `share` of the elements of the matrices, in place."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.numel() > 100:
            tensor[torch.rand(tensor.shape, generator=generator) < share] += 1.0


def copied(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def whole(tensors: Mapping[str, torch.Tensor]) -> list[LocalTensor]:
    return [LocalTensor.whole(name, tensor) for name, tensor in tensors.items()]


def publish_next(publisher: Publisher, version: int, tensors: Mapping[str, torch.Tensor], **how: Any) -> Manifest:
    return publisher.begin(version, version, whole(tensors), PROBE, **how).finish()


def publish_chain(
    run: RunDir, versions: int, tensors: Tensors | None = None, **options: Any
) -> tuple[list[Manifest], list[Tensors]]:
    """Version 0 in full, the others as deltas, each of the one before; and their tensors."""
    tensors, manifests, published = tensors or start_tensors(), [], []
    with sparse_publisher(run, **options) as publisher:
        for version in range(versions):
            step(tensors, version)
            manifests.append(publish_next(publisher, version, tensors))
            published.append(copied(tensors))
    return manifests, published


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def payload_file(run: RunDir, version: int) -> Path:
    return sorted(run.weights_version(version).glob("delta-*.bin"))[0]


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


# ---- processes that die -----------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """The process is gone: nothing of it runs any more."""


@contextmanager
def dying(part: int | None) -> Iterator[None]:
    left = [-1 if part is None else part]

    def overwrite(delta: Any, payload: bytes, target: Any, **how: Any) -> None:
        if left[0] == 0:
            half = target.copy()
            overwrite_all(delta, payload, half, **how)
            target[: len(target) // 2] = half[: len(target) // 2]
            raise KilledError
        left[0] -= 1
        overwrite_all(delta, payload, target, **how)

    with pytest.MonkeyPatch.context() as dying_process:
        dying_process.setattr(versions, "overwrite", overwrite)
        yield


def fill_unless_killed(real: Callable[..., None]) -> Callable[..., None]:
    """A killed process does not tidy up: the memory keeps the name that it had then."""

    def fill(memory: Any, content: str, *how: Any) -> None:
        names: list[str] = []

        class Named:
            def name(self) -> str:
                return str(memory.name())

            def write_name(self, name: str) -> None:
                names.append(str(memory.name()))
                memory.write_name(name)

        try:
            real(Named(), content, *how)
        except KilledError:
            memory.write_name(names[-1])
            raise

    return fill
