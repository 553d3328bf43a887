"""What can go wrong with checkpoints, one type per failure.

Every error keeps its constructor's arguments as `args` (numbers, texts, tuples of them): with these it is made again on every
trainer rank.
"""

from __future__ import annotations

from stages.rundir import FencedError


class CheckpointError(RuntimeError):
    """Base of all errors of checkpoints."""


class SaveError(CheckpointError):
    """A checkpoint could not be saved; nothing of it is visible, and older ones are as they were."""


class NoCheckpointSpaceError(SaveError):
    """The filesystem of the run is full, or a quota is reached."""

    def __init__(self, folder: str, wanted_bytes: int, available_bytes: int) -> None:
        super().__init__(folder, wanted_bytes, available_bytes)

    def __str__(self) -> str:
        folder, wanted, available = self.args
        return (
            f"no space for a checkpoint in {folder}: wanted {wanted:,} bytes, available {available:,} (a quota may allow less);"
            " free space, or lower keep_latest_checkpoints"
        )


class LoadError(CheckpointError):
    """A checkpoint could not be loaded, although nothing says that it is damaged."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint are not what its manifest says, or the manifest is none of this run."""

    def __init__(self, checkpoint: str, problem: str) -> None:
        super().__init__(checkpoint, problem)

    def __str__(self) -> str:
        checkpoint, problem = self.args
        return f"checkpoint {checkpoint} is damaged: {problem}"


class NoSoundCheckpointError(CheckpointError):
    """There are checkpoints, and every one of them is damaged: starting over would throw the training away unasked."""

    def __init__(self, folder: str, steps: tuple[int, ...]) -> None:
        super().__init__(folder, steps)

    def __str__(self) -> str:
        folder, steps = self.args
        names = ", ".join(f"step_{step:06d}" for step in steps)
        return (
            f"none of the checkpoints in {folder} can be used ({names}: see the warnings above);"
            f" to start again from model_path, move {folder} away"
        )


class CheckpointMismatchError(CheckpointError, ValueError):
    """A sound checkpoint that this configuration cannot go on from. `wanted` is what the run now asks for."""

    def __init__(self, checkpoint: str, what: str, wanted: str, available: str, change: str) -> None:
        super().__init__(checkpoint, what, wanted, available, change)

    def __str__(self) -> str:
        checkpoint, what, wanted, available, change = self.args
        return f"checkpoint {checkpoint} has another {what}: wanted {wanted}, available {available}; {change}"


class LayoutMismatchError(CheckpointMismatchError):
    """Saved by another number or arrangement of trainer ranks, or in another number format."""


class ModelMismatchError(CheckpointMismatchError):
    """Saved from another model, or with another tokenizer."""


class TaskMismatchError(CheckpointMismatchError):
    """Saved in training on other prompts: the numbers in the ledger would mean other problems."""


TRAVELS = (CheckpointError, FencedError)
"""What goes from the rank where it happened to all others as it is."""
