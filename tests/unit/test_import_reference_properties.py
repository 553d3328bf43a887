"""Whatever the input says, every key is accounted for, and what is written composes to what the account says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conf.import_reference.convert import Imported, convert
from conf.import_reference.groups import choose
from conf.import_reference.published import DEFAULTS
from conf.import_reference.read import INCLUDED_SECTIONS, SECTIONS, read
from conf.import_reference.report import report
from conf.import_reference.rules import OPTIONS, Kind
from conf.import_reference.write import experiment_text
from conf.pending import value_of
from conf.schema import LibraConfig
from conf.typed import is_text
from launch.compose import Tree, compose

EXAMPLES = 30
"""Each composes once, which takes a tenth of a second."""

RESERVED = ("base_config", *INCLUDED_SECTIONS)
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.integers(2**52, 2**70),
    st.text(),
    st.sampled_from(["\0", "\ud800", "false", "1e-6", "8", "???", "${seed}", ".inf", "null", "no"]),
    st.lists(st.integers(0, 16), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def valid(name: str) -> st.SearchStrategy[Any]:
    """Values that the published system takes for the option: of the type of its default."""
    default = DEFAULTS[name]
    if name == "heterogeneous_rollout.instances[].tp":
        return st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4)
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        return st.integers(0, 2**20)
    if isinstance(default, float):
        return st.floats(0, 1e15)
    if isinstance(default, list) or name.endswith(("allowed_train_ep", "[].gpus")):
        return st.lists(st.sampled_from([1, 2, 4, 8]), max_size=4)
    if name in OPTIONS and OPTIONS[name].choices:
        return st.sampled_from(OPTIONS[name].choices)
    if name.endswith("_threshold"):
        return st.floats(0.01, 10) | st.just(float("inf"))
    if default is None:
        return st.integers(1, 4096) if name == "max_model_len" else st.booleans()
    return st.text(max_size=12).filter(lambda text: is_text(text) and text != "???")


def subsets(values: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(DEFAULTS)), unique=True, max_size=40)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: values(name) for name in chosen}))


def composed(imported: Imported) -> LibraConfig:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment" / "imported.yaml"
        file.parent.mkdir()
        file.write_text(experiment_text(imported, "imported"), encoding="utf-8")
        return compose(["+experiment=imported"], Tree(extra=folder))


@settings(max_examples=EXAMPLES)
@given(subsets(valid))
def test_valid_options_compose_to_what_the_account_says(given_options: dict[str, Any]) -> None:
    imported = choose(convert(given_options))

    config = composed(imported)

    assert [entry.name for entry in imported.entries] == list(given_options)
    assert imported.unknown == ()
    for entry in (*imported.entries, *imported.defaults):
        for option, value in entry.outcome.to.items():
            assert value_of(config, option) == value


@given(subsets(valid))
def test_nothing_that_is_kept_or_renamed_has_another_value(given_options: dict[str, Any]) -> None:
    for entry in choose(convert(given_options)).entries:
        if entry.outcome.kind in (Kind.KEPT, Kind.RENAMED):
            held = list(entry.outcome.to.values())
            assert held == [entry.value] * len(held) or entry.name.endswith("instances[].tp")
        elif entry.outcome.kind is Kind.DROPPED:
            assert entry.outcome.to == {}
        assert entry.outcome.why or entry.outcome.kind in (Kind.KEPT, Kind.RENAMED)


NAMES = sorted(name for name in DEFAULTS if "[]" not in name)
TREES = st.dictionaries(
    st.sampled_from([name for name in NAMES if "." not in name]) | st.text(max_size=8), ANYTHING, max_size=10
)


@settings(max_examples=EXAMPLES)
@given(TREES, TREES, st.dictionaries(st.sampled_from([name.split(".")[-1] for name in NAMES]), ANYTHING, max_size=8))
def test_nonsense_is_accounted_for_and_composes_as_well(
    base: dict[str, Any], top: dict[str, Any], section: dict[str, Any]
) -> None:
    base = {key: value for key, value in base.items() if key not in (*SECTIONS, *RESERVED)}
    top = {key: value for key, value in top.items() if key not in (*SECTIONS, *RESERVED)}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "base.json", Path(folder) / "top.json"
        files[0].write_text(json.dumps(base))
        files[1].write_text(json.dumps({**top, "base_config": "base.json", "global_resource_planner": section}))
        source = read(files[1])
    imported = choose(convert(source.settings))

    composed(imported)
    lines = report(source, imported, ()).splitlines()

    assert len(imported.entries) == len({*base, *top}) + len(section)
    assert [line for line in lines if not line.isprintable()] == []


@settings(max_examples=EXAMPLES)
@given(st.text().filter(lambda text: is_text(text) and text not in ("", "???")))
def test_text_arrives_as_it_was(text: str) -> None:
    config = composed(convert({"model_path": text, "phase_trace_dir": text}))

    assert config.model_path == text
    assert config.trace.directory == text
