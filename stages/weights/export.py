"""Write any version of a run as a HF folder outside of it, as it would be published in full, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.layout import INDEX_FILE
from stages.weights.manifest import Manifest
from stages.weights.reader import checked_files, read_into
from stages.weights.versions import read_version


class ExportRefusedError(WeightsError):
    """Nothing was written."""


def export(run: RunDir, manifest: Manifest, folder: Path) -> None:
    """Small files and weight files into `folder`, which must not exist; one weight file is in memory at a time.

    Raises ExportRefusedError, and what `stages.weights.versions.read_version` raises; then the folder holds a part.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ExportRefusedError(f"{folder} exists; choose another folder") from None
    for name, content in _small_files(run, manifest).items():
        (folder / name).write_bytes(content)
    files: dict[str, list[str]] = {}
    for name, entry in manifest.tensors.items():
        files.setdefault(entry.file, []).append(name)
    for file, names in files.items():
        save_file(read_version(run, manifest, names), folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        (folder / INDEX_FILE).write_bytes(_index(manifest))


def _small_files(run: RunDir, manifest: Manifest) -> dict[str, bytes]:
    """Compared with their digests."""
    small = {name: entry for name, entry in manifest.files.items() if entry.bytes == entry.digest_bytes}
    contents: dict[str, bytes] = {}
    with checked_files(run, manifest, small) as fds:
        for name, entry in small.items():
            buffer = bytearray(entry.bytes)
            read_into(fds[name], memoryview(buffer), 0, name, entry.bytes)
            contents[name] = bytes(buffer)
    return contents


def _index(manifest: Manifest) -> bytes:
    weight_map = {name: entry.file for name, entry in sorted(manifest.tensors.items())}
    return json.dumps({"metadata": {"total_size": manifest.weight_bytes}, "weight_map": weight_map}, indent=1).encode()
