"""After a run: options that somebody set and that no process of the run has read, so that they did nothing.

Values that a file of the tree chooses are not listed: that their options are read somewhere is shown by a test, once for all
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from conf.load import load
from conf.options import declared
from conf.pending import pending, value_of
from conf.readers import PROJECT, readers
from conf.reference import value_text
from conf.schema import LibraConfig
from stages.desired import StepSpec, read_desired
from stages.rundir import RunDir

NOT_SET = ("default", "launcher", "planner", "allocation")
"""Sources that are no user."""
IGNORED = "global_resource_planner.elastic_hybrid_max_workers"
"""Deprecated; the launcher warns about it before the run."""
ROLE_FOLDERS = ("controller", "rollout", "trainer", "warmup")

Hint = tuple[Callable[[str], bool], Callable[[LibraConfig], bool], str]
HINTS: tuple[Hint, ...] = (
    (
        lambda name: name.startswith("slurm.") or name == "launch.setup",
        lambda config: config.launch.mode == "local",
        "it counts only in a Slurm job (launch.mode=slurm), and this run was local",
    ),
    (
        lambda name: name.startswith("warmup.") or name == "launch.cache_dir",
        lambda config: not config.warmup.steps,
        "warmup.steps=0 leaves the warm-up out",
    ),
    (
        lambda name: name.startswith("model."),
        lambda config: not config.warmup.steps,
        "the model is read from config.json in model_path",
    ),
    (
        lambda name: name == "rollout.kv_cache_bytes",
        lambda config: config.hardware.device != "cpu",
        "it counts only on hardware.device=cpu",
    ),
)


def warning(run: RunDir, sources: Mapping[str, str], own_reads: Collection[str]) -> str:
    """One sentence for each such option, under a headline; "" when there is none.

    `sources` says where each option was set, `own_reads` what the launcher has read. A stage of which a task left no record
    (it was killed) is taken to have read whatever its code reads; so is a warm-up, which comes before there is a run, or
    before many of them.
    """
    desired = read_desired(run)
    if desired is None:
        return ""
    config, options = load(run.config_yaml), declared(LibraConfig)
    suspects = {
        name
        for name, source in sources.items()
        if _is_users(source) and value_of(config, name) != options[name].default and name not in pending()
    }
    suspects -= {IGNORED, *own_reads, *_stage_reads(run, desired.steps)}
    if config.warmup.steps:
        suspects -= {*might_read("warmup"), "launch.cache_dir"}
    lines = [
        f"  {name}={value_text(value_of(config, name))} ({sources[name]}){_hint(name, config)}"
        for name in options
        if name in suspects
    ]
    return (
        "\n".join(["warning: nothing in this run has read these options, so they had no effect:", *lines])
        if lines
        else ""
    )


def _is_users(source: str) -> bool:
    """False for the launcher itself, for files of the tree, which are given relative to the project, and for the config.yaml
    of an earlier run, which names every option; that run has said it."""
    is_of_tree = source.startswith("conf/") and (PROJECT / source).is_file()
    is_of_run = Path(source).name == "config.yaml" and Path(source).with_name("run.json").is_file()
    return source not in NOT_SET and not is_of_tree and not is_of_run


def _stage_reads(run: RunDir, steps: Iterable[StepSpec]) -> set[str]:
    found: set[str] = set()
    for step in steps:
        records = [run.read(run.reads_json(step.name, rank)) for rank in range(step.tasks)]
        for record in records:
            found.update(might_read(step.role) if record is None else record["options"])
    return found


def might_read(role: str) -> set[str]:
    """What code that can run in a stage of this role reads: all below stages/ but the folders of the other roles."""
    others = tuple(f"stages/{folder}/" for folder in ROLE_FOLDERS if folder != role)
    return {
        name
        for name, files in readers().items()
        if any(file.startswith("stages/") and not file.startswith(others) for file in files)
    }


def _hint(name: str, config: LibraConfig) -> str:
    return next((f": {words}" for concerns, holds, words in HINTS if concerns(name) and holds(config)), "")
