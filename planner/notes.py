"""What is allowed and still worth a second look: said beside the plan, never an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conf.schema import LibraConfig
from conf.sections import AlgorithmConfig

NUMB_TOLERANCE_NATS = 0.01
"""Log-probs of two engines in 16 bits differ by about this much, from rounding alone."""

FAR_OFF_POLICY = 8
"""Up to this lag AReaL keeps its final score (42.0 -> 41.0 on AIME24, 38.7 at 16; Fu et al. 2025, arXiv 2505.24298)."""


NODE_LOCAL = ("/tmp/", "/var/tmp/", "/dev/shm/")


def notes(config: LibraConfig) -> list[str]:
    """One sentence for each doubtful choice in a configuration that is otherwise right."""
    return [text for note in NOTES for text in note(config)]


def short_run(config: LibraConfig) -> Iterator[str]:
    warmup = config.algorithm.lr_warmup_steps
    if warmup and warmup >= config.total_steps > 0:
        yield (
            f"total_steps={config.total_steps} ends inside algorithm.lr_warmup_steps={warmup}: the learning rate only rises"
        )


def batch_in_pieces(config: LibraConfig) -> Iterator[str]:
    if config.max_concurrent_rollouts < config.batch_size:
        yield (
            f"max_concurrent_rollouts={config.max_concurrent_rollouts} is less than batch_size={config.batch_size}: a batch"
            " is generated in several goes, each with its own slowest answer"
        )


def micro_batch_beyond_the_share(config: LibraConfig) -> Iterator[str]:
    ranks = max(1, config.train_tp_size * config.train_pp_size * config.train_cp_size)
    share = -(-config.batch_size // max(1, config.train_gpus // ranks))
    if config.micro_batch_size > share:
        yield (
            f"micro_batch_size={config.micro_batch_size} is more than the {share} trajectories that one data-parallel"
            " replica trains in a step"
        )


def penalty_without_buffer(config: LibraConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if not algorithm.overlong_buffer_tokens and algorithm.overlong_penalty != AlgorithmConfig().overlong_penalty:
        yield (
            f"algorithm.overlong_penalty={algorithm.overlong_penalty:g} takes nothing off while"
            " algorithm.overlong_buffer_tokens=0"
        )


def tight_proof(config: LibraConfig) -> Iterator[str]:
    formats = {config.train_dtype, config.weights.dtype, config.rollout.dtype}
    if config.weights.proof_tolerance < NUMB_TOLERANCE_NATS and formats != {"float32"}:
        yield (
            f"weights.proof_tolerance={config.weights.proof_tolerance:g} is meant for float32; in {', '.join(sorted(formats))}"
            " rounding alone may fail the proof of load"
        )


def far_off_policy(config: LibraConfig) -> Iterator[str]:
    if config.max_head_offpolicyness > FAR_OFF_POLICY:
        yield (
            f"max_head_offpolicyness={config.max_head_offpolicyness}: beyond {FAR_OFF_POLICY} versions published runs learn"
            " less"
        )


def node_local_run(config: LibraConfig) -> Iterator[str]:
    if config.launch.mode == "slurm" and config.launch.run_dir.startswith(NODE_LOCAL):
        yield (
            f"launch.run_dir={config.launch.run_dir}: folders there belong to one node as a rule, and every step has to"
            " see the run directory"
        )


NOTES: tuple[Callable[[LibraConfig], Iterator[str]], ...] = (
    short_run,
    batch_in_pieces,
    micro_batch_beyond_the_share,
    penalty_without_buffer,
    tight_proof,
    far_off_policy,
    node_local_run,
)
