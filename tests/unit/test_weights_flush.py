"""Between the end of a step and the last ACK nothing waits for a local disk; where another host may read, all of it does.

Trainer and agent open the run as their processes do, and decide by themselves.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks.weights_scale import Keeper
from conf.schema import LibraConfig
from stages.context import StageContext, open_context
from stages.rollout.follow import Follower
from stages.rollout.registration import Registration
from stages.rundir import RunDir
from stages.weights import refresh
from stages.weights.apply import write_nack
from stages.weights.collect import collect
from stages.weights.manifest import Manifest
from stages.weights.publish import Publisher
from stages.weights.records import Nack
from stages.weights.refresh import request_refresh
from stages.weights.tensors import LocalTensor
from tests.weights_kit import INSTANCES, PROBE, make_context, make_source, make_status, small_tensors

NAME = INSTANCES[0]
EXT4, NFS, UNKNOWN = 0xEF53, 0x6969, 0x12345678
OF_THE_EXCHANGE = {
    *("model.safetensors", "config.json", "tokenizer.json", "manifest.json", "weights", "LATEST.json"),
    *("v000001.json", "requests", "refreshed", f"{NAME}.prepared.json", f"{NAME}.loaded.json", f"{NAME}.nack.json"),
    *("v000001", f"{NAME}.json", "instances"),
}
"""Files, records and the folders that have their names; requests and refreshed records are both v000001.json."""


class Flushed(set[str]):
    """Names that os.fsync was called for, those of temporary files as they are to be."""

    def __call__(self, fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name.endswith(".tmp"):
            name = name.lstrip(".").rpartition(".")[0].rpartition(".")[0]
        self.add(name)


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> Flushed:
    names = Flushed()
    monkeypatch.setattr(os, "fsync", names)
    return names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of one instance, as the launcher leaves it."""
    return made_run(tmp_path / "run", "auto").root


def made_run(root: Path, policy: str) -> RunDir:
    run = RunDir.create(root)
    config = LibraConfig(model_path=str(make_source(root.parent / "source")))
    config.weights.fsync, config.weights.dtype, config.hardware.device = policy, "float32", "cpu"
    OmegaConf.save(OmegaConf.create(asdict(config)), run.config_yaml)
    run.write(run.plan_json, make_context(run, (NAME,)).plan.to_dict())
    return run


def exchange(root: Path) -> None:
    """One version from the end of a step to the collection, with a refusal before the ACKs."""
    with ExitStack() as stack:
        trainer = stack.enter_context(open_context("trainer", root, name="trainer"))
        agent = stack.enter_context(open_context("rollout", root, name=NAME))
        registration = Registration(agent.run, make_status(NAME), interval_s=60.0)
        registration.update()
        manifest = published(trainer)
        keeper: Any = Keeper(agent.run, manifest.weight_bytes)
        follower = Follower(agent, keeper, registration)
        refusal = Nack(NAME, 1, manifest.digest, "prepare", "read too early", 0)
        calls = [lambda: write_nack(agent.run, refusal)]

        def answer() -> None:
            calls.pop()() if calls else follower.step()

        result = request_refresh(trainer, manifest, (NAME,), 0.0, answer)
        collect(trainer)
        assert result.instances == (NAME,)


def published(context: StageContext) -> Manifest:
    tensors = [LocalTensor.whole(name, tensor) for name, tensor in small_tensors().items()]
    with Publisher(
        context.run, source_folder=Path(context.config.model_path), options=context.config.weights
    ) as publisher:
        return publisher.begin(1, 1, tensors, PROBE).finish()


@pytest.mark.exercises("weights.fsync")
@pytest.mark.parametrize(
    ("policy", "magic", "wanted"),
    [
        ("auto", EXT4, set()),
        ("never", NFS, set()),
        ("auto", NFS, OF_THE_EXCHANGE),
        ("auto", UNKNOWN, OF_THE_EXCHANGE),
        ("always", EXT4, OF_THE_EXCHANGE),
    ],
)
def test_a_whole_exchange_is_flushed_or_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: Flushed, policy: str, magic: int, wanted: set[str]
) -> None:
    monkeypatch.setattr(refresh, "RETRY_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("stages.weights.filesystems.filesystem_magic", lambda _: magic)
    run = made_run(tmp_path / "run", policy)
    flushed.clear()

    monkeypatch.setattr("stages.context.write_reads", lambda *_: None)  # at the end of a stage, and flushed
    exchange(run.root)

    assert {name for name in flushed if not name.startswith(".v000001.tmp-")} == wanted


def test_the_filesystem_is_asked_once_in_a_process_not_for_each_record(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def asking(path: Path) -> int:
        asked.append(path)
        return EXT4

    monkeypatch.setattr("stages.weights.filesystems.filesystem_magic", asking)

    with open_context("rollout", root, name=NAME) as agent:
        registration = Registration(agent.run, make_status(NAME), interval_s=60.0)
        for _ in range(5):
            registration.update()

    assert asked == [root]


def test_all_other_records_are_flushed_on_a_local_filesystem_too(
    root: Path, monkeypatch: pytest.MonkeyPatch, flushed: Flushed
) -> None:
    monkeypatch.setattr("stages.weights.filesystems.filesystem_magic", lambda _: EXT4)
    with open_context("trainer", root, name="trainer") as context:
        run = context.run
        assert not run.flush_exchange
        for path in (run.start_json, run.state_json, run.plan_json, run.summary_json):
            run.write(path, {})
            assert {path.name, path.parent.name} <= flushed
        with run.publishing(run.batch(0)) as batch:
            batch.commit({"step": 0})
        with run.publishing(run.checkpoint(1)) as checkpoint:
            checkpoint.commit({"step": 1})

    assert {"manifest.json", "batches", "checkpoints"} <= flushed
