"""What several releases of Slurm really printed, stored in tests/golden/slurm: see the README there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "golden" / "slurm"


@dataclass(frozen=True)
class Said:
    """One command and its answer."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str = ""


def version_of(text: str) -> str:
    """ "slurm-wlm 22.05.8" -> "22.05.8"."""
    match = re.search(r"\d+\.\d+\.\d+", text)
    if match is None:
        raise ValueError(f"no version in {text!r}")
    return match[0]


def write(path: Path, said: Iterable[Said], made_up: Mapping[str, str]) -> None:
    """`$ command`, its lines after `>` (output) and `!` (error), and `= exit code`. `made_up` replaces names of this machine."""
    lines = []
    for one in said:
        lines.append(f"$ {shlex.join(one.words)}")
        lines += [f"> {line}" for line in one.out.splitlines()]
        lines += [f"! {line}" for line in one.err.splitlines()]
        lines.append(f"= {one.code}")
    text = "\n".join(line.rstrip() if line[2:].strip() == "" else line for line in lines) + "\n"
    for real, shown in made_up.items():
        text = re.sub(rf"(?<![\w.]){re.escape(real)}(?![\w])", shown, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(path: Path) -> list[Said]:
    """Raises ValueError for a file that is no recording."""
    found: list[Said] = []
    words: tuple[str, ...] = ()
    out: list[str] = []
    err: list[str] = []
    for line in path.read_text().splitlines():
        mark, rest = line[:1], line[2:]
        if mark == "$":
            words, out, err = tuple(shlex.split(rest)), [], []
        elif mark == ">":
            out.append(rest)
        elif mark == "!":
            err.append(rest)
        elif mark == "=":
            found.append(Said(words, int(rest), _text(out), _text(err)))
        elif mark != "#":
            raise ValueError(f"{path}: not a line of a recording: {line!r}")
    return found


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def versions() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def situations(version: str) -> list[str]:
    return sorted(path.stem for path in (FOLDER / version).glob("*.txt"))
