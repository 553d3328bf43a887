"""vLLM's schedulers with one rule more: where nothing runs, a proof that waits gets a step of its own.

After new weights were swapped in, every request under way waits to be computed anew, and the proof waits ahead of them. vLLM
would fill the proof's step with as much of their prompts as it can take (0.2 s of a 7B model on an H200, seconds on a
CPU), and no answer is let out before the proof is there. Alone its step takes no longer than the proof.

Loaded by vLLM in the process of its engine core (option `scheduler_cls`). What it relies on in vLLM 0.25 to 0.32: the attributes
`running`, `waiting` and `max_num_scheduled_tokens`, the last of which is read anew for each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from stages.rollout.compat import PROOF_PRIORITY


class _ProofAlone:
    """To be put before a scheduler of vLLM."""

    running: Any
    waiting: Any
    max_num_scheduled_tokens: int

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        most_tokens = self.max_num_scheduled_tokens
        proof_tokens = 0 if self.running else _leading_proof_tokens(self.waiting)
        if proof_tokens:
            self.max_num_scheduled_tokens = min(proof_tokens, most_tokens)
        try:
            return super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = most_tokens


def _leading_proof_tokens(waiting: Iterable[Any]) -> int:
    proofs = takewhile(lambda request: request.priority == PROOF_PRIORITY, waiting)
    return sum(int(request.num_tokens) for request in proofs)


class ProofAloneScheduler(_ProofAlone, Scheduler):
    """Where vLLM schedules a step when the one before has ended."""


class ProofAloneAsyncScheduler(_ProofAlone, AsyncScheduler):
    """Where it schedules a step while the one before runs."""
