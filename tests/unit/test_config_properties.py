"""Generated from the declarations: every valid configuration goes round unchanged, no invalid value of any option passes."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.dump import dump
from conf.load import load
from conf.options import LARGEST_FLOAT, LARGEST_INT, Option, declared, walk
from conf.schema import LibraConfig
from conf.typed import assemble
from launch.compose import Tree, compose, compose_with_sources, draft
from launch.sources import OPEN
from planner.configured import division_problems
from planner.model import from_model_config
from planner.validate import cross_problems, model_problems, option_problems, out_of_range

OPTIONS = declared(LibraConfig)
MODEL = from_model_config(compose(["model=qwen2_5_7b"]).model)
NUMBERS = [name for name, option in OPTIONS.items() if option.element_type in (int, float)]
BOUNDED = [name for name in NUMBERS if OPTIONS[name].above is not None or OPTIONS[name].minimum is not None]
CHOSEN = [name for name, option in OPTIONS.items() if option.choices]
LARGE_INTS = (str(LARGEST_INT + 1), str(-LARGEST_INT - 1), "9" * 400, f"'{'9' * 5000}'")
WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)
"""An example with a value for each option is read at once; making it smaller takes minutes."""


def sayable(text: str) -> bool:
    """Everything but OmegaConf's mark for a value that is still missing; hypothesis finds it among our own constants."""
    return text != OPEN


TYPED_TEXT = st.text("abcXYZ019 _-/.,:;=()[]{}<>#@!?%&*+~|^äß漢", max_size=12).filter(sayable)
"""What a shell user can type between double quotes in Hydra's grammar; `$`, quotes and backslashes mean something there."""
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20).filter(sayable)


# ---- valid values -------------------------------------------------------------------------------------------------------


def valid(option: Option, text: st.SearchStrategy[str] = ANY_TEXT) -> st.SearchStrategy[Any]:
    """Any value inside the declared type, range and choices."""
    if option.type == dict[str, Any]:
        return mappings(text)
    values = scalars(option, text)
    if option.is_list:
        return st.lists(values, max_size=3)
    return st.none() | values if option.is_optional else values


