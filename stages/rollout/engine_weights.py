"""The weights of one engine worker: staged versions go into its parameters by copies, and what arrived is checked.

At start the way into the parameters is recorded (`copy_plan`) and rehearsed on the files that the engine was started
from. Where the engine is not a set of straight copies of them, vLLM's own reload does the work, and the reason is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stages.files import list_names
from stages.rollout import compat_model
from stages.rollout.checksums import as_words, device_sums, word_of
from stages.rollout.copy_plan import Copy, PlanError, record
from stages.rollout.signature import model_signature
from stages.rollout.source_sums import Source, SourceSums
from stages.rollout.staged_delta import name_of, patch
from stages.rollout.staging import SegmentLayout, Staging
from stages.rundir import RunDir
from stages.weights.manifest import Manifest, xxh3_128
from stages.weights.sums import column_factors
from stages.weights.tensors import TORCH_DTYPES
from stages.weights.versions import read_version

_ALL_COLUMNS = 128
_SOME_COLUMNS = 16
"""How many columns of a packed weight are read back: all up to the first number, else the second."""
_REHEARSAL_BYTES = 64 << 20
"""Compared at a time: the engine may have left little memory on a GPU."""


@dataclass
class StagedVersion:
    """A version in host memory; `sums[i]` is that of the i-th copy's source, `published_sums` of them are the trainer's.

    `targets` are bound where they cannot move.
    """

    manifest: Manifest
    read_here: bool
    published_sums: int = 0
    sums: list[int] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)


class EngineWeights:
    """`runner` is vLLM's model runner. `why_reload` is empty when versions are copied straight into the parameters."""

    def __init__(self, runner: Any, device: torch.device, run_id: str, start_folder: Path, weights_dtype: str) -> None:
        self._runner = runner
        self._model: Any = runner.get_model()
        self._device = device
        self.layout = SegmentLayout.of(model_signature(start_folder, weights_dtype, ()))
        self.staging = Staging(run_id, self.layout, for_cuda=device.type == "cuda")
        self._packed = compat_model.packed_layers(self._model)
        self._copies: list[Copy] = []
        self._words: list[torch.dtype] = []
        self._sources: list[Source] = []
        self._factors = column_factors(0)
        self._gathered: dict[int, torch.Tensor] = {}
        self.why_reload = compat_model.why_not_copied(self._model)
        if not self.why_reload:
            try:
                self._plan(start_folder)
            except PlanError as problem:
                self._copies, self._words, self._sources, self._gathered = [], [], [], {}
                self.why_reload = str(problem)

    def description(self) -> dict[str, Any]:
        """Result of the start, for the log."""
        return {
            "why_reload": self.why_reload,
            "why_private": self.staging.why_private,
            "copies": len(self._copies),
            "packed_layers": len(self._packed),
            "bytes": self.layout.num_bytes,
        }

    # ---- at start ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _plan(self, start_folder: Path) -> None:
        """Record the copies and rehearse them. Raises PlanError when they do not reproduce what the engine holds."""
        with compat_model.unpacked(self._packed) as fresh:
            parameters = self._parameters()
            self._copies = record(self._model.load_weights, self.staging.tensors, parameters)
            self._gathered = self._gather_buffers()
            sources = [self._source(index) for index in range(len(self._copies))]
            targets = self._targets()
            self._words = [word_of(*pair) for pair in zip(sources, targets, strict=True)]
            self._sources = [
                Source.of(copy, self.staging.tensors[copy.name], word)
                for copy, word in zip(self._copies, self._words, strict=True)
            ]
            self._factors = column_factors(max(view.shape[-1] for view in targets))
            self._device_factors = self._factors.to(self._device)
            self._rehearse(start_folder, parameters, fresh)
            for name, layer in self._packed.items():
                if not _multiplies_with(layer, self._weights()[name], seed=0):
                    raise PlanError(f"{name} does not multiply with the weight that was loaded")

    def _rehearse(self, start_folder: Path, parameters: dict[str, torch.Tensor], fresh: set[str]) -> None:
        """Every parameter must hold, bit for bit, what the copies would put there; those of `fresh` layers are filled."""
        awaited: dict[str, list[Copy]] = {name: [] for name in self.layout.offsets}
        for copy in self._copies:
            awaited[copy.name].append(copy)
        for name, tensor in _tensors_in(start_folder, self.layout):
            for copy in awaited.pop(name, []):
                source, target = copy.source.of(tensor), copy.target.of(parameters[copy.parameter])
                if copy.parameter in fresh:
                    target.copy_(source)
                elif not _same_bits(source, target):
                    raise PlanError(f"{copy.parameter} does not hold {name} as it is in {start_folder}")
        if missing := sorted(name for name, left in awaited.items() if left):
            raise PlanError(f"{start_folder} does not hold {missing[0]}")

    def _gather_buffers(self) -> dict[int, torch.Tensor]:
        """Pinned memory for sources that are not contiguous (a rank's columns), which a GPU cannot fetch in one piece."""
        if self._device.type != "cuda":
            return {}
        views = [copy.source.of(self.staging.tensors[copy.name]) for copy in self._copies]
        return {
            index: torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
            for index, view in enumerate(views)
            if not view.is_contiguous()
        }

    # ---- while generating ----------------------------------------------------------------------------------------

    def stage(self, run: RunDir, manifest: Manifest, *, deadline_s: float, check: Callable[[], None]) -> StagedVersion:
        """Bring a version into host memory, from its files, in place by a delta, or because another worker of the node did; it is held there.

        Raises WeightsError for damaged or unfit files, WaitTimeoutError, and whatever `check` raises to give up.
        """
        self.layout.check_fit(manifest)
        staged = self.staging.tensors
        sums = SourceSums(self._sources, self._factors, self._gathered, manifest.tensors)
        # Before the bytes are there: while the engine computes, each of some hundred views waits for the interpreter's lock.
        targets = [] if self._packed else self._targets()

        def fill() -> None:
            sums.restart()  # another process may have replaced what was read before it was held
            read_version(run, manifest, into=staged, arrived=sums.add if sums.wants_bytes else None, check=check)

        read_here = self.staging.hold(
            name_of(manifest.state),
            fill,
            deadline_s=deadline_s,
            check=check,
            patch=partial(patch, run, manifest, staged),
        )
        found = sums.complete(was_added=read_here and manifest.delta is None)
        return StagedVersion(manifest, read_here, sums.num_published, found, targets)

    # ---- while paused --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def swap(self, version: StagedVersion) -> dict[str, Any]:
        """Put a staged version into the engine and compare what arrived; "fault" of the report is empty when all is well."""
        started_s = time.monotonic()
        if self.why_reload:
            compat_model.reload(self._runner, self.staging.tensors, on_cpu=self._device.type == "cpu")
            return self._report(version, started_s, "reload")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # whatever the engine queued last may still read the old weights
        with compat_model.unpacked(self._packed):
            targets = version.targets or self._targets()
            self._copy_into(targets)
            fault = self._difference(version, targets) or self._pack(version)
        return self._report(version, started_s, "copies", *fault)

    @torch.no_grad()
    def check(self, version: StagedVersion) -> dict[str, Any]:
        """Compare what the engine holds with a staged version, changing nothing; the report is that of `swap`."""
        started_s = time.monotonic()
        if self.why_reload:
            return self._report(version, started_s, "unchecked")
        with compat_model.unpacked(self._packed) as fresh:
            targets = self._targets()
            for index, copy in enumerate(self._copies):
                if copy.parameter in fresh:
                    targets[index].copy_(self._source(index))
            fault = self._difference(version, targets) or self._packs_that_differ(self._weights(), version)
        return self._report(version, started_s, "checked", *fault)

    def _copy_into(self, targets: list[torch.Tensor]) -> None:
        for index, target in enumerate(targets):
            target.copy_(self._source(index), non_blocking=True)

    def _difference(self, version: StagedVersion, targets: list[torch.Tensor]) -> tuple[str, ...]:
        """(what is wrong, name of the HF tensor) for the first copy that did not arrive; empty when all did."""
        found = device_sums(targets, self._words, self._device_factors)
        for copy, wanted_sum, found_sum in zip(self._copies, version.sums, found, strict=True):
            if found_sum != wanted_sum:
                what = f"{copy.parameter} in the engine does not hold {copy.name} of version {version.manifest.version}"
                return f"{what}: checksum {found_sum:#x}, wanted {wanted_sum:#x}", copy.name
        return ()

    def _pack(self, version: StagedVersion) -> tuple[str, ...]:
        weights = self._weights()  # packing lets go of some
        for layer in self._packed.values():
            compat_model.pack(layer)
        return self._packs_that_differ(weights, version)

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: layer.get_parameter("weight").data for name, layer in self._packed.items()}

    def _packs_that_differ(self, weights: Mapping[str, torch.Tensor], version: StagedVersion) -> tuple[str, ...]:
        for name, layer in self._packed.items():
            if not _multiplies_with(layer, weights[name], seed=version.manifest.version):
                what = f"{name} in the engine multiplies with other weights than version {version.manifest.version}"
                return what, next((copy.name for copy in self._copies if copy.parameter == f"{name}.weight"), "")
        return ()

    # ---- both ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters() if parameter.numel()}

    def _targets(self) -> list[torch.Tensor]:
        parameters = self._parameters()
        return [copy.target.of(parameters[copy.parameter]) for copy in self._copies]

    def _source(self, index: int) -> torch.Tensor:
        if (gathered := self._gathered.get(index)) is not None:
            return gathered
        copy = self._copies[index]
        return copy.source.of(self.staging.tensors[copy.name])

    def _report(
        self, version: StagedVersion, started_s: float, method: str, fault: str = "", tensor: str = ""
    ) -> dict[str, Any]:
        if fault:
            self.staging.forget()  # where the bytes were damaged after they were verified, that must not end every instance of the node
        return {
            "method": method,
            "why_reload": self.why_reload,
            "tensors": len(version.manifest.tensors),
            "copies": len(self._copies),
            "checksum": xxh3_128(repr(version.sums).encode()) if self._copies else "",
            "published_sums": version.published_sums,
            "read_here": version.read_here,
            "seconds": time.monotonic() - started_s,
            "fault": fault,
            "tensor": tensor,
        }


def _tensors_in(folder: Path, layout: SegmentLayout) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the layout in a HF folder, one after the other, in the published format."""
    for file in list_names(folder):
        if file.endswith(".safetensors"):
            with safe_open(folder / file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    if name in layout.signature:
                        yield name, tensors.get_tensor(name).to(TORCH_DTYPES[layout.signature[name][0]]).contiguous()


def _same_bits(source: torch.Tensor, target: torch.Tensor) -> bool:
    """`source` on the host, `target` anywhere."""
    rows = max(1, _REHEARSAL_BYTES * len(target) // (target.numel() * target.element_size()))
    word = word_of(target)
    return all(
        torch.equal(as_words(wanted.contiguous(), word).to(found.device), as_words(found, word))
        for wanted, found in zip(source.split(rows), target.split(rows), strict=True)
    )


def _multiplies_with(layer: torch.nn.Module, weight: torch.Tensor, *, seed: int) -> bool:
    """Whether a packed layer's copy is that of `weight` ([rows, width]), by some of its columns when there are many."""
    width = weight.shape[1]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))
    columns = order if width <= _ALL_COLUMNS else order[:_SOME_COLUMNS]
    return torch.equal(compat_model.packed_columns(layer, width, columns, weight.dtype), weight[:, columns])
