"""Times of a step: near what was measured, never faster than the hardware, and slower for the right reasons."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.architecture import Architecture
from planner.efficiency import EXPECTED, IDEAL
from planner.lengths import Lengths, longest_possible
from planner.predict import at_best, expected
from planner.rollout_cost import at_once, generate_seconds, step_seconds
from planner.train_cost import communication_compute_ratio, data_parallel_seconds, train_seconds
from tests.planner_kit import EIGHT_LAYERS_OF_7B, H200, QWEN2_5_1_5B, QWEN2_5_7B, QWEN3_30B_A3B, configured

FLOPS, MEMORY, LINK, NETWORK = 989e12, 3.35e12, 450e9, 50e9
"""The default hardware (H100)."""


@pytest.mark.parametrize(
    ("arch", "tp", "dp", "recompute_s", "update_s"),
    [
        (QWEN2_5_1_5B, 1, 1, 0.298, 0.948),
        (QWEN2_5_1_5B, 2, 1, 0.310, 0.691),
        (QWEN2_5_1_5B, 1, 2, 0.152, 0.499),
        (EIGHT_LAYERS_OF_7B, 1, 1, 0.344, 1.430),
        (EIGHT_LAYERS_OF_7B, 2, 1, 0.286, 0.772),
        (EIGHT_LAYERS_OF_7B, 1, 2, 0.177, 0.753),
    ],
)
def test_training_takes_what_was_measured_within_a_fifth(
    arch: Architecture, tp: int, dp: int, recompute_s: float, update_s: float
) -> None:
    """Rows of docs/benchmarks.md: 16 trajectories of 2,048 tokens."""
    sizes = {"batch_size": 16, "max_model_len": 2048, "max_new_tokens": 1792}
    config = configured(**sizes, train_gpus=tp * dp, train_tp_size=tp, hardware=H200)

    assert expected(config, arch)["train_s"] == pytest.approx(recompute_s + update_s, rel=0.2)


def test_training_has_a_term_for_each_thing_that_is_done() -> None:
    config = configured(train_gpus=8, train_tp_size=2, batch_size=64, max_model_len=4096)

    terms = train_seconds(config, QWEN2_5_7B, longest_possible(config), IDEAL)

    flops = 64 * (2 * 4096 * (28 * (2 * 3584 * 4096 + 3 * 3584 * 18944) + 152064 * 3584) + 28 * 2 * 3584 * 4096**2)
    assert terms["forward_backward"] == pytest.approx(3 * flops / (8 * FLOPS))
    assert terms["recompute_logprobs"] == pytest.approx(flops / (8 * FLOPS))
    assert terms["tensor_parallel"] == pytest.approx(3 * 16 * 28 * 2 * (2 * 1 / 2) * 4096 * 3584 * 2 / LINK)
    assert terms["data_parallel"] == pytest.approx(QWEN2_5_7B.parameters / 2 * 6 * 3 / 4 / LINK)
    assert terms["optimizer"] == pytest.approx(QWEN2_5_7B.parameters / 8 * 30 / MEMORY)
    assert terms["optimizer_offload"] == 0


@pytest.mark.exercises("recompute_logprobs")
def test_a_step_without_recomputed_log_probs_is_shorter_by_one_forward_pass() -> None:
    with_it, without = (
        expected(configured(train_gpus=4, train_tp_size=2, recompute_logprobs=on), QWEN2_5_7B) for on in (True, False)
    )

    assert without["train_recompute_logprobs_s"] == 0
    assert without["train_tensor_parallel_s"] == pytest.approx(with_it["train_tensor_parallel_s"] * 2 / 3)


def test_gradients_of_several_nodes_cross_the_network_once_for_each_node() -> None:
    """A node's replicas combine first, so what a GPU sends does not grow with the replicas in its node."""
    config = configured(train_gpus=32, train_tp_size=2)

    seconds = data_parallel_seconds(config, QWEN2_5_7B, IDEAL)

    moved = QWEN2_5_7B.parameters / 2 * 6
    assert seconds == pytest.approx(moved * 3 / 4 / LINK + moved / 4 * 3 / 4 / NETWORK)


@pytest.mark.exercises("megatron_optimizer_offload_fraction")
def test_an_offloaded_optimizer_takes_longer() -> None:
    offloaded = configured(megatron_optimizer_cpu_offload=True, megatron_optimizer_offload_fraction=1.0)

    on_host, on_gpu = expected(offloaded, QWEN2_5_7B), expected(configured(), QWEN2_5_7B)

    assert on_host["train_optimizer_s"] == 0
    assert on_host["train_optimizer_offload_s"] > on_gpu["train_optimizer_s"]


