"""The policy of this rank: log-probabilities of a batch, and one GRPO update on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from conf.schema import LibraConfig
from stages.batches import Batch
from stages.trainer.architecture import Architecture, check_tensor_parallel, read_architecture, read_config
from stages.trainer.head import VocabShard, token_logprobs
from stages.trainer.hf_weights import load_weights
from stages.trainer.loss import Objective, behaviour_weights, policy_terms
from stages.trainer.mapping import padded_vocab_size
from stages.trainer.micro_batches import MicroBatch, loss_tokens_of_rank, micro_batches
from stages.trainer.model import build_model
from stages.trainer.optimizer import TrainableModel
from stages.trainer.parallel import RankGrid

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step, over the whole batch and all ranks.

    `logprob_difference_*` compare the log-probs of this update's weights with those of the sampler, over the tokens
    that the same version generated (`fresh_tokens` of them); None when there are none.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    clip_fraction: float
    logprob_difference_max: float | None
    logprob_difference_mean: float | None
    fresh_tokens: int


@dataclass(frozen=True)
class Policy:
    """A loaded model with its optimizer."""

    architecture: Architecture
    trainable: TrainableModel
    config: LibraConfig
    grid: RankGrid

    @classmethod
    def load(cls, folder: Path, config: LibraConfig, grid: RankGrid, *, read_weights: bool = True) -> Policy:
        """Read a HF folder; without its weights, all parameters hold anything until a checkpoint is restored.

        Raises the ValueErrors of `stages.trainer.architecture` and `stages.trainer.hf_weights`.
        """
        architecture = read_architecture(read_config(folder))
        check_tensor_parallel(architecture, grid.tp)
        built_on = build_device(config, grid.device)
        model = build_model(architecture, tp=grid.tp, dtype=DTYPES[config.train_dtype], device=built_on)
        if read_weights:
            load_weights(model, folder, architecture, grid)
        model.to(grid.device)
        return cls(architecture, TrainableModel.wrap(model, config, grid), config, grid)

    def sequence_logprobs(self, token_ids: list[int]) -> list[float]:
        """log p(token i | tokens before i) at temperature 1 for i = 1 .. n - 1; collective over the tensor-parallel ranks."""
        tokens = torch.tensor([token_ids], device=self.grid.device)
        with torch.no_grad():
            hidden = self.trainable.wrapped(tokens[:, :-1], None, None)
            return self._head(hidden.flatten(0, 1), tokens[0, 1:], temperature=1.0).tolist()

    def recompute_logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-probs of this rank's loss tokens under the current weights, float32 [T]; 0 at all other tokens."""
        recomputed = torch.zeros(batch.num_tokens, device=self.grid.device)
        size = self.config.recompute_micro_batch_size
        with torch.no_grad():
            for micro in micro_batches(batch, self.grid.dp_rank, self.grid.dp, size, self.grid.device):
                recomputed[micro.token_index] = self._logprobs(micro)
        return recomputed

    def update(
        self, batch: Batch, proximal: torch.Tensor | None, *, version: int, learning_rate: float
    ) -> UpdateResult:
        """One GRPO step. `proximal` comes from `recompute_logprobs`; None takes the behaviour log-probs in its place.

        The loss is the sum over all loss tokens of the batch divided by their number, whatever the micro-batch size and
        the number of ranks. Sequences whose loss and gradient are exactly zero are counted, not computed.
        """
        inputs = _LossInputs.of(batch, proximal, self.config, version, self.grid.device)
        totals = _Totals.zero(self.grid.device)
        keep = None
        if proximal is not None:
            own = torch.from_numpy(loss_tokens_of_rank(batch, self.grid.dp_rank, self.grid.dp)).to(self.grid.device)
            totals.compare(inputs, proximal[own], own)
            keep = batch.advantages != 0.0 if self.config.algorithm.kl_coef == 0.0 else None
        self.trainable.start_step()
        for micro in micro_batches(
            batch, self.grid.dp_rank, self.grid.dp, self.config.micro_batch_size, self.grid.device, keep=keep
        ):
            loss = inputs.loss(self._logprobs(micro), micro.token_index, totals)
            loss.backward()
        grad_norm = self.trainable.finish_step(learning_rate)
        totals.reduce(self.grid.dp_group)
        return totals.result(batch.num_response_tokens, grad_norm, learning_rate)

    def _logprobs(self, micro: MicroBatch) -> torch.Tensor:
        """Log-probs of the loss tokens of `micro` at the sampling temperature, float32 [N]."""
        hidden = self.trainable.wrapped(micro.tokens, None, None)
        return self._head(hidden.flatten(0, 1)[micro.source], micro.targets, self.config.temperature)

    def _head(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        return token_logprobs(hidden, self.trainable.module.head_weight, targets, self._vocab_shard(), temperature)

    def _vocab_shard(self) -> VocabShard:
        vocab_size, tp = self.architecture.vocab_size, self.grid.tp
        rows = padded_vocab_size(self.architecture, tp) // tp
        start = self.grid.tp_rank * rows
        return VocabShard(start, min(rows, vocab_size - start), self.grid.tp_group)


def build_device(config: LibraConfig, device: torch.device) -> torch.device:
    """Where the model is built and its weights are read, before they move to `device` in one piece."""
    return torch.device("cpu") if config.megatron_use_cpu_initialization else device


@dataclass(frozen=True)
class _LossInputs:
    """Constants of the update for every token of the batch, on the device: float32 [T] (`fresh` is bool)."""

    behaviour: torch.Tensor
    proximal: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    fresh: torch.Tensor
    recomputed: bool
    loss_tokens: int
    objective: Objective

    @classmethod
    def of(
        cls, batch: Batch, proximal: torch.Tensor | None, config: LibraConfig, version: int, device: torch.device
    ) -> _LossInputs:
        algorithm = config.algorithm
        behaviour = torch.from_numpy(batch.behaviour_logprobs).to(device)
        recomputed = proximal is not None
        lengths = torch.from_numpy(batch.lengths).to(device)
        if proximal is None:
            proximal = behaviour
        return cls(
            behaviour=behaviour,
            proximal=proximal,
            weights=behaviour_weights(proximal, behaviour, algorithm.behaviour_weight_cap),
            advantages=torch.from_numpy(batch.advantages).to(device).repeat_interleave(lengths),
            fresh=torch.from_numpy(batch.versions).to(device) == version,
            recomputed=recomputed,
            loss_tokens=batch.num_response_tokens,
            objective=Objective(
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                behaviour_weight_cap=algorithm.behaviour_weight_cap,
                kl_coef=algorithm.kl_coef,
            ),
        )

    def loss(self, current: torch.Tensor, index: torch.Tensor, totals: _Totals) -> torch.Tensor:
        """The share of the global loss of the tokens at `index`; counts them in `totals`."""
        terms = policy_terms(current, self.proximal[index], self.advantages[index], self.weights[index], self.objective)
        loss = terms.loss / self.loss_tokens
        totals.add(loss.detach(), terms.clipped)
        if not self.recomputed:
            totals.compare(self, current.detach(), index)
        return loss


@dataclass(frozen=True)
class _Totals:
    """sums: float64 [loss, clipped tokens, differences, fresh tokens]; largest: float64 [1], the largest difference."""

    sums: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> _Totals:
        return cls(
            torch.zeros(4, dtype=torch.float64, device=device), torch.zeros(1, dtype=torch.float64, device=device)
        )

    def add(self, loss: torch.Tensor, clipped: torch.Tensor) -> None:
        self.sums[:2].add_(torch.stack([loss.double(), clipped.double()]))

    def compare(self, inputs: _LossInputs, logprobs: torch.Tensor, index: torch.Tensor) -> None:
        """Log-probs under this update's weights against the sampler's, where the same version generated the token."""
        differences = (logprobs - inputs.behaviour[index]).abs()[inputs.fresh[index]]
        count = torch.tensor(len(differences), device=differences.device)
        self.sums[2:].add_(torch.stack([differences.sum().double(), count.double()]))
        if len(differences):
            torch.maximum(self.largest, differences.max().double(), out=self.largest)

    def reduce(self, group: dist.ProcessGroup) -> None:
        dist.all_reduce(self.sums, group=group)
        dist.all_reduce(self.largest, op=dist.ReduceOp.MAX, group=group)

    def result(self, loss_tokens: int, grad_norm: float, learning_rate: float) -> UpdateResult:
        loss, clipped, differences, fresh = self.sums.tolist()
        return UpdateResult(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            clip_fraction=clipped / loss_tokens,
            logprob_difference_max=self.largest.item() if fresh else None,
            logprob_difference_mean=differences / fresh if fresh else None,
            fresh_tokens=int(fresh),
        )
