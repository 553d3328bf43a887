"""The rules that need no machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.options import declared
from conf.schema import LibraConfig
from launch.compose import compose
from planner.architecture import Architecture
from planner.model import from_model_config
from planner.notes import notes
from planner.validate import (
    cross_problems,
    impossible_path,
    model_problems,
    option_problems,
    problems,
    reload_method_problems,
    start_problems,
)

GRP = "global_resource_planner"
GPUS = ["model=qwen2_5_7b", "model_path=/models/m", "train_gpus=8", "rollout_gpus=8", "train_tp_size=4"]


def found(*overrides: str) -> str:
    """What the rules say about a valid setup of 16 GPUs with `overrides`; "" when nothing."""
    return "\n".join(cross_problems(compose([*GPUS, *overrides])))


def model_found(*overrides: str) -> str:
    config = compose([*GPUS, *overrides])
    return "\n".join(model_problems(config, architecture(config)))


def architecture(config: LibraConfig) -> Architecture:
    return from_model_config(config.model)


def test_the_demo_has_no_problem() -> None:
    assert problems(compose(["+experiment=demo"])) == []


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("a\0b", "is no UTF-8 text without NUL"),
        ("/runs/\udcff", "is no UTF-8 text without NUL"),
        (f"/runs/{'a' * 256}/x", "launch.run_dir: a part of the path has 256 bytes, the most allowed are 255"),
        (f"/runs/{'ä' * 128}/x", "has 256 bytes"),
        ("/r" * 201, "launch.run_dir is a path of 201 parts, the most allowed are 200"),
        ("/runs" * 820, "launch.run_dir is a path of 4100 bytes, the most allowed are 4095"),
        ("/runs/" + "a" * 255, ""),
        ("", ""),
    ],
)
def test_a_path_that_no_file_can_have_is_refused(path: str, wanted: str) -> None:
    said = impossible_path("launch.run_dir", path)

    assert wanted in said
    assert bool(said) == bool(wanted)


@pytest.mark.parametrize("name", [name for name, option in declared(LibraConfig).items() if option.unit == "path"])
def test_every_option_that_is_a_path_is_judged_as_one(name: str) -> None:
    found = option_problems(compose([f"{name}={'a' * 300}"]))

    assert any(problem.startswith(name) and "255" in problem for problem in found)


@pytest.mark.parametrize("character", "%'\"\\\n")
def test_a_run_directory_that_a_job_script_cannot_name_is_refused_before_it_is_made(character: str) -> None:
    config = compose(GPUS)
    named = replace(config, launch=replace(config.launch, run_dir=f"/runs/a{character}b"))

    assert "launch.run_dir=" in "\n".join(cross_problems(named))


def test_the_setup_that_these_tests_change_has_no_problem() -> None:
    assert found() == ""
    assert model_found() == ""


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["batch_size=510"], "batch_size=510 is not a multiple of n_samples=8: a step trains whole groups; set batch_size=512"),
        (["max_new_tokens=2048"], "max_new_tokens=2048 leaves no room for a prompt in max_model_len=2048"),
        (["sync_interval=3"], "raise max_head_offpolicyness or lower sync_interval"),
        (["max_concurrent_rollouts=4"], "max_concurrent_rollouts=4 is below n_samples=8"),
        (["batch_size=8", "train_gpus=64", "rollout_gpus=8"], "batch_size=8 is less than the 16 data-parallel replicas"),
        (["top_p=0.9"], "only top_p=1.0 is built"),
        (["algorithm.overlong_buffer_tokens=1024"], "is not less than max_new_tokens=1024"),
        (["algorithm=dapo", "algorithm.overlong_penalty=0"], "takes nothing off"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_trained_is_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(*overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["train_gpus=6"], "train_gpus=6 is not a multiple of train_tp_size x train_pp_size x train_cp_size = 4"),
        (["train_tp_size=16", "train_gpus=16"], "train_tp_size=16 is more than hardware.gpus_per_node=8"),
        (["vllm_tp_size=16", "rollout_gpus=16"], "vllm_tp_size=16 is more than hardware.gpus_per_node=8"),
        (["vllm_tp_size=3"], "rollout_gpus=8 is not a multiple of vllm_tp_size=3"),
        (["hardware=cpu", "vllm_tp_size=2"], "set vllm_tp_size=1"),
    ],
)
def test_parallel_sizes_that_do_not_multiply_are_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(*overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([f"{GRP}.min_train_gpus=16"], f"train_gpus=8 is below {GRP}.min_train_gpus=16"),
        ([f"{GRP}.min_rollout_gpus=9"], f"rollout_gpus=8 is below {GRP}.min_rollout_gpus=9"),
        ([f"{GRP}.allocation_granularity_gpus=3"], f"train_gpus=8 is not a multiple of {GRP}.allocation_granularity_gpus=3"),
        ([f"{GRP}.allowed_train_tp=[1,2]"], f"train_tp_size=4 is not one of {GRP}.allowed_train_tp=[1, 2]"),
        ([f"{GRP}.allowed_train_tp=[4,16]"], f"{GRP}.allowed_train_tp holds [16], more than hardware.gpus_per_node=8"),
        ([f"{GRP}.allowed_train_tp=[4,4]"], f"{GRP}.allowed_train_tp=[4, 4] names [4] twice"),
    ],
)  # fmt: skip
def test_a_given_split_against_the_bounds_of_the_planner_is_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(*overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([f"{GRP}.min_train_gpus=12", f"{GRP}.min_rollout_gpus=8"], "want 20 GPUs, available train_gpus + rollout_gpus = 16"),
        ([f"{GRP}.allocation_granularity_gpus=16"], f"lower {GRP}.allocation_granularity_gpus"),
        (["vllm_tp_size=8", f"{GRP}.min_train_gpus=9"], "want 17 GPUs"),
    ],
)  # fmt: skip
def test_a_sum_that_the_planner_cannot_divide_is_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(f"{GRP}.initial_allocation_strategy=grp", *overrides)


def test_what_the_planner_chooses_itself_is_not_held_against_it() -> None:
    chosen = [f"{GRP}.initial_allocation_strategy=grp", f"{GRP}.allocation_granularity_gpus=8"]

    assert found(*chosen, f"{GRP}.allowed_train_tp=[1,2]", "train_gpus=3", "rollout_gpus=13") == ""


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("hardware.gpu_memory_bytes=80", "hardware.gpu_memory_bytes=80 is less than 1e+09 bytes: 80 GB is 80e9"),
        ("hardware.gpu_flops=989", "989 TFLOP/s is 989e12"),
        ("hardware.gpu_flops=989e15", "989 TFLOP/s is 989e12"),
        ("hardware.gpu_memory_bytes_per_s=3350", "3.35 TB/s is 3.35e12"),
        ("hardware.link_bytes_per_s=450", "450 GB/s is 450e9"),
        ("hardware.network_bytes_per_s=400", "a port of 400 Gb/s is 50e9 bytes/s"),
        ("hardware.network_bytes_per_s=400e9", "a port of 400 Gb/s is 50e9 bytes/s"),
        ("hardware.network_bytes_per_s=200e9", "a port of 400 Gb/s is 50e9 bytes/s"),
        ("hardware.link_bytes_per_s=40e9", "network_bytes_per_s=5e+10 is above hardware.link_bytes_per_s=4e+10"),
        ("hardware.cpus_per_node=4", "hardware.cpus_per_node=4 is less than hardware.gpus_per_node=8"),
        (f"{GRP}.memory_budget_safety_margin_bytes=90e9", "leaves nothing of hardware.gpu_memory_bytes=8e+10"),
        (f"{GRP}.memory_budget_safety_margin_bytes=2", "2 GB is 2e9"),
        ("slurm.mem_per_node_bytes=500", "500 GB is 500e9"),
    ],
)
def test_a_wrong_unit_is_named_with_the_right_one(override: str, wanted: str) -> None:
    assert wanted in found(override)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["model.num_key_value_heads=5"], "is not a multiple of model.num_key_value_heads=5"),
        (["model.head_dim=0", "model.num_attention_heads=24"], "model.hidden_size=3584 is not a multiple of"),
        (["model.num_experts=64"], "model.architecture=Qwen2ForCausalLM has no experts"),
        (["model=qwen3_30b_a3b", "model.num_experts=0"], "needs model.num_experts"),
        (["model=qwen3_30b_a3b", "model.num_experts_per_tok=200"], "is more than model.num_experts=128"),
    ],
)
def test_sizes_of_no_model_are_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(*overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["megatron_optimizer_offload_fraction=0.5"], "needs megatron_optimizer_cpu_offload=true"),
        (["megatron_optimizer_cpu_offload=true"], "offloads nothing"),
        (["hardware=cpu", "megatron_optimizer_cpu_offload=true"], "set megatron_optimizer_cpu_offload=false"),
        (["hardware=cpu", "megatron_use_cpu_initialization=true"], "set megatron_use_cpu_initialization=false"),
        (["algorithm.adam_beta1=1.0"], "algorithm.adam_beta1=1.0 makes Adam divide by zero"),
        (["algorithm.lr_min_ratio=0.1"], "does nothing while algorithm.lr_schedule=constant"),
    ],
)
def test_an_optimizer_option_that_would_do_nothing_or_harm_is_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(*overrides)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["rollout.kv_cache_bytes=4e9"], "is read on hardware.device=cpu only"),
        (["hardware=cpu", "rollout.kv_cache_bytes=4"], "1 GB is 1e9"),
        (["rollout.heartbeat_interval_s=60"], "healthy instances would count as dead"),
        (["rollout.request_timeout_s=3600"], f"raise {GRP}.runtime_batch_collection_timeout_s"),
        (["weights.probe_tokens=2048"], "weights.probe_tokens=2048 does not fit max_model_len=2048"),
        (["weights.delta=sparse", "rollout_weight_reload_method=restart"], "set weights.delta=off, or rollout_weight"),
        (["weights.proof_tolerance=0"], "every proof of load would fail"),
        (["rollout.min_instances=99"], "rollout.min_instances=99 is more than the"),
        (["algorithm.step_timeout_s=300"], "raise algorithm.step_timeout_s"),
        (["rollout_weight_reload_method=restart", "algorithm.step_timeout_s=1000"], "rollout.ready_timeout_s"),
    ],
)
def test_servers_and_waits_that_contradict_are_named(overrides: list[str], wanted: str) -> None:
    assert wanted in found(*overrides)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("slurm.extra=['#SBATCH --constraint=h100']", "leave #SBATCH out"),
        ("slurm.extra=['--time=60']", "change slurm.time_min"),
        ("slurm.extra=['--partition gpu']", "change slurm.partition"),
        ("slurm.extra=['-N 4']", "change train_gpus and rollout_gpus"),
        ("slurm.extra=['--requeue']", "change slurm.requeue"),
        ("slurm.extra=['--constraint=h100']", "change slurm.constraint"),
        ("slurm.rollout.extra=['-C a100']", "slurm.rollout.extra holds '-C a100', which the job script has already"),
        ("slurm.comment='two\nlines'", "which an #SBATCH line cannot hold"),
        ('slurm.account="lab\'s"', "which an #SBATCH line cannot hold"),
        ("slurm.trainer.exclude='node1 node2'", "slurm.trainer.exclude='node1 node2' has a blank in it"),
        ("slurm.srun_extra=['--nodes=2']", "which every step's srun has already"),
        ("slurm.rollout.srun_extra=['container']", "no option of srun in one word"),
        ("launch.prefix=['--nv']", "does not begin with a program"),
        ("launch.rollout_prefix=[apptainer,exec,':']", "srun takes a word ':'"),
        ("slurm.trainer.partition=big", "set slurm.rollout.partition or slurm.partition"),
        ("slurm.trainer.qos=long", "set slurm.rollout.qos or slurm.qos"),
        ("slurm.gpu_flag=none", "slurm.gpu_flag=none asks for no GPU"),
        ("slurm.trainer.mem_per_node_bytes=500", "500 GB is 500e9"),
        ("slurm.extra=['constraint=h100']", "is no option of sbatch"),
        ('slurm.extra=["--comment=a\n--exclusive"]', "has a line break"),
        ("launch.setup=['#SBATCH --exclusive']", "put it into slurm.extra"),
    ],
)
def test_lines_for_the_job_script_that_cannot_be_meant_are_named(override: str, wanted: str) -> None:
    assert wanted in found(override)


def test_lines_of_the_site_go_into_the_script() -> None:
    assert found("slurm.extra=['--exclusive','--switches=1@5']", "launch.setup=['module load cuda']") == ""


def test_a_local_run_that_nobody_follows_is_named() -> None:
    for mode in ("local", "allocation"):
        assert "set launch.follow=true" in found(f"launch.mode={mode}", "launch.follow=false")


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["max_model_len=65536"], "max_model_len=65536 is more than the model's max_position_embeddings=32768"),
        (["hardware=cpu", "model.head_dim=48"], "model.head_dim=48: vLLM's attention on hardware.device=cpu takes 32, 64"),
        (["hardware=cpu", "rollout.kv_cache_bytes=1e7"], "does not hold one sequence of max_model_len=2048"),
        (["rollout.request_timeout_s=2"], "max_new_tokens=1024 take at least 5 s"),
        ([f"{GRP}.allowed_train_ep=[2]"], "has no experts to spread"),
        (["model=qwen3_30b_a3b", f"{GRP}.allowed_train_ep=[8,3]"], "holds [3], which do not divide the model's 128 experts"),
    ],
)  # fmt: skip
def test_options_against_the_model_are_named(overrides: list[str], wanted: str) -> None:
    assert wanted in model_found(*overrides)


@pytest.mark.parametrize("sizes", ["[1]", "[]"])
def test_a_dense_model_may_say_that_it_has_no_experts(sizes: str) -> None:
    assert model_found(f"{GRP}.allowed_train_ep={sizes}") == ""


def test_experts_may_be_spread_over_their_divisors() -> None:
    assert model_found("model=qwen3_30b_a3b", f"{GRP}.allowed_train_ep=[1,2,8]") == ""


def test_all_problems_are_listed_at_once() -> None:
    found = problems(compose(["+experiment=demo", "batch_size=10", "max_new_tokens=64", "learning_rate=-1"]))

    assert [text.partition("=")[0] for text in found] == ["learning_rate", "batch_size", "max_new_tokens"]


@pytest.mark.parametrize("version", ["0.25.1", "0.25.1+cu130", "0.32.0", "0.32.1.dev3", None])
def test_an_in_place_reload_goes_with_every_tried_vllm(version: str | None) -> None:
    assert reload_method_problems(LibraConfig(), version) == []


@pytest.mark.parametrize("version", ["0.24.9", "0.33.0", "1.0.0", "nightly"])
def test_an_in_place_reload_is_refused_with_a_vllm_that_nobody_tried(version: str) -> None:
    (problem,) = reload_method_problems(LibraConfig(), version)

    assert "0.25 to 0.32" in problem
    assert f"installed is {version}" in problem
    assert "set rollout_weight_reload_method=restart" in problem


def test_a_restart_goes_with_any_vllm() -> None:
    assert reload_method_problems(LibraConfig(rollout_weight_reload_method="restart"), "0.99.0") == []


def test_a_model_that_can_only_be_planned_cannot_be_started() -> None:
    config = compose([*GPUS, "model=qwen3_30b_a3b"])

    (problem,) = start_problems(config, architecture(config))

    assert "Qwen3MoeForCausalLM can be planned" in problem
    assert "mixture-of-experts" in problem


def test_a_dense_model_can_be_started() -> None:
    config = compose(GPUS)

    assert start_problems(config, architecture(config)) == []


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("algorithm.lr_warmup_steps=100", "the learning rate only rises"),
        ("max_concurrent_rollouts=64", "a batch is generated in several goes"),
        ("micro_batch_size=400", "more than the 256 trajectories"),
        ("algorithm.overlong_penalty=0.5", "takes nothing off while algorithm.overlong_buffer_tokens=0"),
        ("weights.proof_tolerance=1e-3", "rounding alone may fail"),
        ("max_head_offpolicyness=9", "beyond 8 versions"),
    ],
)
def test_doubtful_choices_are_said_and_allowed(override: str, wanted: str) -> None:
    config = compose([*GPUS, override])

    assert any(wanted in note for note in notes(config))
    assert problems(config) == []


@pytest.mark.parametrize(("mode", "noted"), [("slurm", 1), ("local", 0)])
def test_a_run_directory_of_one_node_is_said(mode: str, noted: int) -> None:
    assert len(notes(compose([*GPUS, f"launch.mode={mode}", "launch.run_dir=/tmp/run"]))) == noted


def test_a_plain_configuration_gets_no_note() -> None:
    assert notes(compose(GPUS)) == []


def test_rules_survive_values_that_are_out_of_range() -> None:
    """All problems are listed at once, so the rules also see what the ranges refuse."""
    broken = replace(LibraConfig(), n_samples=0, train_tp_size=0, vllm_tp_size=0, batch_size=0, max_model_len=-1)

    assert len(problems(broken)) >= 5
