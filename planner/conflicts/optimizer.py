"""The optimizer's own options and where its state lives."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig


def offload_means_a_fraction(config: LibraConfig) -> Iterator[str]:
    fraction = config.megatron_optimizer_offload_fraction
    if config.megatron_optimizer_cpu_offload and fraction == 0:
        yield (
            "megatron_optimizer_cpu_offload=true with megatron_optimizer_offload_fraction=0 offloads nothing; set"
            " megatron_optimizer_offload_fraction (1.0 offloads all of it) or megatron_optimizer_cpu_offload=false"
        )
    if fraction > 0 and not config.megatron_optimizer_cpu_offload:
        yield (
            f"megatron_optimizer_offload_fraction={fraction} needs megatron_optimizer_cpu_offload=true; set it, or set"
            " megatron_optimizer_offload_fraction=0"
        )


def a_host_beside_the_device(config: LibraConfig) -> Iterator[str]:
    """The copies between the two need CUDA; on a CPU everything is in host memory already."""
    if config.hardware.device != "cpu":
        return
    for name in ("megatron_optimizer_cpu_offload", "megatron_use_cpu_initialization"):
        if getattr(config, name):
            yield f"{name}=true: on hardware.device=cpu everything is in host memory already; set {name}=false"


def moments_decay(config: LibraConfig) -> Iterator[str]:
    """At 1 the bias correction of Adam, 1 - beta^t, is 0."""
    for name in ("adam_beta1", "adam_beta2"):
        if getattr(config.algorithm, name) == 1.0:
            yield f"algorithm.{name}=1.0 makes Adam divide by zero; set algorithm.{name} below 1, such as 0.95"


def a_floor_without_a_slope(config: LibraConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.lr_schedule == "constant" and algorithm.lr_min_ratio > 0:
        yield (
            f"algorithm.lr_min_ratio={algorithm.lr_min_ratio} does nothing while algorithm.lr_schedule=constant; set"
            " algorithm.lr_schedule=cosine or linear, or algorithm.lr_min_ratio=0"
        )


RULES = (offload_means_a_fraction, a_host_beside_the_device, moments_decay, a_floor_without_a_slope)
