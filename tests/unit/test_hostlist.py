"""Node lists: what `scontrol show hostnames` of 22.05, 24.11 and 26.05 makes of them, and everything that Slurm writes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.hostlist import MAX_HOSTS, expand_nodes

# Printed alike by `scontrol show hostnames` of 24.11.5 and 26.05.5; by 22.05.8 too where nothing follows a bracket.
PRINTED = {
    "node0": "node0",
    "n[01-3]": "n01 n02 n03",
    "n[9-11]": "n9 n10 n11",
    "n[009-011],n3": "n009 n010 n011 n3",
    "n1,n1": "n1 n1",
    "a,,b": "a b",
    " a, b": "a b",
    "a b": "a b",
    "n[1-2],m[3]": "n1 n2 m3",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "[1-2]n": "1n 2n",
    "n[08-10]x,y": "n08x n09x n10x y",
    "a[1-2]b[3-4]c": "a1b3c a1b4c a2b3c a2b4c",
    "r[1-2]n[3,5]-ib": "r1n3-ib r1n5-ib r2n3-ib r2n5-ib",
    "gpu[08-10,12],login": "gpu08 gpu09 gpu10 gpu12 login",
    "": "",
}
# "Invalid hostlist" in all three, or nonsense in one of them ("n1[" is "n1]" for 22.05, "n[1[2]]" is "n[12]" for 26.05).
INVALID = ["n[3-1]", "n[a-b]", "n[1,,2]", "n[]", "n1[", "n[1-2", "n[0-70000]", "n[1[2]]", "n[-1]", "n[1-2-3]"]


@pytest.mark.parametrize("text, hosts", PRINTED.items())
def test_a_list_is_expanded_as_slurm_does(text: str, hosts: str) -> None:
    assert expand_nodes(text) == hosts.split()


@pytest.mark.parametrize("text", [*INVALID, "n[1-]", "n]1"])
def test_what_slurm_calls_invalid_or_never_writes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm node list"):
        expand_nodes(text)


def test_a_list_that_would_fill_the_memory_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=f"more than {MAX_HOSTS} hosts"):
        expand_nodes("n" + "[0-999]" * 9)


def test_a_long_list_is_not_repeated_in_the_message() -> None:
    with pytest.raises(ValueError, match=r"not a Slurm node list: 'n{77}\.\.\.'"):
        expand_nodes("n" * 1000 + "[")


_letters = st.text("abcdefgh-", min_size=1, max_size=4).filter(lambda text: not text.startswith("-"))
_range = st.tuples(st.integers(0, 120), st.integers(0, 6), st.integers(1, 4)).map(lambda r: (r[0], r[0] + r[1], r[2]))
_brackets = st.lists(_range, min_size=1, max_size=3)
_host = st.tuples(_letters, st.lists(st.tuples(_brackets, st.text("xy-", max_size=2)), max_size=2))


def written(host: tuple[str, list[tuple[list[tuple[int, int, int]], str]]]) -> str:
    head, rest = host
    text = head
    for ranges, tail in rest:
        items = [f"{a:0{w}d}" if a == b else f"{a:0{w}d}-{b:0{w}d}" for a, b, w in ranges]
        text += f"[{','.join(items)}]{tail}"
    return text


def meant(host: tuple[str, list[tuple[list[tuple[int, int, int]], str]]]) -> list[str]:
    head, rest = host
    choices = [
        [f"{number:0{max(w, len(f'{a:0{w}d}'))}d}{tail}" for a, b, w in ranges for number in range(a, b + 1)]
        for ranges, tail in rest
    ]
    return [head + "".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(_host, min_size=1, max_size=4))
def test_every_host_that_is_written_is_found_once_and_in_order(hosts: list[object]) -> None:
    text = ",".join(written(host) for host in hosts)  # type: ignore[arg-type]

    assert expand_nodes(text) == [name for host in hosts for name in meant(host)]  # type: ignore[arg-type]


@given(st.text("n019[]-, ", max_size=12))
def test_any_text_is_a_list_of_hosts_or_an_error(text: str) -> None:
    try:
        hosts = expand_nodes(text)
    except ValueError:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)
