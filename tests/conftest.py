"""What all tests share: which ones can run here, how hypothesis searches, the private Slurm, stored texts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from launch.devcluster import cluster, programs
from launch.devcluster.commands import FOREIGN_PREFIXES
from launch.devcluster.members import find_members

GOLDEN = Path(__file__).parent / "golden"
# A vLLM server on a CPU takes 3.2 GB; a test may start two.
VLLM_NEEDED_BYTES = 4_000_000_000

# No deadline per example: on a busy two-core machine it measures the neighbours.
settings.register_profile("developer", deadline=None, max_examples=40)
settings.register_profile("fast", deadline=None, max_examples=10)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_configure() -> None:
    """Tests see no Slurm but the one they start, also when they run inside somebody's job."""
    for name in [name for name in os.environ if name.startswith(FOREIGN_PREFIXES)]:
        del os.environ[name]
    # A shell starts what it leaves in the background (`make test &`) with Ctrl-C ignored, and every process under it inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Several processes with a thread per core each would wait for one another on a small machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {"slurm": programs.why_not_installable, "vllm": _why_no_vllm, "gpu": _why_no_gpu}
    for marker, why_not in reasons.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else ""
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def _why_no_vllm() -> str:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed"
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if available < VLLM_NEEDED_BYTES:
        return f"{VLLM_NEEDED_BYTES / 1e9:.0f} GB of memory needed, {available / 1e9:.1f} available"
    return ""


def _why_no_gpu() -> str:
    import torch

    return "" if torch.cuda.is_available() else "torch finds no GPU"


@pytest.fixture(scope="session")
def devcluster() -> Iterator[cluster.DevCluster]:
    """A private Slurm of 4 nodes with 2 fake GPUs each, started once; its commands take `env=devcluster.env()`.

    Not under pytest's own folders, whose long names leave no room for unix sockets.
    """
    folder = Path(tempfile.mkdtemp(prefix="libra-"))
    try:
        running = cluster.up(folder / "slurm")
        yield running
        cluster.down(running.root)
        assert find_members(running.root) == []
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def slurm_conf(devcluster: cluster.DevCluster, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For code that takes the Slurm of its environment: SLURM_CONF points at the private one during the test."""
    monkeypatch.setenv("SLURM_CONF", str(devcluster.slurm_conf))
    return devcluster.slurm_conf


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` equals the stored tests/golden/NAME. `make golden` stores it anew."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("LIBRA_UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"{path} is missing: `make golden` writes it"
        assert text == path.read_text()

    return check
