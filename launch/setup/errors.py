"""Why set-up stops; the message names what to change."""

from __future__ import annotations


class SetupError(Exception):
    """Printed without a stack trace; `make` then fails."""
