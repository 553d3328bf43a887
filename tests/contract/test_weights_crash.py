"""A trainer killed between any two file operations never shows half a version, and the next attempt can go on."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.sections import WeightsConfig
from stages.context import StageContext
from stages.rundir import RunDir
from stages.weights.collect import collect
from stages.weights.manifest import Manifest
from stages.weights.publish import Publisher
from stages.weights.reader import load_manifest, verify
from stages.weights.refresh import request_refresh
from stages.weights.tensors import LocalTensor
from tests.weights_kit import (
    INSTANCES,
    PROBE,
    Answers,
    make_context,
    make_source,
    publish_full,
    register,
    small_tensors,
)

OPERATIONS = (
    *("open", "mkdir", "pwrite", "fsync", "close", "rename", "replace", "unlink", "rmdir"),
    *("truncate", "ftruncate", "posix_fallocate"),
)


class AnsweringInstances(threading.Event):
    """A stop flag that is never set; when the trainer looks at it while it waits, all instances answer."""

    def __init__(self, run: RunDir, manifest: Manifest) -> None:
        super().__init__()
        self._answers = Answers(run, manifest)

    def is_set(self) -> bool:
        for instance in INSTANCES:
            self._answers.write(instance)
        return False


def exchange(run: RunDir, source: Path, *, again: bool = False) -> None:
    """All that the trainer writes for version 3; and, `again`, for version 4, over the files of one that was collected."""
    context: StageContext = make_context(run)
    context.config.weights.refresh_timeout_s = 20
    with Publisher(run, source_folder=source, options=WeightsConfig(dtype="float32")) as publisher:
        manifest = publish(publisher, 3, small_tensors(run.attempt))
        context.stop = AnsweringInstances(run, manifest)
        request_refresh(context, manifest, INSTANCES, publish_s=0.0)
        collect(context)
        if again:
            publish(publisher, 4, small_tensors(run.attempt + 10))
    if again:
        collect(context)


def publish(publisher: Publisher, version: int, tensors: dict[str, torch.Tensor]) -> Manifest:
    whole = [LocalTensor.whole(name, tensor) for name, tensor in tensors.items()]
    return publisher.begin(version, version, whole, PROBE).finish()


def kill_before_operation(number: int) -> None:
    """From now on this process dies by SIGKILL instead of doing its `number`-th file operation (counted from 0)."""
    done = itertools.count()
    lock = threading.Lock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            with lock:
                if next(done) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()
            return function(*arguments, **options)

        return operation

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))


def killed_exchange(run: RunDir, source: Path, number: int, *, again: bool) -> bool:
    """Run `exchange` in a process that is killed before operation `number`; False when it ended before that."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            kill_before_operation(number)
            exchange(run, source, again=again)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def check_what_others_see(run: RunDir, *, replaced: bool) -> None:
    published = run.published_versions()
    assert 2 in published or 4 in published
    for version in published:
        verify(run, load_manifest(run, version))
    latest = run.read(run.latest_json, any_attempt=True)
    assert latest is not None
    if not replaced:  # else version 3 is away for a moment, or newer than the pointer: the digest tells
        load_manifest(run, latest["version"], latest["digest"])
    record = run.read(run.refreshed_json(3))
    if record is not None:
        load_manifest(run, 3, record["digest"])
        assert all(run.read(run.ack_json(3, name, "loaded")) for name in INSTANCES)


@pytest.mark.parametrize("mapped", [False, True], ids=["written", "mapped"])
@pytest.mark.parametrize(
    ("replaced", "again"),
    [(False, False), (True, False), (False, True)],
    ids=["new version", "version left by an older attempt", "over the files of a version that was collected"],
)
def test_a_trainer_killed_at_any_file_operation_leaves_only_whole_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool, again: bool, mapped: bool
) -> None:
    monkeypatch.setattr("stages.weights.publish.lies_in_memory", lambda folder: mapped)
    monkeypatch.setattr("stages.weights.spares.is_quicker_written_over", lambda folder: again)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # still a place to die at; a kill loses nothing that was written
    source = make_source(tmp_path / "source")
    template = RunDir.create(tmp_path / "template")
    for version in (1, 2, 3) if replaced else (1, 2):
        publish_full(template, version, source=source)
    template.start_attempt(1)

    killed = True
    number = 0
    kept: list[list[str]] = []
    while killed:
        shutil.copytree(template.root, tmp_path / f"run{number}")
        run = RunDir.open(tmp_path / f"run{number}", writer="trainer")
        for instance in INSTANCES:
            register(run, instance)

        killed = killed_exchange(run, source, number, again=again)

        check_what_others_see(run, replaced=replaced)
        run.start_attempt(2)
        exchange(RunDir.open(run.root, writer="trainer"), source, again=again)
        *spare, pointer, first, second = sorted(os.listdir(run.weights))
        newest = ["v000003", "v000004"] if again else ["v000002", "v000003"]
        assert [pointer, first, second] == ["LATEST.json", *newest]
        kept.append([name.partition(".spare-2-")[0] for name in spare])  # none where version 2 was gone before
        assert not [name for folder in (run.requests, run.refreshed) for name in os.listdir(folder) if name[0] == "."]
        shutil.rmtree(run.root)
        number += 1
    assert number > 40  # so many places to die at were tried
    assert [".v000002"] in kept if again else not any(kept)
    assert all(names in ([], [".v000002"]) for names in kept)
