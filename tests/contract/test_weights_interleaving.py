"""The weight exchange under every order, crash and stall: nothing unproved or older is served, nothing in use deleted, nobody waits for ever.

`tests.exchange_world` says what is the product's own code (all but vLLM and HTTP), and what must hold; it looks after every
stretch of every party. Attempt 1 begins with all that attempt 0 left. The last tests spoil one rule each and see it caught.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.context import StoppedError
from stages.rollout.errors import UnprovedWeightsError
from stages.rundir import FencedError, RunDir
from stages.weights import collect as collection
from stages.weights.errors import ManifestMismatchError, PublishError, WeightRefreshError
from stages.weights.patience import Patience
from stages.weights.reader import load_manifest, verify
from tests.exchange_world import STALL_S, Violation, World, make_world, parts, template
from tests.faulty_files import Late, Rule
from tests.interleaving import Choose, Crashed, NeverEndsError, Party, Search, Sharing, in_order, in_turn
from tests.weights_kit import INSTANCES

__all__ = ["parts", "template"]

FIRST, SECOND = INSTANCES
ORDERS: dict[str, Choose] = {
    "in turn": in_turn,
    "trainer first": in_order("trainer.1", "trainer.2"),
    "instances first": in_order(f"{SECOND}.1", f"{FIRST}.1", f"{FIRST}.2", f"{SECOND}.2"),
}
FOR_EVER_S = 1e6
DEEPER = "LIBRA_SEARCH_INTERRUPTIONS"
"""Environment variable: how often a party may be interrupted although it could go on. 2 takes minutes, each more ten times as long."""


def end_well(world: World, trainer: Party, version: int, *, is_pointed_to: bool = True) -> None:
    """The trainer gets to `version`; then everything is stopped, and ends."""
    world.schedule.run_until(lambda: trainer.is_over)
    if trainer.error is not None:
        raise trainer.error
    world.check_end(version, is_pointed_to=is_pointed_to)
    world.stop_instances()
    world.schedule.run_until(lambda: all(party.is_over for party in world.schedule.parties))
    errors = [party.error for party in world.schedule.parties if party is not trainer]
    assert all(isinstance(error, StoppedError | FencedError | Crashed) for error in errors), errors


def run_out(world: World, trainer: Party) -> None:
    world.schedule.run_until(lambda: trainer.is_over)


def next_attempt(world: World, keep: tuple[Party, ...] = ()) -> Party:
    """The job is requeued and starts again from step 2; the new trainer."""
    world.requeue(keep)
    trainer = world.add_trainer((3,))
    world.add_instances()
    return trainer


def learned(scenario: Callable[[Sharing, Choose], Any]) -> Sharing:
    """Run until nothing new turns out to be shared."""
    sharing, is_new = Sharing(), True
    while is_new:
        for choose in ORDERS.values():
            scenario(sharing, choose)
        is_new = sharing.learn()
    return sharing


# ---- orders ----------------------------------------------------------------------------------------------------------


def all_orders(template: Path, most_interruptions: int, instances: tuple[str, ...]) -> Search:
    def scenario(sharing: Sharing, choose: Choose) -> None:
        with make_world(template, sharing, choose, instances=instances) as world:
            trainer = world.add_trainer((3,))
            world.add_instances()
            end_well(world, trainer, 3)

    return Search(scenario, learned(scenario), most_interruptions).run()


def test_orders_of_a_trainer_and_an_instance_end_well(template: Path) -> None:
    search = all_orders(template, most_interruptions=int(os.environ.get(DEEPER, "1")), instances=(FIRST,))

    print(f"{search.runs} runs, {len(search.states)} states")
    assert search.runs > 30


def test_orders_of_a_trainer_and_two_instances_end_well(template: Path) -> None:
    search = all_orders(template, most_interruptions=int(os.environ.get(DEEPER, "1")) - 1, instances=INSTANCES)

    print(f"{search.runs} runs, {len(search.states)} states")
    assert search.runs > 20


# ---- crashes ---------------------------------------------------------------------------------------------------------


def test_after_a_crash_of_the_trainer_at_any_operation_the_next_attempt_ends_well(template: Path) -> None:
    def scenario(crash_at: int) -> Party:
        with make_world(template, Sharing(), in_turn) as world:
            trainer = world.add_trainer((3,), crash_at=crash_at)
            world.add_instances()
            world.schedule.run_until(lambda: trainer.is_over)
            assert isinstance(trainer.error, Crashed) is (crash_at > 0)
            end_well(world, next_attempt(world), 3)
            return trainer

    changes = scenario(0).changes
    for change in changes:
        scenario(change)
    assert len(changes) > 30


def crashes_of(template: Path, name: str, order: str, min_instances: int) -> Iterator[tuple[World, Party, Party]]:
    """Worlds in which the instance has crashed, at one change after the other that others see; trainer and instance."""

    def sound(sharing: Sharing, choose: Choose) -> Party:
        with make_world(template, sharing, choose, min_instances=min_instances) as world:
            trainer = world.add_trainer((3,))
            instances = world.add_instances()
            end_well(world, trainer, 3)
            return instances[INSTANCES.index(name)]

    sharing = learned(sound)
    party = sound(sharing, ORDERS[order])
    moments = sorted(set(party.moments) & set(party.changes))
    assert len(moments) >= 8
    for moment in moments:
        with make_world(template, sharing, ORDERS[order], min_instances=min_instances) as world:
            trainer = world.add_trainer((3,))
            instances = world.add_instances(**{name: {"crash_at": moment}})
            run_out(world, trainer)
            yield world, trainer, instances[INSTANCES.index(name)]


@pytest.mark.parametrize(("name", "order"), [(FIRST, "in turn"), (SECOND, "instances first")])
def test_a_crash_of_an_instance_ends_in_an_error_that_names_it_and_the_next_attempt_ends_well(
    template: Path, name: str, order: str
) -> None:
    for world, trainer, instance in crashes_of(template, name, order, min_instances=0):
        if isinstance(instance.error, Crashed) and trainer.error is not None:
            assert isinstance(trainer.error, WeightRefreshError)
            assert trainer.error.instances == (name,)
        else:
            assert trainer.error is None
        end_well(world, next_attempt(world), 3)


def test_a_run_that_needs_one_instance_goes_on_when_the_other_crashes_at_any_moment(template: Path) -> None:
    for world, trainer, _ in crashes_of(template, FIRST, "in turn", min_instances=1):
        end_well(world, trainer, 3)


# ---- stalls ----------------------------------------------------------------------------------------------------------


def stall_while_others_go_on(template: Path, name: str) -> None:
    """The instance stands still, at each moment in turn, while the trainer gets three versions further; then it catches up."""

    def scenario(sharing: Sharing, choose: Choose, stall_at: int = 0) -> Party:
        with make_world(template, sharing, choose, min_instances=1) as world:
            trainer = world.add_trainer((3, 4, 5))
            stall = {"stall_at": stall_at, "stall_s": STALL_S}
            instance = world.add_instances(**{name: stall})[INSTANCES.index(name)]
            world.schedule.run_until(lambda: trainer.is_over)
            newest = (1, name, world.digests.get((1, 5), ""))
            world.schedule.run_until(lambda: newest in world.proved or instance.is_over)
            assert instance.error is None
            end_well(world, trainer, 5)
            return instance

    sharing = learned(scenario)
    moments = scenario(sharing, in_turn).moments
    for moment in moments:
        scenario(sharing, in_turn, moment)
    assert len(moments) > 15


def test_versions_that_a_stalled_instance_reads_stay_and_it_catches_up(template: Path) -> None:
    stall_while_others_go_on(template, FIRST)


def zombie_trainers(template: Path) -> int:
    """A trainer stands still before each operation whose moment matters, and comes back at various times of the next attempt
    (after so many renames of its trainer; all of these for operations that change something, because what led to them is old then).

    What no fence can hold back is the one operation before which it stood: it may put an old record in the place of a new one. A
    request of an older attempt counts for nobody, so that the new trainer ends with an error that says so, and the attempt after
    it goes well; a pointer names a digest, and is right again with the next version. Returns how often there was such an error.
    """

    def scenario(sharing: Sharing, choose: Choose, stall_at: int = 0, back_after: int = 99) -> tuple[Party, bool]:
        with make_world(template, sharing, choose) as world:
            zombie = world.add_trainer((3,), stall_at=stall_at, stall_s=FOR_EVER_S)
            world.add_instances()
            world.schedule.run_until(lambda: zombie.is_over or zombie.stalled_until_s > 0)
            trainer = next_attempt(world, keep=(zombie,))
            world.schedule.run_until(lambda: trainer.is_over or world.renames >= back_after)
            zombie.stall_at, zombie.stalled_until_s = 0, 0.0
            world.schedule.run_until(lambda: zombie.is_over and trainer.is_over)
            assert isinstance(zombie.error, FencedError | PublishError | WeightRefreshError | OSError | None), (
                zombie.error
            )
            world.schedule.parties.remove(zombie)
            is_disturbed = isinstance(trainer.error, WeightRefreshError)
            if is_disturbed:
                trainer = next_attempt(world)
            end_well(world, trainer, 3, is_pointed_to=False)
            return zombie, is_disturbed

    sharing = learned(scenario)
    order = in_order("trainer.1", "trainer.2")
    sound = scenario(sharing, order)[0]
    assert len(sound.moments) > 15
    return sum(
        scenario(sharing, order, moment, back)[1]
        for moment in sound.moments
        for back in ((0, 1, 2, 3, 99) if moment in sound.changes else (2,))
    )


def test_a_trainer_that_comes_back_after_its_attempt_replaces_no_version_and_disturbs_hardly(template: Path) -> None:
    assert zombie_trainers(template) <= 3


def reuse_of_files(template: Path, stall_at: int = 0, crash_at: int = 0, back_after: int = 99) -> list[int]:
    """A trainer of two versions, of which the second is written over the first that was collected, stops at one of its operations on
    those files; the next attempt does the same while it comes back. Returns these operations."""
    with make_world(template, Sharing(), in_order("trainer.1", "trainer.2")) as world:
        first = world.add_trainer((3, 4), stall_at=stall_at, stall_s=FOR_EVER_S, crash_at=crash_at)
        world.add_instances()
        world.schedule.run_until(lambda: first.is_over or first.stalled_until_s > 0)
        world.requeue(keep=(first,) if stall_at else ())
        trainer = world.add_trainer((3, 4, 5))
        world.add_instances()
        world.schedule.run_until(lambda: trainer.is_over or world.renames >= back_after)
        first.stall_at, first.stalled_until_s = 0, 0.0
        world.schedule.run_until(lambda: first.is_over and trainer.is_over)
        assert isinstance(first.error, FencedError | PublishError | OSError | Crashed | None), first.error
        if first in world.schedule.parties:
            world.schedule.parties.remove(first)
        end_well(world, trainer, 5)
        for version in world.run.published_versions():
            verify(world.run, load_manifest(world.run, version))
        assert world.reuses["trainer.2"]
        return world.reuses.get("trainer.1", [])


def test_a_trainer_that_comes_back_while_files_are_written_over_disturbs_no_version(template: Path) -> None:
    operations = reuse_of_files(template)
    assert len(operations) > 8
    for number in operations:
        for back_after in (0, 3, 6, 99):
            reuse_of_files(template, stall_at=number, back_after=back_after)


def test_after_a_crash_while_files_are_written_over_the_next_attempt_ends_well(template: Path) -> None:
    for number in reuse_of_files(template):
        reuse_of_files(template, crash_at=number)


def test_an_instance_that_comes_back_after_its_attempt_serves_nothing_of_the_next_and_changes_nothing(
    template: Path,
) -> None:
    def scenario(sharing: Sharing, choose: Choose, stall_at: int = 0, is_early: bool = False) -> Party:
        with make_world(template, sharing, choose) as world:
            first = world.add_trainer((3,))
            zombie = world.add_instances(**{FIRST: {"stall_at": stall_at, "stall_s": FOR_EVER_S}})[0]
            world.schedule.run_until(lambda: zombie.stalled_until_s > 0 or first.is_over)
            trainer = next_attempt(world, keep=(zombie,))
            world.schedule.run_until(lambda: trainer.is_over or is_early)
            zombie.stall_at, zombie.stalled_until_s = 0, 0.0
            end_well(world, trainer, 3)
            return zombie

    sharing = learned(scenario)
    sound = scenario(sharing, in_turn)
    for moment in sound.moments:
        for is_early in (True, False) if moment in sound.changes else (False,):
            scenario(sharing, in_turn, moment, is_early)
    assert len(sound.moments) > 10


# ---- late sight ------------------------------------------------------------------------------------------------------

SEEN_LATE: dict[str, list[Rule]] = {
    "requests": [Late("control/requests/*.json", 3)],
    "versions": [Late("weights/v*", 3)],
    "answers": [Late("control/acks/*.json", 3)],
    "registrations": [Late("instances/*.json", 3)],
    "the attempt": [Late("attempts/*", 3)],
    "everything": [Late("*.json", 2), Late("weights/v*", 2), Late("attempts/*", 2)],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rules", SEEN_LATE.values(), ids=SEEN_LATE)
def test_names_and_contents_that_other_hosts_see_late_delay_a_refresh_and_no_more(
    template: Path, rules: list[Rule], order: str
) -> None:
    with make_world(template, Sharing(), ORDERS[order], rules=rules) as world:
        trainer = world.add_trainer((3, 4))
        world.add_instances()
        end_well(world, trainer, 4)
        end_well(world, next_attempt(world), 3)


@pytest.mark.parametrize("pattern", ["control/requests/*.json", "weights/v*", "control/acks/*.json"])
def test_what_is_never_seen_ends_in_an_error_that_says_who_did_not_answer(template: Path, pattern: str) -> None:
    with make_world(template, Sharing(), in_turn, rules=[Late(pattern, 10**6)]) as world:
        trainer = world.add_trainer((3,))
        world.add_instances()
        world.schedule.run_until(lambda: trainer.is_over)

    assert isinstance(trainer.error, WeightRefreshError)
    assert trainer.error.instances == INSTANCES


# ---- these tests can fail --------------------------------------------------------------------------------------------


def test_an_engine_that_keeps_its_old_weights_is_not_served(template: Path) -> None:
    with make_world(template, Sharing(), in_turn, keeps_old=True) as world:
        trainer = world.add_trainer((3,))
        instances = world.add_instances()
        world.schedule.run_until(lambda: trainer.is_over)

    assert isinstance(trainer.error, WeightRefreshError)
    assert all(isinstance(party.error, UnprovedWeightsError | Crashed) for party in instances)


def test_without_the_proof_it_would_be_served(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.rollout.reload._largest_difference", lambda found, wanted: 0.0)

    with make_world(template, Sharing(), in_turn, keeps_old=True) as world:
        trainer = world.add_trainer((3,))
        world.add_instances()
        with pytest.raises(Violation, match=r"serves 0\.0 as version 3"):
            world.schedule.run_until(lambda: trainer.is_over)


def test_without_leases_a_version_that_is_read_would_be_deleted(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collection, "_leased", lambda context: set())

    with pytest.raises(Violation, match="deletes a version that rollout_000 reads"):
        stall_while_others_go_on(template, FIRST)


def test_without_the_attempt_in_records_answers_left_over_would_count(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RunDir.read_inode
    monkeypatch.setattr(
        RunDir, "read_inode", lambda run, path, any_attempt=False, **_: read(run, path, any_attempt=True)
    )

    with make_world(template, Sharing(), in_order("trainer.1")) as world:
        trainer = world.add_trainer((3,))
        world.add_instances()
        with pytest.raises(Violation, match="which has not proved it"):
            world.schedule.run_until(lambda: trainer.is_over)


def test_without_the_fence_a_trainer_that_comes_back_would_replace_versions(
    template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunDir, "check_older", lambda run, attempt: None)

    with pytest.raises((Violation, ManifestMismatchError)):
        zombie_trainers(template)


def test_without_patience_a_crash_would_be_waited_for_for_ever(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "check", lambda patience, missing: None)

    with make_world(template, Sharing(), in_turn) as world:
        trainer = world.add_trainer((3,))
        world.add_instances(**{FIRST: {"crash_at": 20}})
        with pytest.raises(NeverEndsError):
            world.schedule.run_until(lambda: trainer.is_over)
