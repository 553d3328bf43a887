"""Adam with float32 master weights, split over data-parallel ranks (megatron-core's distributed optimizer)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from conf.sections import AlgorithmConfig
from stages.trainer.model import PolicyModel
from stages.trainer.parallel import RankGrid


class NonFiniteGradientError(ArithmeticError):
    """The gradient holds an infinity or a NaN; the weights were not touched."""


@dataclass(frozen=True)
class TrainableModel:
    """The model behind megatron-core's gradient buffers, and the optimizer that steps it.

    Gradients accumulate in float32 and are summed, not averaged, over data-parallel ranks: the loss is already divided
    by the tokens of the whole batch.
    """

    module: PolicyModel
    wrapped: DistributedDataParallel
    optimizer: Any
    algorithm: AlgorithmConfig
    grid: RankGrid

    @classmethod
    def wrap(cls, module: PolicyModel, algorithm: AlgorithmConfig, grid: RankGrid) -> TrainableModel:
        """Take over the parameters of `module`, which must hold their values already (masters are copied from them)."""
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(module.config, ddp, module)
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,  # set before every step
            weight_decay=algorithm.weight_decay,
            adam_beta1=algorithm.adam_beta1,
            adam_beta2=algorithm.adam_beta2,
            adam_eps=algorithm.adam_eps,
            bf16=module.config.bf16,
            params_dtype=module.config.params_dtype,
            use_distributed_optimizer=True,
        )
        with grid.optimizer_calls():
            optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
        for group in optimizer.param_groups:
            # Megatron's own parameter scheduler does this; biases and norms have wd_mult 0.
            group["weight_decay"] = algorithm.weight_decay * group["wd_mult"]
        return cls(module, wrapped, optimizer, algorithm, grid)

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish_step(self, learning_rate: float) -> float:
        """Reduce gradients over all ranks, clip, step; returns the global gradient norm before clipping.

        Raises NonFiniteGradientError, on every rank, before any weight has changed.
        """
        finalize_model_grads([self.wrapped])
        with self.grid.optimizer_calls():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                raise NonFiniteGradientError(f"gradient norm is {norm}; the step was not taken")
            groups = self.optimizer.param_groups
            for group in groups:
                group["lr"] = learning_rate
            if self.algorithm.clip_grad_norm:
                parameters = [parameter for group in groups for parameter in group["params"]]
                clip_grad_by_total_norm_fp32(parameters, self.algorithm.clip_grad_norm, norm)
            self.optimizer.step_with_ready_grads()
        return norm
