"""Numbers of a machine that can only be a wrong unit: everything is in bytes, bytes/s and FLOP/s, nothing in Gb/s or GB."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig

PLAUSIBLE = {
    "gpu_memory_bytes": (1e9, 2e12, "80 GB is 80e9"),
    "gpu_flops": (1e10, 2e16, "989 TFLOP/s is 989e12"),
    "gpu_memory_bytes_per_s": (1e9, 1e14, "3.35 TB/s is 3.35e12"),
    "link_bytes_per_s": (1e8, 1e13, "450 GB/s is 450e9"),
    "network_bytes_per_s": (1e8, 2e11, "a port of 400 Gb/s is 50e9 bytes/s"),
}
"""Option: the range of machines that exist (from one processor core to twice a B300 and more), and its unit by example.

The upper end of the network, 1.6 Tb/s for each GPU, is what catches 200 or 400 Gb/s written as 200e9 or 400e9.
"""


def plausible_numbers(config: LibraConfig) -> Iterator[str]:
    for name, (least, most, example) in PLAUSIBLE.items():
        value = getattr(config.hardware, name)
        unit = "bytes" if name == "gpu_memory_bytes" else "FLOP/s" if name == "gpu_flops" else "bytes/s"
        if value < least:
            yield f"hardware.{name}={value:g} is less than {least:g} {unit}: {example}"
        elif value >= most:
            yield f"hardware.{name}={value:g} is not below {most:g} {unit}: {example}"


def network_slower_than_link(config: LibraConfig) -> Iterator[str]:
    network, link = config.hardware.network_bytes_per_s, config.hardware.link_bytes_per_s
    if network > link:
        yield (
            f"hardware.network_bytes_per_s={network:g} is above hardware.link_bytes_per_s={link:g}: the network between"
            " nodes is not faster than the link inside one; a port of 400 Gb/s is 50e9 bytes/s"
        )


def memory_left(config: LibraConfig) -> Iterator[str]:
    margin = config.global_resource_planner.memory_budget_safety_margin_bytes
    memory = config.hardware.gpu_memory_bytes
    if margin >= memory:
        yield (
            f"global_resource_planner.memory_budget_safety_margin_bytes={margin:g} leaves nothing of"
            f" hardware.gpu_memory_bytes={memory:g}; lower it"
        )
    elif 0 < margin < 1e6:
        yield (
            f"global_resource_planner.memory_budget_safety_margin_bytes={margin:g} is less than 1e6 bytes: 2 GB is 2e9"
        )


def a_processor_for_each_slot(config: LibraConfig) -> Iterator[str]:
    hardware = config.hardware
    if hardware.cpus_per_node < hardware.gpus_per_node:
        yield (
            f"hardware.cpus_per_node={hardware.cpus_per_node} is less than hardware.gpus_per_node={hardware.gpus_per_node}:"
            " every GPU needs a processor; change one of them"
        )


RULES = (plausible_numbers, network_slower_than_link, memory_left, a_processor_for_each_slot)
