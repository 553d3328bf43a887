"""Configurations and models for tests of the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conf.schema import LibraConfig
from planner.architecture import Architecture

QWEN2_5_1_5B = Architecture("Qwen2ForCausalLM", 28, 1536, 8960, 12, 2, 128, 151936, True, 32768)
QWEN2_5_7B = Architecture("Qwen2ForCausalLM", 28, 3584, 18944, 28, 4, 128, 152064, False, 32768)
QWEN3_14B = Architecture("Qwen3ForCausalLM", 40, 5120, 17408, 40, 8, 128, 151936, False, 40960)
QWEN3_30B_A3B = Architecture("Qwen3MoeForCausalLM", 48, 2048, 6144, 32, 4, 128, 151936, False, 40960, 128, 8, 768)
EIGHT_LAYERS_OF_7B = Architecture("Qwen2ForCausalLM", 8, 3584, 18944, 28, 4, 128, 151936, False, 32768)
"""What docs/benchmarks.md calls the 7B shape of 8 layers."""

H200 = {"gpu_memory_bytes": 141e9, "gpu_memory_bytes_per_s": 4.8e12}
"""Beside the H100 of the defaults."""

GROUPS = ("hardware", "rollout", "slurm", "launch", "model")


def configured(**options: Any) -> LibraConfig:
    """The defaults as a Slurm run, with `options`: of a group as a mapping, of the planner by their bare name."""
    planner_options = set(LibraConfig().global_resource_planner.__dataclass_fields__)
    base = LibraConfig()
    base = replace(base, launch=replace(base.launch, mode="slurm"))
    planner = {name: options.pop(name) for name in list(options) if name in planner_options}
    for name in GROUPS:
        if name in options:
            options[name] = replace(getattr(base, name), **options[name])
    return replace(base, global_resource_planner=replace(base.global_resource_planner, **planner), **options)
