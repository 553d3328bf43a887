"""The agent's side of the guarded endpoints."""

from __future__ import annotations

import http.client
import json
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from stages.rollout.orders import Order


@dataclass(frozen=True)
class GuardAnswer:
    """`body` is the JSON object of the answer; empty when it was none."""

    status: int
    body: dict[str, Any]

    @property
    def is_ok(self) -> bool:
        return self.status == 200


@dataclass(frozen=True)
class GuardClient:
    """One connection per call: calls are seconds apart, and a server that was replaced leaves nothing behind."""

    base_url: str
    token: str = field(repr=False)

    def state(self, timeout_s: float) -> GuardAnswer:
        return self._call("GET", "/libra/state", None, timeout_s, self.token)

    def give(self, order: Order, what: str, timeout_s: float) -> GuardAnswer:
        """`what` is "prepare", "commit" or "prove"."""
        return self._call("POST", f"/libra/{what}", json.dumps(asdict(order)).encode(), timeout_s, self.token)

    def status_without_token(self, path: str, timeout_s: float) -> int:
        return self._call("GET", path, None, timeout_s, None).status

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float, token: str | None) -> GuardAnswer:
        """Raises OSError (refused, reset, timed out) and http.client.HTTPException (cut short)."""
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection = http.client.HTTPConnection(str(urlsplit(self.base_url).netloc), timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return GuardAnswer(response.status, _object(response.read()))
        finally:
            connection.close()


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
