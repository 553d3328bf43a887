"""When a failed step is started again, where, and which nodes are to be left out. Pure.

A budget for each step and attempt, pauses that double, and a list of nodes: more is not needed, because whatever a restart
cannot cure ends the run with the step's own failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stages.desired import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, StepSpec

BAD_NODE_FAILURES = 2
"""Failed replacements on one node that put it on the exclude list."""


@dataclass(frozen=True)
class Failure:
    """One failed start of a step. `number` is that of the incarnation, 0 for the first; `host` is empty when unknown."""

    step: str
    number: int
    host: str = ""


def backoff_s(failures: int) -> float:
    """Pause before the start that follows the `failures`-th failure (from 1): 1, 2, 4, ... 60 seconds."""
    return float(min(FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16), LONGEST_BACKOFF_S))


@dataclass
class RestartBook:
    """The failures of one attempt."""

    failures: list[Failure] = field(default_factory=list)

    def count(self, step: str) -> int:
        return sum(failure.step == step for failure in self.failures)

    def failed(self, spec: StepSpec, number: int, host: str = "") -> float | None:
        """Note a failure. Seconds to wait before the next start; None when there is none: the budget is used up."""
        earlier = self.count(spec.name)
        self.failures.append(Failure(spec.name, number, host))
        return backoff_s(earlier + 1) if earlier < spec.max_restarts else None

    def bad_nodes(self) -> set[str]:
        """Nodes on which replacements failed twice. First starts do not count: they may fail together, for one reason."""
        counts = Counter(failure.host for failure in self.failures if failure.number and failure.host)
        return {host for host, count in counts.items() if count >= BAD_NODE_FAILURES}


def another_place(
    spec: StepSpec, placed: Sequence[StepSpec], running: Iterable[StepSpec], usable: Collection[int]
) -> StepSpec | None:
    """`spec` on another node of its component that has room for it; None when there is none.

    `placed` are all steps of the desired state: together they show what a node of the component offers. `running` are the
    steps that run or are about to, each where it is now; `usable` numbers the component's nodes that may be used.
    """
    mine = [step for step in placed if step.component == spec.component]
    nodes = range(max(step.node + step.nodes for step in mine))
    gpus = max(_gpus(mine, node) for node in nodes)
    cpus = max(_cpus(mine, node) for node in nodes)
    others = [step for step in running if step.component == spec.component and step.name != spec.name]
    for node in sorted(usable):
        has_room = (
            _gpus(others, node) + spec.gpus_per_node <= gpus
            and _cpus(others, node) + spec.tasks_per_node * spec.cpus_per_task <= cpus
        )
        if node != spec.node and spec.nodes == 1 and has_room:
            return replace(spec, node=node)
    return None


def _gpus(steps: Iterable[StepSpec], node: int) -> int:
    return sum(step.gpus_per_node for step in _on(steps, node))


def _cpus(steps: Iterable[StepSpec], node: int) -> int:
    return sum(step.tasks_per_node * step.cpus_per_task for step in _on(steps, node))


def _on(steps: Iterable[StepSpec], node: int) -> Iterable[StepSpec]:
    return (step for step in steps if step.node <= node < step.node + step.nodes)
