"""What a launch would still say about an imported experiment."""

from __future__ import annotations

import tempfile
from pathlib import Path


def problems_of(text: str, name: str) -> list[str]:
    """Composed, validated and planned as in a dry run, from a folder of its own. [] when nothing is left to say."""
    from launch.errors import ConfigError
    from launch.prepare import prepare
    from launch.tree import Tree

    with tempfile.TemporaryDirectory(prefix="libra-import-") as folder:
        file = Path(folder) / "experiment" / f"{name}.yaml"
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        try:
            prepare([f"+experiment={name}"], Tree(extra=folder))
        except ConfigError as error:
            return [problem.replace(str(file), file.name) for problem in error.problems]
    return []
