"""When a failed step is started again, and where: rules that hold for every history of failures."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from launch.restarts import RestartBook, another_place, backoff_s
from stages.desired import LONGEST_BACKOFF_S, StepSpec

NAMES = ("rollout_000", "rollout_001")
HOSTS = ("node0", "node1", "node2")


def instance(name: str, node: int = 0, gpus: int = 1, budget: int = 3) -> StepSpec:
    return StepSpec(name, "rollout", 0, node, 1, 1, 1, 1, gpus, restart="replace", max_restarts=budget)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(HOSTS)), max_size=40), st.integers(1, 5))
def test_no_step_is_started_again_more_often_than_its_budget(failures: list[tuple[str, str]], budget: int) -> None:
    book = RestartBook()

    granted = [
        (name, book.failed(instance(name, budget=budget), book.count(name), host) is not None)
        for name, host in failures
    ]

    for name in NAMES:
        answers = [answer for whose, answer in granted if whose == name]
        assert answers == [True] * min(budget, len(answers)) + [False] * max(0, len(answers) - budget)


@given(st.integers(1, 1000))
def test_pauses_grow_up_to_a_minute(failures: int) -> None:
    assert 1.0 <= backoff_s(failures) <= backoff_s(failures + 1) <= LONGEST_BACKOFF_S


def test_pauses_double() -> None:
    assert [backoff_s(number) for number in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_node_is_bad_after_two_failed_replacements_on_it() -> None:
    book = RestartBook()
    for number in range(3):
        assert book.bad_nodes() == set()
        book.failed(instance("rollout_000"), number, "node1")

    assert book.bad_nodes() == {"node1"}


def test_first_starts_that_fail_together_make_no_node_bad() -> None:
    book = RestartBook()
    for name in NAMES:
        book.failed(instance(name), 0, "node1")

    assert book.bad_nodes() == set()


TRAINER = StepSpec("trainer", "trainer", 0, 0, 1, 2, 2, 1, 2)


def test_another_place_is_a_node_with_a_free_gpu() -> None:
    placed = [TRAINER, instance("rollout_000", 1), instance("rollout_001", 1), instance("rollout_002", 2)]

    moved = another_place(placed[1], placed, placed, {0, 1, 2})

    assert moved == replace(placed[1], node=2)


def test_there_is_no_other_place_when_all_gpus_are_taken() -> None:
    placed = [TRAINER, instance("rollout_000", 1, gpus=2), instance("rollout_001", 2, gpus=2)]

    assert another_place(placed[1], placed, placed, {0, 1, 2}) is None


def test_a_node_that_may_not_be_used_is_no_place() -> None:
    placed = [TRAINER, instance("rollout_000", 1), instance("rollout_001", 2)]

    assert another_place(placed[1], placed, placed, {0, 1}) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sets(st.integers(0, 3)))
def test_a_moved_step_fits_where_it_goes(nodes: list[int], usable: set[int]) -> None:
    placed = [instance(f"rollout_{index:03d}", node, gpus=1 + index % 2) for index, node in enumerate(nodes)]

    moved = another_place(placed[0], placed, placed, usable)

    capacity = max(sum(step.gpus_per_node for step in placed if step.node == node) for node in range(4))
    if moved is not None:
        there = [step for step in placed[1:] if step.node == moved.node]
        assert moved.node in usable - {placed[0].node}
        assert sum(step.gpus_per_node for step in there) + moved.gpus_per_node <= capacity
