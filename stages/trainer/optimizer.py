"""Adam with float32 master weights, split over data-parallel ranks (megatron-core's distributed optimizer)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from conf.schema import LibraConfig
from stages.trainer.model import PolicyModel
from stages.trainer.offload import building, pin_host_weights
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
    clip_grad_norm: float
    grid: RankGrid

    @classmethod
    def wrap(cls, module: PolicyModel, config: LibraConfig, grid: RankGrid) -> TrainableModel:
        """Take over the parameters of `module`, which must hold their values already (masters are copied from them)."""
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(module.config, ddp, module)
        options = optimizer_config(config, module.config.params_dtype)
        with grid.optimizer_calls(), building() if options.optimizer_cpu_offload else nullcontext():
            optimizer = get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=False)
        if options.optimizer_cpu_offload:
            pin_host_weights(optimizer)
        for group in optimizer.param_groups:
            # Megatron's own parameter scheduler does this; biases and norms have wd_mult 0.
            group["weight_decay"] = config.algorithm.weight_decay * group["wd_mult"]
        return cls(module, wrapped, optimizer, config.algorithm.clip_grad_norm, grid)

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
            if self.clip_grad_norm:
                parameters = [parameter for group in groups for parameter in group["params"]]
                apart = self.optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self.clip_grad_norm, norm, use_decoupled_grad=apart)
            self.optimizer.step_with_ready_grads()
        return norm


def optimizer_config(config: LibraConfig, params_dtype: torch.dtype) -> OptimizerConfig:
    """megatron-core's options for a model whose weights are of `params_dtype`.

    With offload, a bfloat16 model needs megatron-core's precision-aware code path, in which the offloading optimizer
    itself holds the float32 masters (beside it they would stay on the GPU); all state stays float32. A float32 model must
    not take it: the part that stays on the GPU would be given no gradients.
    """
    algorithm, bf16 = config.algorithm, params_dtype == torch.bfloat16
    options = OptimizerConfig(
        optimizer="adam",
        lr=0.0,  # set before every step
        weight_decay=algorithm.weight_decay,
        adam_beta1=algorithm.adam_beta1,
        adam_beta2=algorithm.adam_beta2,
        adam_eps=algorithm.adam_eps,
        bf16=bf16,
        params_dtype=params_dtype,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=config.megatron_optimizer_cpu_offload,
        optimizer_offload_fraction=config.megatron_optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=True,
        pin_cpu_grads=True,
        pin_cpu_params=True,
    )
    if bf16 and options.optimizer_cpu_offload:
        # Not given above: the constructor of 0.16.1 then asks for the version of Transformer Engine, and fails without it.
        options.use_precision_aware_optimizer = options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        options.store_param_remainders = False
    return options
