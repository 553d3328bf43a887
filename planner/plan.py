"""What the planner decides, and what plan.json holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TrainLayout:
    """The core training pool: tp x pp x cp x dp ranks, one rank per GPU."""

    gpus: int
    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    cp: int
    dp: int
    micro_batch_size: int


@dataclass(frozen=True)
class InstancePlacement:
    """One vLLM server. `component` is its hetjob component (0 when the layout is single); `node` counts inside it."""

    name: str
    tp: int
    component: int
    node: int


@dataclass(frozen=True)
class RolloutLayout:
    gpus: int
    nodes: int
    gpus_per_node: int
    instances: tuple[InstancePlacement, ...]


@dataclass(frozen=True)
class Rejected:
    """A branch that was cut, and why, with wanted and available."""

    branch: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """A division of the GPUs that can be launched, with the times that the cost model expects of a step."""

    train_gpus: int
    rollout_gpus: int
    train_tp_size: int
    train_s: float
    generate_s: float

    @property
    def step_s(self) -> float:
        """Both sides work at the same time."""
        return max(self.train_s, self.generate_s)

    @property
    def rank(self) -> tuple[float, float, int, int]:
        """Sorts the best first. Equal step times: the other side's time, then more rollout GPUs, then a smaller TP.

        More rollout, because the times assume trajectories of equal length: a longer tail than that is generation's.
        """
        return self.step_s, min(self.train_s, self.generate_s), -self.rollout_gpus, self.train_tp_size


@dataclass(frozen=True)
class Plan:
    """`memory_bytes` maps "trainer" and "rollout" to named terms per GPU, with "total" and "budget", and "trainer_host" to
    those of a trainer node's host memory when something is offloaded.

    `predicted` holds seconds as the cost model expects them, `bounds` what the hardware cannot beat (`planner.predict`).
    `alternative` is what initial_allocation_strategy=grp would choose, when this plan keeps another division.
    `evaluated` counts the divisions whose times were computed.
    """

    layout: str
    layout_reason: str
    device: str
    train: TrainLayout
    rollout: RolloutLayout
    memory_bytes: dict[str, dict[str, float]] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    rejected: tuple[Rejected, ...] = ()
    runners_up: tuple[Choice, ...] = ()
    strategy: str = "configured"
    bounds: dict[str, float] = field(default_factory=dict)
    alternative: Choice | None = None
    evaluated: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Plan:
        """Inverse of `to_dict`; keys that a record adds (run id, attempt) are ignored."""
        rollout = record["rollout"]
        alternative = record["alternative"]
        instances = tuple(InstancePlacement(**placement) for placement in rollout["instances"])
        return cls(
            layout=record["layout"],
            layout_reason=record["layout_reason"],
            device=record["device"],
            train=TrainLayout(**record["train"]),
            rollout=RolloutLayout(rollout["gpus"], rollout["nodes"], rollout["gpus_per_node"], instances),
            memory_bytes=record["memory_bytes"],
            predicted=record["predicted"],
            rejected=tuple(Rejected(**cut) for cut in record["rejected"]),
            runners_up=tuple(Choice(**choice) for choice in record["runners_up"]),
            strategy=record["strategy"],
            bounds=record["bounds"],
            alternative=Choice(**alternative) if alternative else None,
            evaluated=record["evaluated"],
        )
