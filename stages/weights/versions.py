"""Read any published version, in full or along the deltas that lead to it, and believe nothing that manifests do not confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from stages.rundir import RunDir
from stages.weights.boxes import Box
from stages.weights.delta import DeltaError, overwrite
from stages.weights.delta_chain import Link, State, route
from stages.weights.delta_entry import DeltaPart
from stages.weights.errors import (
    DigestMismatchError,
    SignatureMismatchError,
    SizeMismatchError,
    VersionNotPublishedError,
    WeightsError,
)
from stages.weights.manifest import DTYPE_BYTES, Manifest, Part
from stages.weights.parallel import map_threads, thread_count
from stages.weights.reader import (
    checked_files,
    digest_of_slice,
    load_manifest,
    read_into,
    read_verified,
)
from stages.weights.reader import faults as faults_in_full
from stages.weights.tensors import bytes_of


class ChangeError(WeightsError):
    """What a version changes does not fit what is there: another base, or a damaged payload."""

    def __init__(self, tensor: str, version: int, problem: str) -> None:
        super().__init__(tensor, version, problem)
        self.tensor = tensor

    def __str__(self) -> str:
        tensor, version, problem = self.args
        return f"tensor {tensor}, as version {version} changes it: {problem}"


def chain_to(run: RunDir, manifest: Manifest, held: State | None = None) -> list[Manifest]:
    """What is to be read, in order, by who has `held`: see `stages.weights.delta_chain.route`.

    Raises BrokenChainError, RecordError for a damaged manifest on the way.
    """
    found, links, link = {}, {}, manifest
    while True:
        base = None if link.delta is None else link.delta.base
        found[link.version] = link
        links[link.version] = Link(link.state, base, link.weight_bytes if link.delta is None else link.delta.bytes)
        if base is None or base == held:
            break
        try:
            link = load_manifest(run, base.version)
        except VersionNotPublishedError:
            break  # `route` says what is missing
    return [found[step.state.version] for step in route(manifest.state, held, links)]


def read_version(
    run: RunDir,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    threads: int = 0,
    into: Mapping[str, torch.Tensor] | None = None,
    arrived: Callable[[str, int, int], None] | None = None,
    check: Callable[[], None] | None = None,
    have: Mapping[tuple[str, int, int], str] | None = None,
    chain: Sequence[Manifest] = (),
) -> dict[str, torch.Tensor]:
    """As `stages.weights.reader.read_verified`, for any version; `arrived`, `check` and `have` are for one that is published in full.

    Of a delta, what its payloads do not change is read from its bases, and compared with this version's digests like the rest.
    `chain` is that of `chain_to`, by who has it already.
    Raises further BrokenChainError, ChangeError, SignatureMismatchError when a base has other shapes.
    """
    if manifest.delta is None:
        return read_verified(run, manifest, names, threads=threads, into=into, arrived=arrived, check=check, have=have)
    wanted = list(manifest.tensors if names is None else names)
    chain = chain or chain_to(run, manifest)
    for base, link in pairwise(chain):
        _check_same_shapes(base, link, wanted)
    if names is None:
        with checked_files(run, manifest, manifest.files):
            pass
    tensors = read_verified(run, chain[0], wanted, threads=threads, into=into)
    for link in chain[1:]:
        apply_changes(run, link, tensors, threads=threads)
    check_unchanged(manifest, tensors, threads=threads)
    return tensors


def apply_changes(
    run: RunDir, manifest: Manifest, tensors: Mapping[str, torch.Tensor], *, torn: bool = False, threads: int = 0
) -> None:
    """Overwrite those of `tensors`, which hold the base, that a delta changes. Each part is compared before and after.

    `torn`: an application of this very delta was cut off, and every part may be the base's, the version's, or between.
    Raises ChangeError, SizeMismatchError; `tensors` may then hold anything.
    """
    parts = {} if manifest.delta is None else manifest.delta.parts
    changes = [(name, change) for name, found in parts.items() if name in tensors for change in found]
    files = {change.file: manifest.files[change.file] for _, change in changes}
    boxes = {
        (name, part.start): part.box for name in {name for name, _ in changes} for part in manifest.tensors[name].parts
    }

    with checked_files(run, manifest, files) as fds:

        def apply(named: tuple[str, DeltaPart]) -> None:
            name, change = named
            payload = _payload(fds[change.file], change)
            try:
                _overwrite(change, payload, tensors[name], boxes[name, change.start], torn=torn)
            except DeltaError as problem:
                raise ChangeError(name, manifest.version, str(problem)) from problem

        touched = sum(change.delta.elements * change.delta.width for _, change in changes)
        map_threads(apply, changes, thread_count(threads, touched))


def check_unchanged(manifest: Manifest, tensors: Mapping[str, torch.Tensor], *, threads: int = 0) -> None:
    """Compare all parts of `tensors` that a delta does not change with their digests. Raises DigestMismatchError."""

    def check(named: tuple[str, Part]) -> None:
        name, part = named
        found = digest_of_slice(tensors[name][part.box.slices()])
        if found != part.xxh3_128:
            raise DigestMismatchError(name, manifest.tensors[name].file, part.xxh3_128, found)

    parts = [(name, part) for name, part in _unchanged(manifest) if name in tensors]
    num_bytes = sum(part.box.elements * DTYPE_BYTES[manifest.tensors[name].dtype] for name, part in parts)
    map_threads(check, parts, thread_count(threads, num_bytes))


def faults(run: RunDir, manifest: Manifest) -> list[WeightsError]:
    """Every fault of a version, for people: does not stop at the first. Of a delta, what its bases lack is a fault too."""
    if manifest.delta is None:
        return faults_in_full(run, manifest)
    found: list[WeightsError] = []
    for file, entry in manifest.files.items():
        try:
            with checked_files(run, manifest, {file: entry}):
                pass
        except (SizeMismatchError, DigestMismatchError) as problem:
            found.append(problem)
    try:
        chain = chain_to(run, manifest)
    except WeightsError as problem:
        return [*found, problem]
    for name in manifest.tensors:
        try:
            read_version(run, manifest, [name], chain=chain)
        except WeightsError as problem:
            found.append(problem)
    return list({str(problem): problem for problem in found}.values())


def _unchanged(manifest: Manifest) -> Iterator[tuple[str, Part]]:
    changes = {} if manifest.delta is None else manifest.delta.parts
    for name, entry in manifest.tensors.items():
        changed = {change.start for change in changes.get(name, ())}
        # An empty part begins where its neighbour does.
        yield from ((name, part) for part in entry.parts if part.box.elements and part.start not in changed)


def _check_same_shapes(base: Manifest, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        wanted, found = manifest.tensors[name], base.tensors.get(name)
        if found is None or (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            of_base = "lacks it" if found is None else f"has {found.dtype}{list(found.shape)}"
            problem = f"its base, version {base.version}, {of_base}, wanted {wanted.dtype}{list(wanted.shape)}"
            raise SignatureMismatchError(name, f"in version {manifest.version}: {problem}")


def _payload(fd: int, change: DeltaPart) -> bytes:
    buffer = bytearray(change.delta.bytes)
    read_into(fd, memoryview(buffer), change.offset, change.file, change.end)
    return bytes(buffer)


def _overwrite(change: DeltaPart, payload: bytes, tensor: torch.Tensor, box: Box, *, torn: bool) -> None:
    view = tensor[box.slices()]
    if view.is_contiguous():
        overwrite(change.delta, payload, bytes_of(view), torn=torn)
        return
    rows = view.contiguous()
    overwrite(change.delta, payload, bytes_of(rows), torn=torn)
    view.copy_(rows)
