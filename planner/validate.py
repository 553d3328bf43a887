"""The one validator of planner and launcher: every rule that needs no machine, all problems at once."""

from __future__ import annotations

import math
import os
import re
from typing import Any

from conf.options import Option, declared, walk
from conf.pending import PLANNED_ONLY, pending_problems
from conf.schema import LibraConfig
from conf.typed import is_text
from planner.architecture import Architecture
from planner.conflicts import MODEL_RULES, RULES

LONGEST_PATH_BYTES, LONGEST_NAME_BYTES = 4095, 255
"""Linux (PATH_MAX without its NUL, NAME_MAX): a look at a longer one is an error, not a path that is not there."""
MOST_PARTS = 200
"""pathlib makes missing folders one inside the other, on Python's stack."""
TRIED_VLLM = ((0, 25), (0, 32))
"""Oldest and newest vLLM whose interfaces the in-place reload was tried with (`stages/rollout/compat.py`)."""


def problems(config: LibraConfig) -> list[str]:
    """What is wrong with the options alone; empty when nothing is."""
    return [*option_problems(config), *cross_problems(config), *pending_problems(config)]


def option_problems(config: LibraConfig) -> list[str]:
    """Values outside the range or the choices that the schema declares."""
    options = declared(LibraConfig)
    found = (out_of_range(options[name], value) for name, _, value in walk(config))
    return [problem for problem in found if problem]


def out_of_range(option: Option, value: Any) -> str:
    """Why `value` is not allowed for `option`, or "". For a list, the first element that is not."""
    if isinstance(value, list):
        return next((problem for element in value if (problem := out_of_range(option, element))), "")
    name, unit = option.name, f" {option.unit}" if option.unit else ""
    if option.choices and value not in option.choices:
        wanted = ", ".join(repr(choice) for choice in option.choices if choice)
        return f"{name}={value!r} is not one of {wanted}"
    if isinstance(value, str) and option.unit == "path":
        return impossible_path(name, value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name}={value} is not a finite number"
    if option.above is not None and value <= option.above:
        return f"{name}={value} is not above {option.above:g}{unit}"
    if option.minimum is not None and value < option.minimum:
        return f"{name}={value} is below the least allowed, {option.minimum:g}{unit}"
    if option.maximum is not None and value > option.maximum:
        return f"{name}={value} is above the most allowed, {option.maximum:g}{unit}"
    return ""


def impossible_path(name: str, path: str) -> str:
    """Why no file can have this path, or "". What the launcher makes of the working folder and HOME is judged here too."""
    if not is_text(path):
        return f"{name}={path!r} is no UTF-8 text without NUL; choose another {name}"
    if len(os.fsencode(path)) > LONGEST_PATH_BYTES:
        return f"{name} is a path of {len(os.fsencode(path))} bytes, the most allowed are {LONGEST_PATH_BYTES}"
    if path.count("/") > MOST_PARTS:
        return f"{name} is a path of {path.count('/')} parts, the most allowed are {MOST_PARTS}"
    longest = max(path.split("/"), key=lambda part: len(os.fsencode(part)))
    if len(os.fsencode(longest)) > LONGEST_NAME_BYTES:
        return f"{name}: a part of the path has {len(os.fsencode(longest))} bytes, the most allowed are {LONGEST_NAME_BYTES}"
    return ""


def cross_problems(config: LibraConfig) -> list[str]:
    """Options that contradict each other; each sentence names wanted, given and what to change."""
    return [problem for rule in RULES for problem in rule(config)]


def model_problems(config: LibraConfig, arch: Architecture) -> list[str]:
    """Options that contradict the model's sizes."""
    return [problem for rule in MODEL_RULES for problem in rule(config, arch)]


def start_problems(config: LibraConfig, arch: Architecture) -> list[str]:
    """Why a run that can be planned cannot be started yet."""
    sentence = PLANNED_ONLY.get(arch.name)
    if sentence is None:
        return []
    return [f"{arch.name} can be planned (launch.dry_run=true), not started: {sentence}; choose another model_path"]


def reload_method_problems(config: LibraConfig, vllm_version: str | None) -> list[str]:
    """Whether the installed vLLM was tried with the in-place reload. None: it is not known here (a login node)."""
    if config.rollout_weight_reload_method != "inplace" or vllm_version is None:
        return []
    oldest, newest = (".".join(map(str, version)) for version in TRIED_VLLM)
    found = re.match(r"(\d+)\.(\d+)", vllm_version)
    if found is not None and TRIED_VLLM[0] <= (int(found[1]), int(found[2])) <= TRIED_VLLM[1]:
        return []
    return [
        f"rollout_weight_reload_method=inplace was tried with vLLM {oldest} to {newest}, installed is {vllm_version}: a reload"
        " that keeps old weights is worse than a slow one; set rollout_weight_reload_method=restart, or install a tried vLLM"
    ]
