"""A tracked configuration remembers what is read from it, and is like any other in everything else."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.load import load
from conf.options import walk
from conf.reads import reads_of, track
from conf.schema import LibraConfig
from conf.sections import WarmupConfig


@pytest.fixture
def tracked() -> LibraConfig:
    return track(LibraConfig(total_steps=7))


def test_an_option_that_was_read_is_known_by_its_dotted_name(tracked: LibraConfig) -> None:
    assert (tracked.total_steps, tracked.algorithm.clip_low) == (7, 0.2)

    assert reads_of(tracked) == {"total_steps", "algorithm.clip_low"}


def test_passing_a_section_on_reads_none_of_its_options(tracked: LibraConfig) -> None:
    options = tracked.warmup

    assert reads_of(tracked) == set()
    assert isinstance(options, WarmupConfig)


def test_what_is_replaced_goes_on_counting(tracked: LibraConfig) -> None:
    derived = replace(tracked, launch=replace(tracked.launch, mode="local"), seed=3)

    assert reads_of(tracked) == set()
    assert (derived.launch.mode, derived.seed) == ("local", 3)
    assert reads_of(tracked) == reads_of(derived) == {"launch.mode", "seed"}


def test_walks_over_all_options_are_no_reads(tracked: LibraConfig, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"

    walk(tracked)
    fields(tracked)
    asdict(tracked)
    repr(tracked)
    copy.deepcopy(tracked)
    pickle.dumps(tracked)
    OmegaConf.save(OmegaConf.structured(tracked), path)

    assert reads_of(tracked) == set()
    assert load(path) == tracked


def test_it_is_equal_to_a_plain_one_with_the_same_values(tracked: LibraConfig) -> None:
    plain = LibraConfig(total_steps=7)

    assert tracked == plain
    assert plain == tracked
    assert tracked != LibraConfig()
    assert tracked.algorithm == plain.algorithm
    assert reads_of(tracked) == set()


def test_pickled_or_copied_it_is_a_plain_one(tracked: LibraConfig) -> None:
    for same in (pickle.loads(pickle.dumps(tracked)), copy.copy(tracked), copy.deepcopy(tracked)):
        assert type(same) is LibraConfig
        assert type(same.algorithm) is type(LibraConfig().algorithm)
        assert same == tracked


def test_a_value_that_is_set_is_the_one_that_is_read(tracked: LibraConfig) -> None:
    tracked.hardware.device = "cpu"

    assert reads_of(tracked) == set()
    assert tracked.hardware.device == "cpu"


def test_two_tracked_configurations_do_not_share_their_record() -> None:
    first, second = track(LibraConfig()), track(LibraConfig())

    assert first.seed == 0
    assert reads_of(first) == {"seed"}
    assert reads_of(second) == set()


def test_tracking_twice_keeps_the_record(tracked: LibraConfig) -> None:
    assert track(tracked).seed == 0

    assert reads_of(tracked) == {"seed"}


def test_a_plain_configuration_has_no_record() -> None:
    assert reads_of(LibraConfig()) == set()


def test_threads_lose_no_reads(tracked: LibraConfig) -> None:
    names = [name for name, _, _ in walk(tracked)]

    def read(some: list[str]) -> None:
        for name in some:
            found: object = tracked
            for part in name.split("."):
                found = getattr(found, part)

    threads = [threading.Thread(target=read, args=(names[start::8],)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert reads_of(tracked) == set(names)


def test_a_read_costs_less_than_a_microsecond_or_two(tracked: LibraConfig) -> None:
    def fastest_s() -> float:
        started = time.perf_counter()
        for _ in range(10_000):
            tracked.total_steps  # noqa: B018
        return (time.perf_counter() - started) / 10_000

    assert min(fastest_s() for _ in range(5)) < 2e-6
