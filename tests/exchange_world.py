"""The weight exchange as parties of `tests.interleaving`: the product's trainer and agents, its server's state machine and reader.

What is replaced: vLLM (an engine that holds one number, read from the version's files and told by its log-probs), HTTP (the guard's
endpoints are called), threads inside a party (done at once), the heartbeat's thread (a beat when the agent's pause is over).
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from benchmarks.watched_files import Operation
from conf.schema import LibraConfig
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.context import StageContext
from stages.rollout import stage as rollout_stage
from stages.rundir import RunDir
from stages.weights.collect import collect, drop_versions
from stages.weights.manifest import Manifest, Probe
from stages.weights.patience import Patience
from stages.weights.publish import publish
from stages.weights.reader import load_manifest, verify
from stages.weights.records import RefreshRequest
from stages.weights.refresh import request_refresh
from stages.weights.tensors import LocalTensor
from tests.exchange_server import InlinePool, QuietRegistration, Server, at_once, says
from tests.faulty_files import Rule
from tests.interleaving import Choose, Party, Schedule, Sharing
from tests.weights_kit import INSTANCES, Answers, register
from traces.recorder import Recorder

OLD = (1, 2, 3)
"""Versions that attempt 0 published, had served and acknowledged; a scenario begins with attempt 1, which goes on from step 2."""
STALL_S = 90.0
"""Longer than any deadline of the scenarios."""
_TRASH = re.compile(r"^weights/(\.v\d+\.(?:trash|spare)-[0-9a-f-]+)(?:/|$)")

_SPARE = re.compile(r"^weights/(\.v\d+\.spare-[0-9a-f-]+)(?:/|$)")


class Violation(AssertionError):
    """What must hold does not."""


def value_of(attempt: int, version: int) -> float:
    """The one number that a version consists of; the model that everything starts from has 0.

    Attempt 1 repeats exactly what attempt 0 did, as after a resume, so its digests are the same too.
    """
    return 10.0 * max(attempt, 1) + version


@dataclass
class World:
    """One run directory with its parties, and what is true about it.

    `renames` counts how often the newest attempt named something in weights/, `reuses` are those operations of each party that
    have to do with files that are written over; `keeps_old` is an engine that skips the swap.
    """

    schedule: Schedule
    root: Path
    model: Path
    instances: tuple[str, ...] = INSTANCES
    min_instances: int = 0
    digests: dict[tuple[int, int], str] = field(default_factory=dict)
    servers: dict[tuple[int, str], Server] = field(default_factory=dict)
    proved: set[tuple[int, str, str]] = field(default_factory=set)
    trash: dict[str, str] = field(default_factory=dict)
    keeps_old: bool = False
    attempt: int = 1
    renames: int = 0
    reuses: dict[str, list[int]] = field(default_factory=dict)
    _stops: list[threading.Event] = field(default_factory=list)

    # ---- parties ---------------------------------------------------------------------------------------------------

    def add_trainer(self, versions: tuple[int, ...], **faults: Any) -> Party:
        context = self._context("trainer", "trainer")
        return self.schedule.add(f"trainer.{self.attempt}", lambda: self._train(context, versions), **faults)

    def add_instances(self, **faults: dict[str, Any]) -> list[Party]:
        """`faults` by name of the instance."""
        return [self._add_instance(name, faults.get(name, {})) for name in self.instances]

    def _add_instance(self, name: str, faults: dict[str, Any]) -> Party:
        context = self._context("rollout", name)
        self._stops.append(context.stop)
        return self.schedule.add(f"{name}.{self.attempt}", lambda: self._serve(context), **faults)

    def _context(self, role: str, name: str) -> StageContext:
        config = LibraConfig(model_path=str(self.model))
        config.weights.refresh_timeout_s = config.weights.refresh_floor_s = 40.0
        config.weights.dtype, config.weights.proof_tolerance = "float32", 1e-3
        config.rollout.ready_timeout_s, config.rollout.stop_timeout_s = 20.0, 1.0
        config.rollout.heartbeat_interval_s, config.rollout.heartbeat_timeout_s = 5.0, 60.0
        config.rollout.min_instances, config.hardware.device = self.min_instances, "cpu"
        places = tuple(InstancePlacement(instance, 1, 1, 0) for instance in self.instances)
        layout = TrainLayout(1, 1, 1, 1, 1, 1, 1, 1)
        plan = Plan("single", "test", "cpu", layout, RolloutLayout(len(places), 1, len(places), places))
        run = replace(self.run, writer=name)
        recorder = Recorder(run.traces, role, 0, 1, name, enabled=False)
        return StageContext(run, config, plan, role, name, 0, 1, 0, recorder)

    @property
    def run(self) -> RunDir:
        """As the newest attempt sees it."""
        record = json.loads((self.root / "run.json").read_text())
        return RunDir(self.root, record["run_id"], self.attempt, "test")

    def _train(self, context: StageContext, versions: tuple[int, ...]) -> int:
        """As `stages.trainer.stage` does: go on from a step, then publish, wait, collect. Returns the last version."""
        drop_versions(context.run, newer_than=versions[0] - 1)
        for version in versions:
            manifest = publish_value(context.run, version, self.model)
            result = request_refresh(context, manifest, self.instances, publish_s=0.0)
            for name in result.instances:
                if (context.run.attempt, name, manifest.digest) not in self.proved:
                    raise Violation(f"version {version} counts as served by {name}, which has not proved it")
            collect(context)
        return versions[-1]

    def _serve(self, context: StageContext) -> None:
        rollout_stage.run(context)

    def make_server(self, context: StageContext, registration: QuietRegistration) -> Server:
        party = next(party for party in self.schedule.parties if party.thread is threading.current_thread())
        return Server(context, registration, party, servers=self.servers, proved=self.proved, keeps_old=self.keeps_old)

    def stop_instances(self) -> None:
        for stop in self._stops:
            stop.set()
        for party in self.schedule.parties:
            party.is_called = True

    def requeue(self, keep: tuple[Party, ...] = ()) -> None:
        """The job ends, but for `keep`, which nobody could reach; its next attempt begins."""
        self.schedule.end([party for party in self.schedule.parties if party not in keep])
        self.schedule.parties = list(keep)
        self.run.start_attempt(self.attempt + 1)
        self.attempt += 1
        self.renames = 0
        self.schedule.change("attempts/")

    # ---- what must hold --------------------------------------------------------------------------------------------

    def watch(self, party: Party, operation: Operation) -> None:
        """Before each operation: what is named, and what is deleted or written over."""
        if ".spare-" in operation.path or ".spare-" in operation.target:
            self.reuses.setdefault(party.name, []).append(party.operations)
        if operation.kind == "rename" and operation.path.startswith("weights/"):
            self.renames += party.name.endswith(f".{self.attempt}")
            self._note_rename(operation)
            if match := _SPARE.match(operation.path) or _SPARE.match(operation.target):
                self._check_deletion(party, self.trash.get(match[1], ""))
        elif operation.kind == "remove" and (match := _TRASH.match(operation.path)):
            self._check_deletion(party, self.trash.get(match[1], ""))

    def _note_rename(self, operation: Operation) -> None:
        record = read_manifest(self.root / operation.path)
        if ".tmp-" in operation.path and record:
            self.digests[record["attempt"], record["version"]] = record["digest"]
        elif (".trash-" in operation.target or ".spare-" in operation.target) and record:
            self.trash[Path(operation.target).name] = record["digest"]

    def _check_deletion(self, party: Party, digest: str) -> None:
        readers = [name for (attempt, name), server in self.servers.items() if self._reads(attempt, server, digest)]
        if readers:
            raise Violation(f"{party.name} deletes a version that {', '.join(readers)} reads")
        newest = max((version for attempt, version in self.digests if attempt == self.attempt), default=0)
        if digest and digest == self.digests.get((self.attempt, newest)):
            raise Violation(f"{party.name} deletes the newest version, {newest}, of attempt {self.attempt}")

    def _reads(self, attempt: int, server: Server, digest: str) -> bool:
        return attempt == self.attempt and not server.party.is_gone and server.engine.reading == digest != ""

    def check(self) -> None:
        """After each stretch: what is served."""
        for (attempt, name), server in self.servers.items():
            gate, manifest = server.reloads.gate, server.reloads.proved
            if gate.shut_because or not gate._decided.is_set():
                continue
            version = -1 if manifest is None else manifest.version
            if manifest is None or manifest.digest != self.digests.get((attempt, version)):
                raise Violation(f"{name} of attempt {attempt} serves version {version} of somebody else")
            if server.engine.value != value_of(attempt, version):
                raise Violation(f"{name} of attempt {attempt} serves {server.engine.value} as version {version}")

    def check_end(self, version: int, *, is_pointed_to: bool = True) -> None:
        """The newest version of the newest attempt is whole and pointed to."""
        self.schedule.files.settle()
        run = self.run
        manifest = load_manifest(run, version, self.digests[self.attempt, version])
        verify(run, manifest)
        latest = run.read(run.latest_json) or {}
        if is_pointed_to and latest.get("digest") != manifest.digest:
            raise Violation(f"LATEST.json says {latest}, wanted version {version} of attempt {self.attempt}")


# ---- making a world --------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Any]:
    """Empty when there is none, or none that is whole."""
    try:
        record: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return record


def publish_value(run: RunDir, version: int, model: Path) -> Manifest:
    value = value_of(run.attempt, version)
    options = LibraConfig().weights
    options.dtype, options.io_threads = "float32", 1
    tensor = torch.full((4,), value)
    return publish(
        run,
        version=version,
        step=version,
        tensors=[LocalTensor.whole("model.value", tensor)],
        probe=Probe((1, 2, 3), says(value)),
        source_folder=model,
        options=options,
    )


def make_template(folder: Path) -> Path:
    """A run whose attempt 0 got to version 3, with all that it left; beside it the model that instances start from."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}')
    safetensors.torch.save_file({"model.value": torch.zeros(4)}, model / "model.safetensors")
    run = replace(RunDir.create(folder / "template"), writer="trainer")
    for version in OLD:
        manifest = publish_value(run, version, model)
        path = f"weights/v{version:06d}"
        asked = RefreshRequest(version, path, manifest.digest, "inplace", "parallel", INSTANCES, 10.0, time.time())
        run.write(run.request_json(version), asked.to_record())
        for name in INSTANCES:
            Answers(run, manifest).write(name)
        proved = {"version": version, "method": "inplace", "slowest_bytes_per_s": 1e9, "quarantined": {}}
        run.write(run.refreshed_json(version), proved)
    for name in INSTANCES:
        register(run, name, version=OLD[-1], leases=(OLD[-1],), heartbeat=7)
    (run.weights / ".v000004.tmp-0-abcd").mkdir()
    run.start_attempt(1)
    return run.root


