"""The rules that need no machine."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.options import walk
from conf.schema import LibraConfig
from launch.compose import compose
from planner.validate import option_problems, problems

BOUNDED = [(name, spec) for name, spec, value in walk(LibraConfig()) if spec.metadata.get("minimum") is not None]
CHOSEN = [(name, spec) for name, spec, value in walk(LibraConfig()) if spec.metadata.get("choices")]


def with_value(config: Any, name: str, value: Any) -> Any:
    head, _, rest = name.partition(".")
    return replace(config, **{head: with_value(getattr(config, head), rest, value) if rest else value})


def test_the_demo_has_no_problem() -> None:
    assert problems(compose(["+experiment=demo"])) == []


@pytest.mark.parametrize(("name", "spec"), BOUNDED, ids=[name for name, _ in BOUNDED])
def test_a_value_below_the_declared_minimum_is_named(name: str, spec: Any) -> None:
    config = with_value(LibraConfig(), name, spec.metadata["minimum"] - 1)

    assert any(text.startswith(f"{name}=") for text in option_problems(config))


@given(st.sampled_from(CHOSEN), st.text(min_size=1))
def test_a_word_that_is_not_a_choice_is_named(option: tuple[str, Any], word: str) -> None:
    name, spec = option
    if word in spec.metadata["choices"]:
        return

    assert any(text.startswith(f"{name}=") for text in option_problems(with_value(LibraConfig(), name, word)))


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["batch_size=10", "n_samples=4"], "batch_size=10 is not a multiple of n_samples=4"),
        (["max_new_tokens=64"], "max_new_tokens=64 leaves no room"),
        (["sync_interval=3"], "raise max_head_offpolicyness or lower sync_interval"),
        (["max_concurrent_rollouts=2"], "max_concurrent_rollouts=2 is below n_samples"),
        (["vllm_tp_size=2"], "set vllm_tp_size=1"),
        (["weights.probe_tokens=64"], "weights.probe_tokens=64"),
        (["launch.follow=false"], "set launch.follow=true"),
        (["top_p=0.9"], "only top_p=1.0 is built"),
        (["learning_rate=-1"], "learning_rate=-1"),
    ],
)
def test_contradictions_name_the_option_to_change(overrides: list[str], wanted: str) -> None:
    found = problems(compose(["+experiment=demo", *overrides]))

    assert any(wanted in text for text in found)


def test_all_problems_are_listed_at_once() -> None:
    found = problems(compose(["+experiment=demo", "batch_size=10", "max_new_tokens=64", "learning_rate=-1"]))

    assert len(found) == 3


def test_groups_hold_only_declared_sections() -> None:
    nested = {spec.name for spec in fields(LibraConfig) if is_dataclass(getattr(LibraConfig(), spec.name))}

    assert {"model", "hardware", "task"} <= nested
