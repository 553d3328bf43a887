"""What the proof of load can tell. It compares log-probs of a probe; two versions that are close on it look alike.

Where trainer, files and engine compute in float32, they agree to about 1e-5 nats, so the difference that is allowed can be
half of what the new version moved the probe: an engine that kept the version before is then always found out. In 16 bits
rounding is larger than a small learning rate's step; there the configured tolerance stands, and the trainer says so.
"""

from __future__ import annotations

from conf.schema import LibraConfig
from stages.weights.manifest import Probe

EXACT_RESOLUTION_NATS = 1e-4
"""Ten times the disagreement of float32 trainer and engine."""


def resolution_nats(config: LibraConfig) -> float:
    """Differences of the probe below this are rounding, not weights."""
    exact = {config.train_dtype, config.weights.dtype, config.rollout.dtype} == {"float32"}
    return min(EXACT_RESOLUTION_NATS, config.weights.proof_tolerance) if exact else config.weights.proof_tolerance


def probe_change_nats(before: Probe, after: Probe) -> float:
    """The largest change of a log-prob; infinite when the sequence itself is another."""
    if before.token_ids != after.token_ids:
        return float("inf")
    return max(abs(new - old) for new, old in zip(after.logprobs, before.logprobs, strict=True))


def allowed_difference_nats(tolerance: float, resolution: float, before: Probe | None, after: Probe) -> float:
    """How far the engine may be from the trainer: `tolerance`, or half of the probe's change where that can be resolved."""
    half = float("inf") if before is None else probe_change_nats(before, after) / 2
    return min(tolerance, half) if half > resolution else tolerance
