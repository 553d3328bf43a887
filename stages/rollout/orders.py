"""What the agent orders its server to do with a published version."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from stages.rollout.errors import ReloadRefusedError


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
        except ValueError as error:
            raise ReloadRefusedError(f"the body is not JSON: {error}") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ReloadRefusedError(f"wanted an object with the fields {sorted(names)}")
        order = cls(**values)
        numbers = [order.version, order.attempt]
        texts = [order.run_id, order.path, order.digest, order.method]
        if not (
            all(type(value) is int and value >= 0 for value in numbers)
            and all(isinstance(value, str) for value in texts)
            and isinstance(order.deadline_s, int | float)
            and order.deadline_s > 0
            and order.method in ("inplace", "restart")
        ):
            raise ReloadRefusedError("a field has a wrong type or value")
        return order
