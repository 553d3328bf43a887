"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_NODES_NAMED = 4


def size(num_bytes: float) -> str:
    """Decimal units: "8.0 GB"."""
    for name, unit in _SIZES:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


def seconds(value_s: float) -> str:
    """Two digits that matter: "3.1 ms", "0.42 s", "12 s"."""
    if value_s < 0.1:
        return f"{value_s * 1e3:.2g} ms"
    return f"{value_s:.2g} s" if value_s < 10 else f"{value_s:.0f} s"


def nodes(names: Iterable[str]) -> str:
    """A few names, and how many more: a cluster may have thousands."""
    listed = list(names)
    if len(listed) <= _NODES_NAMED:
        return ", ".join(listed)
    return f"{', '.join(listed[:_NODES_NAMED])} and {len(listed) - _NODES_NAMED} more"


def by_value(texts: Mapping[str, str]) -> str:
    """{"n0": "a", "n1": "a", "n2": "b"} -> "n0, n1: a; n2: b"; just "a" when all nodes say the same."""
    groups: dict[str, list[str]] = {}
    for node, text in texts.items():
        groups.setdefault(text, []).append(node)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{nodes(names)}: {text}" for text, names in groups.items())
