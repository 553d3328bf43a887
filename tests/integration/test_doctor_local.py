"""The doctor without Slurm, in its full mode: a real vLLM server is started and reloaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch.doctor.probes.engine import IDENTITY

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_a_real_server_gives_the_same_log_probs_after_a_reload(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch.doctor", "--json", "launch.mode=local"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=380)

    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert [finding for finding in found.values() if finding["status"] == "problem"] == []
    assert done.returncode == 0
    started = [finding for name, finding in found.items() if name.startswith("vllm")]
    assert [finding["status"] for finding in started] == ["ok"]
    assert "ready" in started[0]["seen"]
    assert found[IDENTITY]["status"] == "ok"
    assert "after the same weights differ by" in found[IDENTITY]["seen"]
    assert {path.name for path in tmp_path.iterdir()} == {"libra_site"}