def scalars(option: Option, text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    if option.choices:
        return st.sampled_from(option.choices)
    if option.element_type is bool:
        return st.booleans()
    if option.element_type is str:
        return text
    least, most = bounds(option)
    if option.element_type is int:
        return st.integers(math.ceil(least), min(math.floor(most), LARGEST_INT))
    return st.floats(least, most, exclude_min=option.above is not None, allow_nan=False, allow_infinity=False)


def bounds(option: Option) -> tuple[float, float]:
    below = option.above if option.above is not None else option.minimum
    return (-LARGEST_FLOAT if below is None else below, LARGEST_FLOAT if option.maximum is None else option.maximum)


def mappings(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.text("abcdef_", min_size=1, max_size=6)
    plain = st.none() | st.booleans() | st.integers(-9999, 9999) | st.floats(-1e9, 1e9) | text
    return st.dictionaries(
        keys, st.recursive(plain, lambda inner: st.lists(inner, max_size=2), max_leaves=4), max_size=3
    )


def every_option(text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid value for each option of the schema."""
    return st.fixed_dictionaries({name: valid(option, text) for name, option in OPTIONS.items()})


def typed(value: Any) -> str:
    """`value` as a user types it behind `option=`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{','.join(typed(element) for element in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}: {typed(element)}' for key, element in value.items())}}}"
    return repr(value)


@settings(phases=WITHOUT_SHRINKING)
@given(every_option(ANY_TEXT))
def test_dumping_any_valid_configuration_and_loading_it_is_a_fixed_point(values: dict[str, Any]) -> None:
    config = assemble(values)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump(config, {}), encoding="utf-8")
        again = load(path)

    assert again == config
    assert dump(again, {}) == dump(config, {})


@settings(max_examples=15, phases=WITHOUT_SHRINKING)
@given(every_option(ANY_TEXT))
def test_composing_what_was_dumped_is_a_fixed_point(values: dict[str, Any]) -> None:
    """As `--config-path RUN` does: through Hydra's files and interpolations, beside `conf.load`'s own reader."""
    config = assemble(values)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(dump(config, {}), encoding="utf-8")
        again = compose([], Tree(folder))

    assert again == config
    assert dump(again, {}) == dump(config, {})


@settings(max_examples=15, phases=WITHOUT_SHRINKING)
@given(every_option(TYPED_TEXT))
def test_any_valid_configuration_can_be_typed_on_the_command_line(values: dict[str, Any]) -> None:
    composed = compose_with_sources([f"{name}={typed(value)}" for name, value in values.items()])

    arrived = {name: value for name, _, value in walk(composed.config)}
    # A mapping is merged into the one of the chosen task file, as everywhere in Hydra.
    assert arrived.pop("task.params").items() >= values.pop("task.params").items()
    assert arrived == values
    assert all(source.endswith("command line") for source in composed.sources.values())
    assert option_problems(composed.config) == []


@given(every_option(ANY_TEXT))
def test_the_ranges_let_every_declared_value_pass(values: dict[str, Any]) -> None:
    assert option_problems(assemble(values)) == []


@settings(phases=WITHOUT_SHRINKING)
@given(every_option(ANY_TEXT))
def test_rules_and_planner_judge_any_configuration_of_a_real_machine(values: dict[str, Any]) -> None:
    machine = {name: option.default for name, option in OPTIONS.items() if name.startswith("hardware.")}
    config = assemble(values | machine)

    found = [*cross_problems(config), *model_problems(config, MODEL), *division_problems(config, MODEL)]

    assert all(found), "sentences, and no exception"


# ---- invalid values -----------------------------------------------------------------------------------------------------


def outside(option: Option) -> st.SearchStrategy[float]:
    """Numbers of the right type that the declared range excludes, close to its ends and far from them."""
    whole = option.element_type is int
    ends: list[st.SearchStrategy[float]] = []
    if option.above is not None:
        ends += [st.just(option.above), st.floats(max_value=option.above, allow_nan=False)]
    if option.minimum is not None:
        ends += [st.integers(max_value=math.ceil(option.minimum) - 1)] if whole else [floats_below(option.minimum)]
    if option.maximum is not None:
        ends += [st.integers(min_value=math.floor(option.maximum) + 1)] if whole else [floats_above(option.maximum)]
    if not whole:
        ends += [st.just(math.nan), st.just(math.inf), st.just(-math.inf)]
    return st.one_of(ends)


def floats_below(end: float) -> st.SearchStrategy[float]:
    return st.floats(max_value=end, exclude_max=True, allow_nan=False)


def floats_above(end: float) -> st.SearchStrategy[float]:
    return st.floats(min_value=end, exclude_min=True, allow_nan=False)


def wrong_type(option: Option) -> st.SearchStrategy[str]:
    """What can be typed and is not of the declared type."""
    texts = {"{a: {b: 1}}", "[[1]]"}
    if not option.is_optional:
        texts |= {"null"}
    if option.type == dict[str, Any]:
        return st.sampled_from(sorted({"null", "3", "word", "[1]", "true"}))
    if option.is_list:
        elements = {
            int: {"[1.5]", "[word]", "[null]", *(f"[{text}]" for text in LARGE_INTS)},
            str: {"[1]", "[true]", "[null]"},
        }[option.element_type]
        return st.sampled_from(sorted(texts | elements | {"word", "3"}))
    kinds = {
        bool: {"2", "maybe", "0.5", "[true]"},
        int: {"8.5", "1e3", "word", "true", "[1]", "nan", *LARGE_INTS},
        float: {"word", "true", "[1.0]", "1 GB", "50Gb", "1.1e30", "-1e308", "9" * 400},
        str: {"[a]", "[7]", "{a: 7}"},  # 7, true and 1e-6 are text here
    }
    return st.sampled_from(sorted(texts | kinds[option.element_type]))


def invalid(option: Option) -> st.SearchStrategy[str]:
    """Anything that may be typed for `option` and must be refused."""
    wrong = wrong_type(option)
    if option.choices:
        words = st.text("abcdefgh", min_size=1, max_size=8).filter(lambda word: word not in option.choices)
        return wrong | words
    if option.name in BOUNDED or option.element_type is float:
        numbers = outside(option).map(repr)
        return wrong | (numbers.map("[{}]".format) if option.is_list else numbers)
    return wrong


@pytest.mark.parametrize("name", NUMBERS)
@given(data=st.data())
def test_no_number_outside_its_range_passes(name: str, data: st.DataObject) -> None:
    option = OPTIONS[name]
    if option.element_type is int and name not in BOUNDED:
        pytest.skip("whole numbers of any size are allowed")

    value = data.draw(outside(option))

    assert out_of_range(option, [value] if option.is_list else value).startswith(f"{name}=")


@pytest.mark.parametrize("name", CHOSEN)
@given(word=st.text(min_size=1))
def test_no_word_beside_the_choices_passes(name: str, word: str) -> None:
    option = OPTIONS[name]
    if word in option.choices:
        return

    problem = out_of_range(option, word)

    assert problem.startswith(f"{name}=")
    assert all(choice in problem for choice in option.choices)


@settings(max_examples=25, phases=WITHOUT_SHRINKING)
@given(st.fixed_dictionaries({name: invalid(option) for name, option in OPTIONS.items()}))
def test_every_wrong_value_on_the_command_line_is_named_all_at_once(texts: dict[str, str]) -> None:
    composed = draft([f"{name}={text}" for name, text in texts.items()])

    refused = [*composed.problems, *option_problems(composed.config)]
    silent = [f"{name}={text}" for name, text in texts.items() if not any(_names(name, line) for line in refused)]
    assert silent == []


def _names(option: str, line: str) -> bool:
    return line.startswith((f"{option}=", f"'{option}=")) or f" {option}=" in line
