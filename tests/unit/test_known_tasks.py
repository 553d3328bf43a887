"""A task that could be made is not made again for the next launch, until something changes that could matter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from conf.sections import TaskConfig
from launch import checks, known_tasks

SUMS = TaskConfig(params={"dataset": "chain_sum"})
TASK = """
from stages.controller.tasks.base import Task

class Mine(Task):
    chat = {chat}

    def train_problem(self, index):
        return None

    def test_problems(self):
        return []

    def score(self, completion, problem):
        return 0.0
"""


@pytest.fixture
def config(tmp_path: Path) -> LibraConfig:
    made = LibraConfig(task=SUMS)
    made.launch.cache_dir = str(tmp_path / "cache")
    return made


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LibraConfig]:
    """The configurations whose tasks were really made."""
    asked: list[LibraConfig] = []

    def make_task(config: LibraConfig) -> tuple[object, list[str]]:
        asked.append(config)
        return really(config)

    really: Callable[[LibraConfig], tuple[object, list[str]]] = checks.make_task
    monkeypatch.setattr(checks, "make_task", make_task)
    return asked


def test_a_task_is_made_once(config: LibraConfig, made: list[LibraConfig]) -> None:
    answers = [checks.task_facts(config) for _ in range(3)]

    assert answers == [(False, [])] * 3
    assert len(made) == 1


def test_another_seed_needs_no_other_look(config: LibraConfig, made: list[LibraConfig]) -> None:
    checks.task_facts(config)
    checks.task_facts(replace(config, seed=7))

    assert len(made) == 1


def test_other_parameters_are_looked_at(config: LibraConfig, made: list[LibraConfig]) -> None:
    checks.task_facts(config)
    chat = replace(config, task=TaskConfig(params={"dataset": "chain_sum", "chat": True}))

    assert checks.task_facts(chat) == (True, [])
    assert checks.task_facts(config) == (False, [])
    assert len(made) == 2


def test_a_task_that_cannot_be_made_is_never_taken_for_known(config: LibraConfig, made: list[LibraConfig]) -> None:
    wrong = replace(config, task=TaskConfig(params={"dataset": "chain_sun"}))

    first, second = checks.task_facts(wrong), checks.task_facts(wrong)

    assert first == second
    assert "chain_sum" in first[1][0]
    assert len(made) == 2


def test_an_installation_makes_everything_unknown(
    config: LibraConfig, made: list[LibraConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(packages))
    checks.task_facts(config)
    os.utime(packages, ns=(1, 1))

    checks.task_facts(config)

    assert len(made) == 2


def test_a_class_of_the_user_is_looked_at_again_when_its_file_changes(
    config: LibraConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config.task = TaskConfig(name="my_task_of_a_test:Mine")
    (tmp_path / "my_task_of_a_test.py").write_text(TASK.format(chat=False))
    known_tasks.remember(config, chat=False)
    before = known_tasks.remembered(config)

    (tmp_path / "my_task_of_a_test.py").write_text(TASK.format(chat=True))

    assert (before, known_tasks.remembered(config)) == (False, None)


def test_a_damaged_memory_is_made_anew(config: LibraConfig, made: list[LibraConfig]) -> None:
    folder = Path(config.launch.cache_dir)
    folder.mkdir()
    (folder / "tasks.json").write_text("{")

    checks.task_facts(config)
    checks.task_facts(config)

    assert len(made) == 1


def test_a_cache_that_cannot_be_written_costs_only_time(
    config: LibraConfig, made: list[LibraConfig], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config.launch.cache_dir = str(tmp_path / "file" / "cache")

    assert [checks.task_facts(config) for _ in range(2)] == [(False, [])] * 2
    assert len(made) == 2


def test_only_so_many_are_kept(config: LibraConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_tasks, "MOST", 2)
    configs = [
        replace(config, task=TaskConfig(params={"dataset": "chain_sum", "template": f"{{question}}{n}"}))
        for n in range(3)
    ]

    for one in configs:
        known_tasks.remember(one, chat=False)

    assert [known_tasks.remembered(one) for one in configs] == [None, False, False]


def test_a_known_task_imports_no_library(config: LibraConfig, tmp_path: Path) -> None:
    checks.task_facts(config)
    code = (
        "import sys; from conf.schema import LibraConfig; from conf.sections import TaskConfig; from launch import checks\n"
        "config = LibraConfig(task=TaskConfig(params={'dataset': 'chain_sum'})); config.launch.cache_dir = sys.argv[1]\n"
        "print(checks.task_facts(config), 'reasoning_gym' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, config.launch.cache_dir], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "(False, []) False"
