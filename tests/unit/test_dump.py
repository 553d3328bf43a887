"""config.yaml: every option with its source, the same for people, PyYAML and OmegaConf, and good for another run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf.dump import dump
from conf.load import WrongConfigFileError, load
from conf.options import walk
from conf.schema import LibraConfig
from launch.errors import ConfigError
from launch.pipeline import config_text
from launch.prepare import Prepared, prepare
from launch.tree import tree_at

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30).filter(
    lambda text: text != "???"
)
TRICKY = st.sampled_from(
    (
        *("", "#", " # no comment", "null", "yes", "1e3", "007", "0x1f", "1:30", ".inf", "=", "<<", "~", "%a", "@b"),
        *("a: b", "- a", "'", '"', "\\", "\\\\${a}", "${a}", "${", "}", "$", "a\nb", "\n", "\t", "\x85", "\u2028"),
        *("\ufeff", "漢字", "\U0001f600"),
    )
)
STRINGS = TEXT | TRICKY
NUMBERS = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)
CONFIGS = st.builds(
    lambda text, number, count, texts, params, ratio: replace(
        LibraConfig(),
        model_path=text,
        learning_rate=number,
        seed=count,
        task=replace(LibraConfig().task, params=params),
        slurm=replace(LibraConfig().slurm, extra=texts, account=text),
        global_resource_planner=replace(
            LibraConfig().global_resource_planner, train_comm_compute_ratio_threshold=ratio, allowed_train_tp=[count]
        ),
    ),
    STRINGS,
    st.floats(-1e30, 1e30),
    st.integers(-(2**53), 2**53),
    st.lists(STRINGS, max_size=3),
    st.dictionaries(STRINGS, VALUES, max_size=3),
    st.none() | st.floats(-1e30, 1e30),
)


@given(config=CONFIGS, source=TEXT)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dump_and_load_are_a_fixed_point(tmp_path: Path, config: LibraConfig, source: str) -> None:
    text = dump(config, {"model_path": source, "task.params": source})
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8", newline="")

    again = load(path)

    assert again == config
    assert dump(again, {"model_path": source, "task.params": source}) == text


@given(text=STRINGS.filter(lambda text: "${" not in text))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pyyaml_and_omegaconf_read_the_same(text: str) -> None:
    written = dump(replace(LibraConfig(), model_path=text), {})

    plain, resolved = yaml.safe_load(written), OmegaConf.to_container(OmegaConf.create(written), resolve=True)

    assert plain == resolved
    assert plain["model_path"] == text


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (1e-6, "learning_rate: 1.0e-06  # there"),
        (8e10, "learning_rate: 8.0e+10  # there"),
        (123456789.5, "learning_rate: 1.234567895e+8  # there"),
        (0.1, "learning_rate: 0.1  # there"),
    ],
)
def test_floats_are_written_so_that_every_reader_takes_them_for_floats(value: float, line: str) -> None:
    text = dump(replace(LibraConfig(), learning_rate=value), {"learning_rate": "there"})

    assert line in text.splitlines()
    assert yaml.safe_load(text)["learning_rate"] == value


def test_every_option_has_a_line_with_its_source() -> None:
    prepared = prepared_demo()

    lines = config_text(prepared).splitlines()

    for name, _, _ in walk(prepared.config):
        leaf = re.escape(name.rsplit(".", 1)[-1])
        wanted = re.compile(rf" *{leaf}:.*  # {re.escape(prepared.sources[name])}")
        assert any(wanted.fullmatch(line) for line in lines), name


def test_one_section_can_be_had_alone() -> None:
    text = dump(LibraConfig(), {}, "trace")

    assert yaml.safe_load(text) == {"trace": {"directory": ""}}


# ---- reading back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train_gpuz: 3", "unknown option 'train_gpuz'"),
        ("train_gpus: many", "train_gpus='many': wanted a whole number"),
        ("slurm: {account: 007}", "slurm.account=7: wanted text"),
        ("[1, 2]", "holds no options but a list"),
    ],
)
def test_a_file_that_does_not_fit_the_schema_is_refused_with_its_name(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)

    with pytest.raises(WrongConfigFileError, match=re.escape(wanted)) as caught:
        load(path)

    assert str(path) in str(caught.value)


def prepared_demo(*overrides: str) -> Prepared:
    return prepare(["+experiment=demo", "seed=7", "slurm.extra=['--nice=1, b']", *overrides])


@pytest.fixture
def run_config(tmp_path: Path) -> Path:
    path = tmp_path / "RUN" / "config.yaml"
    path.parent.mkdir()
    path.write_text(config_text(prepared_demo("launch.setup=['export X=\\${HOME}']", f"launch.run_dir={path.parent}")))
    return path


def without_run_dir(config: LibraConfig) -> LibraConfig:
    return replace(config, launch=replace(config.launch, run_dir=""))


@pytest.mark.parametrize("flag", ["folder", "file"])
def test_a_runs_config_makes_the_same_run_somewhere_else(run_config: Path, tmp_path: Path, flag: str) -> None:
    tree = tree_at(str(run_config.parent if flag == "folder" else run_config), None, None)

    again = prepare([f"launch.run_dir={tmp_path}/new"], tree)

    assert again.config.launch.run_dir == f"{tmp_path}/new"
    assert without_run_dir(again.config) == without_run_dir(load(run_config))
    assert again.config.launch.setup == ["export X=${HOME}"]
    assert {source for name, source in again.sources.items() if name != "launch.run_dir"} == {str(run_config)}


def test_a_run_again_takes_overrides_and_groups_of_the_house(run_config: Path) -> None:
    again = prepare(["seed=8", "cluster=devcluster"], tree_at(str(run_config), None, None))

    assert (again.config.seed, again.config.slurm.partition, again.config.batch_size) == (8, "dev", 384)
    assert again.sources["slurm.partition"] == "conf/cluster/devcluster.yaml"


def test_another_warm_up_gets_another_starter_policy(run_config: Path) -> None:
    """The path in config.yaml is that of the earlier policy: under that name would lie another one."""
    before = load(run_config)

    again = prepare(["warmup.steps=3"], tree_at(str(run_config), None, None))

    assert again.config.model_path != before.model_path
    assert again.config.tokenizer_path == again.config.model_path
    assert again.sources["model_path"] == "launcher"


@pytest.mark.parametrize("line", ["totl_steps: 3\n", "train_gpus: many\n", "n_samples: 1\n"])
def test_an_edited_config_is_checked_like_any_other(run_config: Path, line: str) -> None:
    name = line.partition(":")[0]
    kept = [text for text in run_config.read_text().splitlines(keepends=True) if not text.startswith(f"{name}:")]
    run_config.write_text("".join(kept) + line)

    with pytest.raises(ConfigError, match=name):
        prepare([], tree_at(str(run_config), None, None))


def test_the_configuration_says_everything(tmp_path: Path) -> None:
    whole: dict[str, Any] = yaml.safe_load(dump(LibraConfig(), {}))

    assert OmegaConf.to_container(OmegaConf.structured(LibraConfig)) == whole
