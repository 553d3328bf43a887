"""Run directories as a run would have left them, without a run: every kind of state, and pieces that may be taken away."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.dump import dump
from conf.options import walk
from conf.schema import LibraConfig
from launch.desired_steps import desired_steps
from launch.prepare import Prepared
from stages.desired import DesiredState, write_desired
from stages.files import make_directory, write_bytes_atomic
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan

JOB = "41"
STEP = {
    "total_steps": 10,
    "reward": 0.5,
    "tokens_per_s": 1000.0,
    "staleness_mean": 0.25,
    "staleness_max": 1,
    "sync_s": 0.07,
    "step_s": 2.0,
    "eta_s": 8.0,
    "generate_s": 1.5,
    "seconds": {"grpo_update": 0.5, "wait_acks": 0.1},
}
CAUSE = {
    "step": "trainer",
    "kind": "signal",
    "message": "rank 1 killed by SIGKILL",
    "exit_code": 137,
    "log_tail": "loss 0.5\nloss 0.4",
}
KILLED_LAUNCHER = {"host": socket.gethostname(), "pid": 1, "started": "0"}


def new_run(root: Path, config: LibraConfig | None = None, launcher: Mapping[str, Any] | None = None) -> RunDir:
    """As `pipeline.create_run` leaves it."""
    run = RunDir.create(root, extra={"git": "unknown", "launcher": dict(launcher or KILLED_LAUNCHER)})
    config = config or fake_config("slurm")
    config = replace(config, launch=replace(config.launch, run_dir=str(root)))
    sources = {name: "default" for name, _, _ in walk(config)} | {"batch_size": "conf/experiment/grpo_7b.yaml"}
    write_bytes_atomic(run.config_yaml, dump(config, sources).encode())
    write_bytes_atomic(run.token_file, b"token\n")
    run.write(run.plan_json, fake_plan().to_dict())
    return run


def submitted(run: RunDir, mode: str = "slurm", job_id: str = JOB) -> RunDir:
    write_desired(run, desired_steps(fake_config(mode), fake_plan()))
    run.write(run.submission_json, {"mode": mode, "job_id": job_id})
    return run


def says(run: RunDir, phase: str, mode: str = "slurm", job_id: str = JOB, **more: Any) -> None:
    """A word of the supervisor; `host` is another one unless told."""
    record: dict[str, Any] = {
        "phase": phase,
        "steps": {},
        "cause": None,
        "heartbeat": 7,
        "mode": mode,
        "job_id": job_id,
    }
    run.write(run.state_json, {**record, "host": "node0", "pid": 4711, "time": 0.0, **more})
    write_bytes_atomic(run.events_jsonl, b'{"event": "phase", "phase": "starting"}\n')


def made(root: Path, phase: str = "", mode: str = "slurm", **more: Any) -> RunDir:
    """A submitted run; with `phase`, one whose supervisor said this last."""
    run = submitted(new_run(root), mode)
    if phase:
        says(run, phase, mode, **more)
    return run


def another_attempt(run: RunDir, reason: str = "resume", step: int = 4, **more: Any) -> RunDir:
    number = run.attempt + 1
    run.start_attempt(number)
    run = RunDir(run.root, run.run_id, number, "launcher")
    run.write(run.attempt_json, {"job_id": "", "resumed_step": step, "reason": reason, "previous": number - 1} | more)
    return run


def trained(run: RunDir, steps: int, first: int = 0) -> None:
    """Lines of metrics, weights of the last step, a ledger."""
    lines = [json.dumps(STEP | {"step": step, "version": step + 1}) for step in range(first, first + steps)]
    with open(run.metrics_jsonl, "a") as out:
        out.write("".join(f"{line}\n" for line in lines))
    version = first + steps
    make_directory(run.weights_version(version))
    run.write(run.weights_version(version) / "manifest.json", {"version": version})
    run.write(run.latest_json, {"version": version, "path": f"weights/v{version:06d}"})
    run.ledger_jsonl(run.attempt).write_text("")


def finished(root: Path, steps: int = 10, mode: str = "slurm") -> RunDir:
    """A run that has trained all its steps and summed up."""
    run = made(root, "succeeded", mode)
    trained(run, steps)
    run.write(run.summary_json, {"steps": steps, "checkpoint": str(run.weights_version(steps)), "phase_s": {}})
    return run


def saved(run: RunDir, step: int, size: int = 64) -> Path:
    """A checkpoint whose sizes are right."""
    layout = {"tp": 1, "dp": 1, "world_size": 1, "dtype": "float32"}
    model = {"architecture": "LlamaForCausalLM", "config": "c", "tokenizer": "", "task": "t"}
    files = {"rank_00000.safetensors": {"bytes": size, "xxh3_128": "0" * 32}}
    manifest = {"format": 1, "step": step, "version": step, "layout": layout, "model": model, "files": files}
    with run.publishing(run.checkpoint(step)) as publication:
        (publication.path / "rank_00000.safetensors").write_bytes(b"\0" * size)
        publication.commit(manifest | {"save_s": 0.25, "step_s": 2.0})
    return run.checkpoint(step)


def serves(run: RunDir, name: str, version: int, heartbeat: int = 3, state: str = "ready") -> None:
    record = {"instance": name, "state": state, "version": version, "host": "node1", "heartbeat": heartbeat}
    run.write(run.instance_json(name), record | {"base_url": "http://node1:8000"})


def take_away(run: RunDir, *names: str) -> None:
    for name in names:
        path = run.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def desired_of(prepared: Prepared) -> DesiredState:
    """What `submit` would write for it."""
    return desired_steps(prepared.config, prepared.plan)
