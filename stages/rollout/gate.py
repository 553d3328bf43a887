"""Whether answers may leave the server: "an instance never serves a version that it has not proved"."""

from __future__ import annotations

import asyncio

from stages.rollout.errors import NotServingError


class Gate:
    """Open: answers pass. Held: they wait (a new version is in the engine, its proof is running). Shut: none leave.

    Requests may enter while the gate is held; the engine queues them. All methods belong to one event loop.
    """

    def __init__(self, shut_because: str = "") -> None:
        self._decided = asyncio.Event()
        self._decided.set()
        self._shut_because = shut_because

    @property
    def shut_because(self) -> str:
        """Why nothing is served; empty when the gate is open or held."""
        return self._shut_because

    def hold(self) -> None:
        self._decided.clear()

    def open(self) -> None:
        self._shut_because = ""
        self._decided.set()

    def shut(self, because: str) -> None:
        self._shut_because = because
        self._decided.set()

    def check(self) -> None:
        """Raises NotServingError when the gate is shut."""
        if self._shut_because:
            raise NotServingError(self._shut_because)

    async def passed(self) -> None:
        """Wait until it is decided, then return or raise NotServingError."""
        if not self._decided.is_set():
            await self._decided.wait()
        self.check()
