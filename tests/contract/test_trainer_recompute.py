"""The pass that recomputes log-probs, as the options of the run ask for it. The model's forward pass is replaced by a note."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conf.schema import LibraConfig
from stages.batches import Batch, Sequence
from stages.context import StageContext
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.micro_batches import MicroBatch
from stages.trainer.parallel import RankGrid
from stages.trainer.policy import Policy
from stages.trainer.refresher import Refresher
from stages.trainer.stage import SECONDS, Trainer
from traces.recorder import Recorder

CPU = torch.device("cpu")
GRID = cast(
    RankGrid, SimpleNamespace(dp_rank=0, dp=1, device=CPU, synchronize=lambda: None, is_first=False)
)  # one rank, without process groups


def batch(sequences: int) -> Batch:
    rows = [
        Sequence.of_completion([1, 2], [3, 4], [-0.5, -0.5], [0, 0], reward=0.0, advantage=0.0, group_id=group)
        for group in range(sequences)
    ]
    return Batch.pack(rows)


@pytest.mark.exercises("recompute_micro_batch_size")
@pytest.mark.parametrize(("size", "passes"), [(1, [1] * 6), (4, [4, 2]), (8, [6])])
def test_a_pass_takes_as_many_trajectories_as_the_run_allows(
    monkeypatch: pytest.MonkeyPatch, size: int, passes: list[int]
) -> None:
    seen: list[int] = []

    def note(policy: Policy, micro: MicroBatch) -> torch.Tensor:
        seen.append(len(micro.tokens))
        return torch.full((len(micro.targets),), -0.25)

    monkeypatch.setattr(Policy, "_logprobs", note)
    config = LibraConfig(micro_batch_size=2, recompute_micro_batch_size=size)

    found = Policy(cast(Any, None), cast(Any, None), config, GRID).recompute_logprobs(batch(6))

    assert seen == passes
    assert found.tolist() == [0.0, 0.0, -0.25, -0.25] * 6


@pytest.mark.exercises("recompute_logprobs")
@pytest.mark.parametrize("wanted", [True, False])
def test_log_probs_are_recomputed_before_the_update_only_where_the_run_wants_it(tmp_path: Path, wanted: bool) -> None:
    recomputed, given = torch.zeros(4), []
    policy = SimpleNamespace(
        recompute_logprobs=lambda batch: recomputed,
        update=lambda batch, proximal, version, learning_rate: given.append(proximal),
    )
    with Recorder(tmp_path, "trainer", 0, 1, "trainer", enabled=False) as recorder:
        context = SimpleNamespace(config=LibraConfig(recompute_logprobs=wanted), recorder=recorder)
        trainer = Trainer(
            cast(StageContext, context), cast(Policy, policy), GRID, cast(Checkpoints, None), cast(Refresher, None)
        )
        seconds = dict.fromkeys(SECONDS, 0.0)

        trainer.update(batch(1), 0, seconds)

    assert given[0] is (recomputed if wanted else None), "without, the behaviour policy's take their place"
    assert (seconds["recompute_logprobs"] > 0.0) is wanted
