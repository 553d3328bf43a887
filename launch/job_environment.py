"""The variables that Slurm sets in the shell of a job, each read with a judgement: what is odd is an error that names it.

A variable may be inherited from somewhere else, exported by hand, or cut by a wrapper. Whatever it holds, nobody shall see a stack
trace for it, and nobody shall wait for a loop over a billion components.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.errors import LibraError, readable
from launch.hostlist import expand_nodes

MOST_COMPONENTS = 128
"""MAX_HET_JOB_COMPS of slurm.h."""
MOST = 2**32 - 1
"""Slurm counts jobs, restarts and processors in 32 bits."""
LONGEST_SHOWN = 80
COUNT = re.compile(r"[0-9]{1,10}")
GPUS = re.compile(r"(?:[^\s:,=]+[:=])*([0-9]{1,10})")
CPUS = re.compile(r"([0-9]{1,10})(?:\(x[0-9]{1,10}\))?")


class AllocationError(LibraError, ValueError):
    """What this shell has been given cannot be told; the message names the variable, its value and what was wanted."""


@dataclass(frozen=True)
class JobEnvironment:
    """Every method raises AllocationError for a value that Slurm would not set. A variable that is empty counts as not set."""

    values: Mapping[str, str]

    def count(self, name: str, default: int, most: int = MOST) -> int:
        """A whole number from 0 to `most`."""
        text = self.values.get(name, "")
        if not text:
            return default
        if COUNT.fullmatch(text) is None or int(text) > most:
            raise _odd(name, text, f"a whole number from 0 to {most:,}")
        return int(text)

    def job_id(self, name: str = "SLURM_JOB_ID") -> int:
        number = self.count(name, -1)
        if number < 1:
            raise _odd(name, self.values.get(name, ""), "the number of a job")
        return number

    @property
    def restarts(self) -> int:
        """How often Slurm has run this job before; the variable is not set in the first run."""
        return self.count("SLURM_RESTART_COUNT", 0)

    def components(self) -> list[str]:
        """What the names of each component's variables end with: nothing in a job that is not heterogeneous."""
        size = self.count("SLURM_HET_SIZE", 0, MOST_COMPONENTS)
        return [f"_HET_GROUP_{index}" for index in range(size)] or [""]

    def hosts(self, suffix: str = "") -> list[str]:
        name = f"SLURM_JOB_NODELIST{suffix}"
        text, wanted = self.values.get(name, ""), "a Slurm node list such as node[0-3]"
        try:
            hosts = expand_nodes(text)
        except ValueError as error:
            raise _odd(name, text, wanted) from error
        if not hosts:
            raise _odd(name, text, wanted)
        return hosts

    def cpus_per_node(self, suffix: str = "") -> int:
        """Of the node with the fewest: "64(x2),16" is 16."""
        name = f"SLURM_JOB_CPUS_PER_NODE{suffix}"
        text = self.values.get(name, "")
        found = [match and int(match[1]) for match in map(CPUS.fullmatch, text.split(","))]
        if not all(found):
            raise _odd(name, text, "numbers of processors such as 64 or 64(x2),16")
        return min(count for count in found if count)

    def gpus_per_node(self, suffix: str = "") -> int | None:
        """What --gpus-per-node asked for, all types together; None without it."""
        name = f"SLURM_GPUS_PER_NODE{suffix}"
        text = self.values.get(name, "")
        if not text:
            return None
        found = [GPUS.fullmatch(part) for part in text.split(",")]
        if not all(found):
            raise _odd(name, text, "a number of GPUs such as 8, or h100:4,a100:4")
        return sum(int(match[1]) for match in found if match)

    def word(self, name: str) -> str:
        """A name such as a partition's; "" where it is not set."""
        text = self.values.get(name, "")
        if not text.isprintable() or any(character in text for character in " '\"\\"):
            raise _odd(name, text, "one name")
        return text

    @property
    def step_id(self) -> int | None:
        """None outside of a step; SLURM_STEPID is the older name. Slurm 26.05 writes its special steps below zero."""
        for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
            text = self.values.get(name, "")
            if text:
                if re.fullmatch(r"-?[0-9]{1,10}", text) is None or abs(int(text)) > MOST:
                    raise _odd(name, text, "the number of a step")
                return int(text)
        return None


def _odd(name: str, text: str, wanted: str) -> AllocationError:
    shown = text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."
    held = f"is {readable(shown)!r}" if text else "is not set"
    return AllocationError(
        f"the environment of this Slurm job cannot be used: {name} {held}, wanted is {wanted}; start Libra in the shell that"
        " Slurm gave this job, or let launch.mode=slurm submit a job of its own"
    )
