"""The two phases of a refresh inside the server: prepare while generating, then commit: pause, swap, prove, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from stages.rollout.errors import (
    NotPreparedError,
    OutsideWeightsError,
    ProofFailedError,
    ReloadBusyError,
    SwapFailedError,
    UnfitWeightsError,
    VersionNotNewerError,
    WrongRunError,
)
from stages.rollout.gate import Gate
from stages.rollout.orders import Order
from stages.rollout.settings import ServerSettings
from stages.rollout.signature import StartModel
from stages.rollout.versions import VersionTimeline
from stages.rundir import OutsideRunError, RunDir
from stages.weights.errors import NotInFullError, WeightsError
from stages.weights.manifest import Manifest, check_signature
from stages.weights.proof import allowed_difference_nats
from stages.weights.reader import load_manifest, verify
from traces.recorder import Recorder

_POLL_FIRST_S = 0.002
_POLL_LAST_S = 0.02
_POLL_SHARE = 0.02
"""Workers that read are asked every 2 % of the time that they have read, within the two limits: half of a pause is lost at the end."""
_LAST_WORD_S = 0.5
"""For workers that waited in vain for the node's memory: they have the same deadline, and say who has it."""
_SEED_WAIT_S = 0.25
"""The canary has so long to get into the prefix cache, from when it was queued."""


class Answer(Protocol):
    """What the engine says about a prompt: log-probs (nats) of tokens 1.., and how many came from the prefix cache."""

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def cached_tokens(self) -> int: ...


class Engine(Protocol):
    """The part of `stages.rollout.compat.VllmEngine` that a reload uses."""

    timeline: VersionTimeline

    async def call(self, method: str, *arguments: Any) -> list[Any]: ...

    async def pause(self) -> float: ...

    async def resume(self) -> None: ...

    async def reset_caches(self) -> None: ...

    def canary(self, token_ids: tuple[int, ...]) -> tuple[int, ...]: ...

    async def submit(self, token_ids: tuple[int, ...], *, logprobs: bool) -> Awaitable[Answer]: ...