def test_the_replica_with_the_most_trajectories_decides() -> None:
    """17 trajectories on 4 replicas: one has 5."""
    seventeen, twenty = (
        expected(configured(batch_size=size, n_samples=1, train_gpus=4), QWEN2_5_1_5B)["train_s"] for size in (17, 20)
    )

    assert seventeen == pytest.approx(twenty)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_ratio_of_a_layer_is_its_all_reduces_over_its_products(tp: int) -> None:
    config = configured(train_gpus=8, train_tp_size=tp, micro_batch_size=2, max_model_len=4096)

    ratio = communication_compute_ratio(config, QWEN2_5_7B)

    tokens = 2 * 4096
    matrices = 2 * tokens * (2 * 3584 * (28 + 4) * 128 + 3 * 3584 * 18944)
    attention = 2 * (2 * 2 * 4096**2 / 2) * 28 * 128
    compute_s = (matrices + attention) / tp / FLOPS
    assert ratio == pytest.approx(2 * 2 * (tp - 1) / tp * tokens * 3584 * 2 / LINK / compute_s)


def test_decoding_reads_the_weights_once_and_every_sequence_s_cache() -> None:
    config = configured(vllm_tp_size=4, rollout_gpus=8)

    seconds = step_seconds(config, QWEN2_5_7B, IDEAL, 32, 1000)

    weights = (QWEN2_5_7B.parameters - 152064 * 3584) * 2 / 4
    cache = 32 * 1000 * 2 * 28 * 1 * 128 * 2
    all_reduces = 28 * 2 * 2 * 3 / 4 * 32 * 3584 * 2 / LINK
    assert seconds == pytest.approx((weights + cache) / MEMORY + all_reduces)


def test_a_large_batch_is_bound_by_its_products() -> None:
    config = configured(vllm_tp_size=1)

    seconds = step_seconds(config, QWEN2_5_7B, IDEAL, 4096, 0)

    assert seconds == pytest.approx(4096 * 2 * QWEN2_5_7B.matrix_parameters / FLOPS)


def test_more_sequences_than_an_instance_takes_decode_in_waves() -> None:
    sizes: dict[str, Any] = {"batch_size": 256, "n_samples": 8, "rollout_gpus": 1, "max_concurrent_rollouts": 4096}
    lengths = Lengths(512, 512, 512)

    one, four, five = (
        generate_seconds(configured(**sizes, rollout={"max_num_seqs": most}), QWEN2_5_1_5B, lengths, IDEAL)["decode"]
        for most in (256, 64, 60)
    )

    step = step_seconds(configured(), QWEN2_5_1_5B, IDEAL, 64, 768)
    assert four == pytest.approx(4 * 512 * step)
    assert one < four < five


@pytest.mark.exercises("max_concurrent_rollouts")
@pytest.mark.parametrize(("most_in_flight", "wanted"), [(16, 8), (200, 100), (4096, 256)])
def test_an_instance_decodes_its_part_of_what_may_be_in_flight(most_in_flight: int, wanted: int) -> None:
    config = configured(rollout_gpus=2, max_concurrent_rollouts=most_in_flight)

    assert at_once(config, QWEN2_5_1_5B) == wanted


def test_an_instance_decodes_no_more_than_its_cache_holds() -> None:
    roomy, tight = (
        configured(max_model_len=32768, max_concurrent_rollouts=4096, hardware={"gpu_memory_bytes": size})
        for size in (400e9, 20e9)
    )

    assert at_once(roomy, QWEN2_5_1_5B) == 256
    assert 1 <= at_once(tight, QWEN2_5_1_5B) < 256


def test_the_longest_trajectory_is_a_floor_that_more_gpus_do_not_lower() -> None:
    lengths = Lengths(prompt_tokens=512, mean_new_tokens=200, longest_new_tokens=30000)
    configs = [configured(rollout_gpus=gpus, batch_size=512, max_model_len=32768) for gpus in (8, 16, 64)]

    times = [sum(generate_seconds(config, QWEN2_5_7B, lengths, EXPECTED).values()) for config in configs]

    alone_s = 30000 * step_seconds(configs[0], QWEN2_5_7B, EXPECTED, 1, 512 + 15000)
    assert min(times) > alone_s
    assert max(times) < 1.05 * alone_s


def test_trajectories_of_equal_length_have_no_tail() -> None:
    config = configured(rollout_gpus=4)

    assert generate_seconds(config, QWEN2_5_7B, longest_possible(config), EXPECTED)["tail"] == 0


