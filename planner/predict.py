"""What a step of a configured layout takes: expected, and at best."""

from __future__ import annotations

from conf.schema import LibraConfig
from planner.architecture import Architecture
from planner.efficiency import EXPECTED, IDEAL
from planner.lengths import longest_possible
from planner.memory import DTYPE_BYTES
from planner.rollout_cost import generate_seconds
from planner.train_cost import train_seconds


def expected(config: LibraConfig, arch: Architecture) -> dict[str, float]:
    """Seconds: train_s, generate_s, step_s (both sides work at the same time), and every term of the two."""
    lengths = longest_possible(config)
    train = train_seconds(config, arch, lengths, EXPECTED)
    generate = generate_seconds(config, arch, lengths, EXPECTED)
    train_s, generate_s = sum(train.values()), sum(generate.values())
    terms = {"step_s": max(train_s, generate_s), "train_s": train_s, "generate_s": generate_s}
    terms |= {f"train_{name}_s": seconds for name, seconds in train.items()}
    return terms | {f"generate_{name}_s": seconds for name, seconds in generate.items()}


def at_best(config: LibraConfig, arch: Architecture) -> dict[str, float]:
    """Seconds and bytes that the hardware cannot beat. refresh_s: a node reads every published byte once."""
    lengths = longest_possible(config)
    weight_bytes = float(arch.parameters * DTYPE_BYTES[config.weights.dtype])
    return {
        "train_s": sum(train_seconds(config, arch, lengths, IDEAL).values()),
        "generate_s": sum(generate_seconds(config, arch, lengths, IDEAL).values()),
        "refresh_s": weight_bytes / config.hardware.network_bytes_per_s,
        "weight_bytes": weight_bytes,
    }
