"""What the trainer's weights say about the fixed token sequence, so that an instance can prove that it serves them."""

from __future__ import annotations

from stages.trainer.policy import Policy
from stages.weights.manifest import Probe
from stages.weights.probe_tokens import probe_tokens


def probe(policy: Policy) -> Probe:
    """Token ids and their log-probs under the policy's present weights; collective over the tensor-parallel ranks."""
    tokens = probe_tokens(policy.config, policy.architecture.vocab_size)
    return Probe(tokens, tuple(policy.sequence_logprobs(list(tokens))))
