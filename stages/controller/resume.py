"""From where a controller goes on: what the trainer starts from, the ledger of all that came before, and what is on disk.

The first start of a run, a new attempt, and a controller that is started again within its attempt take the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.batches import BatchError, BatchManifest, adopt_batch
from stages.context import StageContext
from stages.controller.ledger import Ledger, LedgerError, LedgerState, Resumed, read_ledgers
from stages.files import list_names, wait_for
from stages.rundir import RunDir


@dataclass(frozen=True)
class Position:
    """`first_version` is what the trainer of this attempt published first, also its step; `trained_steps` are done by now.

    `served_version` is -1 unless this attempt has served one already. `manifests` are those of the recorded batches, from
    step `trained_steps` on, that are trained as they are. `is_first`: nothing of this run came before.
    """

    first_version: int
    trained_steps: int
    served_version: int
    manifests: dict[int, BatchManifest]
    ledger: Ledger
    is_first: bool


def wait_for_trainer_start(context: StageContext) -> int:
    """The step that the trainer of this attempt starts from. Raises WaitTimeoutError, and what `check_wishes` raises."""
    run, config = context.run, context.config
    record = wait_for(
        lambda: run.read(run.start_json) if run.start_json.name in list_names(run.attempt_dir) else None,
        deadline_s=config.rollout.ready_timeout_s + config.algorithm.step_timeout_s,
        awaited=str(run.start_json),
        from_whom="the trainer",
        check=lambda: check_wishes(context),
    )
    return int(record["step"])


def find_position(run: RunDir, first_version: int) -> Position:
    """Fold the ledger, take over the recorded batches that count, and open a ledger file of our own.

    Raises LedgerError when the ledger does not know of the batches that the trainer's checkpoint was trained on.
    """
    files = run.ledger_files()
    state = read_ledgers(run)
    is_same_attempt = bool(files) and state.attempt == run.attempt
    step = max(first_version, state.trained_steps, _published(run)) if is_same_attempt else first_version
    if step > len(state.batches):
        raise LedgerError(
            f"the trainer goes on from step {step}, but {run.ledger} knows of {len(state.batches)} batches: a file is missing"
        )
    manifests = _recorded(run, state, step)
    restart = 1 + max((number for attempt, number in files if attempt == run.attempt), default=-1)
    ledger = Ledger(run.ledger_jsonl(run.attempt, restart), state)
    if files or run.attempt:
        ledger.record([Resumed(run.attempt, step, step + len(manifests))])
        ledger.sync()
    served = _newest_served(run, first_version) if is_same_attempt else -1
    return Position(first_version, step, served, manifests, ledger, is_first=not (files or run.attempt))


def check_wishes(context: StageContext) -> None:
    """Raises StoppedError, StopRequestedError."""
    context.check_stop()
    context.check_stop_request()


def _recorded(run: RunDir, state: LedgerState, step: int) -> dict[int, BatchManifest]:
    """The unbroken row of sound batches from `step` on, now of this attempt: the trainer takes no others.

    A batch behind a gap may hold tokens of versions that this line of training never has, so it is made anew too.
    """
    manifests: dict[int, BatchManifest] = {}
    while (groups := state.batches.get(step + len(manifests))) is not None:
        number = step + len(manifests)
        try:
            manifest = adopt_batch(run, number, groups)
        except BatchError as damage:
            print(f"warning: batch {number} is made anew: {damage}", flush=True)
            break
        if manifest is None:
            break
        manifests[number] = manifest
    return manifests


def _published(run: RunDir) -> int:
    """The newest version of this attempt. Batches below it may have been collected while no controller ran."""
    latest = run.read(run.latest_json, skip_damaged=True)
    return 0 if latest is None else int(latest["version"])


def _newest_served(run: RunDir, first_version: int) -> int:
    """The newest version that all instances have proved in this attempt; -1 for none."""
    newest = -1
    for name in list_names(run.refreshed):
        record = run.read(run.refreshed / name, skip_damaged=True)
        if record is not None and record["version"] >= first_version:
            newest = max(newest, int(record["version"]))
    return newest
