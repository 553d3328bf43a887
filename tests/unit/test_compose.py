"""Overrides become a typed configuration, or messages that name what to change: all of them, not the first only."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.options import walk
from conf.schema import LibraConfig
from launch.compose import Tree, compose, compose_with_sources, draft, groups, option_names
from launch.errors import ConfigError
from launch.prepare import settled

EXPERIMENTS = groups()["experiment"]


def refused(*overrides: str, tree: Tree = Tree()) -> tuple[str, ...]:  # noqa: B008
    with pytest.raises(ConfigError) as caught:
        compose(overrides, tree)
    return caught.value.problems


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_shipped_experiment_composes(experiment: str) -> None:
    config = compose([f"+experiment={experiment}"])

    assert isinstance(config, LibraConfig)


def test_every_option_says_what_it_does() -> None:
    silent = [name for name, spec, _ in walk(LibraConfig()) if not spec.metadata.get("effect")]

    assert silent == []


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("totl_steps=3", "unknown option 'totl_steps' (totl_steps=3); did you mean 'total_steps'?"),
        ("+totl_steps=3", "did you mean 'total_steps'"),
        ("++totl_steps=3", "did you mean 'total_steps'"),
        ("algorithm.clip_lo=0.1", "did you mean 'algorithm.clip_low'"),
        ("+algorithm.clip_lo=0.1", "did you mean 'algorithm.clip_low'"),
        ("algorithm={clip_lo:0.1}", "did you mean 'algorithm.clip_low'"),
        ("+clip_low=0.1", "did you mean 'algorithm.clip_low'"),
        ("initial_allocation_strategy=grp", "did you mean 'global_resource_planner.initial_allocation_strategy'"),
        ("dtype=float32", "did you mean 'rollout.dtype' or 'weights.dtype'"),
        ("rollout.probe_tokens=3", "did you mean 'weights.probe_tokens'"),
        ("rollout.foo=1", "unknown option 'rollout.foo' (rollout.foo=1); rollout has dtype, enforce_eager"),
        ("rollout.max_num_sequences=1", "did you mean 'rollout.max_num_seqs'"),
        ("+whatever.deep.key=1", "unknown option 'whatever.deep.key'"),
        ("hardware=h100", "there is no hardware 'h100'"),
        ("+experiment=dmo", "did you mean 'demo'"),
        ("+experiment=my/own.yaml", "--config-dir FOLDER experiment=NAME with FOLDER/experiment/NAME.yaml"),
        ("+experment=demo", "did you mean 'experiment'"),
        ("model@other=demo", "unknown option 'other' (conf/model/demo.yaml)"),
        ("total_steps", "'total_steps' is not of the form option=value"),
        ("demo", "'demo' is not of the form option=value; did you mean 'experiment=demo'?"),
        ("=3", "'=3' is not of the form option=value"),
        ("launch.run_dir=a=b", "put the value in quotes: 'launch.run_dir=\"a=b\"'"),
        ("~total_steps", "an option cannot be taken out; set total_steps to a value instead"),
        ("~task.params.nothing", "there is no task.params.nothing"),
        ("~totl_steps", "did you mean 'total_steps'"),
        ("rollout=5", "rollout is a group of options"),
        ("warmup.phrases.0=x", "warmup.phrases is a list and is set as a whole, warmup.phrases=[...]"),
        ("seed=1,2", "'seed=1,2' gives several values: add -m for one run each; for one list say seed=[1,2]"),
        ("seed=range(1,3)", "add -m"),
        ("model=glob(*)", "add -m"),
        (
            "hydra.run.dir=x",
            "'hydra.run.dir' has no effect here, Hydra only reads the configuration; set launch.run_dir",
        ),
        ("hydra/launcher=basic", "'hydra/launcher' has no effect here"),
        ("hydra.searchpath=[nowhere]", "hydra.searchpath: there is no folder nowhere"),
        ("+hydra.searchpath=[nowhere]", "hydra.searchpath: there is no folder nowhere"),
        ("~rollout", "~rollout: a group of options cannot be taken out"),
        ("seed =1", "'seed ' is no name of an option or group; did you mean seed=...?"),
        ("slurm.extra[0]=x", "'slurm.extra[0]' is no name of an option or group; did you mean slurm.extra=...?"),
        ("override /model=demo", "'override /model' is no name of an option or group; did you mean model=...?"),
        ("é=1", "'é' is no name of an option or group"),
        ("model=é", "a character in it has to stand in quotes"),
        (f"task.params={'{a: ' * 30}1{'}' * 30}", "task.params is nested deeper than 20 levels"),
        (f"task.params.{'.'.join('a' * 30)}=1", "task.params is nested deeper than 20 levels"),
        (f"seed={'[' * 600}{']' * 600}", "cannot be read (it is nested too deeply)"),
    ],
)
def test_a_wrong_word_names_the_option_to_change(override: str, wanted: str) -> None:
    assert any(wanted in problem for problem in refused(override))


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("train_gpus=8GB", "train_gpus=8GB: wanted a whole number (GPUs)"),
        ("train_gpus=2.5", "train_gpus=2.5: wanted a whole number (GPUs)"),
        ("train_gpus=8.0", "train_gpus=8.0: wanted a whole number (GPUs)"),
        ("train_gpus=true", "train_gpus=true: wanted a whole number (GPUs)"),
        ("train_gpus=null", "train_gpus=null: wanted a whole number (GPUs)"),
        ("train_gpus=", "train_gpus=: wanted a whole number (GPUs)"),
        ("train_gpus=[8]", "train_gpus=[8]: wanted a whole number (GPUs)"),
        ("seed=9007199254740993", "wanted a whole number (seed) of at most 9007199254740992 (2^53)"),
        (f"seed={'9' * 400}", "of at most 9007199254740992 (2^53)"),
        (f"seed='{'9' * 5000}'", "of at most 9007199254740992 (2^53)"),
        (f"learning_rate={'9' * 400}", "wanted a number (per step) of at most 1e+30"),
        ("learning_rate=-1e31", "wanted a number (per step) of at most 1e+30"),
        ("learning_rate=fast", "learning_rate=fast: wanted a number (per step)"),
        ("phase_trace_enabled=yes?", "phase_trace_enabled=yes?: wanted true or false"),
        ("phase_trace_enabled=2", "phase_trace_enabled=2: wanted true or false"),
        ("model_path=null", "model_path=null: wanted text (path)"),
        ("model_path=[a]", "model_path=[a]: wanted text (path)"),
        ("global_resource_planner.allowed_train_tp=2", "wanted a list of whole numbers (ranks) such as [1,2]"),
        ("global_resource_planner.allowed_train_tp=[2,x]", "wanted a list of whole numbers (ranks) such as [1,2]"),
        ("global_resource_planner.train_comm_compute_ratio_threshold=x", "wanted a number (ratio) or null"),
        ("slurm.extra=[1]", "wanted a list of texts (sbatch options) such as [a,b], in quotes"),
        ("task.params=3", "wanted a mapping"),
        ("model_path='\udcff'", "wanted text (path), in UTF-8 and without NUL"),
        ("model_path='a\0b'", "wanted text (path), in UTF-8 and without NUL"),
        ("slurm.extra=['\udcff']", "in UTF-8 and without NUL"),
        ("task.params={a: ['\udcff']}", "in UTF-8 and without NUL"),
        ("task.params={1:2}", "with text as names"),
        ("seed=${sed}", "seed=${sed}: Interpolation key 'sed' not found"),
        ("train_gpus=${model.architecture}", "wanted a whole number (GPUs), this gives ''"),
        ("launch.python=???", "launch.python=???: ??? means that you have to set it"),
    ],
)
def test_a_wrong_type_says_what_is_wanted_with_its_unit(override: str, wanted: str) -> None:
    problems = refused(override)

    assert len(problems) == 1
    assert problems[0].startswith(override.partition("=")[0])
    assert wanted in problems[0]


@pytest.mark.parametrize(
    ("override", "option", "value"),
    [
        ("phase_trace_enabled=off", "phase_trace_enabled", False),
        ("phase_trace_enabled=1", "phase_trace_enabled", True),
        ("learning_rate=1", "learning_rate", 1.0),
        ("learning_rate=1e-3", "learning_rate", 1e-3),
        ("+total_steps=5", "total_steps", 5),
        ("++total_steps=5", "total_steps", 5),
        ("train_gpus='4'", "train_gpus", 4),
        ("model_path=1e3", "model_path", "1e3"),
        ("model_path=007", "model_path", "007"),
        ("model_path=true", "model_path", "true"),
        ("model_path='run-${seed}'", "model_path", "run-0"),
        ("tokenizer_path=${seed}", "tokenizer_path", "0"),
        ("model_path='\\${HOME}'", "model_path", "${HOME}"),
    ],
)
def test_what_is_typed_becomes_the_declared_type_and_nothing_else(override: str, option: str, value: object) -> None:
    got = getattr(compose([override]), option)

    assert got == value
    assert type(got) is type(value)


def test_all_problems_are_listed_at_once() -> None:
    problems = refused(
        "totl_steps=3", "+learning_rat=1", "train_gpus=8GB", "rollout_gpus=x", "model=none", "word", "a=("
    )

    assert len(problems) == 7


def test_ranges_and_contradictions_are_listed_beside_wrong_types() -> None:
    composed = settled(["+experiment=demo", "train_gpus=8GB", "batch_size=10", "learning_rate=-1"])

    assert [problem.split("=")[0] for problem in composed.problems] == ["train_gpus"]
    assert any("batch_size=10 is not a multiple of n_samples=4" in conflict for conflict in composed.conflicts)
    assert any("learning_rate=-1.0 is below the least" in conflict for conflict in composed.conflicts)


def test_a_rule_says_nothing_about_an_option_whose_value_has_the_wrong_type() -> None:
    """With the default of n_samples, 8, in place of the wrong value, batch_size=12 would look wrong."""
    composed = settled(["+experiment=demo", "n_samples=4x", "batch_size=12"])

    assert not [conflict for conflict in composed.conflicts if "n_samples" in conflict]


def test_the_later_of_two_values_counts() -> None:
    composed = compose_with_sources(["model=demo", "seed=1", "model=smollm2_135m", "seed=2"])

    assert composed.config.seed == 2
    assert composed.choices["model"] == "smollm2_135m"


@pytest.mark.parametrize(
    "words", [["experiment=demo", "+model=smollm2_135m"], ["+experiment=demo", "model=smollm2_135m"]]
)
def test_a_plus_before_a_group_may_be_there_or_not(words: list[str]) -> None:
    composed = compose_with_sources(words)

    assert (composed.choices["experiment"], composed.choices["model"]) == ("demo", "smollm2_135m")


@pytest.mark.parametrize("words", [["~algorithm"], ["algorithm=null"]])
def test_a_group_can_be_left_out(words: list[str]) -> None:
    assert "algorithm" not in compose_with_sources(words).choices


def test_a_mapping_can_grow_and_shrink_by_single_entries() -> None:
    config = compose(
        ["+experiment=demo", "task.params.lower=false", "+task.params.more.deep=1", "~task.params.dataset"]
    )

    assert config.task.params["lower"] is False
    assert config.task.params["more"] == {"deep": 1}
    assert "dataset" not in config.task.params


def test_what_only_repeats_a_wrong_value_is_not_said_twice() -> None:
    assert refused("+experiment=demo", "seed=x") == ("seed=x: wanted a whole number (seed)",)


def test_option_names_are_dotted_and_unique() -> None:
    names = option_names()

    assert "algorithm.clip_low" in names
    assert len(set(names)) == len(names)


def test_folders_without_yaml_files_are_no_groups() -> None:
    assert not {"import_reference", "__pycache__", "hydra"} & set(groups())


# ---- a user's own folders -----------------------------------------------------------------------------------------------


def test_a_folder_of_the_user_adds_to_every_group(tmp_path: Path) -> None:
    write(tmp_path / "model/small.yaml", "defaults: [demo, _self_]\nnum_hidden_layers: 1\n")
    write(tmp_path / "cluster/site.yaml", "# @package _global_\nslurm:\n  partition: gpu\n")
    write(
        tmp_path / "experiment/mine.yaml",
        "# @package _global_\ndefaults: [override /model: small, override /cluster: site]\ntotal_steps: 7\n",
    )

    composed = compose_with_sources(["+experiment=mine"], Tree(extra=str(tmp_path)))

    assert (composed.config.total_steps, composed.config.slurm.partition) == (7, "gpu")
    assert (composed.config.model.num_hidden_layers, composed.config.model.hidden_size) == (1, 128)


def test_choices_of_the_user_are_offered_with_those_of_the_house(tmp_path: Path) -> None:
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\n")
    tree = Tree(extra=str(tmp_path))

    assert {"mine", "demo"} <= set(groups(tree)["experiment"])
    assert "did you mean 'mine'" in refused("experiment=min", tree=tree)[0]


def test_a_group_that_only_an_experiment_lists_is_overridden_without_a_plus(tmp_path: Path) -> None:
    for name, steps in (("a", 1), ("b", 2)):
        write(tmp_path / f"length/{name}.yaml", f"# @package _global_\ntotal_steps: {steps}\n")
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\ndefaults: [/length: a, _self_]\n")

    assert compose(["+experiment=mine", "length=b"], Tree(extra=str(tmp_path))).total_steps == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("# @package _global_\ntotl_steps: 3\n", "(FILE); did you mean 'total_steps'?"),
        ("# @package _global_\ntrain_gpus: many\n", "train_gpus='many' (FILE): wanted a whole number (GPUs)"),
        ("# @package _global_\nslurm: {account: 007}\n", "slurm.account=7 (FILE): wanted text (name), in quotes"),
        ("# @package _global_\nslurm: 3\n", "slurm=3 (FILE): slurm is a group of options"),
        ("# @package _global_\nhydra: {run: {dir: x}}\n", "FILE: 'hydra.run' has no effect here"),
        ("# @package _global_\nmodel_path: ???\n", "model_path='???' (FILE): ??? means that you have to set it"),
        ("# @package _global_\nseed: [1,\n", 'in "FILE", line 3'),
        ("# @package _global_\nseed: 1\nseed: 2\n", "found duplicate key seed"),
        ("# @package _global_\ndefaults: [override /model: smol]\n", "FILE: there is no model 'smol'; available: demo"),
        (
            "# @package _global_\ndefaults: [override /modl: demo]\n",
            "overrides the group 'modl', which no defaults list",
        ),
        ("# @package _global_\ndefaults: [/model: demo]\n", "the group 'model' is chosen in two places"),
        ("total_steps: 3\n", "FILE lacks the line '# @package _global_'"),
        (
            "defaults: [override /model: demo]\ntotal_steps: 3\n",
            "experiment/mine.yaml lacks the line '# @package _global_' at its top",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_the_file(tmp_path: Path, text: str, wanted: str) -> None:
    file = write(tmp_path / "experiment/mine.yaml", text)

    problems = refused("+experiment=mine", tree=Tree(extra=str(tmp_path)))

    assert any(wanted.replace("FILE", str(file)) in problem for problem in problems)


def test_a_file_with_the_name_of_a_file_of_the_house_is_refused_not_ignored(tmp_path: Path) -> None:
    file = write(tmp_path / "experiment/demo.yaml", "# @package _global_\n")

    problems = refused("+experiment=demo", tree=Tree(extra=str(tmp_path)))

    assert problems == (f"{file} has the name of conf/experiment/demo.yaml, which Hydra takes first; rename yours",)


def test_an_open_option_is_settled_by_a_later_word(tmp_path: Path) -> None:
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\nmodel_path: ???\n")
    tree = Tree(extra=str(tmp_path))

    assert compose(["+experiment=mine", "model_path=/m"], tree).model_path == "/m"
    assert draft(["+experiment=mine"], tree).wrong == {"model_path"}


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        (Tree(extra="/nowhere"), "--config-dir=/nowhere is not a folder"),
        (Tree(root="/nowhere"), "--config-path=/nowhere has no config.yaml"),
        (Tree(name="other"), "--config-name=other: there is no such file in pkg://conf"),
        (Tree(root="pkg://nowhere"), "--config-path: there is no folder nowhere"),
        (Tree(extra="x" * 5000), "is not a folder"),
        (Tree(root="x" * 5000), "has no config.yaml"),
    ],
)
def test_a_folder_or_root_file_that_is_not_there_is_named(tree: Tree, wanted: str) -> None:
    assert wanted in refused(tree=tree)[0]


def test_the_last_of_two_search_paths_counts(tmp_path: Path) -> None:
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\nseed: 3\n")

    assert compose(["hydra.searchpath=[nowhere]", f"+hydra.searchpath=[{tmp_path}]", "+experiment=mine"]).seed == 3


def test_a_root_file_of_the_user_reaches_the_groups_of_the_house(tmp_path: Path) -> None:
    write(tmp_path / "root.yaml", "defaults:\n  - model: demo\n  - _self_\nseed: 5\n")

    composed = compose_with_sources(["hardware=cpu", "total_steps=3"], Tree(str(tmp_path), "root"))

    assert (composed.config.seed, composed.config.model.num_hidden_layers) == (5, 2)
    assert composed.config.hardware.device == "cpu"
