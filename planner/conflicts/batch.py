"""What one optimizer step trains on, and how far generation may run ahead.

The trainer takes any batch_size and micro_batch_size (ranks get equal counts up to one sequence, the last micro-batch may
be short; `stages/trainer/micro_batches.py`). Only whole groups, and work for every rank, are really needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import LibraConfig


def whole_groups(config: LibraConfig) -> Iterator[str]:
    batch, group = config.batch_size, max(1, config.n_samples)
    if batch % group:
        nearest = max(1, round(batch / group)) * group
        yield (
            f"batch_size={batch} is not a multiple of n_samples={group}: a step trains whole groups;"
            f" set batch_size={nearest}, or change n_samples"
        )


def room_for_a_prompt(config: LibraConfig) -> Iterator[str]:
    if config.max_new_tokens >= config.max_model_len:
        yield (
            f"max_new_tokens={config.max_new_tokens} leaves no room for a prompt in max_model_len={config.max_model_len};"
            " lower max_new_tokens or raise max_model_len"
        )


def fresh_enough(config: LibraConfig) -> Iterator[str]:
    """See `stages/controller/staleness.py`: with fewer versions of slack the trainer starves between two syncs."""
    needed = config.sync_interval - 1
    if config.max_head_offpolicyness < needed:
        yield (
            f"max_head_offpolicyness={config.max_head_offpolicyness} is below sync_interval - 1 = {needed}: with weights"
            " synced that rarely no trajectory would be fresh enough; raise max_head_offpolicyness or lower sync_interval"
        )


def a_group_in_flight(config: LibraConfig) -> Iterator[str]:
    if config.max_concurrent_rollouts < config.n_samples:
        yield (
            f"max_concurrent_rollouts={config.max_concurrent_rollouts} is below n_samples={config.n_samples}: no group"
            " could be in flight; raise max_concurrent_rollouts"
        )


def work_for_every_rank(config: LibraConfig) -> Iterator[str]:
    ranks = max(1, config.train_tp_size * config.train_pp_size * config.train_cp_size)
    replicas = config.train_gpus // ranks
    if config.global_resource_planner.initial_allocation_strategy == "configured" and config.batch_size < replicas:
        yield (
            f"batch_size={config.batch_size} is less than the {replicas} data-parallel replicas of"
            f" train_gpus={config.train_gpus}: some would have nothing to train; raise batch_size or lower train_gpus"
        )


def whole_distribution(config: LibraConfig) -> Iterator[str]:
    if config.top_p < 1.0:
        yield (
            f"top_p={config.top_p}: vLLM's log-probs are then those of the nucleus, the trainer's those of the whole"
            " distribution, and their ratio is wrong; only top_p=1.0 is built"
        )


def punishment_inside_the_answer(config: LibraConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if 0 < algorithm.overlong_buffer_tokens >= config.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer_tokens={algorithm.overlong_buffer_tokens} is not less than"
            f" max_new_tokens={config.max_new_tokens}: every answer would be punished; lower"
            " algorithm.overlong_buffer_tokens (a fifth of max_new_tokens is DAPO's) or set it to 0"
        )
    elif algorithm.overlong_buffer_tokens and not algorithm.overlong_penalty:
        yield (
            f"algorithm.overlong_buffer_tokens={algorithm.overlong_buffer_tokens} with algorithm.overlong_penalty=0 takes"
            " nothing off; set algorithm.overlong_penalty, or algorithm.overlong_buffer_tokens=0"
        )


RULES = (
    whole_groups,
    room_for_a_prompt,
    fresh_enough,
    a_group_in_flight,
    work_for_every_rank,
    whole_distribution,
    punishment_inside_the_answer,
)
