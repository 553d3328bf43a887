"""Completion of `python -m launch` in bash.

Hydra's own install line completes `python FILE` and installed commands, not `python -m MODULE`; so the function for bash is
ours (`launch/wrappers/completion.bash`), and its answers are Hydra's (`--shell-completion query=bash`).
"""

from __future__ import annotations

import itertools
import os
from importlib import resources

UNINSTALL = "libra_completion_uninstall 2> /dev/null\n"

FOLDER_FLAGS = {"-cd": "--config-dir", "-cp": "--config-path", "-cn": "--config-name"}


def script(action: str) -> str:
    """Shell text for `eval`; `action` is "install" or "uninstall"."""
    if action == "uninstall":
        return UNINSTALL
    return (resources.files("launch") / "wrappers" / "completion.bash").read_text(encoding="utf-8")


def folder_flags(line: str = "") -> list[str]:
    """The flags of the line that is being completed which change where Hydra looks; Hydra reads them in its own line only."""
    words = (line or os.environ.get("COMP_LINE", "")).split()
    found: list[str] = []
    for word, following in itertools.pairwise(words):
        flag, equals, value = word.partition("=")
        flag = FOLDER_FLAGS.get(flag, flag)
        if flag in FOLDER_FLAGS.values():
            found += [flag, value if equals else following]
    return found
