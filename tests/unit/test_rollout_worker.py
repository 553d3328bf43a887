"""The worker extension on a stand-in for vLLM's model runner, and the signature that a version must have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stages.files import wait_for
from stages.rollout.errors import UnfitWeightsError
from stages.rollout.orphans import bind_spawned, environment_of
from stages.rollout.settings import SERVER_ID_VARIABLE
from stages.rollout.signature import model_signature
from stages.rollout.worker import WeightWorker
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.engine_kit import (
    DOWN,
    NORM,
    EngineModel,
    Runner,
    checkpoint,
    loaded,
    part_sums_on_the_host,
    publish_version,
    run,
    start_folder,
)

__all__ = ["run"]


@pytest.fixture
def model() -> EngineModel:
    made: EngineModel = loaded(EngineModel(), checkpoint(0))
    return made


@pytest.fixture
def worker(run: RunDir, model: EngineModel, tmp_path: Path) -> WeightWorker:
    return started(run, model, tmp_path)


def started(run: RunDir, model: EngineModel, folder: Path) -> WeightWorker:
    made = WeightWorker()
    made.model_runner = Runner(model)
    made.device = torch.device("cpu")
    start = start_folder(folder / "start", checkpoint(0))
    assert made.libra_start(run.run_id, str(start), "float32")["why_reload"] == ""
    return made


def prepare(made: WeightWorker, run: RunDir, manifest: Manifest, keep_s: float = 20.0) -> dict[str, Any]:
    order = str(run.root), run.run_id, run.attempt, "rollout_000", manifest.version, manifest.digest
    made.libra_prepare(*order, keep_s)
    return wait_for(
        lambda: report if (report := made.libra_prepared())["done"] else None,
        deadline_s=20,
        awaited="the reading",
        from_whom="the worker",
    )


def test_a_prepared_version_goes_into_the_model_once(run: RunDir, worker: WeightWorker, model: EngineModel) -> None:
    manifest = publish_version(run, 1)

    assert prepare(worker, run, manifest) == {"done": True, "error": "", "tensor": ""}
    assert worker.libra_swap(1, manifest.digest)["tensors"] == len(manifest.tensors)

    assert torch.equal(model.norm, checkpoint(1)[NORM])
    with pytest.raises(RuntimeError, match="not prepared"):
        worker.libra_swap(1, manifest.digest)


def test_a_flipped_byte_is_reported_with_its_tensor_and_cannot_be_swapped_in(
    run: RunDir, worker: WeightWorker, model: EngineModel
) -> None:
    manifest = publish_version(run, 1)
    entry = manifest.tensors[DOWN]
    path = run.weights_version(1) / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset + 5] ^= 0x10
    path.write_bytes(data)

    report = prepare(worker, run, manifest)

    assert report["tensor"] == DOWN
    assert DOWN in report["error"]
    with pytest.raises(RuntimeError, match="not prepared"):
        worker.libra_swap(1, manifest.digest)
    assert torch.equal(model.norm, checkpoint(0)[NORM])


def test_a_file_that_leads_out_of_the_run_is_reported_and_not_read(
    run: RunDir, worker: WeightWorker, tmp_path: Path
) -> None:
    manifest = publish_version(run, 1)
    file = run.weights_version(1) / manifest.tensors[DOWN].file
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")

    assert prepare(worker, run, manifest)["error"].startswith(f"{file} lies outside the run directory")


def test_another_version_than_the_prepared_one_cannot_be_swapped_in(run: RunDir, worker: WeightWorker) -> None:
    manifest = publish_version(run, 1)
    prepare(worker, run, manifest)

    with pytest.raises(RuntimeError, match="not prepared"):
        worker.libra_swap(2, manifest.digest)


def test_a_worker_that_started_from_a_version_says_whether_it_holds_it(run: RunDir, worker: WeightWorker) -> None:
    manifest = publish_version(run, 1, checkpoint(0))
    prepare(worker, run, manifest)

    assert worker.libra_check(1, manifest.digest)["fault"] == ""


def test_a_later_order_takes_the_place_of_one_that_waits_for_another_instance(
    run: RunDir, worker: WeightWorker, tmp_path: Path
) -> None:
    other = started(run, loaded(EngineModel(), checkpoint(0)), tmp_path)
    first, second = publish_version(run, 1), publish_version(run, 2)
    prepare(other, run, first)
    order = str(run.root), run.run_id, run.attempt, "rollout_000"
    worker.libra_prepare(*order, 2, second.digest, 60.0)

    assert prepare(worker, run, first)["error"] == ""
    assert worker.libra_swap(1, first.digest)["fault"] == ""


def test_a_version_that_nobody_asks_for_is_given_up_so_that_other_instances_can_go_on(
    run: RunDir, worker: WeightWorker, tmp_path: Path
) -> None:
    other = started(run, loaded(EngineModel(), checkpoint(0)), tmp_path)
    first, second = publish_version(run, 1), publish_version(run, 2)
    prepare(other, run, first, keep_s=0.1)

    assert prepare(worker, run, second)["error"] == ""
    with pytest.raises(RuntimeError, match="not prepared in this worker any more: nobody asked for it within"):
        other.libra_swap(1, first.digest)
    assert worker.libra_swap(2, second.digest)["fault"] == ""


def test_an_instance_that_waits_for_another_in_vain_says_so(run: RunDir, worker: WeightWorker, tmp_path: Path) -> None:
    other = started(run, loaded(EngineModel(), checkpoint(0)), tmp_path)
    prepare(other, run, publish_version(run, 1))

    assert "an instance that holds another version" in prepare(worker, run, publish_version(run, 2), 0.05)["error"]


@pytest.mark.parametrize("what", ["libra_swap", "libra_check"])
def test_staged_bytes_that_were_damaged_are_read_anew_by_the_next_instance(
    run: RunDir, worker: WeightWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    part_sums_on_the_host(monkeypatch)
    other = started(run, loaded(EngineModel(), checkpoint(0)), tmp_path)
    manifest = publish_version(run, 1)
    prepare(other, run, manifest)
    other.libra_weights.staging.tensors[DOWN].view(torch.int32)[0, 0] ^= 1

    assert DOWN in getattr(other, what)(1, manifest.digest)["fault"]

    prepare(worker, run, manifest)
    report = worker.libra_swap(1, manifest.digest)
    assert (report["fault"], report["read_here"]) == ("", True)


# ---- signature -------------------------------------------------------------------------------------------------------


def model_folder(folder: Path, *, tied: bool, head: bool) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(6, 4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
    }
    if head:
        tensors["lm_head.weight"] = torch.zeros(6, 4)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_signature_has_the_published_format_and_no_constants(tmp_path: Path) -> None:
    found = model_signature(model_folder(tmp_path / "m", tied=False, head=True), "bfloat16", [])

    assert found == {"model.embed_tokens.weight": ("BF16", (6, 4)), "lm_head.weight": ("BF16", (6, 4))}


@pytest.mark.parametrize("in_folder", [True, False])
@pytest.mark.parametrize("is_published", [True, False])
def test_a_tied_head_may_be_published_or_not(tmp_path: Path, in_folder: bool, is_published: bool) -> None:
    folder = model_folder(tmp_path / "m", tied=True, head=in_folder)

    found = model_signature(folder, "float32", ["lm_head.weight"] if is_published else [])

    assert ("lm_head.weight" in found) is is_published


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(UnfitWeightsError, match="safetensors"):
        model_signature(tmp_path, "float32", [])


# ---- no orphans ------------------------------------------------------------------------------------------------------


def test_forked_children_die_with_the_process_that_forked_them(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
from stages.rollout.orphans import bind_forks
bind_forks()
child = os.fork()
if child == 0:
    grandchild = os.fork()
    if grandchild == 0:
        time.sleep(600)
    os.write(1, b"%d\\n" % grandchild)
    time.sleep(600)
os.write(1, b"%d\\n" % child)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]

    parent.kill()
    parent.wait(10)

    wait_for(
        lambda: True if not any(_lives(pid) for pid in pids) else None,
        deadline_s=5,
        awaited="the end of the forks",
        from_whom="the kernel",
    )


def test_a_spawned_process_whose_starter_is_gone_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_ID_VARIABLE, "rollout_000-1")
    monkeypatch.setattr("stages.rollout.orphans.die_with_parent", lambda: None)

    bind_spawned(lambda _pid: {SERVER_ID_VARIABLE: "rollout_000-1"})
    with pytest.raises(SystemExit):
        bind_spawned(lambda _pid: {})


def test_the_environment_of_a_process_that_is_gone_is_empty() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)

    assert environment_of(gone.pid) == {}


def test_the_environment_of_a_process_is_the_one_it_was_started_with() -> None:
    # Its word says that it runs: the kernel shows no environment for the last moments of an exec.
    with subprocess.Popen(["/bin/cat"], env={"MARK": "a=b"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"up\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"up\n"

        assert environment_of(child.pid) == {"MARK": "a=b"}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
