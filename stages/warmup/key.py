"""Which starter policy a configuration asks for, and where it is cached. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from conf.schema import LibraConfig

RECIPE_VERSION = 2
"""Raise it with every change of code that makes another policy from the same options."""


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
    return cache_dir / f"policy-{warmup_key(config)}"