class Reloads:
    """The server's state machine. One order at a time; an order that is refused changes nothing.

    After a swap or a proof that failed the engine may hold anything: the gate stays shut until a later version has been
    swapped in and proved.
    """

    def __init__(
        self,
        settings: ServerSettings,
        engine: Engine,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._run: RunDir = settings.run_dir()
        self._engine = engine
        self._recorder = recorder
        self._busy = ""
        self._prepared: Manifest | None = None
        self._prepared_method = ""
        self._seeding: asyncio.Task[None] | None = None
        self._queued_s = 0.0
        self.proved: Manifest | None = None
        self.gate = Gate("" if settings.serve_unproved else "no version of the weights has been proved yet")

    def state(self) -> dict[str, Any]:
        """Body of GET /libra/state. `version` is -1 until one was proved."""
        return {
            "instance": self._settings.instance,
            "version": -1 if self.proved is None else self.proved.version,
            "manifest_digest": "" if self.proved is None else self.proved.digest,
            "prepared_version": -1 if self._prepared is None else self._prepared.version,
            "busy": self._busy,
            "shut_because": self.gate.shut_because,
        }

    @property
    def serving_version(self) -> int:
        """The version of tokens generated now; the start version while nothing is proved (see `serve_unproved`)."""
        return self._settings.start_version if self.proved is None else self.proved.version

    # ---- the three orders ----------------------------------------------------------------------------------------

    async def prepare(self, order: Order) -> dict[str, Any]:
        """Check that the version fits and read it into the workers' memory (`restart`: only verify it).

        Raises ReloadRefusedError subtypes; the engine goes on generating in every case.
        """
        with self._exclusively("prepare"):
            self._check_origin(order)
            self._check_newer(order)
            started_s = time.monotonic()
            with self._recorder.span("prepare_weights", version=order.version):
                manifest = await asyncio.to_thread(self._fitting_manifest, order)
                if order.method == "restart":
                    _check_whole(manifest)
                self._seed_prefix_cache(manifest)
                if order.method == "restart":
                    await asyncio.to_thread(_verified, self._run, manifest)
                else:
                    await self._read_into_workers(order)
            self._prepared, self._prepared_method = manifest, order.method
            return {"bytes": manifest.weight_bytes, "prepare_s": time.monotonic() - started_s}

    async def commit(self, order: Order) -> dict[str, Any]:
        """Replace the weights by the prepared ones, prove them, then let answers out again.

        Raises NotPreparedError; SwapFailedError and ProofFailedError leave the gate shut.
        """
        with self._exclusively("commit"):
            self._check_origin(order)
            manifest = self._prepared
            if manifest is None or (manifest.version, manifest.digest) != (order.version, order.digest):
                raise NotPreparedError(f"version {order.version} with digest {order.digest} is not prepared")
            if not self._prepared_method == order.method == "inplace":
                raise NotPreparedError(
                    f"version {order.version} was prepared by the method {self._prepared_method}, the commit says "
                    f"{order.method}: only what was prepared in place is in the workers' memory and can be committed there"
                )
            self._check_newer(order)
            self._prepared = None
            seeded = await self._seeded()
            with self._recorder.span("commit_weights", version=order.version):
                return await self._swap_and_prove(manifest, order, check_cache=seeded)

    async def prove(self, order: Order) -> dict[str, Any]:
        """Prove the weights that this process was started from (`restart`, or an instance that serves a version alone)."""
        with self._exclusively("prove"):
            self._check_origin(order)
            if order.version != self._settings.start_version or self.proved is not None:
                raise NotPreparedError(f"this process was not started from version {order.version}, or has proved it")
            manifest = await asyncio.to_thread(self._fitting_manifest, order)
            await self._read_into_workers(order)
            self.gate.hold()
            started_s = time.monotonic()
            try:
                reports = await self._engine.call("libra_check", manifest.version, manifest.digest)
                _check_arrival(reports)
                proof = await self._proof(await self._queue_proof(manifest, check_cache=False), manifest, order)
            except Exception as error:
                self.gate.shut(f"the proof of version {order.version} failed: {error}")
                raise
            self._accept(manifest)
            return {"proof": proof, "prove_s": time.monotonic() - started_s, "workers": reports}

    # ---- checks --------------------------------------------------------------------------------------------------

    @contextmanager
    def _exclusively(self, what: str) -> Iterator[None]:
        if self._busy:
            raise ReloadBusyError(f"a {self._busy} is under way")
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""

    def _check_origin(self, order: Order) -> None:
        if (order.run_id, order.attempt) != (self._run.run_id, self._run.attempt):
            raise WrongRunError(
                f"the order is from run {order.run_id} attempt {order.attempt}, "
                f"this server belongs to run {self._run.run_id} attempt {self._run.attempt}"
            )
        weights = self._run.weights.resolve()
        try:
            folder = self._run.inside(order.path)
        except OutsideRunError as error:
            raise OutsideWeightsError(str(error)) from error
        if folder != weights / self._run.weights_version(order.version).name:
            raise OutsideWeightsError(f"{order.path} is not the folder of version {order.version} in {weights}")

    def _check_newer(self, order: Order) -> None:
        if self.proved is not None and order.version <= self.proved.version:
            raise VersionNotNewerError(
                f"version {order.version} is not newer than {self.proved.version}, which is served"
            )

    def _fitting_manifest(self, order: Order) -> Manifest:
        """The manifest of the ordered version, if it describes the model that the engine was started with."""
        start = self._start_model
        try:
            manifest = load_manifest(self._run, order.version, order.digest)
            if manifest.model_config_digest != start.config_digest:
                folder = self._settings.start_folder
                raise UnfitWeightsError(f"version {order.version} has another config.json than {folder}")
            check_signature(manifest, start.signature(self._settings.weights_dtype, manifest.tensors))
        except WeightsError as error:
            raise UnfitWeightsError(str(error), tensor=getattr(error, "tensor", "")) from error
        return manifest

    @cached_property
    def _start_model(self) -> StartModel:
        return StartModel.of(Path(self._settings.start_folder))

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def _read_into_workers(self, order: Order) -> None:
        """Start the reading in every worker and wait for all; the engine loop is free meanwhile."""
        started_s = self._clock()
        run = self._run
        await self._engine.call(
            "libra_prepare",
            str(run.root),
            run.run_id,
            run.attempt,
            run.writer,
            order.version,
            order.digest,
            order.deadline_s,
        )
        while True:
            reports = await self._engine.call("libra_prepared")
            for report in reports:
                if report["error"]:
                    raise UnfitWeightsError(report["error"], tensor=report["tensor"])
            if all(report["done"] for report in reports):
                return
            waited_s = self._clock() - started_s
            if waited_s > order.deadline_s + _LAST_WORD_S:
                raise UnfitWeightsError(f"version {order.version} was not read within {order.deadline_s:.0f} s")
            await asyncio.sleep(min(_POLL_LAST_S, max(_POLL_FIRST_S, _POLL_SHARE * waited_s)))

    def _seed_prefix_cache(self, manifest: Manifest) -> None:
        """Put the canary prompt into the prefix cache, so that its absence after the swap shows that the cache was reset."""
        canary = self._engine.canary(manifest.probe.token_ids)
        if canary and (self._seeding is None or self._seeding.done()):

            async def seed() -> None:
                await (await self._engine.submit(canary, logprobs=False))

            self._seeding = asyncio.create_task(seed())
            self._queued_s = self._clock()

    async def _seeded(self) -> bool:
        """Whether the canary is in the prefix cache; waits a little for it, while generation goes on: a commit that follows a long
        prepare does not wait for a canary that an engine with a full queue has not come to.

        One that is still queued is left alone: if it ran after the swap it would look like a cache that was not reset.
        """
        if self._seeding is None:
            return False
        left_s = max(0.0, self._queued_s + _SEED_WAIT_S - self._clock())
        done, _ = await asyncio.wait([self._seeding], timeout=left_s)
        return bool(done) and self._seeding.exception() is None

    async def _swap_and_prove(self, manifest: Manifest, order: Order, *, check_cache: bool) -> dict[str, Any]:
        engine, span = self._engine, self._recorder.span
        self.gate.hold()
        started_s = time.monotonic()
        try:
            with span("pause"):
                paused_s = await engine.pause()
            with span("swap_weights"):
                reports = await engine.call("libra_swap", manifest.version, manifest.digest)
            _check_arrival(reports)
            swapped_s = time.monotonic()
            with span("reset_prefix_cache"):
                await engine.reset_caches()
            engine.timeline.switch(manifest.version, paused_s)
            with span("prove_weights"):
                queued = await self._queue_proof(manifest, check_cache=check_cache)
                await engine.resume()
                resumed_s = time.monotonic()
                proof = await self._proof(queued, manifest, order)
        except ProofFailedError as error:
            self.gate.shut(str(error))
            raise
        except Exception as error:
            self.gate.shut(f"replacing the weights by version {manifest.version} failed: {error!r}")
            raise SwapFailedError(self.gate.shut_because) from error
        self._accept(manifest)
        return {
            "proof": proof,
            "paused_s": time.monotonic() - started_s,
            "pause_s": paused_s - started_s,
            "swap_s": swapped_s - paused_s,
            "generation_paused_s": resumed_s - started_s,
            "prefix_cache_checked": check_cache,
            "workers": reports,
        }

    async def _queue_proof(self, manifest: Manifest, *, check_cache: bool) -> list[Awaitable[Answer]]:
        queued = [await self._engine.submit(manifest.probe.token_ids, logprobs=True)]
        canary = self._engine.canary(manifest.probe.token_ids)
        if check_cache and canary:
            queued.append(await self._engine.submit(canary, logprobs=False))
        return queued

    async def _proof(self, queued: list[Awaitable[Answer]], manifest: Manifest, order: Order) -> dict[str, Any]:
        """Compare with the trainer's log-probs. Raises ProofFailedError."""
        tolerance = allowed_difference_nats(
            self._settings.proof_tolerance,
            self._settings.proof_resolution,
            None if self.proved is None else self.proved.probe,
            manifest.probe,
        )
        try:
            async with asyncio.timeout(order.deadline_s):
                answers = await asyncio.gather(*queued)
        except TimeoutError as error:
            raise ProofFailedError(f"the engine did not answer the proof within {order.deadline_s:.0f} s") from error
        difference = _largest_difference(answers[0].logprobs, manifest.probe.logprobs)
        if not difference <= tolerance:
            raise ProofFailedError(
                f"version {manifest.version} is not what the engine holds: a log-prob of the probe differs by "
                f"{difference:.6g} nats, allowed are {tolerance:g} (weights.proof_tolerance, or half of the probe's change)"
            )
        if any(answer.cached_tokens for answer in answers[1:]):
            raise ProofFailedError(
                f"after the swap to version {manifest.version} the prefix cache still holds keys and values of older weights"
            )
        return {"max_difference": difference, "tolerance": tolerance, "tokens": len(manifest.probe.logprobs)}

    def _accept(self, manifest: Manifest) -> None:
        self.proved = manifest
        self.gate.open()


def _largest_difference(found: list[float], wanted: tuple[float, ...]) -> float:
    """Infinite when lengths differ; NaN when a log-prob is NaN (which no tolerance admits)."""
    if len(found) != len(wanted):
        return float("inf")
    differences = [abs(one - other) for one, other in zip(found, wanted, strict=True)]
    return float("nan") if any(value != value for value in differences) else max(differences)


def _check_arrival(reports: list[dict[str, Any]]) -> None:
    """Raises ProofFailedError when a worker's tensors are not those that were staged."""
    for report in reports:
        if report["fault"]:
            raise ProofFailedError(report["fault"], tensor=report["tensor"])


def _check_whole(manifest: Manifest) -> None:
    """A new process reads the folder itself."""
    if manifest.delta is not None:
        raise UnfitWeightsError(str(NotInFullError(manifest.version, manifest.delta.base.version)))


def _verified(run: RunDir, manifest: Manifest) -> None:
    try:
        verify(run, manifest)
    except WeightsError as error:
        raise UnfitWeightsError(str(error), tensor=getattr(error, "tensor", "")) from error
