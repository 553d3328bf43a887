"""A version that was pushed by hand is proved and served by a real vLLM that a person starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from stages.weights.__main__ import main
from stages.weights.reader import load_manifest
from tests.rollout_instances import REPOSITORY, Instance, stop_instance, token_headers
from tests.rollout_kit import cpu_config, make_run, save_model, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


def test_a_pushed_version_is_proved_and_served(tmp_path: Path) -> None:
    start, pushed = save_model(tiny_model(0), tmp_path / "start"), tiny_model(1)
    run = make_run(tmp_path / "run", cpu_config(start))
    assert main(["push", str(run.root), str(save_model(pushed, tmp_path / "pushed")), "--no-trainer"]) == 0
    agent = subprocess.Popen(
        [sys.executable, "-m", "stages.rollout", str(run.root)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    http = httpx.Client(timeout=60, headers=token_headers(run))
    instance = Instance(http, {0: pushed}, run=run, source=start, agent=agent)
    try:
        instance.wait_ready()
        status = instance.status()
        answer = instance.generate([[5, 6, 7]])
    finally:
        stop_instance(instance)

    assert (status["version"], status["manifest_digest"]) == (0, load_manifest(run, 0).digest)
    assert instance.largest_difference(answer, [[5, 6, 7]]) < 1e-4
