"""The rules of the house that can be counted: lengths, and who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
FOLDERS = ("launch", "planner", "stages", "conf", "traces", "tests", "benchmarks")
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 400
# Plans and scripts can be made and printed on a laptop: these import nothing that trains, submits or runs.
PURE = ("planner", "launch/hetjob.py")
IMPURE_MODULES = frozenset({"torch", "submitit", "subprocess", "vllm", "megatron", "transformers"})


def python_files(*roots: str) -> list[Path]:
    files: list[Path] = []
    for root in roots:
        path = PROJECT / root
        files += [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return [file for file in files if "__pycache__" not in file.parts]


def function_lengths(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def imported_modules(source: str) -> set[str]:
    """Top-level names of everything imported anywhere in `source`, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


def test_no_function_is_longer_than_80_lines() -> None:
    too_long = [
        f"{file.relative_to(PROJECT)}: {name} has {lines} lines"
        for file in python_files(*FOLDERS)
        for name, lines in function_lengths(file.read_text())
        if lines > MAX_FUNCTION_LINES
    ]
    assert too_long == []


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in python_files(*FOLDERS)}
    assert {str(file): lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_the_planner_and_the_script_generator_are_pure() -> None:
    files = python_files(*PURE)
    assert len(files) > 1
    guilty = {str(file): sorted(imported_modules(file.read_text()) & IMPURE_MODULES) for file in files}
    assert {file: modules for file, modules in guilty.items() if modules} == {}


@pytest.mark.parametrize("module", ["launch", "launch.pipeline", "launch.devcluster.cluster", "planner", "traces"])
def test_importing_it_loads_neither_torch_nor_vllm(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'vllm', 'transformers', 'megatron'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""


def test_set_up_and_development_cluster_need_the_standard_library_only() -> None:
    """Both run before anything is installed, or with a system Python."""
    own = {"launch", "stages"}
    files = python_files("launch/setup", "launch/devcluster", "launch/errors.py", "stages/process.py")
    foreign = set().union(*(imported_modules(file.read_text()) for file in files)) - own - sys.stdlib_module_names
    assert foreign == set()
