"""Checkpoints: checkpoints/step_000010/ holds what the trainer needs to go on after 10 optimizer steps.

One file for each trainer rank, and a manifest, written last, without which the checkpoint does not exist. Importing this
package loads no torch: who starts an attempt asks `newest` from where it would resume. `stages.checkpoint.save` and
`.load` are the trainer's side.
"""

from stages.checkpoint.find import Checkpoint, available, newest, verify

__all__ = ["Checkpoint", "available", "newest", "verify"]
