"""The owner's reference, name by name: declared, described, and either shown by a test or refused as not built yet.

And the page that is made from the schema.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conf import reference
from conf.options import Option, declared
from conf.pending import CAPABILITIES, MOST_PENDING, PLANNER, pending
from conf.reference import PAGE, entries, introductions, page, range_text, type_text, value_text
from conf.schema import LibraConfig
from launch.compose import compose
from planner.validate import problems

TESTS = Path(__file__).resolve().parents[1]
OWNERS = (TESTS / "golden" / "owner_reference.md").read_text(encoding="utf-8")
RUNTIME_HEADING = "Runtime Planner and Elastic Options"
NUM_OWNERS = 55
"""Counted by hand: 21 in the table of core options, 3 in the rows that ran into the paragraph below it, 5 of Megatron-Core, 24 of
planner and runtime (in 21 rows, two of which name more than one), and 2 in prose only."""
ENVIRONMENT = {"RL_TRAIN_PHASE_TRACE", "RL_TRAIN_PHASE_TRACE_DIR"}
NO_OPTIONS = {
    "configuration_reference.md": "the name of the page",
    "phase_trace_rank*.jsonl": "the files that phase_trace_enabled writes",
    "scripts/phase_trace_to_chrome.py": "a command; `python -m traces export` here",
    "megatron_core": "a value of train_backend",
    "restart_all": "a value of runtime_rollout_reconfigure_strategy",
    "blue_green": "a value of runtime_rollout_reconfigure_strategy",
    "cluster_swap": "a value of runtime_rollout_reconfigure_strategy",
}
IDENTIFIER = re.compile(r"[\w./*]*_[\w./*]*\w")


# ---- what the owner names ----------------------------------------------------------------------------------------


def rows() -> Iterator[tuple[str, str]]:
    """(heading, first cell) of every row of a table; of one table the rows have run into a paragraph, between pipes."""
    heading = ""
    for line in OWNERS.splitlines():
        first, tab, _ = line.partition("\t")
        if tab:
            yield heading, first
        elif line.endswith("Options"):
            heading = line
        for row in line.split(" | | ")[1:]:
            yield heading, row.split(" | ")[0]


def names_in_tables() -> Iterator[str]:
    for heading, cell in rows():
        for name in cell.split(" / ") if cell != "Option" else ():
            yield f"{PLANNER}.{name}" if heading == RUNTIME_HEADING and "." not in name else name


@cache
def owners_names() -> tuple[str, ...]:
    """Every option that the owner's reference names, by its dotted name: those of the tables, then those of the prose."""
    in_tables = list(names_in_tables())
    known = {*(name.removeprefix(f"{PLANNER}.") for name in in_tables), *in_tables, *NO_OPTIONS, *ENVIRONMENT}
    return tuple(dict.fromkeys([*in_tables, *(word for word in IDENTIFIER.findall(OWNERS) if word not in known)]))


def test_the_list_of_the_owners_names_is_complete() -> None:
    assert len(owners_names()) == NUM_OWNERS
    assert set(owners_names()) >= {"model_path", "sync_interval", "rollout_weight_sync_mode", "phase_trace_enabled"}
    assert f"{PLANNER}.min_rollout_gpus" in owners_names()
    assert [name for name, count in Counter(owners_names()).items() if count > 1] == []


def test_every_word_of_the_owner_that_looks_like_an_option_is_one_or_is_known_not_to_be() -> None:
    leaves = {name.rpartition(".")[2] for name in owners_names()}
    words = set(IDENTIFIER.findall(OWNERS))

    unknown = {word for word in words if word.removeprefix(f"{PLANNER}.") not in leaves}

    assert unknown == {*NO_OPTIONS, *ENVIRONMENT}


def test_words_that_are_values_are_values() -> None:
    choices = {choice for option in declared(LibraConfig).values() for choice in option.choices}

    assert {word for word, why in NO_OPTIONS.items() if "a value of" in why} <= choices