@contextmanager
def replaced_parts() -> Iterator[None]:
    """See the module."""
    with pytest.MonkeyPatch.context() as patched:
        for module in ("stages.files", "stages.weights.publish"):
            patched.setattr(f"{module}.ThreadPoolExecutor", InlinePool)
        # Its default clock was taken when the module was loaded.
        patched.setattr("stages.weights.refresh.Patience", partial(Patience, clock=lambda: time.monotonic()))
        patched.setattr("asyncio.to_thread", at_once)
        patched.setattr("os.fsync", lambda fd: None)
        patched.setattr("stages.weights.spares.is_quicker_written_over", lambda folder: True)
        patched.setattr(rollout_stage, "Registration", QuietRegistration)
        patched.setattr(rollout_stage, "ServerKeeper", lambda context, _, beat: _here[-1].make_server(context, beat))
        yield


_here: list[World] = []


@contextmanager
def make_world(
    template: Path, sharing: Sharing, choose: Choose, *, rules: Sequence[Rule] = (), **options: Any
) -> Iterator[World]:
    """A copy of the template with no parties yet. `options` as of World."""
    root = template.with_name("run")
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    schedule = Schedule(
        root,
        sharing,
        choose,
        rules=rules,
        watch=lambda party, operation: world.watch(party, operation),
        check=lambda: world.check(),
    )
    world = World(schedule, root, template.with_name("model"), **options)
    for version in OLD:
        record = json.loads((root / f"weights/v{version:06d}/manifest.json").read_text())
        world.digests[0, version] = record["digest"]
    _here.append(world)
    try:
        with schedule.entered():
            yield world
    finally:
        _here.pop()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with replaced_parts():
        return make_template(tmp_path_factory.mktemp("exchange"))


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    """For every test of a module that imports it."""
    with replaced_parts():
        yield
