"""Stage callables without torch or vLLM, for tests of supervisor, runners and executors: each does what fake.json tells it.

RUN/fake.json: {"trainer": {"do": "succeed"}, "rollout_000": {"do": "serve"}, ...}; see BEHAVIOURS. A task that is up leaves
RUN/ready/<name>.<rank> with its pid.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import submitit

from stages.checkpoint import newest
from stages.checkpoint.manifest import CheckpointManifest, FileEntry, Fingerprint, Layout, rank_file
from stages.desired import end_run
from stages.files import list_names, write_bytes_atomic
from stages.orphaned import SupervisorWatch
from stages.process import die_with_parent, install_stop_handlers
from stages.rollout.node_folder import leave_node_folder, node_folder, remove_scratch
from stages.rollout.shared_memory import note_shared_memory
from stages.rundir import RunDir
from stages.stopping import read_stop_request

GIVE_UP_S = 180.0
STEPS_PER_ATTEMPT = 5
"""What a fake trainer has done when it is asked for a checkpoint."""


class FakeStageError(RuntimeError):
    """What a failing fake raises."""


def entry(role: str, run_dir: str, attempt: int, name: str) -> dict[str, Any]:
    """Stands in for stages.entry.run_stage."""
    die_with_parent()
    place = submitit.JobEnvironment()
    stop = threading.Event()
    install_stop_handlers(stop)
    told = json.loads((Path(run_dir) / "fake.json").read_text())[name]
    if place.global_rank not in told.get("ranks", [place.global_rank]):
        told = {"do": "serve"}
    print(
        f"{name} rank {place.global_rank} of {place.num_tasks}, local {place.local_rank}, pid {os.getpid()}", flush=True
    )
    ready = Path(run_dir) / "ready" / f"{name}.{place.global_rank}"
    before_ready(told, ready)
    run = RunDir.open(Path(run_dir), writer=name, attempt=attempt)
    with belongings(run, name) if role == "rollout" else nullcontext():
        write_bytes_atomic(ready, str(os.getpid()).encode())
        return BEHAVIOURS[told["do"]](told, run, stop)


@contextmanager
def belongings(run: RunDir, name: str) -> Iterator[None]:
    """What an instance has: a port, a folder on the node, and shared memory that nothing removes when the process is killed."""
    memory = SharedMemory(create=True, size=4096)
    unregister(f"/{memory.name}", "shared_memory")
    scratch = node_folder(run.run_id) / f"{name}-{os.getpid()}"
    scratch.mkdir()
    note_shared_memory(scratch, [os.getpid()])
    with socket.create_server(("127.0.0.1", 0)):
        yield
    memory.close()
    remove_scratch(scratch)
    leave_node_folder(run.run_id)


def before_ready(told: dict[str, Any], ready: Path) -> None:
    if told.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if told.get("grandchild"):
        # A double fork into a session of its own: no signal to the task's group or session reaches it.
        code = "import os, sys, time\nif os.fork(): sys.exit()\nos.setsid()\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
        subprocess.run(
            [sys.executable, "-c", code, str(ready.with_suffix(".grandchild"))], check=True, stdin=subprocess.DEVNULL
        )


def wait(until: Callable[[], bool], stop: threading.Event) -> bool:
    """True when `until` holds, False when the stage was asked to stop. Raises FakeStageError after GIVE_UP_S."""
    deadline = time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        if until():
            return True
        if stop.wait(0.02):
            return False
    raise FakeStageError("nobody ended this fake stage")


def start_step(run: RunDir) -> int:
    checkpoint = newest(run)
    return 0 if checkpoint is None else checkpoint.step


def save_checkpoint(run: RunDir, step: int, ranks: int) -> None:
    """What `stages.checkpoint.newest` takes for a sound checkpoint."""
    with run.publishing(run.checkpoint(step)) as publication:
        for rank in range(ranks):
            (publication.path / rank_file(rank)).write_bytes(b"a checkpoint")
        files = {rank_file(rank): FileEntry(len(b"a checkpoint"), "0" * 32) for rank in range(ranks)}
        layout, model = Layout(1, ranks, ranks, "float32"), Fingerprint("a", "b", "c", "d")
        publication.commit(CheckpointManifest(step, step, layout, model, files, 0.1, 0.2).to_record())


def train(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """Go on from the newest checkpoint until RUN/go, or until a checkpoint is asked for; `saves: false` makes none."""
    step, place = start_step(run), submitit.JobEnvironment()
    write_bytes_atomic(run.root / "ready" / f"from.{run.attempt}", str(step).encode())
    asked = threading.Event()

    def is_over() -> bool:
        if read_stop_request(run) is not None:
            asked.set()
        return asked.is_set() or is_told_to_go(run)

    if not wait(is_over, stop):
        return {"stopped": True}
    if not asked.is_set():
        return {"worked": True}
    step += STEPS_PER_ATTEMPT
    if told.get("saves", True) and place.global_rank == 0:
        save_checkpoint(run, step, place.num_tasks)
    return {"stopped_at": step, "checkpoint": step}


def is_told_to_go(run: RunDir) -> bool:
    return "go" in list_names(run.root)


def succeed(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    return {"worked": True}


def work(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """Succeed once RUN/go is there."""
    return {"worked": True} if wait(lambda: is_told_to_go(run), stop) else {"stopped": True}


def serve(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """Run until asked to stop; `watch`: the supervisor is looked after, as a real instance does."""
    watch = SupervisorWatch(run, os.environ.get("SLURM_JOB_ID", "") if told.get("watch") else "", True, silent_s=5.0)

    def look() -> bool:
        watch.look()
        return False

    wait(look, stop)
    return {"stopped": True}


def control(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """Wait for RUN/go, then end the run; leave when a checkpoint is asked for."""
    if not wait(lambda: is_told_to_go(run) or read_stop_request(run) is not None, stop):
        return {"stopped": True}
    if read_stop_request(run) is not None:
        return {"stopped_at": 0}
    end_run(run, told.get("outcome", "success"), "the fake controller said so")
    return {"worked": True}


def fail(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """Raise once RUN/go is there."""
    if not wait(lambda: is_told_to_go(run), stop):
        return {"stopped": True}
    raise FakeStageError("the boiler burst\nat 3 bar")


def leave(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """sys.exit(code) once RUN/go is there."""
    if not wait(lambda: is_told_to_go(run), stop):
        return {"stopped": True}
    sys.exit(told["code"])


def hang(told: dict[str, Any], run: RunDir, stop: threading.Event) -> dict[str, Any]:
    """Do not look at the stop flag, like a rank inside a collective."""
    time.sleep(GIVE_UP_S)
    raise FakeStageError("nobody killed this fake stage")


BEHAVIOURS: dict[str, Callable[[dict[str, Any], RunDir, threading.Event], dict[str, Any]]] = {
    "succeed": succeed,
    "work": work,
    "train": train,
    "serve": serve,
    "control": control,
    "fail": fail,
    "leave": leave,
    "hang": hang,
}
