"""The GRPO objective as pure functions of log-probabilities; every argument is float32 [N], one entry per loss token.

Sources: group advantages, Shao et al. 2024 (arXiv 2402.03300, GRPO); clipping, Schulman et al. 2017 (arXiv 1707.06347,
PPO); separate bounds, Yu et al. 2025 (arXiv 2503.14476, DAPO "clip-higher"); proximal policy apart from the behaviour
policy, Hilton et al. 2021 (arXiv 2110.00641) as used by AReaL, Fu et al. 2025 (arXiv 2505.24298, section 5.2); KL
estimate, Schulman 2020 ("Approximating KL divergence", k3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Objective:
    """Hyperparameters of the loss; names as in `conf.schema.AlgorithmConfig`."""

    clip_low: float
    clip_high: float
    behaviour_weight_cap: float
    kl_coef: float


@dataclass(frozen=True)
class LossTerms:
    """`loss` is the sum over the given tokens, not yet divided; `clipped` counts tokens whose ratio the clip cut off."""

    loss: torch.Tensor
    clipped: torch.Tensor


def behaviour_weights(proximal: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """min(pi_prox / pi_behav, cap): the importance weight of decoupled PPO, a constant of the update.

    AReaL (equation 5) leaves the weight unbounded and its code drops tokens above a cap; we truncate, which keeps every
    token in the gradient (truncated importance sampling, Ionides 2008).
    """
    return (proximal - behaviour).exp().clamp(max=cap)


def policy_terms(
    current: torch.Tensor, proximal: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, objective: Objective
) -> LossTerms:
    """-sum w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(current - proximal), plus the KL term.

    Gradients flow through `current` only.
    """
    ratio = (current - proximal).exp()
    free = ratio * advantages
    held = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages
    loss = -(weights * torch.minimum(free, held)).sum()
    if objective.kl_coef:
        loss = loss + objective.kl_coef * kl_estimate(current, proximal).sum()
    return LossTerms(loss, (held < free).sum())


def kl_estimate(current: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """k3: exp(d) - d - 1 with d = reference - current; unbiased for KL(current || reference) and never negative."""
    difference = reference - current
    return difference.exp() - difference - 1
