"""What the trainer hands to megatron-core, and which waits it allows, for given options of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig
from stages.trainer.architecture import read_architecture
from stages.trainer.model import transformer_config
from stages.trainer.optimizer import optimizer_config
from stages.trainer.parallel import batch_timeout_s
from stages.trainer.policy import build_device
from stages.trainer.stage import Trainer

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_offload_nothing_of_it_is_asked_for(dtype: torch.dtype) -> None:
    options = optimizer_config(LibraConfig(), dtype)

    assert (options.optimizer_cpu_offload, options.optimizer_offload_fraction) == (False, 0.0)
    assert not options.use_precision_aware_optimizer
    assert options.bf16 is (dtype == torch.bfloat16)


@pytest.mark.exercises("megatron_optimizer_cpu_offload", "megatron_optimizer_offload_fraction")
@pytest.mark.parametrize(("dtype", "masters_in_offload"), [(torch.float32, False), (torch.bfloat16, True)])
def test_offload_arrives_with_its_fraction_pinned_and_overlapped(dtype: torch.dtype, masters_in_offload: bool) -> None:
    config = LibraConfig(megatron_optimizer_cpu_offload=True, megatron_optimizer_offload_fraction=0.25)

    options = optimizer_config(config, dtype)

    assert (options.optimizer_cpu_offload, options.optimizer_offload_fraction) == (True, 0.25)
    assert options.overlap_cpu_optimizer_d2h_h2d
    assert options.pin_cpu_grads
    assert options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 is masters_in_offload


def test_adam_gets_the_numbers_of_the_algorithm() -> None:
    algorithm = AlgorithmConfig(adam_beta1=0.5, adam_beta2=0.6, adam_eps=1e-3, weight_decay=0.2)

    options = optimizer_config(LibraConfig(algorithm=algorithm), torch.float32)

    assert (options.adam_beta1, options.adam_beta2, options.adam_eps, options.weight_decay) == (0.5, 0.6, 1e-3, 0.2)


@pytest.mark.exercises("megatron_use_cpu_initialization")
def test_a_model_for_the_gpu_is_built_in_host_memory_when_asked_for() -> None:
    assert build_device(LibraConfig(megatron_use_cpu_initialization=True), CUDA) == CPU
    assert build_device(LibraConfig(), CUDA) == CUDA


@pytest.mark.parametrize("on_cpu", [True, False])
def test_megatron_is_told_where_to_build(on_cpu: bool) -> None:
    options = transformer_config(read_architecture(SMALL), tp=1, dtype=torch.float32, on_cpu=on_cpu)

    assert options.use_cpu_initialization is on_cpu


@pytest.mark.exercises("global_resource_planner.runtime_batch_collection_max_retries")
def test_the_trainer_waits_for_all_retries_of_the_controller() -> None:
    config = LibraConfig()
    config.global_resource_planner.runtime_batch_collection_timeout_s = 100.0
    without = batch_timeout_s(config, step=1)
    config.global_resource_planner.runtime_batch_collection_max_retries = 2

    assert without > 100.0
    assert batch_timeout_s(config, step=1) > 300.0


@pytest.mark.exercises("sync_interval")
@pytest.mark.parametrize(("interval", "published"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_the_trainer_publishes_every_so_many_steps_and_the_last(interval: int, published: list[int]) -> None:
    context = cast(Any, SimpleNamespace(config=LibraConfig(sync_interval=interval, total_steps=5)))
    nothing = cast(Any, None)

    trainer = Trainer(context, nothing, nothing, nothing, nothing)

    assert [version for version in range(1, 6) if trainer._is_published(version)] == published
