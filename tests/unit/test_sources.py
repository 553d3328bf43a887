"""Every option knows the file, the word, the variable or the part of Libra that its value comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.compose import Tree, compose_with_sources, option_names
from launch.errors import ConfigError
from launch.prepare import prepare, settled
from launch.settle import settle

DEMO = "conf/experiment/demo.yaml"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def sources(*overrides: str, tree: Tree = Tree()) -> dict[str, str]:  # noqa: B008
    return dict(compose_with_sources(overrides, tree).sources)


def test_a_user_without_a_home_folder_is_asked_for_a_cache_only_when_one_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it returns then

    assert settled(["+experiment=grpo_7b"]).problems == ()
    (problem,) = settled(["+experiment=demo"]).problems
    assert problem.startswith("launch.cache_dir is empty and this user has no home folder")
    assert settled(["+experiment=demo", "launch.cache_dir=/cache"]).problems == ()


def test_every_option_has_one_source() -> None:
    assert tuple(sources("+experiment=demo")) == option_names()


@pytest.mark.parametrize(
    ("option", "source"),
    [
        ("top_p", "default"),
        ("batch_size", DEMO),
        ("warmup.seed", DEMO),
        ("model.hidden_size", "conf/model/demo.yaml"),
        ("hardware.device", "conf/hardware/cpu.yaml"),
        ("launch.mode", "conf/cluster/local.yaml"),
        ("task.params", "conf/task/spell_backward.yaml"),
        ("seed", "command line"),
        ("total_steps", "command line"),
        ("learning_rate", "command line"),
    ],
)
def test_the_source_is_where_the_value_was_set_last(option: str, source: str) -> None:
    given = ("+experiment=demo", "seed=3", "+total_steps=5", "++learning_rate=1e-3")

    assert sources(*given)[option] == source


def test_the_same_value_as_the_default_still_has_its_source() -> None:
    assert sources("seed=0")["seed"] == "command line"


def test_a_mapping_names_everything_that_contributed() -> None:
    given = ("+experiment=demo", "task.params.lower=false", "~task.params.whole_only")

    assert sources(*given)["task.params"] == "conf/task/spell_backward.yaml, command line"


def test_a_file_of_the_user_is_named_by_its_path(tmp_path: Path) -> None:
    file = write(tmp_path / "experiment/mine.yaml", "# @package _global_\ndefaults: [demo]\nseed: 4\n")
    more = write(tmp_path / "more/cluster/site.yaml", "# @package _global_\nslurm: {partition: gpu}\n")

    found = sources(
        "+experiment=mine",
        "cluster=site",
        f"hydra.searchpath=[{tmp_path / 'more'}]",
        tree=Tree(extra=str(tmp_path)),
    )

    assert (found["seed"], found["slurm.partition"], found["batch_size"]) == (str(file), str(more), DEMO)


# ---- environment and launcher -------------------------------------------------------------------------------------------


@pytest.mark.exercises("RL_TRAIN_PHASE_TRACE")
def test_the_trace_variable_set_to_1_turns_tracing_on_above_files(tmp_path: Path) -> None:
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\nphase_trace_enabled: false\n")
    composed = compose_with_sources(["+experiment=mine"], Tree(extra=str(tmp_path)))

    settled_ = settle(composed, environ={"RL_TRAIN_PHASE_TRACE": "1"})

    assert composed.config.phase_trace_enabled is False
    assert settled_.config.phase_trace_enabled is True
    assert settled_.sources["phase_trace_enabled"] == "environment RL_TRAIN_PHASE_TRACE"


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_the_command_line_wins_over_the_trace_variable(value: str) -> None:
    composed = settle(compose_with_sources(["phase_trace_enabled=false"]), environ={"RL_TRAIN_PHASE_TRACE": value})

    assert composed.config.phase_trace_enabled is False
    assert composed.sources["phase_trace_enabled"] == "command line"


@pytest.mark.parametrize("value", ["", "0"])
def test_the_trace_variable_set_to_0_leaves_the_configuration_alone(value: str) -> None:
    composed = settle(compose_with_sources([]), environ={"RL_TRAIN_PHASE_TRACE": value})

    assert composed.config.phase_trace_enabled is True
    assert composed.sources["phase_trace_enabled"] == "default"


@pytest.mark.parametrize("value", ["2", "true", "yes"])
def test_any_other_value_of_the_trace_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RL_TRAIN_PHASE_TRACE", value)

    with pytest.raises(ConfigError, match=f"RL_TRAIN_PHASE_TRACE={value} in the environment: 1 turns tracing on"):
        prepare(["+experiment=demo"])


@pytest.mark.exercises("RL_TRAIN_PHASE_TRACE_DIR")
def test_the_trace_folder_variable_becomes_an_absolute_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_TRAIN_PHASE_TRACE_DIR", "spans")

    prepared = prepare(["+experiment=demo"])

    assert prepared.config.trace.directory == str(tmp_path / "spans")
    assert prepared.sources["trace.directory"] == "environment RL_TRAIN_PHASE_TRACE_DIR"


def test_the_command_line_wins_over_the_trace_folder_variable() -> None:
    composed = settle(compose_with_sources(["trace.directory=/mine"]), environ={"RL_TRAIN_PHASE_TRACE_DIR": "/other"})

    assert composed.config.trace.directory == "/mine"
    assert composed.sources["trace.directory"] == "command line"


def test_what_was_left_empty_comes_from_the_launcher() -> None:
    composed = settled(["+experiment=demo", "cluster=auto"])

    wanted = ["model_path", "tokenizer_path", "launch.mode", "launch.run_dir", "launch.cache_dir"]
    wanted += ["launch.python", "launch.supervisor_python"]
    assert {name: composed.sources[name] for name in wanted} == dict.fromkeys(wanted, "launcher")


def test_a_path_that_was_only_made_absolute_keeps_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    composed = settled(["+experiment=demo", "launch.run_dir=here", "trace.directory=there"])

    assert composed.config.launch.run_dir == str(tmp_path / "here")
    assert (composed.sources["launch.run_dir"], composed.sources["trace.directory"]) == ("command line", "command line")


def test_what_the_planner_chooses_is_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.prepare.adopt", lambda config, plan: replace(config, train_gpus=3))

    prepared = prepare(["+experiment=demo"])

    assert (prepared.config.train_gpus, prepared.sources["train_gpus"]) == (3, "planner")
    assert prepared.sources["rollout_gpus"] == DEMO
