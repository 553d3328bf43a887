"""The version that a node has staged is made the next one in place, by what a delta says.

The name of the staged bytes says at every moment what they are: a version; nothing; or "BASE on its way to RESULT" while a delta
is applied. Who finds the last, because the process that applied it died, completes it with that very delta: every element that can
differ is overwritten, whichever of the two it has. Each part that a delta changes is compared with its digest before and after,
all others at the end. What does not fit (a wrong base, a damaged payload) leaves the bytes without a name and is an error; whoever
comes next, the same instance asked again, reads the version from its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from stages.rundir import RunDir
from stages.weights.delta_chain import State
from stages.weights.errors import WeightsError
from stages.weights.manifest import Manifest
from stages.weights.reader import load_manifest
from stages.weights.versions import apply_changes, chain_to, check_unchanged

_NAME = re.compile(r"version (\d+) ([0-9a-f]{32})(?: on its way to version (\d+) ([0-9a-f]{32}))?")


def name_of(state: State) -> str:
    return f"version {state.version} {state.digest}"


def patch(
    run: RunDir,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    found: str,
    write_name: Callable[[str], None],
) -> bool:
    """Make `tensors`, whose bytes are called `found`, a version; see `stages.rollout.staging.Patch`.

    Raises ChangeError, DigestMismatchError, SizeMismatchError; then the bytes are worth nothing.
    """
    steps = _steps(run, manifest, found)
    for link in steps:
        assert link.delta is not None
        way = f"{name_of(link.delta.base)} on its way to {name_of(link.state)}"
        is_torn = found == way
        write_name(way)
        apply_changes(run, link, tensors, torn=is_torn)
    if steps:
        check_unchanged(manifest, tensors)
    return bool(steps)


def _steps(run: RunDir, manifest: Manifest, found: str) -> list[Manifest]:
    """The deltas from `found` to a version, in order; none when there is no such way."""
    match = _NAME.fullmatch(found)
    if manifest.delta is None or match is None:
        return []
    held = State(int(match[1]), match[2])
    try:
        if match[3] is None:
            steps = chain_to(run, manifest, held)
        else:
            torn = load_manifest(run, int(match[3]), match[4])
            steps = [torn, *chain_to(run, manifest, torn.state)]
    except WeightsError:
        return []  # reading the version from its files says what is wrong, if that matters
    bases = [None if step.delta is None else step.delta.base for step in steps]
    return steps if bases[:1] == [held] and None not in bases else []