# ---- each of them works ------------------------------------------------------------------------------------------


@cache
def exercised() -> dict[str, list[str]]:
    """Option -> tests marked `@pytest.mark.exercises("option", ...)`, found in the text of the tests."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for name in marked_names(node):
                    found.setdefault(name, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def marked_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.exercises":
            yield from (ast.literal_eval(argument) for argument in decorator.args)


@pytest.mark.parametrize("name", owners_names())
def test_an_option_of_the_owner_is_declared_and_described(name: str) -> None:
    option = declared(LibraConfig).get(name)

    assert option is not None, f"{name} is not in conf/schema.py"
    assert option.unit
    assert option.effect


@pytest.mark.parametrize("name", [*owners_names(), *sorted(ENVIRONMENT)])
def test_an_option_of_the_owner_is_shown_by_a_test_or_pending_and_never_both(name: str) -> None:
    """Tests that need Slurm, vLLM or a GPU may be skipped, so they are not enough."""
    tests = [test for test in exercised().get(name, []) if not test.startswith("integration")]
    sentence = pending().get(name, "")

    assert tests or sentence, f'{name}: no test is marked @pytest.mark.exercises("{name}"), and it is not pending'
    assert not (tests and sentence), (
        f"{name} is pending ({sentence}), but {tests} show its effect: take it off the list"
    )


def test_marks_name_options_that_exist() -> None:
    assert set(exercised()) <= {*declared(LibraConfig), *ENVIRONMENT}


def test_every_option_has_a_unit_and_an_effect() -> None:
    assert [option.name for option in declared(LibraConfig).values() if not (option.unit and option.effect)] == []


def test_no_option_asks_for_a_wait_that_is_longer_than_the_system_can_wait() -> None:
    waits = [option.maximum for option in declared(LibraConfig).values() if option.unit == "s"]

    assert all(longest is not None and longest < threading.TIMEOUT_MAX for longest in waits)


# ---- what is pending ---------------------------------------------------------------------------------------------


def test_the_pending_list_is_short_and_has_no_double_or_stale_entries() -> None:
    names = [name for capability in CAPABILITIES for name in capability.options]

    assert len(names) == len(set(names)) <= MOST_PENDING
    assert set(names) <= set(declared(LibraConfig))
    assert all(capability.sentence for capability in CAPABILITIES)


def other_values(option: Option) -> Iterator[str]:
    """Values in range that are not the default, as a command line gives them."""
    if option.choices:
        yield from (choice for choice in option.choices if choice != option.default)
    elif option.element_type is bool:
        yield str(not option.default).lower()
    elif option.is_list:
        yield from ("[1]", "[2,4]")
    elif option.element_type is float:
        yield from ("0.5", "3.0")
    else:
        yield from (str(option.default + more) for more in (1, 7))


REFUSED = [(name, value) for name in pending() for value in other_values(declared(LibraConfig)[name])]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_pending_option_is_refused_with_its_sentence(name: str, value: str) -> None:
    found = [problem for problem in problems(compose([f"{name}={value}"])) if pending()[name] in problem]

    assert any(problem.startswith(f"{name}=") for problem in found)


def test_every_pending_option_is_refused_in_the_test_above() -> None:
    assert {name for name, _ in REFUSED} == set(pending())


# ---- the page ----------------------------------------------------------------------------------------------------


def test_the_stored_page_is_up_to_date() -> None:
    if os.environ.get("LIBRA_UPDATE_GOLDEN"):
        PAGE.write_text(page(), encoding="utf-8")

    assert PAGE.read_text(encoding="utf-8") == page(), "`python -m conf.reference --write` (or `make golden`) renews it"


def test_a_page_that_cannot_be_written_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("conf.reference.PAGE", tmp_path / "nowhere" / "configuration.md")
    monkeypatch.setattr(sys, "argv", ["reference", "--write"])

    assert reference.main() == 2

    assert capsys.readouterr().err.endswith("configuration.md cannot be written: No such file or directory\n")


def test_the_page_has_a_row_for_every_option_under_the_owners_headings_and_our_groups() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|", page(), flags=re.MULTILINE)

    assert sorted(rows) == sorted(declared(LibraConfig))
    assert "| Option | Meaning | Default | Unit | Range |" in page()
    assert list(introductions())[:4] == [
        "Core Options",
        "Megatron-Core Options",
        "Runtime Planner and Elastic Options",
        "Rollout Weight Reloads",
    ]
    assert all(line and not line.endswith(")") for line in introductions().values()), "a docstring, not a signature"


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("recompute_logprobs", "Core Options"),
        ("phase_trace_enabled", "Core Options"),
        (f"{PLANNER}.memory_budget_check_enabled", "Core Options"),
        ("megatron_grouped_gemm", "Megatron-Core Options"),
        (f"{PLANNER}.min_train_gpus", RUNTIME_HEADING),
        ("rollout_weight_sync_mode", "Rollout Weight Reloads"),
        ("launch.mode", "launch"),
    ],
)
def test_an_option_stands_in_the_owners_section_or_in_its_group(name: str, section: str) -> None:
    assert entries()[name].section == section


def test_a_pending_option_says_so_on_the_page() -> None:
    rows = {name: row for row in page().splitlines() for name in pending() if row.startswith(f"| `{name}` |")}

    assert {name for name, row in rows.items() if f"Pending: {pending()[name]}" in row} == set(pending())


@pytest.mark.parametrize(
    ("name", "type_wanted", "range_wanted"),
    [
        ("model_path", "str", "any"),
        ("train_gpus", "int", "1 to 100000"),
        ("batch_size", "int", ">= 1"),
        ("launch.stop_grace_s", "float", "0.1 to 1e9"),
        ("learning_rate", "float", ">= 0"),
        ("recompute_logprobs", "bool", "true, false"),
        ("top_p", "float", "0.01 to 1"),
        ("rollout_weight_reload_strategy", "str", "one of parallel, serial"),
        (f"{PLANNER}.memory_budget_logits_dtype_bytes", "int", "1 to 8"),
        (f"{PLANNER}.allowed_train_tp", "list[int]", "each >= 1"),
        (f"{PLANNER}.train_comm_compute_ratio_threshold", "float or null", "> 0, or null"),
        ("task.params", "mapping", "any"),
        ("slurm.extra", "list[str]", "any"),
    ],
)
def test_types_and_ranges_are_written_as_people_write_them(name: str, type_wanted: str, range_wanted: str) -> None:
    option = declared(LibraConfig)[name]

    assert (type_text(option), range_text(option)) == (type_wanted, range_wanted)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2e9, "2e9"),
        (3.35e12, "3.35e12"),
        (123456789.0, "1.23456789e8"),
        (1e-6, "1e-6"),
        (0.28, "0.28"),
        (600.0, "600"),
        (4096, "4096"),
        (80_000_000_000, "80000000000"),
        (True, "true"),
        (None, "null"),
        ("", '""'),
        ("gpu", "gpu"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_a_value_is_written_as_on_the_command_line(value: Any, text: str) -> None:
    assert value_text(value) == text


def test_the_command_prints_every_option_as_json_with_the_standard_library_alone() -> None:
    code = (
        "import runpy, sys; sys.argv = ['reference', '--json']\n"
        "try: runpy.run_module('conf.reference', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "loaded = {'torch', 'hydra', 'omegaconf', 'yaml', 'submitit'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=True, timeout=60
    )

    records = {record["name"]: record for record in json.loads(done.stdout)}
    assert set(records) == set(declared(LibraConfig))
    wanted = {"name", "type", "default", "unit", "range", "effect", "section", "reason", "pending", "read_by"}
    assert {frozenset(record) for record in records.values()} == {frozenset(wanted)}
    assert records["learning_rate"]["default"] == 1e-6
    assert records["learning_rate"]["read_by"] == ["stages/trainer/schedule.py"]
