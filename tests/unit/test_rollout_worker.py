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
from stages.rollout.worker import WeightWorker, _repack_shared
from stages.rundir import RunDir
from stages.weights.manifest import Manifest
from tests.weights_kit import publish_full, small_tensors


class PackedLayer(torch.nn.Module):
    """Multiplies with a copy of its weight that is made when it is processed, as vLLM's CPU layers do."""

    def __init__(self, weight: torch.nn.Parameter, *, packs: bool) -> None:
        super().__init__()
        self.weight = weight
        self.quant_method = self
        if packs:
            self.process_weights_after_loading(self)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.cpu_linear = self.weight.detach().clone()


class Runner:
    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.model = torch.nn.Module()

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = dict(weights_iterator)

    def get_model(self) -> torch.nn.Module:
        return self.model


def worker() -> WeightWorker:
    made = WeightWorker()
    made.model_runner = Runner()
    made.device = torch.device("cpu")
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run")


def prepare(made: WeightWorker, run: RunDir, manifest: Manifest) -> dict[str, Any]:
    made.libra_prepare(str(run.root), run.run_id, run.attempt, "rollout_000", manifest.version, manifest.digest)
    return wait_for(
        lambda: report if (report := made.libra_prepared())["done"] else None,
        deadline_s=20,
        awaited="the reading",
        from_whom="the worker",
    )


def test_a_prepared_version_goes_into_the_model_once(run: RunDir) -> None:
    made, manifest = worker(), publish_full(run, 1)

    assert prepare(made, run, manifest) == {"done": True, "error": "", "tensor": ""}
    assert made.libra_swap(1, manifest.digest)["tensors"] == len(manifest.tensors)

    for name, tensor in small_tensors(1).items():
        assert torch.equal(made.model_runner.loaded[name], tensor)
    with pytest.raises(RuntimeError, match="not prepared"):
        made.libra_swap(1, manifest.digest)


def test_a_flipped_byte_is_reported_with_its_tensor_and_cannot_be_swapped_in(run: RunDir) -> None:
    made, manifest = worker(), publish_full(run, 1)
    entry = manifest.tensors["model.layer.down"]
    path = run.weights_version(1) / entry.file
    data = bytearray(path.read_bytes())
    data[entry.offset + 5] ^= 0x10
    path.write_bytes(data)

    report = prepare(made, run, manifest)

    assert report["tensor"] == "model.layer.down"
    assert "model.layer.down" in report["error"]
    with pytest.raises(RuntimeError, match="not prepared"):
        made.libra_swap(1, manifest.digest)
    assert made.model_runner.loaded == {}


def test_another_version_than_the_prepared_one_cannot_be_swapped_in(run: RunDir) -> None:
    made, manifest = worker(), publish_full(run, 1)
    prepare(made, run, manifest)

    with pytest.raises(RuntimeError, match="not prepared"):
        made.libra_swap(2, manifest.digest)


def test_a_layer_that_shares_its_weight_is_packed_anew_after_a_reload() -> None:
    shared, own = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    model = torch.nn.ModuleDict(
        {
            "embed": PackedLayer(shared, packs=False),
            "head": PackedLayer(shared, packs=True),
            "other": PackedLayer(own, packs=True),
        }
    )
    with torch.no_grad():
        shared.fill_(7.0)
        own.fill_(7.0)

    _repack_shared(model)

    assert torch.equal(model["head"].cpu_linear, torch.full((2, 2), 7.0))  # type: ignore[arg-type]
    assert torch.equal(model["other"].cpu_linear, torch.zeros(2, 2))  # type: ignore[arg-type]
    assert not hasattr(model["embed"], "cpu_linear")


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
