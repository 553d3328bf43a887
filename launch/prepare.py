"""A command line becomes a checked configuration with its plan; nothing is written."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.pending import PLANNED_ONLY, pending_problems
from conf.reads import reads_of, track
from conf.schema import LibraConfig
from launch import checks, machine, occupancy
from launch.compose import Composed, draft
from launch.errors import ConfigError
from launch.settle import PLANNER, Place, changes, default_place, settle
from launch.tree import HOUSE, Tree
from planner.allocation import adopt
from planner.architecture import Architecture
from planner.configured import division_problems
from planner.conflicts import RULES, hardware
from planner.errors import PlanError
from planner.model import from_model_config, resolve
from planner.notes import notes
from planner.plan import Plan
from planner.search import make_plan
from planner.validate import model_problems, option_problems
from stages.trainer.architecture import ModelError, check_supported

IGNORED_WORKERS = (
    "global_resource_planner.elastic_hybrid_max_workers={value} is deprecated and ignored: the elastic hybrid pool has no"
    " policy maximum; leave it out"
)
ASSIGNMENT = re.compile(r"[\w.]+=[^\s;:,()]+")


@dataclass(frozen=True)
class Prepared:
    """A checked configuration with its plan; nothing exists on disk yet. `config` remembers what is read from it."""

    config: LibraConfig
    architecture: Architecture
    plan: Plan
    run_dir: Path
    sources: dict[str, str]
    said: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What the user should know although it is no error."""
        workers = self.config.global_resource_planner.elastic_hybrid_max_workers
        return [IGNORED_WORKERS.format(value=workers)] if workers else []

    @property
    def notes(self) -> list[str]:
        """Doubtful choices, said beside the plan. Judged on a copy: judging a value is not reading it (conf/reads.py)."""
        return notes(copy.deepcopy(self.config))


def prepare(overrides: Sequence[str], tree: Tree = HOUSE, place: Place = default_place) -> Prepared:
    """Pure up to a look at the model folder. Raises ConfigError with every problem found."""
    return complete(settled(overrides, tree, place))


def settled(overrides: Sequence[str], tree: Tree = HOUSE, place: Place = default_place) -> Composed:
    """Composed, with environment and launcher, and with the conflicts that the options alone have."""
    composed = settle(draft(overrides, tree), place)
    config = composed.config
    found = (*option_problems(config), *_rule_problems(composed), *pending_problems(config))
    return replace(composed, conflicts=(*composed.conflicts, *found, *_argument_problems(composed)))


def complete(composed: Composed) -> Prepared:
    """Raises ConfigError with the problems and conflicts of `composed` and, where its options can be used at all, with those
    of its model and its plan."""
    said = [*composed.problems, *composed.conflicts]
    if composed.problems or _is_no_ground(composed.config):
        raise ConfigError(said)
    config = track(composed.config)
    try:
        architecture = read_architecture(config)
        said += _unsaid(model_problems(composed.config, architecture), said)
        if said:
            raise ConfigError([*said, *_unsaid(division_problems(composed.config, architecture), said)])
        plan = make_plan(config, architecture)
    except PlanError as error:
        raise ConfigError([*said, *error.problems]) from error
    chosen = adopt(config, plan)
    sources = dict(composed.sources) | {name: PLANNER for name, _, _ in changes(config, chosen)}
    return Prepared(chosen, architecture, plan, Path(chosen.launch.run_dir), sources, composed.said)


def _is_no_ground(config: LibraConfig) -> bool:
    """Whether an option is outside its range, or a number of the machine has a wrong unit: what would follow is noise.

    So it is after a misspelt word, which has left a default behind.
    """
    return bool(option_problems(config)) or any(problem for rule in hardware.RULES for problem in rule(config))


def _unsaid(problems: Sequence[str], said: Sequence[str]) -> list[str]:
    """Rules and planner judge some contradictions both, in other words: those that name the same values are one."""
    known = [ASSIGNMENT.findall(problem) for problem in said]
    return [problem for problem in problems if ASSIGNMENT.findall(problem) not in known]


def read_architecture(config: LibraConfig) -> Architecture:
    """From model_path/config.json when it is there, else from the model group. Raises PlanError."""
    hf_config = machine.read_hf_config(Path(config.model_path)) if config.model_path else None
    if hf_config is None or config.warmup.steps:
        return from_model_config(config.model)
    architecture = resolve(hf_config, config.model)
    if architecture.name not in PLANNED_ONLY:
        try:
            check_supported(hf_config)
        except ModelError as error:
            raise PlanError(f"model_path={config.model_path}: {error}") from error
    return architecture


def check_machine(prepared: Prepared) -> None:
    """What needs this machine: the model folder, the run directory, free space. Raises ConfigError."""
    config = prepared.config
    with machine.about_run_dir(prepared.run_dir):
        occupancy.check_free(prepared.run_dir, replace_finished=config.launch.replace_finished)
        found = machine.space_problems(config, prepared.architecture, prepared.run_dir)
    if not config.warmup.steps:
        found += (
            machine.model_folder_problems(Path(config.model_path))
            if config.model_path
            else ["model_path is empty; set it to a HF model folder"]
        )
    found += checks.before_start(config, prepared.architecture)
    if found:
        raise ConfigError(found)


def _rule_problems(composed: Composed) -> list[str]:
    """Contradictions between options. A rule that looked at an option without a usable value says nothing."""
    if not composed.wrong:
        return [problem for rule in RULES for problem in rule(composed.config)]
    found: list[str] = []
    for rule in RULES:
        config = track(composed.config)
        problems = list(rule(config))
        found += problems if composed.wrong.isdisjoint(reads_of(config)) else []
    return found


def _argument_problems(composed: Composed) -> list[str]:
    return [] if "rollout.extra_args" in composed.wrong else checks.argument_problems(composed.config)
