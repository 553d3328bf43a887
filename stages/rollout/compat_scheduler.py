"""vLLM's schedulers with one rule more: where nothing else runs, nothing is begun beside a proof, nor before its answer is out.

After new weights were swapped in, every request under way waits to be computed anew, and the proof waits ahead of them. vLLM
would fill the proof's step with as much of their prompts as it can take (0.2 s of a 7B model on an H200, seconds on a
CPU), and no answer is let out before the proof is there. Alone its step takes no longer than the proof. Nor may the next step, where
vLLM schedules ahead: it is prepared by the same thread that would let out the proof's answer.

Loaded by vLLM in the process of its engine core (option `scheduler_cls`). What it relies on in vLLM 0.25 to 0.32: the attributes
`running`, `waiting` and `max_num_scheduled_tokens`, the last of which is read anew for each step and may be 0, as while vLLM is paused.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from stages.rollout.compat import PROOF_REQUEST


class _ProofAlone:
    """To be put before a scheduler of vLLM."""

    running: Any
    waiting: Any
    max_num_scheduled_tokens: int

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        most_tokens = self.max_num_scheduled_tokens
        proofs = [*takewhile(_is_proof, self.waiting), *self.running]
        if proofs and all(map(_is_proof, self.running)):
            self.max_num_scheduled_tokens = min(most_tokens, sum(map(_tokens_to_compute, proofs)))
        try:
            return super().schedule(*arguments, **options)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = most_tokens


def _is_proof(request: Any) -> bool:
    """Not by its priority, which a client may ask for too, and then would have the engine for itself."""
    return str(request.request_id).startswith(PROOF_REQUEST)


def _tokens_to_compute(request: Any) -> int:
    """None once its prompt is on its way: a proof generates one token, with the last of the prompt."""
    return max(0, int(request.num_tokens - request.num_computed_tokens))


class ProofAloneScheduler(_ProofAlone, Scheduler):
    """Where vLLM schedules a step when the one before has ended."""


class ProofAloneAsyncScheduler(_ProofAlone, AsyncScheduler):
    """Where it schedules a step while the one before runs."""
