"""vLLM's own schedulers, with our rule for proofs: no model, no server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout_kit import save_model, tiny_model

pytestmark = pytest.mark.vllm

STEP_TOKENS = 64
PROMPT = [5 + number % 50 for number in range(100)]
Made = tuple[Any, Callable[..., str]]


@pytest.fixture(params=["--async-scheduling", "--no-async-scheduling"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A scheduler as the server's options make it, and how to add a request to it."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from stages.rollout import compat

    folder = save_model(tiny_model(0), tmp_path / "model")
    arguments = ["--model", str(folder), "--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", "8"]
    arguments += ["--scheduling-policy", "priority", "--kv-cache-memory-bytes", "100000000"]
    arguments += ["--no-enable-prefix-caching", request.param]
    config = compat.engine_config(compat.parse_arguments(arguments), fork=False)
    config.cache_config.num_gpu_blocks = 1000
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    scheduler: Scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )

    def add(name: str, *, priority: int = 0, tokens: int = 20) -> str:
        params = SamplingParams(max_tokens=4 if priority == 0 else 1, temperature=0.0)
        scheduler.add_request(Request(name, PROMPT[:tokens], params, None, priority=priority))
        return name

    return scheduler, add


def test_after_a_swap_the_proof_has_a_step_of_its_own_and_the_others_the_next(made: Made) -> None:
    from stages.rollout.compat import PROOF_PRIORITY, PROOF_REQUEST

    scheduler, add = made
    for name in ("a", "b"):
        add(name)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 20, "b": 20}
    assert scheduler.reset_prefix_cache(reset_running_requests=True)

    proof = add(f"{PROOF_REQUEST}1", priority=PROOF_PRIORITY, tokens=7)
    canary = add(f"{PROOF_REQUEST}2", priority=PROOF_PRIORITY, tokens=17)

    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {proof: 7, canary: 17}
    assert scheduler.schedule().num_scheduled_tokens == {}
    answer(scheduler, step)
    assert {"a", "b"} == scheduler.schedule().num_scheduled_tokens.keys()


def test_a_proof_that_is_longer_than_a_step_goes_on_in_the_next(made: Made) -> None:
    from stages.rollout.compat import PROOF_PRIORITY, PROOF_REQUEST

    scheduler, add = made
    add("a")

    proof = add(f"{PROOF_REQUEST}1", priority=PROOF_PRIORITY, tokens=STEP_TOKENS + 9)

    assert scheduler.schedule().num_scheduled_tokens == {proof: STEP_TOKENS}
    last = scheduler.schedule()
    assert last.num_scheduled_tokens == {proof: 9}
    assert scheduler.schedule().num_scheduled_tokens == {}
    answer(scheduler, last)
    assert scheduler.schedule().num_scheduled_tokens == {"a": 20}


def answer(scheduler: Any, step: Any) -> None:
    """The model's answer to a step: one token for each request, which is its last."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(step.num_scheduled_tokens)
    index = {name: number for number, name in enumerate(names)}
    tokens = [[3] for _ in names]
    scheduler.update_from_output(step, ModelRunnerOutput(names, index, tokens))


def test_a_proof_beside_running_requests_takes_nothing_from_them(made: Made) -> None:
    from stages.rollout.compat import PROOF_PRIORITY, PROOF_REQUEST

    scheduler, add = made
    add("a")
    scheduler.schedule()
    add("b")

    canary = add(f"{PROOF_REQUEST}2", priority=PROOF_PRIORITY, tokens=17)

    assert {canary, "b"} <= scheduler.schedule().num_scheduled_tokens.keys()


def test_a_client_that_asks_for_the_priority_of_proofs_does_not_get_the_engine_for_itself(made: Made) -> None:
    from stages.rollout.compat import PROOF_PRIORITY

    scheduler, add = made
    add("cmpl-libra-proof-1", priority=PROOF_PRIORITY)
    add("a")

    assert scheduler.schedule().num_scheduled_tokens == {"cmpl-libra-proof-1": 20, "a": 20}


def test_without_a_proof_steps_are_as_full_as_ever(made: Made) -> None:
    scheduler, add = made
    for name in "abcd":
        add(name)

    assert scheduler.schedule().total_num_scheduled_tokens == STEP_TOKENS
