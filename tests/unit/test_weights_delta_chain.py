"""Which deltas are published and followed: no way leads over a base that is not the one a delta was made against."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.weights.delta_chain import MOST_LINKS, BrokenChainError, Link, State, is_worth_it, links_to, route

FULL_BYTES = 1000


def state(version: int) -> State:
    return State(version, f"digest{version}")


def full(version: int) -> Link:
    return Link(state(version), None, FULL_BYTES)


def delta(version: int, base: int, num_bytes: int = 10) -> Link:
    return Link(state(version), state(base), num_bytes)


def published(*links: Link) -> dict[int, Link]:
    return {link.state.version: link for link in links}


CHAIN = published(full(3), delta(4, 3), delta(5, 4), delta(6, 5))


def versions(links: tuple[Link, ...]) -> list[int]:
    return [link.state.version for link in links]


def test_who_has_the_version_before_reads_one_delta() -> None:
    assert versions(route(state(6), state(5), CHAIN)) == [6]


def test_who_missed_some_versions_reads_all_deltas_since() -> None:
    assert versions(route(state(6), state(4), CHAIN)) == [5, 6]


def test_who_has_nothing_or_something_else_begins_with_the_full_version() -> None:
    assert versions(route(state(6), None, CHAIN)) == [3, 4, 5, 6]
    assert versions(route(state(6), state(1), CHAIN)) == [3, 4, 5, 6]


def test_who_has_the_version_reads_nothing() -> None:
    assert route(state(6), state(6), CHAIN) == ()


def test_the_same_number_of_another_attempt_is_no_base() -> None:
    assert versions(route(state(6), State(5, "of an older attempt"), CHAIN)) == [3, 4, 5, 6]


def test_a_full_version_is_read_without_what_came_before() -> None:
    assert versions(route(state(3), state(2), CHAIN)) == [3]


def test_a_base_that_was_collected_does_not_matter_to_who_has_a_newer_one() -> None:
    rest = published(delta(5, 4), delta(6, 5))

    assert versions(route(state(6), state(5), rest)) == [6]
    with pytest.raises(BrokenChainError, match="version 4, a base of it, is not published"):
        route(state(6), None, rest)


def test_a_base_that_was_published_anew_breaks_the_chain() -> None:
    anew = {**CHAIN, 4: replace(CHAIN[4], state=State(4, "anew"))}

    with pytest.raises(
        BrokenChainError, match="version 6 cannot be reached: version 4 has digest anew, wanted digest4"
    ):
        route(state(6), None, anew)


def test_a_version_that_names_a_newer_base_is_an_error() -> None:
    with pytest.raises(BrokenChainError, match="names 5 as its base, which is not older"):
        route(state(5), None, published(delta(5, 5)))


def test_a_delta_is_published_while_it_is_small_and_the_chain_short() -> None:
    assert is_worth_it(500, 1000, 0)
    assert not is_worth_it(501, 1000, 0)
    assert is_worth_it(0, 0, MOST_LINKS - 1)
    assert not is_worth_it(1, 1000, MOST_LINKS)


def test_links_are_counted_from_the_nearest_full_version() -> None:
    assert [links_to(state(version), CHAIN) for version in (3, 4, 6)] == [0, 1, 3]


@st.composite
def histories(draw: st.DrawFn) -> dict[int, Link]:
    """Versions in full or on any older one, some published anew, some collected."""
    links: dict[int, Link] = {}
    for version in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from([None, *links.values()]))
        digest = draw(st.sampled_from(["a", "b"]))
        size = FULL_BYTES if base is None else draw(st.integers(1, 600))
        links[version] = Link(State(version, digest), None if base is None else base.state, size)
        is_anew: bool = draw(st.booleans())
        if is_anew:
            again = draw(st.sampled_from(sorted(links)))
            links[again] = replace(links[again], state=State(again, draw(st.sampled_from(["a", "b"]))))
    return {version: link for version, link in links.items() if draw(st.integers(0, 5))}


@settings(max_examples=200, deadline=None)
@given(
    histories(),
    st.integers(0, 8),
    st.sampled_from("ab"),
    st.one_of(st.none(), st.builds(State, st.integers(0, 8), st.sampled_from("ab"))),
)
def test_a_route_puts_every_delta_on_the_base_it_names_and_ends_at_the_target(
    links: dict[int, Link], version: int, digest: str, held: State | None
) -> None:
    target = State(version, digest)
    try:
        way = route(target, held, links)
    except BrokenChainError:
        return

    have = held
    for link in way:
        assert link.base is None or link.base == have
        have = link.state
    assert have == target
