"""`-m`: one run, with its own run directory, for each combination of the values given.

All points are composed, checked and planned before the first is submitted. On Slurm nobody stays with the jobs; local runs go
one after another.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from hydra.core.override_parser.types import Override, RangeSweep

from launch import pipeline
from launch.errors import ConfigError, InterruptedRunError, LibraError
from launch.hydra_internals import FAILURES, Loader
from launch.overrides import no_hydra
from launch.pipeline import Prepared
from launch.settle import Place, default_run_dir
from launch.tree import HOUSE, Tree

RUN_DIR = "launch.run_dir"
MOST_POINTS = 1000
"""All are planned before the first is submitted, a fiftieth of a second each; clusters take fewer jobs of one user at a time."""
LONGEST_NAME = 80
"""Characters of a point's folder: 255 bytes is what file systems allow, and paths are read by people."""
FOLLOW = """\
The jobs go on without this command. To look at them:
  squeue --me
  tail -f RUN/attempts/0/logs/supervisor.log     and RUN/metrics.jsonl, a line for each step"""

Done = TypeVar("Done")


@dataclass(frozen=True)
class Point:
    """One combination: `label` is what differs ("seed=1"), `name` its folder, `words` its whole command line."""

    index: int
    label: str
    name: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"point {self.index} ({self.label})" if self.label else f"point {self.index}"


@dataclass(frozen=True)
class _Shared(Tree):
    """One loader for all points: the files that they share are read once."""

    def loader(self) -> Loader:
        return self._loader

    @cached_property
    def _loader(self) -> Loader:
        return super().loader()


@dataclass(frozen=True)
class Ready:
    point: Point
    prepared: Prepared


def expand(words: Sequence[str], tree: Tree = HOUSE) -> list[Point]:
    """Every combination of the swept values, the last one changing fastest. Raises ConfigError."""
    loader = tree.loader()
    fixed, swept, problems = list[str](), dict[str, list[str]](), list[str]()
    for word in words:
        override = _parsed(word, loader)
        key = override.get_key_element() if override else ""
        bare = key.lstrip("+")
        if override is None or not override.is_sweep_override():
            if bare in swept:
                problems.append(
                    f"{word} comes after the sweep of {bare}, and would be every point's; leave one of them out"
                )
            fixed.append(word)
            continue
        try:
            values = _values(override)
        except ValueError as error:
            problems.append(f"{word}: {error}")
            continue
        if bare in swept:
            problems.append(f"{bare} is swept twice; give all its values at once")
        swept[bare] = [f"{key}={value}" for value in values]
    count = math.prod(map(len, swept.values()))
    if count > MOST_POINTS and not problems:
        problems.append(
            f"{', '.join(swept)} make {count} points, the most allowed are {MOST_POINTS}; sweep fewer values"
        )
    if problems:
        raise ConfigError(problems)
    combinations = list(itertools.product(*swept.values()))
    width = len(str(len(combinations) - 1))
    return [
        Point(index, _label(chosen), f"{index:0{width}}{_slug(chosen)}", (*fixed, *chosen))
        for index, chosen in enumerate(combinations)
    ]


def launch_sweep(words: Sequence[str], tree: Tree = HOUSE) -> int:
    """The exit code of the worst point. Raises LibraError kinds before anything is submitted."""
    tree = _Shared(**vars(tree))
    points = expand(words, tree)
    place = _places(words, points)
    ready = [
        Ready(point, prepared)
        for point, prepared in _for_all(
            points, lambda point: pipeline.prepare(point.words, tree, place(point)), "is right"
        )
    ]
    _check_together(ready)
    for sentence in sorted({sentence for one in ready for sentence in one.prepared.said}):
        print(sentence, flush=True)
    pipeline.warn([*sorted({warning for one in ready for warning in one.prepared.warnings}), *_repeated(ready)])
    dry = [one for one in ready if one.prepared.config.launch.dry_run]
    for one in dry:
        print(f"# ==== {one.point} ====\n{pipeline.dry_run_text(one.prepared)}")
    real = [one for one in ready if one not in dry]
    by_point = {one.point: one.prepared for one in real}
    _for_all(list(by_point), lambda point: pipeline.check_machine(by_point[point]), "can start")
    pipeline.warn(sorted({note for prepared in by_point.values() for note in prepared.notes}))
    for one in real:
        pipeline.warm_up(one.prepared.config)
    return _run_all(real)


def _run_all(real: Sequence[Ready]) -> int:
    """One after another; a point that fails does not stop the next, Ctrl-C does."""
    codes, rows = [0], list[tuple[str, str, str]]()
    for done, one in enumerate(real):
        print(f"{one.point}:", flush=True)
        try:
            run = pipeline.create_run(one.prepared)
            submission = pipeline.start(run, one.prepared)
            if not submission.is_own:
                rows.append((str(one.point), str(run.root), submission.job_id))
            else:
                pipeline.stay(run, submission, one.prepared)
        except (InterruptedRunError, KeyboardInterrupt):
            _say_rows(rows)
            rest = ", ".join(str(other.point) for other in real[done + 1 :])
            raise InterruptedRunError(f"interrupted in {one.point}; not started: {rest or 'none'}") from None
        except LibraError as error:
            codes.append(error.exit_code)
            more = "; going on with the next" if done + 1 < len(real) else ""
            print(f"{one.point} failed (exit code {error.exit_code}){more}:\n{error}", file=sys.stderr, flush=True)
    _say_rows(rows)
    return max(codes)


