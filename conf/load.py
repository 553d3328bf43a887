"""Read a run's config.yaml back into the schema."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from conf.schema import LibraConfig


def load(path: Path) -> LibraConfig:
    """The typed configuration in `path`. Raises omegaconf errors for unknown keys and wrong types."""
    merged = OmegaConf.merge(OmegaConf.structured(LibraConfig), OmegaConf.load(path))
    return cast(LibraConfig, OmegaConf.to_object(merged))
