"""Completion of `python -m launch` in bash.

Hydra's own install line completes `python FILE` and installed commands, not `python -m MODULE`; so the function for bash is
ours (`launch/wrappers/completion.bash`), and its answers are Hydra's (`--shell-completion query=bash`).
"""

from __future__ import annotations

from importlib import resources

UNINSTALL = "libra_completion_uninstall 2> /dev/null\n"


def script(action: str) -> str:
    """Shell text for `eval`; `action` is "install" or "uninstall"."""
    if action == "uninstall":
        return UNINSTALL
    return (resources.files("launch") / "wrappers" / "completion.bash").read_text(encoding="utf-8")
