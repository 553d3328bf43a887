"""Overrides become a typed configuration or a message that names the nearest key."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.load import load
from conf.schema import LibraConfig
from launch.compose import compose, groups, option_names
from launch.errors import ConfigError

EXPERIMENTS = groups()["experiment"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_shipped_experiment_composes(experiment: str) -> None:
    config = compose([f"+experiment={experiment}"])

    assert isinstance(config, LibraConfig)


def test_a_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = compose(["+experiment=demo", "total_steps=7"])
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))

    assert load(path) == config


def test_every_option_says_what_it_does() -> None:
    from conf.options import walk

    silent = [name for name, spec, _ in walk(LibraConfig()) if not spec.metadata.get("effect")]

    assert silent == []


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("totl_steps=3", "did you mean 'total_steps'"),
        ("+totl_steps=3", "did you mean 'total_steps'"),
        ("algorithm.clip_lo=0.1", "did you mean 'algorithm.clip_low'"),
        ("+algorithm.clip_lo=0.1", "did you mean 'algorithm.clip_low'"),
        ("+clip_low=0.1", "did you mean 'algorithm.clip_low'"),
        ("+whatever.deep.key=1", "unknown option 'whatever'"),
        ("hardware=h100", "there is no hardware 'h100'"),
        ("+experiment=dmo", "did you mean 'demo'"),
        ("+experment=demo", "did you mean 'experiment'"),
        ("experiment=demo", "needs a plus: +experiment=demo"),
        ("total_steps=many", "total_steps: Value 'many'"),
        ("train_gpus=null", "train_gpus"),
        ("~total_steps", "option 'total_steps' was removed"),
        ("total_steps", "total_steps"),
    ],
)
def test_a_wrong_override_names_the_option_to_change(override: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([override])

    assert wanted in str(caught.value)


def test_all_unknown_keys_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["+totl_steps=3", "+learning_rat=1"])

    assert len(caught.value.problems) == 2


def test_option_names_are_dotted_and_unique() -> None:
    names = option_names()

    assert "algorithm.clip_low" in names
    assert len(set(names)) == len(names)
