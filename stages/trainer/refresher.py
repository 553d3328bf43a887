"""Publishing a version and having it served, beside the training.

On every rank one thread at a time, over a process group of its own: a group's collectives must come in the same order on all
ranks, which two threads cannot promise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from stages.context import StageContext, StoppedError
from stages.members import members
from stages.rundir import FencedError
from stages.stopping import StopRequestedError
from stages.trainer.checkpoints import Checkpoints
from stages.trainer.parallel import EXTRA_TIMEOUT_S, RankGrid, TrainerRanks, collective_timeout_s
from stages.weights.collect import collect
from stages.weights.errors import WeightsError
from stages.weights.hf_folder import other_tokenizer
from stages.weights.manifest import Manifest, Probe
from stages.weights.publication import Publication
from stages.weights.publish import Publisher
from stages.weights.ranks import agree
from stages.weights.refresh import request_refresh
from stages.weights.tensors import LocalTensor

SYNCS = {"restart": request_refresh}
"""By rollout_weight_sync_mode."""
THREAD = "refresh"
"""The name of its track in the trace."""
FAREWELL_S = 5.0
"""How long a rank that fails waits for its thread: the other ranks may never do their part."""
_TRAVELS = (WeightsError, FencedError)

Result = TypeVar("Result")


class ServeError(WeightsError):
    """A version could not be brought to the instances, for a reason that is none of theirs."""


class ServingFailedError(RuntimeError):
    """What this rank did beside the training failed; it is raised where the ranks meet (`Refresher.raise_failure`)."""


class Refresher:
    """All ranks call `begin`, `wait`, `finish` and `raise_failure` alike, between two of their other collectives.

    At most one version is under way. Each is published by all ranks, then rank 0 asks the instances to serve it, and all
    ranks learn how that ended: when `wait` is over it has failed on all of them, or on none. Last, rank 0 deletes what is old.
    """

    def __init__(self, context: StageContext, grid: RankGrid, checkpoints: Checkpoints) -> None:
        self.context = context
        self.grid = grid
        self.checkpoints = checkpoints
        self.ranks = TrainerRanks(grid, grid.refresh_group)
        self.publisher = Publisher(
            context.run,
            source_folder=Path(context.config.model_path),
            options=context.config.weights,
            ranks=self.ranks,
            device=grid.device,
            tokenizer_folder=other_tokenizer(context.config),
        )
        self.is_cut_short = threading.Event()
        self._limit_s = collective_timeout_s(context) + EXTRA_TIMEOUT_S
        self._current: _Serving | None = None

    def __enter__(self) -> Refresher:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        in_order = kind is None or issubclass(kind, StoppedError)
        self._close(self._limit_s if in_order else FAREWELL_S)
        failure = self._failure()
        if failure is not None and error is not failure:
            print(f"beside the training: {type(failure).__name__}: {failure}", flush=True)

    # ---- one version ----------------------------------------------------------------------------------------------

    def begin(self, version: int, tensors: Iterable[LocalTensor], probe: Probe) -> None:
        """Returns as soon as `tensors` may change; the rest goes on in a thread. Raises PublishError on all ranks."""
        self.finish()
        is_last = version == self.context.config.total_steps
        self._current = _Serving(self, self.publisher.begin(version, version, tensors, probe, in_full=is_last))
        self._current.start()

    def wait(self) -> None:
        """Until the version under way is served, or that has failed (`has_failed`) or was cut short by a wish to stop."""
        self._wait(lambda current: current.served)

    def finish(self) -> None:
        """As `wait`, until this rank has nothing at all under way."""
        self._wait(lambda current: current.collected)

    def cut_short(self) -> None:
        """Wait no longer for ACKs; a publication is finished."""
        self.is_cut_short.set()

    def _wait(self, part: Callable[[_Serving], Future[object]]) -> None:
        if self._current is None:
            return
        try:
            part(self._current).exception(self._limit_s)
        except TimeoutError:
            raise ServeError(
                f"version {self._current.version} is still under way after {self._limit_s:.0f} s"
            ) from None
        self._raise_fault()

    # ---- failures -------------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Has what this rank did in its thread failed? Raises what only a fault of this program can be: it ends the rank."""
        self._raise_fault()
        return self._failure() is not None

    def check(self) -> None:
        """Ends a wait of this rank alone. Raises ServingFailedError."""
        if self.has_failed:
            raise ServingFailedError("what goes on beside the training has failed")

    def raise_failure(self) -> None:
        """Collective, in the training's own group: raises the failure of the lowest rank that has one, on all ranks."""
        agree(TrainerRanks(self.grid), self._raise, None, _TRAVELS, failed)

    def _failure(self) -> BaseException | None:
        return None if self._current is None else self._current.failure()

    def _raise(self) -> None:
        failure = self._failure()
        if failure is not None:
            raise failure

    def _raise_fault(self) -> None:
        failure = self._failure()
        if failure is not None and not isinstance(failure, OSError | RuntimeError | ValueError):
            raise failure

    # ---- the end --------------------------------------------------------------------------------------------------

    def _close(self, limit_s: float) -> None:
        self.cut_short()
        if self._current is not None:
            self._current.join(limit_s)
            if self._current.is_alive():
                return  # the publisher is still in use; the process is about to end
        self.publisher.close()


