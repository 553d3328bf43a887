"""launch.explain: one option, or a group."""

from __future__ import annotations

import pytest

from conf.options import declared
from conf.schema import LibraConfig
from launch.errors import ConfigError
from launch.explain import explain_text

SOURCES = {**dict.fromkeys(declared(LibraConfig), "default"), "batch_size": "command line"}


def test_an_option_is_explained_with_value_default_source_type_unit_range_effect_and_readers() -> None:
    text = explain_text("batch_size", LibraConfig(batch_size=64), SOURCES)

    lines = [line.split(maxsplit=1) for line in text.splitlines()]
    assert lines[0] == ["batch_size"]
    assert ["value", "64"] in lines
    assert ["default", "512"] in lines
    assert ["set", "by            command line"] in lines
    assert ["type", "int"] in lines
    assert ["unit", "trajectories"] in lines
    assert ["range", ">= 1"] in lines
    assert ["effect", "Trajectories in one optimizer step"] in lines
    assert "stages/controller/staleness.py" in text


def test_a_default_that_is_not_obvious_has_its_reason() -> None:
    text = explain_text("rollout_weight_reload_method", LibraConfig(), SOURCES)

    assert "why this default  a restart costs a minute" in text
    assert "one of restart, inplace" in text


def test_a_pending_option_says_what_is_not_built() -> None:
    text = explain_text("train_cp_size", LibraConfig(), SOURCES)

    assert "pending           context-parallel training is not built yet; any value but the default is refused" in text


def test_a_group_is_a_table_of_its_options() -> None:
    config = LibraConfig()
    config.warmup.phrases = ["a fixed question that is much longer than the column for values can be"]

    lines = explain_text("warmup", config, SOURCES).splitlines()

    assert lines[0].split() == ["option", "value", "set", "by", "effect"]
    assert len(lines) == 1 + sum(name.startswith("warmup.") for name in SOURCES)
    steps = next(line for line in lines if line.startswith("warmup.steps "))
    assert steps.split(maxsplit=3) == ["warmup.steps", "0", "default", "Most supervised steps; 0 disables the warm-up"]
    assert max(line.index("default") for line in lines[1:]) == min(line.index("default") for line in lines[1:])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("batch_siz", "did you mean 'batch_size'"),
        ("min_train_gpus", "did you mean 'global_resource_planner.min_train_gpus'"),
        ("warm", "did you mean 'warmup'"),
        ("algorithm.clip", "algorithm.clip"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(name: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.explain: unknown option") as caught:
        explain_text(name, LibraConfig(), SOURCES)

    assert wanted in str(caught.value)


def test_every_option_can_be_explained() -> None:
    texts = {name: explain_text(name, LibraConfig(), SOURCES) for name in SOURCES}

    assert all(text.startswith(f"{name}\n") for name, text in texts.items())
