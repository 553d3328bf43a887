"""Slurm's node lists as host names, as `scontrol show hostnames` prints them. scontrol itself is missing on some nodes."""

from __future__ import annotations

import re

MAX_HOSTS = 65536
"""Slurm refuses a longer range ("Too many hosts in range"); what claims to be longer is damage."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(nodelist: str) -> list[str]:
    """Host names of "node[0-1,03],r[1-2]n[3,5]-ib" in the order written. Raises ValueError where Slurm calls it invalid."""
    hosts: list[str] = []
    for part in _parts(nodelist):
        hosts.extend(_expand(part, nodelist))
        if len(hosts) > MAX_HOSTS:
            raise _invalid(nodelist, f"more than {MAX_HOSTS} hosts")
    return hosts


def _parts(nodelist: str) -> list[str]:
    """Split at blanks and at commas outside of brackets."""
    if re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", nodelist)):
        raise _invalid(nodelist, "unbalanced brackets")
    return re.findall(r"(?:[^,\s\[]|\[[^\]]*\])+", nodelist)


def _expand(part: str, nodelist: str) -> list[str]:
    """Every combination of the brackets' numbers, the last bracket fastest."""
    names = [""]
    for text, ranges in re.findall(r"([^\[]+)|(\[[^\]]*\])", part):
        choices = _numbers(ranges[1:-1], nodelist) if ranges else [text]
        if len(names) * len(choices) > MAX_HOSTS:
            raise _invalid(nodelist, f"more than {MAX_HOSTS} hosts")
        names = [name + choice for name in names for choice in choices]
    return names


def _numbers(ranges: str, nodelist: str) -> list[str]:
    """ "08-10,12" -> 08 09 10 12: the width of the first number is kept."""
    found: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _invalid(nodelist, f"{item!r} is no range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_HOSTS:
            raise _invalid(nodelist, f"range {item!r} runs backwards or is too long")
        found.extend(f"{value:0{len(match[1])}d}" for value in range(first, last + 1))
    return found


def _invalid(nodelist: str, problem: str) -> ValueError:
    shown = nodelist if len(nodelist) <= 80 else nodelist[:77] + "..."
    return ValueError(f"not a Slurm node list: {shown!r}: {problem}")
