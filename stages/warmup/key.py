"""Which starter policy a configuration asks for, and where it is cached. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict
from pathlib import Path

from conf.schema import LibraConfig
from stages.files import list_names

RECIPE_VERSION = 2
"""Raise it with every change of code that makes another policy from the same options."""

CACHED_POLICY = "policy-"
"""How the name of every policy in the cache begins."""


def warmup_key(config: LibraConfig) -> str:
    """Digest of everything that shapes the policy: architecture, task, warm-up options (with seed), version of the code."""
    shaping = {
        "recipe": RECIPE_VERSION,
        "model": asdict(config.model),
        "task": {"name": config.task.name, "params": config.task.params},
        "warmup": asdict(config.warmup),
        "max_new_tokens": config.max_new_tokens,
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def cached_policy_path(config: LibraConfig, cache_dir: Path) -> Path:
    """The HF folder of the policy inside `cache_dir`. It exists only when complete: it gets its name by a rename."""
    return cache_dir / f"{CACHED_POLICY}{warmup_key(config)}"


def damage(folder: Path) -> str:
    """What a policy's folder lacks, so that nobody can start from it (a copy that was cut short); empty when it is whole."""
    if not folder.is_dir():
        return "no such folder"
    names = list_names(folder)
    weights = [name for name in names if name.endswith(".safetensors")]
    if "config.json" not in names or not weights:
        return f"no {'*.safetensors' if 'config.json' in names else 'config.json'}"
    if not {"tokenizer.json", "tokenizer.model"}.intersection(names):
        return "no tokenizer.json"
    return next((f"{name} is cut short" for name in weights if not _is_whole(folder / name)), "")


def _is_whole(path: Path) -> bool:
    """Is a safetensors file as long as its header (8 bytes of little-endian length, then JSON) says?"""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if 8 + length > size:
            return False
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(size == 8 + length + max(ends, default=0))
