"""Publisher and staging together: whatever is published, dies, comes late or is collected, an instance has exactly the trainer's
bytes, or an error by name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.rollout import memory_folder, staging
from stages.rollout.staged_delta import name_of, patch
from stages.rollout.staging import SegmentLayout, Staging
from stages.rundir import RunDir
from stages.weights import delta_chain
from stages.weights.collect import collect
from stages.weights.errors import WeightsError
from stages.weights.publish import Publisher
from stages.weights.reader import load_manifest
from stages.weights.versions import chain_to, read_version
from tests.delta_kit import (
    SHAPES,
    KilledError,
    Tensors,
    copied,
    dying,
    fill_unless_killed,
    flip_last_byte,
    publish_next,
    same,
    sparse_publisher,
    start_tensors,
    step,
)
from tests.weights_kit import make_context, register

LAYOUT = SegmentLayout.of({name: ("F32", shape) for name, shape in SHAPES.items()})
INSTANCES = ("rollout_000", "rollout_001")


class World:
    """A trainer, its run, and the memory of one node for each instance."""

    def __init__(self, root: Path) -> None:
        self.run = replace(RunDir.create(root), writer="trainer")
        self.tensors = start_tensors()
        self.truth: dict[int, Tensors] = {}
        self.newest = -1
        self.nodes = {name: Staging("run", LAYOUT, for_cuda=False) for name in INSTANCES}
        self.staged = dict.fromkeys(INSTANCES, -1)
        self.damaged: set[int] = set()
        self.publisher: Publisher = sparse_publisher(self.run)

    # ---- the trainer ---------------------------------------------------------------------------------------------

    def publish(self, share: float, in_full: bool = False) -> None:
        self.newest += 1
        step(self.tensors, self.newest, share)
        publish_next(self.publisher, self.newest, self.tensors, in_full=in_full)
        self.truth[self.newest] = copied(self.tensors)
        self.damaged.discard(self.newest)

    def refresh(self, share: float, dies_at: int | None) -> None:
        """A version that the first instance stages and the second may die with; then what is old goes."""
        self.publish(share)
        self.stage(INSTANCES[0], None)
        self.stage(INSTANCES[1], dies_at)
        self.collect()

    def requeue(self) -> None:
        """The next attempt goes on one version earlier and publishes that number again."""
        self.publisher.close()
        attempt = self.run.attempt + 1
        self.run.start_attempt(attempt)
        self.run = replace(self.run, attempt=attempt)
        self.publisher = sparse_publisher(self.run)
        self.newest = max(-1, self.newest - 2)
        self.publish(0.02)

    def collect(self) -> None:
        for name in INSTANCES:
            register(self.run, name, version=self.staged[name], leases=())
        collect(make_context(self.run, INSTANCES))

    # ---- an instance ---------------------------------------------------------------------------------------------

    def stage(self, name: str, dies_at: int | None) -> None:
        """The newest version, killed in the middle of the change of that number, or not."""
        memory, manifest = self.nodes[name], load_manifest(self.run, self.newest)
        try:
            with dying(dies_at):
                memory.hold(
                    name_of(manifest.state),
                    lambda: void(read_version(self.run, manifest, into=memory.tensors)),
                    deadline_s=1.0,
                    check=lambda: None,
                    patch=lambda found, write: patch(self.run, manifest, memory.tensors, found, write),
                )
        except KilledError:
            return
        except WeightsError:
            on_the_way = {link.version for link in chain_to(self.run, manifest)}
            assert self.damaged & on_the_way, "nothing was wrong with the files"
            assert memory.name() == ""
            return
        assert same(memory.tensors, self.truth[self.newest])
        self.staged[name] = self.newest

    def restart_node(self, name: str) -> None:
        self.nodes[name] = Staging("run", LAYOUT, for_cuda=False)
        self.staged[name] = -1

    def damage(self) -> None:
        for path in sorted(self.run.weights_version(self.newest).glob("delta-*.bin"))[:1]:
            flip_last_byte(path)
            self.damaged.add(self.newest)


def void(_: object) -> None:
    return None


SHARES = st.sampled_from([0.02, 0.0, 0.02, 0.05, 0.02, 1.0])
NAMES = st.sampled_from(INSTANCES)
ACTIONS = st.one_of(
    st.tuples(st.just("publish"), SHARES),
    st.tuples(st.just("refresh"), SHARES, st.sampled_from([None, 0, 1, 3])),
    st.tuples(st.just("refresh"), SHARES, st.sampled_from([None, 0, 1, 3])),
    st.tuples(st.just("stage"), NAMES, st.sampled_from([None, 0, 1, 3])),
    st.tuples(st.just("collect")),
    st.tuples(st.just("requeue")),
    st.tuples(st.just("restart_node"), NAMES),
    st.tuples(st.just("damage")),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=6, max_size=24), most_links=st.integers(1, 4))
def test_whatever_happens_an_instance_has_the_trainers_bytes_or_an_error_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: list[tuple[Any, ...]], most_links: int
) -> None:
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    monkeypatch.setattr(memory_folder, "_SHARED_MEMORY", tmp_path / "no shared memory")
    monkeypatch.setattr(delta_chain, "MOST_LINKS", most_links)
    monkeypatch.setattr("stages.weights.publish.MOST_LINKS", most_links)
    monkeypatch.setattr(staging, "_fill", fill_unless_killed(staging._fill))
    world = World(root)
    world.publish(0.02)
    for what, *arguments in actions:
        getattr(world, what)(*arguments)
    world.publish(0.02, in_full=True)
    for name in INSTANCES:
        world.stage(name, None)
        assert same(world.nodes[name].tensors, world.truth[world.newest])
    world.publisher.close()
    monkeypatch.undo()
