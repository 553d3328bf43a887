"""What a crash of the host leaves of a weight exchange that was not flushed, and the next attempt, which must get along with it.

After a power failure a filesystem may show a file that was written and renamed as it was, empty, with zeros in place of its
bytes, cut off, or not at all, and all of these beside each other. `tests.exchange_world` says what is the product's own code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exchange_world import OLD, World, make_world, parts, template
from tests.interleaving import Choose, Sharing, in_order
from tests.weights_kit import INSTANCES

__all__ = ["parts", "template"]

FIRST, SECOND = INSTANCES


def gone(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


WAYS: list[Callable[[Path], None]] = [gone, empty, zeros, cut]
RECORDS = [
    "weights/LATEST.json",
    *(f"weights/v00000{version}/{name}" for version in (2, 3) for name in ("manifest.json", "model.safetensors")),
    *(f"control/{folder}/v00000{version}.json" for version in (2, 3) for folder in ("requests", "refreshed")),
    *(f"control/acks/v000003/{FIRST}.{phase}.json" for phase in ("prepared", "loaded")),
    f"instances/{FIRST}.json",
]
"""Of attempt 0, which got to version 3. Attempt 1 goes on from step 2: it publishes version 3 again, and then 4."""
ORDERS: list[Choose] = [in_order("trainer.1"), in_order(f"{SECOND}.1", f"{FIRST}.1")]
"""Who comes first may read what another is about to replace."""


def goes_on(template: Path, choose: Choose, spoil: Callable[[Path], object]) -> World:
    """Attempt 1 in what `spoil` has made of the run gets to version 4, all instances serve it, and nobody fails."""
    with make_world(template, Sharing(), choose) as world:
        world.schedule.files.settle()
        spoil(world.root)
        trainer = world.add_trainer((3, 4))
        instances = world.add_instances()
        world.schedule.run_until(lambda: trainer.is_over)
        assert trainer.error is None
        assert not [party.error for party in instances if party.is_over]
        world.check_end(4)
        assert {name for attempt, name, digest in world.proved if digest == world.digests[1, 4]} == set(INSTANCES)
        world.stop_instances()
        world.schedule.run_until(lambda: all(party.is_over for party in world.schedule.parties))
        return world


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("record", RECORDS)
def test_the_next_attempt_gets_along_with_what_is_left_of_a_file(
    template: Path, record: str, way: Callable[[Path], None]
) -> None:
    for choose in ORDERS:
        goes_on(template, choose, lambda root: way(root / record))


@pytest.mark.parametrize("way", WAYS)
def test_the_next_attempt_gets_along_when_nothing_of_the_exchange_is_whole(
    template: Path, way: Callable[[Path], None]
) -> None:
    def spoil(root: Path) -> None:
        for path in [path for top in ("weights", "control", "instances") for path in (root / top).rglob("*")]:
            if path.is_file():
                way(path)

    for choose in ORDERS:
        goes_on(template, choose, spoil)


@pytest.mark.parametrize("version", OLD)
def test_the_next_attempt_gets_along_without_the_folder_of_a_version(template: Path, version: int) -> None:
    for choose in ORDERS:
        goes_on(template, choose, lambda root: shutil.rmtree(root / f"weights/v{version:06d}"))


@pytest.mark.parametrize("way", [empty, zeros, cut])
def test_refusals_that_are_left_in_pieces_are_none(template: Path, way: Callable[[Path], None]) -> None:
    def spoil(root: Path) -> None:
        for name in INSTANCES:
            path = root / f"control/acks/v000003/{name}.nack.json"
            path.write_text("{}" * 10)
            way(path)

    for choose in ORDERS:
        goes_on(template, choose, spoil)