def _say_rows(rows: Sequence[tuple[str, str, str]]) -> None:
    if not rows:
        return
    table = [("point", "run directory", "job"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print(FOLLOW, flush=True)


def _for_all(points: Sequence[Point], action: Callable[[Point], Done], what: str) -> list[tuple[Point, Done]]:
    """`action` for every point. Raises one ConfigError with the problems of all; what all share is said once."""
    done: list[tuple[Point, Done]] = []
    found: dict[str, list[Point]] = {}
    for point in points:
        try:
            done.append((point, action(point)))
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(point)
    if found:
        raise ConfigError([_whose(found[problem], points) + problem for problem in found])
    return done


def _whose(guilty: Sequence[Point], points: Sequence[Point]) -> str:
    if len(guilty) == len(points):
        return ""
    return f"{', '.join(str(point) for point in guilty)}: "


def _check_together(ready: Sequence[Ready]) -> None:
    """What is wrong with points that are right one by one."""
    if any(one.prepared.config.launch.explain for one in ready):
        raise ConfigError(["launch.explain shows one configuration; leave out -m"])
    taken: dict[Path, Point] = {}
    for one in ready:
        place = Path(os.path.realpath(one.prepared.run_dir))
        other = taken.setdefault(place, one.point)
        if other is not one.point:
            raise ConfigError([f"launch.run_dir={one.prepared.run_dir} is that of {other} and of {one.point}"])
    for place, point in taken.items():
        for above in place.parents:
            if above in taken:
                raise ConfigError([f"launch.run_dir={place} of {point} is inside {above}, that of {taken[above]}"])


def _repeated(ready: Sequence[Ready]) -> Iterator[str]:
    """Points that are the same run as an earlier one: allowed, to see what chance does, and a misprint as a rule."""
    seen: dict[str, Point] = {}
    for one in ready:
        config = one.prepared.config
        other = seen.setdefault(repr(replace(config, launch=replace(config.launch, run_dir=""))), one.point)
        if other is not one.point:
            yield f"{one.point} is the same run as {other}"


def _places(words: Sequence[str], points: Sequence[Point]) -> Callable[[Point], Place]:
    """Where the points go: below launch.run_dir, or below one new folder in runs/; as given where launch.run_dir is swept."""
    chosen = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("experiment=")]
    is_one = len({word for point in points for word in point.words if word.lstrip("+").startswith("experiment=")}) == 1
    base = default_run_dir({"experiment": chosen[-1] if chosen and is_one else "sweep"})
    is_swept = any(word.lstrip("+").startswith(f"{RUN_DIR}=") and word not in points[0].words for word in words)

    def place(point: Point) -> Place:
        def folder(given: str, _choices: Mapping[str, str]) -> str:
            return given if given and is_swept else str(Path(given or base) / point.name)

        return folder

    return place


def _parsed(word: str, loader: Loader) -> Override | None:
    """None for what cannot be read: composing the points says why."""
    try:
        return loader.parse(word)
    except FAILURES:
        return None


def _values(override: Override) -> list[str]:
    """Raises ValueError with the reason why there are none."""
    if override.is_hydra_override():
        raise ValueError(no_hydra(override.key_or_group))
    if not override.is_discrete_sweep():
        raise ValueError("an interval has no end of values; use range(START,STOP,STEP) or a list of values")
    swept = override.value()
    if isinstance(swept, RangeSweep):  # shuffled, it would be made whole
        _check_range(swept)
    values = list(itertools.islice(override.sweep_string_iterator(), MOST_POINTS + 1))
    if not values:
        raise ValueError("there is no such value")
    if len(values) > MOST_POINTS:
        raise ValueError(f"more than {MOST_POINTS} values; sweep fewer")
    return values


def _check_range(swept: RangeSweep) -> None:
    start, stop, step = swept.start, swept.stop, swept.step
    if start is None or stop is None or not step or not all(map(math.isfinite, (start, stop, step))):
        raise ValueError("the numbers of a range are finite, and its step is not 0")
    if (stop - start) / step > MOST_POINTS:
        raise ValueError(f"more than {MOST_POINTS} values; sweep fewer")


def _label(chosen: Sequence[str]) -> str:
    return " ".join(word.lstrip("+") for word in chosen)


def _slug(chosen: Sequence[str]) -> str:
    """_seed-1_model-qwen3_8b: no "=", which would need quotes on a command line, nor anything else that would."""
    words = (word.lstrip("+").rpartition("=") for word in chosen)
    text = "".join(f"_{key.rsplit('.', 1)[-1]}-{value}" for key, _, value in words)
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text)[:LONGEST_NAME].rstrip("-.")
