"""What the tests of the weight worker share: a small engine model that loads as vLLM's do, and versions for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conf.sections import WeightsConfig
from stages.rollout import memory_folder
from stages.rollout.engine_weights import EngineWeights, StagedVersion
from stages.rundir import RunDir
from stages.weights import snapshot
from stages.weights.manifest import Manifest, TensorEntry
from stages.weights.sums import PartSums
from tests.weights_kit import make_source, publish_full

EMBED, NORM, DOWN = "model.embed_tokens.weight", "model.norm.weight", "model.down.weight"
QKV = ("model.q.weight", "model.k.weight", "model.v.weight")
SHAPES = {EMBED: (10, 8), NORM: (8,), DOWN: (8, 12), QKV[0]: (8, 8), QKV[1]: (4, 8), QKV[2]: (4, 8)}
_PADDED_ROWS = 16


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose node memory is a folder of the test."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(memory_folder, "_SHARED_MEMORY", tmp_path / "shm")
    return RunDir.create(tmp_path / "run")


def stage(weights: EngineWeights, run: RunDir, manifest: Manifest) -> StagedVersion:
    return weights.stage(run, manifest, deadline_s=5.0, check=lambda: None)


def checkpoint(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class EngineModel(torch.nn.Module):
    """Fuses q, k and v, pads the embedding with zeros, and takes its rank's share under tensor parallelism."""

    def __init__(self, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.embed = _parameter(_PADDED_ROWS // size, 8, dtype=dtype)
        self.qkv = _parameter(16 // size, 8, dtype=dtype)
        self.down = _parameter(8, 12 // size, dtype=dtype)
        self.norm = _parameter(8, dtype=dtype)
        self.head = self.embed  # tied

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.load(name, tensor)
        return set()

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == EMBED:
            share = len(self.embed)
            rows = tensor[self.rank * share : (self.rank + 1) * share]
            self.embed[: len(rows)].data.copy_(rows)
            self.embed[len(rows) :].data.fill_(0)
        elif name in QKV:
            parts = [SHAPES[each][0] // self.size for each in QKV]
            index = QKV.index(name)
            target = self.qkv.data.narrow(0, sum(parts[:index]), parts[index])
            target.copy_(tensor.narrow(0, self.rank * parts[index], parts[index]))
        elif name == DOWN:
            width = self.down.shape[1]
            self.down.data.copy_(tensor.narrow(1, self.rank * width, width))
        else:
            self.norm.data.copy_(tensor)


def _parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)


class Runner:
    """In place of vLLM's model runner. `reloaded` holds what the last `reload_weights` was given."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.reloaded: dict[str, torch.Tensor] = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def reload_weights(self, weights_iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reloaded = {name: tensor.clone() for name, tensor in weights_iterator}


def start_folder(folder: Path, tensors: Mapping[str, torch.Tensor], *, tied: bool = False) -> Path:
    make_source(folder)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def loaded(model: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    model.load_weights(tensors.items())
    return model


def engine(run: RunDir, model: torch.nn.Module, folder: Path, dtype: str = "float32") -> EngineWeights:
    return EngineWeights(Runner(model), torch.device("cpu"), run.run_id, folder, dtype)


def publish_version(run: RunDir, version: int, tensors: Mapping[str, torch.Tensor] | None = None) -> Manifest:
    chosen = checkpoint(version) if tensors is None else tensors
    dtype = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[chosen[EMBED].dtype]
    return publish_full(run, version, chosen, WeightsConfig(dtype=dtype))


# ---- sums, as a trainer with a GPU publishes them ---------------------------------------------------------------------


def with_sums(manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Manifest:
    """The manifest with the sums of `tensors`, which hold the version as it is published."""
    entries = {name: _summed(entry, tensors[name]) for name, entry in manifest.tensors.items()}
    return with_entries(manifest, entries)


def with_entries(manifest: Manifest, entries: Mapping[str, TensorEntry]) -> Manifest:
    """The manifest as a trainer would make it with other entries for some tensors."""
    fields = {name: value for name, value in vars(manifest).items() if name not in ("digest", "tensors")}
    return Manifest.of(**fields, tensors={**manifest.tensors, **entries})


def _summed(entry: TensorEntry, tensor: torch.Tensor) -> TensorEntry:
    parts = []
    for part in entry.parts:
        total = PartSums().of(tensor[part.box.slices()].contiguous(), part.box, entry.shape)
        parts.append(replace(part, sum64=None if total is None else int(total)))
    return replace(entry, parts=tuple(parts))


def part_sums_on_the_host(monkeypatch: pytest.MonkeyPatch, wrong: str = "") -> None:
    """Let a publisher of host memory make sums as one of a GPU does; of the tensor `wrong` another one than that of its bytes."""
    honest = snapshot.Copier.copy

    class Summed:
        def __init__(self, copier: snapshot.Copier, piece: snapshot.Piece, place: torch.Tensor | None = None) -> None:
            self._copy = honest(copier, piece, place)
            self.converted_bytes = self._copy.converted_bytes
            self.in_file = self._copy.in_file
            self.bytes = self._copy.bytes
            total = PartSums().of(piece.converted(), piece.box, piece.full_shape)
            self._sum64 = None if total is None else int(total) ^ int(piece.name == wrong)

        def sum64(self) -> int | None:
            return self._sum64

    for name in ("copy", "lend"):
        monkeypatch.setattr(snapshot.Copier, name, lambda *what: Summed(*what))
