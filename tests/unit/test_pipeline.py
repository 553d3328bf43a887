"""Bad input ends before anything is made; a dry run writes nothing; the launcher stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from conf.reads import reads_of
from launch import machine, pipeline
from launch.errors import ConfigError
from launch.submission import Submission
from planner.model import from_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def model_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_dry_run_through_the_command_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch", "+experiment=demo", "total_steps=10", "launch.dry_run=true"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "#SBATCH hetjob" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_option_through_the_command_exits_2_without_a_stack_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch", "+experiment=demo", "+totl_steps=10"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 2
    assert "did you mean 'total_steps'" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["launch", "launch.pipeline", "launch.hetjob", "planner.search"])
def test_the_launcher_imports_neither_torch_nor_vllm(module: str) -> None:
    code = f"import {module}, sys; sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'transformers')))"

    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["rollout_gpus=16"], "do not fit on this machine"),
        (["batch_size=10"], "batch_size=10 is not a multiple"),
        (["warmup.steps=0", "model=from_path"], "set model_path to a HF folder"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_option_to_change(overrides: list[str], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        pipeline.prepare(["+experiment=demo", *overrides])


def test_a_missing_model_folder_is_refused_before_the_run_directory_is_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    with pytest.raises(ConfigError, match=r"model_path=.*is not a folder"):
        pipeline.launch(
            ["+experiment=demo", "warmup.steps=0", f"model_path={tmp_path}/none", f"launch.run_dir={run_dir}"]
        )

    assert not run_dir.exists()


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "gpt2", architectures=["GPT2LMHeadModel"])

    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel.*supported: LlamaForCausalLM"):
        pipeline.prepare(["+experiment=demo", "warmup.steps=0", f"model_path={folder}"])


@pytest.mark.parametrize("text", ["{broken", "[1, 2]", '"words"', "null"])
def test_a_config_json_that_is_no_object_is_refused_by_name(tmp_path: Path, text: str) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text(text)

    with pytest.raises(ConfigError, match=r"model_path=.*config\.json"):
        pipeline.prepare(["+experiment=demo", "warmup.steps=0", f"model_path={folder}"])


def test_sizes_come_from_the_model_folder_when_there_is_one(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "llama")

    prepared = pipeline.prepare(["+experiment=demo", "warmup.steps=0", "model=from_path", f"model_path={folder}"])

    assert prepared.architecture.hidden == 64


def test_a_model_group_that_contradicts_the_folder_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "llama")

    with pytest.raises(ConfigError, match=r"model\.hidden_size=128, config\.json has 64.*choose model=from_path"):
        pipeline.prepare(["+experiment=demo", "warmup.steps=0", f"model_path={folder}"])


def test_a_model_that_can_only_be_planned_is_planned_from_its_folder(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    folder = model_folder(tmp_path / "moe", architectures=["Qwen3MoeForCausalLM"], **experts)

    prepared = pipeline.prepare(["+experiment=demo", "warmup.steps=0", "model=from_path", f"model_path={folder}"])

    assert prepared.architecture.num_experts == 8


def test_a_full_disk_is_refused_with_wanted_available_and_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = pipeline.prepare(["+experiment=demo", f"launch.run_dir={tmp_path}/run"])
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("launch.machine.shutil.disk_usage", lambda _: usage)

    found = machine.space_problems(prepared.config, from_model_config(prepared.config.model), prepared.run_dir)

    assert len(found) == 1
    assert "available 0.00 GB" in found[0]
    assert "launch.run_dir" in found[0]


def test_a_run_directory_in_the_way_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")

    with pytest.raises(ConfigError, match="holds other files"):
        pipeline.launch(["+experiment=demo", f"launch.run_dir={tmp_path}"])

    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("place", ["file/run", "loop", "loop/run", "dangling/run"])
def test_a_run_directory_below_what_is_no_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    prepared = pipeline.prepare(["+experiment=demo", f"launch.run_dir={tmp_path}/{place}"])

    with pytest.raises(ConfigError, match=r"launch\.run_dir=.* is no folder; choose another launch\.run_dir"):
        pipeline.check_machine(prepared)


@pytest.mark.parametrize("refusing", ["launch.occupancy.check_free", "launch.pipeline.RunDir.create"])
def test_what_the_system_refuses_about_a_run_directory_is_said_with_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    def refused(place: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied", f"{place}/run.json")

    prepared = pipeline.prepare(["+experiment=demo", f"launch.run_dir={tmp_path}/run"])
    monkeypatch.setattr(refusing, refused)

    with pytest.raises(ConfigError, match=r"launch\.run_dir=.*/run: Permission denied \(.*/run/run\.json\); choose"):
        pipeline.create_run(prepared)


def test_the_written_configuration_has_no_open_ends() -> None:
    config = pipeline.prepare(["+experiment=demo", "seed=3"]).config

    assert config.warmup.seed == 3
    assert config.launch.mode == "local"
    assert config.model_path.startswith("/")
    assert config.tokenizer_path == config.model_path


@pytest.mark.parametrize(("code", "answer", "wanted"), [(0, "Slurmctld(primary) at h is UP", True), (1, "", False)])
def test_slurm_counts_only_when_its_controller_answers(code: int, answer: str, wanted: bool) -> None:
    done = subprocess.CompletedProcess([], code, answer, "")

    assert machine.has_slurm(lambda name: f"/usr/bin/{name}", lambda *args, **options: done) is wanted


def test_a_cache_that_cannot_be_written_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    prepared = pipeline.prepare(["+experiment=demo", f"launch.cache_dir={tmp_path}/file/cache"])

    with pytest.raises(ConfigError, match=r"launch\.cache_dir=.*/file/cache"):
        pipeline.warm_up(prepared.config)


def test_after_a_run_options_that_nothing_read_are_named_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = pipeline.prepare(["+experiment=demo", "total_steps=5", f"launch.run_dir={tmp_path}/run"])
    run = pipeline.create_run(prepared)
    monkeypatch.setattr("launch.follow.follow", lambda run, submission, display: None)
    monkeypatch.setattr(
        "launch.unread.warning",
        lambda run, sources, own_reads: f"unread: {sources['total_steps']}, {'train_gpus' in own_reads}",
    )

    pipeline.stay(run, cast(Submission, SimpleNamespace(life=lambda: None)), prepared)

    assert "unread: command line, True" in capsys.readouterr().err


def test_what_is_only_judged_does_not_count_as_read_by_the_launcher() -> None:
    prepared = pipeline.prepare(["+experiment=demo"])
    pipeline.dry_run_text(prepared)

    assert "weights.proof_tolerance" not in reads_of(prepared.config)
    assert {"train_gpus", "slurm.job_name"} <= reads_of(prepared.config)


def test_a_dry_run_of_a_local_run_that_no_cluster_would_take_says_why() -> None:
    overrides = ["+experiment=demo", "train_gpus=3", "slurm.controller_cpus=2", "launch.run_dir=/runs/x"]
    text = pipeline.dry_run_text(pipeline.prepare(overrides))

    assert "The same run on a Slurm cluster would be refused: a node of train_gpus=3" in text
    assert "job.sbatch" not in text
