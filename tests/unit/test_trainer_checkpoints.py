"""When the trainer saves, and what a save that fails means. The saving itself is replaced by a note."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conf.schema import LibraConfig
from launch.machine import checkpoint_bytes, num_checkpoints, run_bytes
from planner.architecture import Architecture
from planner.model import from_model_config
from stages.checkpoint.errors import NoCheckpointSpaceError, SaveError
from stages.rundir import RunDir
from stages.trainer import checkpoints
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.parallel import RankGrid
from stages.trainer.policy import Policy
from stages.trainer.state import OptimizerStateError, state_to_save
from tests.weights_kit import make_context

TOTAL_STEPS = 10


class Scene:
    """A trainer's checkpoints of which every save is noted, and those in `failing` fail."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.saved: list[int] = []
        self.medians: list[float] = []
        self.failing: set[int] = set()
        context = make_context(run)
        context.config = LibraConfig(total_steps=TOTAL_STEPS, **options)
        grid = SimpleNamespace(is_first=True, synchronize=lambda: None, tp=1, dp=1, world_size=1, rank=0)
        policy = SimpleNamespace(trainable=None)
        self.checkpoints = Checkpoints(context, cast(Policy, policy), cast(RankGrid, grid))
        monkeypatch.setattr(checkpoints, "state_to_save", lambda trainable: {})
        monkeypatch.setattr(checkpoints, "fingerprint", lambda config: None)
        monkeypatch.setattr(checkpoints, "save", self.save)

    def save(self, run: RunDir, *, step: int, step_s: float, **_options: Any) -> Any:
        if step in self.failing:
            raise NoCheckpointSpaceError(str(run.checkpoints), 10, 5)
        self.saved.append(step)
        self.medians.append(step_s)
        manifest = SimpleNamespace(total_bytes=7, save_s=0.5)
        return SimpleNamespace(path=run.checkpoint(step), manifest=manifest)

    def train(self, steps: range) -> list[int]:
        for step in steps:
            self.checkpoints.save_when_due(step)
        return self.saved


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


ALL = range(1, TOTAL_STEPS + 1)


@pytest.mark.parametrize(("interval", "wanted"), [(3, [3, 6, 9, 10]), (5, [5, 10]), (100, [10]), (0, [])])
def test_steps_are_saved_in_the_interval_and_at_the_end(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, interval: int, wanted: list[int]
) -> None:
    assert Scene(run, monkeypatch, save_interval=interval).train(ALL) == wanted


def test_a_failed_save_is_told_and_tried_again_after_the_next_step(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(run, monkeypatch, save_interval=3)
    scene.failing = {6, 7}

    assert scene.train(ALL) == [3, 8, 9, 10]
    assert scene.checkpoints.saved_step == 10
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(warnings) == 2
    assert "wanted 10 bytes, available 5" in warnings[0]
    assert "going on with checkpoint step_000003" in warnings[0]


def test_a_first_save_that_fails_ends_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(run, monkeypatch, save_interval=3)
    scene.failing = {3}

    with pytest.raises(SaveError, match="no space for a checkpoint"):
        scene.train(ALL)


def test_a_save_that_fails_when_the_run_is_asked_to_stop_is_an_error(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(run, monkeypatch, save_interval=3)
    scene.train(range(1, 5))
    scene.failing = {4}

    with pytest.raises(SaveError):
        scene.checkpoints.save(4)
    assert scene.checkpoints.saved_step == 3


def test_nothing_is_saved_twice(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(run, monkeypatch, save_interval=3)
    scene.train(range(1, 4))

    scene.checkpoints.save(3)

    assert scene.saved == [3]


def test_the_median_of_the_recent_steps_is_saved_along(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(run, monkeypatch, save_interval=3)
    for seconds in (50.0, 1.0, 2.0, 3.0):
        scene.checkpoints.took_step(seconds)
    scene.train(range(3, 4))

    assert scene.medians == [2.5]


@pytest.mark.parametrize(("interval", "wanted"), [(3, 0), (0, 7)])
def test_batches_are_kept_from_the_oldest_checkpoint_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, interval: int, wanted: int
) -> None:
    scene = Scene(run, monkeypatch, save_interval=interval)

    assert scene.checkpoints.first_needed_batch(7) == wanted
    if interval:
        for step in (3, 6):
            run.checkpoint(step).mkdir()
        assert scene.checkpoints.first_needed_batch(7) == 3


def test_parameters_that_were_stepped_differently_often_are_no_state() -> None:
    def adam(steps: int) -> Any:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([parameter])
        for _ in range(steps):
            parameter.grad = torch.ones(2)
            optimizer.step()
        return parameter, optimizer

    def distributed(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Any:
        whole = SimpleNamespace(start=0, end=2)
        return SimpleNamespace(
            optimizer=optimizer,
            model_param_group_index_map={parameter: (0, 0)},
            _get_model_param_range_map=lambda _parameter: {"param": whole},
        )

    def trainable(*steps: int) -> Any:
        pairs = [adam(count) for count in steps]
        names = [(f"p{index}", parameter) for index, (parameter, _) in enumerate(pairs)]
        return SimpleNamespace(
            module=SimpleNamespace(named_parameters=lambda: names),
            optimizer=SimpleNamespace(chained_optimizers=[distributed(*pair) for pair in pairs]),
            grid=SimpleNamespace(device=torch.device("cpu")),
        )

    with pytest.raises(OptimizerStateError, match=r"stepped \[1.0, 2.0\] times"):
        state_to_save(trainable(1, 2))
    with pytest.raises(OptimizerStateError, match="p1 has no Adam state"):
        state_to_save(trainable(1, 0))
    assert float(state_to_save(trainable(2, 2))["adam.step"]) == 2.0


# ---- what it takes on disk ---------------------------------------------------------------------------------------


def architecture() -> Architecture:
    config = LibraConfig()
    config.model.architecture = "LlamaForCausalLM"
    config.model.num_hidden_layers, config.model.hidden_size, config.model.intermediate_size = 2, 32, 48
    config.model.num_attention_heads, config.model.num_key_value_heads, config.model.vocab_size = 4, 2, 51
    return from_model_config(config.model)


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 12), ("bfloat16", 14)])
def test_a_checkpoint_has_parameters_masters_and_moments(dtype: str, per_parameter: int) -> None:
    arch = architecture()

    assert checkpoint_bytes(LibraConfig(train_dtype=dtype), arch) == per_parameter * arch.parameters


def test_the_space_for_a_run_grows_with_the_checkpoints_that_it_keeps() -> None:
    arch = architecture()
    few, many = (LibraConfig(keep_latest_checkpoints=keep, save_interval=1) for keep in (1, 3))

    assert run_bytes(many, arch) - run_bytes(few, arch) == 2 * checkpoint_bytes(few, arch)
    assert [num_checkpoints(config) for config in (few, many, LibraConfig(save_interval=0))] == [2, 4, 2]


def test_the_space_for_a_run_counts_the_batches_since_the_oldest_checkpoint() -> None:
    arch = architecture()
    short, long = (LibraConfig(save_interval=interval) for interval in (10, 1000))

    batch = short.batch_size * short.max_model_len * 16
    assert run_bytes(long, arch) - run_bytes(short, arch) == batch * (3 * 1000 - short.weights.keep_batches)
