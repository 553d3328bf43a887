"""Two silent faults of real engines, and the proof that catches them; one vLLM server with a tied model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.files import wait_for
from stages.rollout import server_process
from stages.rollout.command import ServerCommand, server_command
from stages.rollout.orders import Order
from stages.rollout.server_process import ServerProcess
from stages.rollout.settings import ServerSettings
from stages.rundir import RunDir
from tests.rollout_faults import FOLDER_VARIABLE
from tests.rollout_instances import (
    NAME,
    Client,
    token_headers,
)
from tests.rollout_kit import (
    TOLERANCE,
    cpu_config,
    make_run,
    publish_model,
    save_model,
    tiny_model,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

# ---- tied embeddings, and the two silent faults ----------------------------------------------------------------------


@dataclass
class Faulty(Client):
    """A server of a tied model that can be made to commit the faults of `tests.rollout_faults`."""

    run: RunDir = field(kw_only=True)
    source: Path = field(kw_only=True)
    faults: Path = field(kw_only=True)

    def refresh(self, version: int, fault: str = "") -> httpx.Response:
        """Prepare and commit a new version while `fault` is on; the answer to the commit."""
        self.models[version] = tiny_model(version, tied=True)
        manifest = publish_model(self.run, version, self.models[version], self.source)
        path = f"weights/v{version:06d}"
        order = Order(self.run.run_id, self.run.attempt, version, path, manifest.digest, "inplace", 60.0)
        if fault:
            (self.faults / fault).touch()
        try:
            self.http.post("/libra/prepare", json=asdict(order)).raise_for_status()
            return self.http.post("/libra/commit", json=asdict(order))
        finally:
            (self.faults / fault).unlink(missing_ok=True) if fault else None


def faulty_command(*args: Any, **kwargs: Any) -> ServerCommand:
    made = server_command(*args, **kwargs)
    swapped = {
        "stages.rollout.guard.GuardMiddleware": "tests.rollout_faults.FaultyGuard",
        "stages.rollout.worker.WeightWorker": "tests.rollout_faults.FaultyWorker",
    }
    return replace(made, arguments=[swapped.get(argument, argument) for argument in made.arguments])


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faults").mkdir()
    source = save_model(tiny_model(0, tied=True), folder / "model")
    config = cpu_config(source)
    run = make_run(folder / "run", config)
    settings = ServerSettings(
        run_root=str(run.root),
        run_id=run.run_id,
        attempt=0,
        instance=NAME,
        token_file=str(run.token_file),
        start_folder=str(source),
        start_version=0,
        serve_unproved=False,
        weights_dtype="float32",
        proof_tolerance=TOLERANCE,
        agent_pid=os.getpid(),
        listen_fd=-1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder / "faults"))
        patch.setattr(server_process, "server_command", faulty_command)
        server = ServerProcess.start(config, settings, tp=1, num_threads=1, log_path=folder / "server.log")
    try:
        http = httpx.Client(base_url=server.base_url, timeout=60, headers=token_headers(run))

        def is_up() -> bool | None:
            assert not server.wait_for_end(0), server.log_tail()
            try:
                return http.get("/libra/state").status_code == 200 or None
            except httpx.ConnectError:
                return None

        wait_for(is_up, deadline_s=120, awaited="the server", from_whom="vLLM")
        yield Faulty(http, run=run, source=source, faults=folder / "faults")
        http.close()
    finally:
        server.stop(10)


def test_a_tied_model_is_exact_after_a_reload_in_place(faulty: Faulty) -> None:
    for version in (1, 2):
        assert faulty.refresh(version).status_code == 200
        assert faulty.largest_difference(faulty.generate([[5, 6, 7]], n=4), [[5, 6, 7]]) < 1e-3


@pytest.mark.parametrize(
    "version, fault, symptom",
    [
        (3, "forgotten_repack", "multiplies with other weights"),
        (5, "forgotten_reset", "prefix cache"),
        (7, "skipped_tensor", "does not hold model.layers"),
        (9, "skipped_slice", "does not hold model.layers"),
        (11, "kept_version", "does not hold model.embed_tokens.weight"),
    ],
)
def test_the_proof_catches_a_silent_fault_of_the_engine(faulty: Faulty, version: int, fault: str, symptom: str) -> None:
    answer = faulty.refresh(version, fault)

    assert (answer.status_code, answer.json()["kind"]) == (500, "proof_failed")
    assert symptom in answer.json()["error"]
    assert faulty.generate([[5, 6, 7]]).status_code == 503
    assert faulty.refresh(version + 1).status_code == 200
    assert faulty.largest_difference(faulty.generate([[5, 6, 7]]), [[5, 6, 7]]) < 1e-3
