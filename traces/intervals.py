"""Sets of time as sorted lists of disjoint, non-empty (start, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[int, int]]


def union(parts: Iterable[tuple[int, int]]) -> Intervals:
    """The times covered by any of `parts`, which may be in any order and overlap."""
    merged: Intervals = []
    for start, end in sorted(part for part in parts if part[0] < part[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """The times covered by both."""
    found: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(first: Intervals, second: Intervals) -> Intervals:
    """The times covered by `first` and not by `second`."""
    found: Intervals = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if start < second[k][0]:
                found.append((start, second[k][0]))
            start = max(start, second[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def total(intervals: Intervals) -> int:
    """The summed length."""
    return sum(end - start for start, end in intervals)
