"""A file of the configuration before anybody reads it: is it one at all, and would reading it ever end?"""

from __future__ import annotations

import os

import yaml

MAX_FILE_BYTES = 1_000_000
MAX_VALUES = 50_000


class UnusableFileError(ValueError):
    """The message names the file, and says in one line what is wrong with it."""

    def __init__(self, file: str, reason: Exception | str) -> None:
        text = "it is nested too deeply" if isinstance(reason, RecursionError) else " ".join(str(reason).split())
        text = text.split(" full_key:")[0]
        super().__init__(text if file in text else f"{file}: {text}")


def check_text(file: str) -> None:
    """Raises ValueError with the reason, OSError and yaml.YAMLError for a file that should not be read."""
    size = os.path.getsize(file)
    if size > MAX_FILE_BYTES:
        raise ValueError(f"it has {size} bytes, more than {MAX_FILE_BYTES}; is it a configuration?")
    with open(file, encoding="utf-8") as stream:
        text = stream.read()
        if text.startswith("\ufeff"):
            raise ValueError(
                "it begins with a byte-order mark, which hides its first line; save it as UTF-8 without one"
            )
        if "&" in text and "*" in text:
            stream.seek(0)
            _check_aliases(yaml.compose(stream, Loader=yaml.SafeLoader))


def _check_aliases(root: yaml.Node | None) -> None:
    """A few anchors of YAML can stand for more values than there is memory, or for themselves."""
    counted: dict[int, int] = {}
    inside: set[int] = set()

    def count(node: yaml.Node) -> int:
        if id(node) in inside:
            raise ValueError(f"the anchor in line {node.start_mark.line + 1} holds itself")
        if id(node) not in counted:
            inside.add(id(node))
            counted[id(node)] = 1 + sum(count(inner) for inner in _inner(node))
            inside.remove(id(node))
        return counted[id(node)]

    if root is not None and count(root) > MAX_VALUES:
        raise ValueError(f"its anchors make more than {MAX_VALUES} values; is it a configuration?")


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [inner for pair in node.value for inner in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
