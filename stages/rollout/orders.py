"""What the agent orders its server to do with a published version."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from stages.rollout.errors import ReloadRefusedError

MOST_NUMBER = 10**9
LONGEST_DEADLINE_S = 7 * 86400.0
_LONGEST_TEXT = 256


@dataclass(frozen=True)
class Order:
    """Body of POST /libra/prepare, /libra/commit and /libra/prove; `path` is relative to the run directory."""

    run_id: str
    attempt: int
    version: int
    path: str
    digest: str
    method: str
    deadline_s: float

    @classmethod
    def from_json(cls, body: bytes) -> Order:
        """Raises ReloadRefusedError for anything but an object with exactly these fields, of these types."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ReloadRefusedError(f"the body is not JSON: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ReloadRefusedError(f"wanted an object with the fields {sorted(names)}")
        order = cls(**values)
        numbers = [order.version, order.attempt]
        texts = [order.run_id, order.path, order.digest, order.method]
        if not (
            all(type(value) is int and 0 <= value <= MOST_NUMBER for value in numbers)
            and all(isinstance(value, str) and _is_plain(value) for value in texts)
            and type(order.deadline_s) in (int, float)
            and 0 < order.deadline_s <= LONGEST_DEADLINE_S
            and order.method in ("inplace", "restart")
        ):
            raise ReloadRefusedError("a field has a wrong type or value")
        return order


def _is_plain(text: str) -> bool:
    """Short printable ASCII: what the system's path functions take without an error of their own (a NUL, a lone surrogate)."""
    return len(text) <= _LONGEST_TEXT and text.isascii() and (text.isprintable() or not text)