class _Serving(threading.Thread):
    """One version from its snapshot to its last ACK. A daemon: a rank that fails must be able to end without it."""

    def __init__(self, refresher: Refresher, publication: Publication) -> None:
        super().__init__(name=THREAD, daemon=True)
        self.version = publication.version
        self.served: Future[object] = Future()
        self.collected: Future[object] = Future()
        self._refresher = refresher
        self._context = refresher.context
        self._publication = publication
        self._is_first = refresher.grid.is_first

    def run(self) -> None:
        _run_into(self.served, self._serve)
        _run_into(self.collected, self._collect)

    def failure(self) -> BaseException | None:
        """The first, as far as is known by now."""
        failures = (part.exception() for part in (self.served, self.collected) if part.done())
        return next((failure for failure in failures if failure is not None), None)

    def _serve(self) -> bool:
        """False when a wish to stop cut it short."""
        recorder, ranks = self._context.recorder, self._refresher.ranks
        with recorder.span("write_version", step=self.version, version=self.version):
            manifest = self._publication.finish()
            if self._is_first:
                if self.version:
                    recorder.flow_end("step", self.version - 1)
                recorder.flow_start("version", self.version)
        with recorder.span("serve_version", step=self.version, version=self.version):
            return agree(ranks, lambda: self._ask(manifest), bool, _TRAVELS, failed)[0]

    def _ask(self, manifest: Manifest) -> bool:
        if not self._is_first:
            return True
        context = self._context
        sync = SYNCS[context.config.rollout_weight_sync_mode]
        try:
            sync(context, manifest, members(context.run, context.plan), self._publication.report.total_s, self._check)
        except (StoppedError, StopRequestedError):
            return False
        return True

    def _check(self) -> None:
        self._context.check_stop()
        self._context.check_stop_request()
        if self._refresher.is_cut_short.is_set():
            raise StoppedError("the trainer ends")

    def _collect(self) -> None:
        """A controller that is started again goes on from the published version: it looks for the batches behind it."""
        if self._is_first and self.served.exception() is None and self.served.result():
            before = min(self.version, self._refresher.checkpoints.first_needed_batch(self.version))
            with self._context.recorder.span("collect_old", step=self.version, version=self.version):
                collect(self._context, batches_before=before)


def failed(described: str) -> ServeError:
    return ServeError(f"serving a version failed on {described}")


def _run_into(future: Future[object], work: Callable[[], object]) -> None:
    try:
        result = work()
    except BaseException as problem:
        future.set_exception(problem)
        if not isinstance(problem, Exception):
            raise
    else:
        future.set_result(result)