def test_a_group_s_prompt_is_computed_once() -> None:
    lengths = Lengths(1024, 128, 128)
    alone, in_groups = (
        generate_seconds(configured(n_samples=size, batch_size=64), QWEN2_5_1_5B, lengths, IDEAL)["prefill"]
        for size in (1, 16)
    )

    assert alone == pytest.approx(16 * in_groups)


def test_steps_without_graphs_take_longer() -> None:
    eager = configured(rollout={"enforce_eager": True})

    assert expected(eager, QWEN2_5_7B)["generate_s"] > expected(configured(), QWEN2_5_7B)["generate_s"]
    assert at_best(eager, QWEN2_5_7B)["generate_s"] == at_best(configured(), QWEN2_5_7B)["generate_s"]


def test_generation_agrees_with_the_one_trial_that_its_shares_rest_on() -> None:
    """7B on one H200, 256 requests of 512 + 256 tokens: 11.5k tokens/s with graphs, 6.2k without (docs/planner.md)."""
    sizes: dict[str, Any] = {"batch_size": 256, "n_samples": 1, "max_model_len": 768, "max_new_tokens": 256}

    for eager, tokens_per_s in ((False, 11500), (True, 6200)):
        config = configured(**sizes, hardware=H200, rollout={"enforce_eager": eager})
        assert 256 * 256 / expected(config, QWEN2_5_7B)["generate_s"] == pytest.approx(tokens_per_s, rel=0.1)


SIZES = st.fixed_dictionaries(
    {
        "train_gpus": st.sampled_from([4, 8, 16, 64]),
        "rollout_gpus": st.sampled_from([4, 8, 16, 64]),
        "train_tp_size": st.sampled_from([1, 2, 4]),
        "vllm_tp_size": st.sampled_from([1, 2, 4]),
        "batch_size": st.sampled_from([64, 512, 520]),
        "n_samples": st.sampled_from([1, 8]),
        "max_model_len": st.sampled_from([256, 2048, 32768]),
        "max_new_tokens": st.sampled_from([16, 255]),
        "recompute_logprobs": st.booleans(),
    }
)


@given(sizes=SIZES, arch=st.sampled_from([QWEN2_5_1_5B, QWEN2_5_7B, QWEN3_30B_A3B]))
def test_no_prediction_beats_the_hardware(sizes: dict[str, Any], arch: Architecture) -> None:
    config = configured(**sizes)

    predicted, best = expected(config, arch), at_best(config, arch)

    tokens = config.batch_size * config.max_model_len
    passes = 8 if config.recompute_logprobs else 6
    assert (
        predicted["train_s"]
        >= best["train_s"]
        >= passes * arch.matrix_parameters * tokens / (config.train_gpus * FLOPS)
    )
    decoded = math.ceil(config.batch_size / (config.rollout_gpus // config.vllm_tp_size))
    at_least_read_s = config.max_new_tokens * arch.parameters_read(1) * 2 / config.vllm_tp_size / MEMORY
    at_least_computed_s = decoded * config.max_new_tokens * 2 * arch.matrix_parameters / (config.vllm_tp_size * FLOPS)
    assert predicted["generate_s"] >= best["generate_s"]
    assert best["generate_s"] >= max(at_least_read_s, at_least_computed_s) * (1 - 1e-9)


@given(sizes=SIZES, arch=st.sampled_from([QWEN2_5_7B, QWEN3_30B_A3B]))
def test_terms_add_up_and_the_slower_side_is_the_step(sizes: dict[str, Any], arch: Architecture) -> None:
    found = expected(configured(**sizes), arch)

    for side in ("train", "generate"):
        terms = [value for name, value in found.items() if name.startswith(f"{side}_") and name != f"{side}_s"]
        assert min(terms) >= 0
        assert sum(terms) == pytest.approx(found[f"{side}_s"])
    assert found["step_s"] == max(found["train_s"], found["generate_s"])


@given(sizes=SIZES, factor=st.sampled_from([2, 4]))
def test_faster_parts_never_slow_a_step_down(sizes: dict[str, Any], factor: int) -> None:
    config = configured(**sizes)
    rates = ("gpu_flops", "gpu_memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")
    for rate in rates:
        faster = replace(config, hardware=replace(config.hardware, **{rate: getattr(config.hardware, rate) * factor}))
        assert expected(faster, QWEN2_5_7B)["step_s"] <= expected(config, QWEN2_5_7B)["step_s"]


def test_every_share_is_one() -> None:
    shares = [value for name, value in vars(EXPECTED).items() if not name.endswith(("_s", "_per_s"))]

    assert all(0 < share <= 1 for share in shares)
    assert all(value == 1 for name, value in vars(IDEAL).items() if not name.endswith(("_s", "_per_s")))
