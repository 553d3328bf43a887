"""What can be wrong with the files, the command or a value, in one sentence each."""

from __future__ import annotations


class ImportReferenceError(ValueError):
    """A file cannot be read, or the result cannot be written; the message says which and what to do."""


class WrongValueError(ValueError):
    """A value that an option of Libra cannot take; the message says what the value is not."""
