"""The files of conf/: models as published, machines as on their data sheets, algorithms, tasks that verify themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import conf
from conf.sections import HardwareConfig
from launch.compose import Tree, compose, groups
from planner.architecture import Architecture
from planner.conflicts.hardware import plausible_numbers
from planner.model import from_model_config
from planner.validate import cross_problems, option_problems, problems
from stages.controller.tasks import Task, make_task

TREE = Path(conf.__file__).parent
FILES = sorted(TREE.glob("*/*.yaml"))
HARDWARE = groups()["hardware"]

PUBLISHED = {
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
}
"""Parameters of the published weights, a tied head counted once. Source: the tensor sizes of each model's repository on the
Hugging Face hub (Qwen/Qwen2.5-*-Instruct, Qwen/Qwen3-*, meta-llama/Llama-3.*-Instruct, HuggingFaceTB/SmolLM2-*-Instruct); the
model cards give the same in three digits (0.49B, 1.54B, 3.09B, 7.61B, 14.7B, ... for Qwen2.5; 30.5B, 235B for the mixtures).
All equal what transformers builds from these sizes."""

ACTIVE = {"qwen3_30b_a3b": 3.3e9, "qwen3_235b_a22b": 22e9}
"""Activated parameters, from the model cards."""

MADE_HERE = {"demo", "from_path"}


def architecture(model: str) -> Architecture:
    return from_model_config(compose([f"model={model}"]).model)


def task_of(name: str) -> Task:
    return make_task(replace(compose([f"task={name}"]).task, test_size=5), seed=0)


def test_every_published_model_is_compared() -> None:
    assert set(groups()["model"]) == set(PUBLISHED) | MADE_HERE


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_model_has_the_published_number_of_parameters(model: str) -> None:
    assert architecture(model).parameters == pytest.approx(PUBLISHED[model], rel=0.005)


@pytest.mark.parametrize("model", ACTIVE)
def test_a_mixture_uses_the_published_number_of_parameters_for_a_token(model: str) -> None:
    assert architecture(model).active_parameters == pytest.approx(ACTIVE[model], rel=0.03)


@pytest.mark.parametrize(("model", "hardware"), [*itertools.product(groups()["model"], HARDWARE)])
def test_every_model_composes_with_every_machine(model: str, hardware: str) -> None:
    config = compose([f"model={model}", f"hardware={hardware}"])

    assert option_problems(config) == []
    assert cross_problems(config) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_file_says_in_a_comment_what_it_is_for(file: Path) -> None:
    package, purpose, *_ = file.read_text().splitlines()

    assert package.startswith("# @package ")
    assert purpose.startswith("# ")
    assert len(purpose) > 20


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_machine_says_every_number_and_none_in_a_wrong_unit(hardware: str) -> None:
    given = yaml.safe_load((TREE / "hardware" / f"{hardware}.yaml").read_text())
    config = compose([f"hardware={hardware}"])

    assert set(given) == set(HardwareConfig.__dataclass_fields__)
    assert list(plausible_numbers(config)) == []
    assert config.hardware.network_bytes_per_s <= config.hardware.link_bytes_per_s


@pytest.mark.parametrize("hardware", [name for name in HARDWARE if name != "cpu"])
def test_a_gpu_node_is_one_that_is_sold(hardware: str) -> None:
    node = compose([f"hardware={hardware}"]).hardware

    assert node.device == "cuda"
    assert 300e12 <= node.gpu_flops <= 2500e12
    assert 80e9 <= node.gpu_memory_bytes <= 288e9
    assert 25e9 <= node.network_bytes_per_s < 200e9
    # A GPU that could not read its memory in 10 to 60 ms would be no GPU of these years.
    assert 0.01 <= node.gpu_memory_bytes / node.gpu_memory_bytes_per_s <= 0.06


@pytest.mark.parametrize("algorithm", groups()["algorithm"])
def test_every_algorithm_is_a_valid_choice(algorithm: str) -> None:
    assert problems(compose([f"algorithm={algorithm}", "model_path=/models/m"])) == []


def test_algorithms_differ_where_their_papers_do() -> None:
    grpo, dapo, dr_grpo = (compose([f"algorithm={name}"]).algorithm for name in ("grpo", "dapo", "dr_grpo"))

    assert (grpo.clip_low, grpo.clip_high) == (0.2, 0.2)
    assert (dapo.clip_low, dapo.clip_high, dapo.kl_coef) == (0.2, 0.28, 0.0)
    assert (dapo.drop_uniform_groups, grpo.drop_uniform_groups) == (True, False)
    assert (grpo.normalize_advantage, dr_grpo.normalize_advantage) == (True, False)


def test_an_experiment_has_the_last_word_over_its_algorithm() -> None:
    config = compose(["+experiment=demo", "algorithm=dapo"])

    assert config.algorithm.clip_high == 0.28
    assert (config.algorithm.lr_schedule, config.algorithm.lr_warmup_steps) == ("cosine", 10)


def test_the_command_line_has_the_last_word_over_both() -> None:
    assert compose(["+experiment=demo", "algorithm=dapo", "algorithm.clip_high=0.3"]).algorithm.clip_high == 0.3


@pytest.mark.parametrize("task", groups()["task"])
def test_a_task_asks_the_same_questions_again(task: str) -> None:
    first, second = task_of(task), task_of(task)

    assert [first.train_problem(index).prompt for index in range(3)] == [
        second.train_problem(index).prompt for index in range(3)
    ]
    assert len({problem.prompt for problem in first.test_problems()}) == 5


@pytest.mark.parametrize("task", groups()["task"])
def test_the_verifier_of_a_task_takes_its_own_answer_and_no_wrong_one(task: str) -> None:
    made = task_of(task)
    asked = [made.train_problem(index) for index in range(12)]

    for problem in asked:
        wrong = [other.answer for other in asked if other.answer != problem.answer]
        assert made.score(problem.answer, problem) == 1.0
        assert max(made.score(answer, problem) for answer in [*wrong, "", "I do not know"]) < 1.0


def test_the_profile_in_the_manual_composes_from_a_folder_of_the_user(tmp_path: Path) -> None:
    manual = (TREE.parent / "docs" / "cluster.md").read_text()
    profile = manual.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "alpine.yaml").write_text(profile)

    config = compose(["+experiment=grpo_7b", "cluster=alpine"], Tree(extra=str(tmp_path)))

    assert (config.slurm.account, config.slurm.constraint, config.slurm.extra) == ("0042", "h100", ["--exclusive"])
    assert (config.hardware.gpus_per_node, config.hardware.network_bytes_per_s) == (4, 25e9)
    assert problems(config) == []
