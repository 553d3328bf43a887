"""Run directories whose stages are fakes (tests/fake_stages.py), and what tests ask about them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from conf.schema import LibraConfig
from launch.steps import STEP_ID_VARIABLE
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.files import list_names, make_directory, write_bytes_atomic
from stages.rundir import RunDir

Found = TypeVar("Found")

WORKING = {
    "trainer": {"do": "succeed"},
    "controller": {"do": "control"},
    "rollout_000": {"do": "serve"},
    "rollout_001": {"do": "serve"},
}
"""A run in which all goes well once RUN/go exists."""


def fake_plan(layout: str = "single", train_gpus: int = 1, instances: int = 2, rollout_node: int = 0) -> Plan:
    """One trainer node; the instances on one node: of component 1 (hetjob) or of the only component (single)."""
    component = 1 if layout == "hetjob" else 0
    placed = tuple(InstancePlacement(f"rollout_{index:03d}", 1, component, rollout_node) for index in range(instances))
    return Plan(
        layout=layout,
        layout_reason="a test says so",
        device="cpu",
        train=TrainLayout(train_gpus, 1, train_gpus, 1, 1, 1, train_gpus, 1),
        rollout=RolloutLayout(instances, 1, instances, placed),
    )


def fake_config(mode: str = "local") -> LibraConfig:
    config = LibraConfig()
    config.hardware.device = "cpu"
    config.hardware.gpus_per_node = 4
    config.hardware.cpus_per_node = 4
    config.hardware.threads_per_core = 1
    config.launch.mode = mode
    config.launch.stop_grace_s = 2.0
    return config


def fake_run(
    root: Path, config: LibraConfig, plan: Plan, behaviours: dict[str, dict[str, Any]] | None = None
) -> RunDir:
    """A run directory as `python -m launch` leaves it before submission, for fake stages; `behaviours` replace WORKING's."""
    run = RunDir.create(root)
    write_bytes_atomic(run.config_yaml, OmegaConf.to_yaml(OmegaConf.structured(config)).encode())
    run.write(run.plan_json, plan.to_dict())
    make_directory(root / "ready")
    (root / "fake.json").write_text(json.dumps({**WORKING, **(behaviours or {})}))
    return run


def go(run: RunDir) -> None:
    """Let the waiting fakes do what they were told."""
    write_bytes_atomic(run.root / "go", b"")


def await_ready(run: RunDir, names: Iterable[str], deadline_s: float = 60.0) -> dict[str, int]:
    """Task name ("trainer.0") -> pid, once all of them are up."""
    wanted = set(names)

    def look() -> dict[str, int] | None:
        present = set(list_names(run.root / "ready"))
        return {name: int((run.root / "ready" / name).read_text()) for name in wanted} if wanted <= present else None

    return until(look, deadline_s, f"{sorted(wanted)} to be ready")


def until(look: Callable[[], Found | None], deadline_s: float, awaited: str) -> Found:
    """Poll `look` until it returns something true. Fails the test at the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {deadline_s} s for {awaited}")


def state(run: RunDir) -> dict[str, Any]:
    return run.read(run.state_json) or {}


def processes_of(run: RunDir) -> list[str]:
    """Command lines of all processes that carry a step id of this run, or name its directory."""
    found = []
    for pid in (name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        try:
            environment = Path("/proc", pid, "environ").read_bytes()
            command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"{STEP_ID_VARIABLE}={run.run_id}.".encode() in environment or str(run.root) in command:
            found.append(f"{pid} {command}")
    return found
