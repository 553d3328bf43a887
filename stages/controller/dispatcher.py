"""Keeps groups of trajectories in flight: issues prompts, collects scored groups, re-queues what failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextvars import Context
from dataclasses import dataclass

from stages.controller.answers import Answerer
from stages.controller.client import GenerationError, InstanceDiedError, InvalidAnswerError, Sampling
from stages.controller.groups import Completion, FinishedGroup, Prompt, WaitingGroups
from stages.controller.instances import Instance
from stages.controller.ledger import Batched, Dropped, Event, Finished, Issued, Ledger
from stages.controller.staleness import Bounds, capacity
from traces.phases import DROPPED_INSTANT

UNIFORM_DROPS_PER_GROUP = 3  # a batch may cost this many discarded groups for each one it keeps


class PromptFailedError(RuntimeError):
    """One prompt failed more often than rollout.max_retries allows."""


@dataclass(frozen=True)
class Limits:
    """`prompts_per_request`: see option rollout.request_tokens."""

    prompts_per_request: int
    max_retries: int
    drop_uniform_groups: bool


@dataclass(frozen=True)
class OpenGroup:
    """A group that is being generated."""

    group: int
    prompt: Prompt
    failures: int
    started_s: float


@dataclass(frozen=True)
class OpenRequest:
    """What one request task asked of whom; `sent_s` is of this process's monotonic clock."""

    instance: Instance
    groups: list[OpenGroup]
    sent_s: float


class Dispatcher:
    """Call `fill`, `wait` and `take` in a loop; `close` cancels what is in flight.

    All state changes go through the ledger first. A failed request re-queues each of its prompts; a prompt that failed
    before travels alone, so that one bad prompt can not take its neighbours down again. Whatever ends a request task
    with another exception (a refused request, a verifier that raises) comes out of `wait`.
    """

    def __init__(self, answerer: Answerer, ledger: Ledger, bounds: Bounds, sampling: Sampling, limits: Limits) -> None:
        self.answerer = answerer
        self.ledger = ledger
        self.bounds = bounds
        self.sampling = sampling
        self.limits = limits
        self.open: dict[int, OpenGroup] = {}
        self.last_failure = ""
        self._waiting = WaitingGroups()
        self._requests: dict[asyncio.Task[None], OpenRequest] = {}
        self._uniform_drops = 0

    def fill(self, served_version: int) -> int:
        """Start as many groups as staleness and load allow; returns how many."""
        state = self.ledger.state
        open_groups = len(state.in_flight) + len(state.waiting)
        count = capacity(
            self.bounds,
            served_version=served_version,
            # What was issued, counted in batches of today's size: a resumed run may have been given another batch_size.
            issued=state.dropped + len(state.batches) * self.bounds.groups_per_batch + open_groups,
            dropped=state.dropped,
            in_flight=len(state.in_flight),
        )
        self.answerer.pool.advance(served_version)
        usable = self.answerer.pool.usable() if count else []
        if not usable:
            return 0
        groups: list[OpenGroup] = []
        self.ledger.record(self._issue(count, served_version, groups))
        for request in self._split(groups, len(usable)):
            self._send(request, usable, served_version)
        self._count()
        return count

    async def wait(self, timeout_s: float) -> None:
        """Return when a request ends or after `timeout_s`. Raises what a request task raised."""
        if not self._requests:
            await asyncio.sleep(timeout_s)
            return
        done, _ = await asyncio.wait(self._requests, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._requests[task]
        for task in done:
            task.result()
        if done:
            self._count()

    @property
    def num_waiting(self) -> int:
        """Finished groups that no batch has taken."""
        return len(self._waiting)

    def take(self, step: int) -> list[FinishedGroup] | None:
        """The groups of batch `step`, or None while there are not enough; re-queues what became too stale for it."""
        for group in self._waiting.expire(self.bounds, step):
            self._drop(group.group, "stale", requeued=True, tokens=group.response_tokens)
        groups = self._waiting.take(self.bounds, step)
        if groups is not None:
            self.ledger.record([Batched(step, [group.group for group in groups])])
            self._uniform_drops = 0
            self._count()
        return groups

    async def give_up(self, sent_before_s: float) -> int:
        """Cancel the requests sent before `sent_before_s` and re-queue their prompts; returns how many groups that were.

        A server sees the connection close and stops generating. The instances cool down as after a failed request, and
        the prompts travel alone next, because one of them may be what hangs. Raises what a request task raised.
        """
        hanging = {task: request for task, request in self._requests.items() if request.sent_s < sent_before_s}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        groups = 0
        for task, request in hanging.items():
            del self._requests[task]
            if task.cancelled():
                groups += len(request.groups)
                self._abandon(request)
            else:
                task.result()  # it ended in the same moment
        self._count()
        return groups

    async def close(self) -> None:
        """Cancel the requests in flight. Their prompts stay open in the ledger, where a resumed run finds them (`Resumed`)."""
        for task in self._requests:
            task.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        self._requests = {}

    def describe(self) -> str:
        """One phrase for error messages: what is in flight and for how long, and what failed last."""
        parts = []
        if self.open:
            oldest = min(self.open.values(), key=lambda group: group.started_s)
            age_s = time.monotonic() - oldest.started_s
            parts.append(f"{len(self.open)} in flight (prompt {oldest.prompt.index} for {age_s:.0f} s)")
        if self.last_failure:
            parts.append(f"last failure: {self.last_failure}")
        return ", ".join(parts) or "nothing in flight"

    def _issue(self, count: int, version: int, groups: list[OpenGroup]) -> Iterator[Event]:
        """The events of `count` new groups; lazy, because each changes which prompt is next."""
        state, answerer = self.ledger.state, self.answerer
        for _ in range(count):
            ask = state.next_ask()
            group = state.issued
            problem = answerer.task.train_problem(ask.prompt)
            prompt = answerer.prompt(ask.prompt, problem, self.sampling.max_tokens)
            groups.append(OpenGroup(group, prompt, ask.failures, time.monotonic()))
            answerer.recorder.flow_start("prompt", group)
            yield Issued(group, ask.prompt, version, ask.failures)

    def _split(self, groups: list[OpenGroup], instances: int) -> Iterator[list[OpenGroup]]:
        """Split evenly over the instances, within the size limit; prompts that failed before go alone."""
        fresh = [group for group in groups if not group.failures]
        size = max(1, min(self.limits.prompts_per_request, -(-len(fresh) // instances)))
        yield from (fresh[start : start + size] for start in range(0, len(fresh), size))
        yield from ([group] for group in groups if group.failures)

    def _send(self, groups: list[OpenGroup], usable: list[Instance], served_version: int) -> None:
        self.open.update({group.group: group for group in groups})
        instance = self.answerer.pool.claim(usable, len(groups) * self.sampling.n)
        # An empty context: the loop's open span (a step being collected) says nothing about these groups' step.
        request = self._request(instance, groups, served_version)
        task = asyncio.create_task(request, context=Context())
        self._requests[task] = OpenRequest(instance, groups, time.monotonic())

    async def _request(self, instance: Instance, groups: list[OpenGroup], served_version: int) -> None:
        try:
            answers = await self._generate(instance, groups, served_version)
        except GenerationError as error:
            self._failed(instance, groups, error)
            return
        finally:
            self.answerer.pool.release(instance, len(groups) * self.sampling.n)
        with self.answerer.recorder.span("score", version=served_version, groups=len(groups)):
            prompts = [group.prompt for group in groups]
            rewards = await asyncio.to_thread(self.answerer.score, prompts, answers)
        self._finish(groups, answers, rewards)

    async def _generate(
        self, instance: Instance, groups: list[OpenGroup], served_version: int
    ) -> list[list[Completion]]:
        recorder = self.answerer.recorder
        with recorder.span("generate", version=served_version, instance=instance.name, groups=len(groups)) as span:
            for group in groups:
                recorder.flow_end("prompt", group.group)
            prompts = [group.prompt for group in groups]
            answers = await self.answerer.ask(instance, prompts, self.sampling, oldest_version=served_version)
            span.add(tokens=sum(len(answer.token_ids) for group in answers for answer in group))
            for group in groups:
                recorder.flow_start("trajectory", group.group)
        return answers

    def _finish(self, groups: list[OpenGroup], answers: list[list[Completion]], rewards: list[list[float]]) -> None:
        now = time.monotonic()
        finished = [
            FinishedGroup(group.group, group.prompt, completions, scores, group.started_s, now)
            for group, completions, scores in zip(groups, answers, rewards, strict=True)
        ]
        self.ledger.record(
            Finished(group.group, group.oldest_version, group.response_tokens, group.reward_mean) for group in finished
        )
        for group in finished:
            del self.open[group.group]
            if self._is_worthless(group):
                self._uniform_drops += 1
                self._drop(group.group, "uniform", requeued=False, tokens=group.response_tokens)
            else:
                self._waiting.add(group)

    def _is_worthless(self, group: FinishedGroup) -> bool:
        """DAPO's dynamic sampling, with a cap: a policy that is always right must not generate for ever."""
        allowed = UNIFORM_DROPS_PER_GROUP * self.bounds.groups_per_batch
        return self.limits.drop_uniform_groups and group.is_uniform and self._uniform_drops < allowed

    def _failed(self, instance: Instance, groups: list[OpenGroup], error: GenerationError) -> None:
        """Re-queue every prompt of a failed request. Raises PromptFailedError for one that failed too often."""
        interrupted = isinstance(error, InstanceDiedError) or self.answerer.pool.is_interrupted(instance.name)
        if not isinstance(error, InvalidAnswerError):  # a server that answers is there; its prompt may be the poison
            self.answerer.pool.failed(instance, interrupted=interrupted)
        self.last_failure = f"{instance.name}: {type(error).__name__}: {error}"
        print(f"request of {len(groups)} prompts failed on {self.last_failure}", flush=True)
        for group in groups:
            del self.open[group.group]
            if not interrupted and group.failures >= self.limits.max_retries:
                raise PromptFailedError(
                    f"prompt {group.prompt.index} failed {group.failures + 1} times "
                    f"(rollout.max_retries={self.limits.max_retries}), last on {self.last_failure}"
                ) from error
            self._drop(group.group, "interrupted" if interrupted else "failed", requeued=True, tokens=0)

    def _abandon(self, request: OpenRequest) -> None:
        pool = self.answerer.pool
        interrupted = pool.is_interrupted(request.instance.name)
        pool.failed(request.instance, interrupted=interrupted)
        for group in request.groups:
            del self.open[group.group]
            self._drop(group.group, "interrupted" if interrupted else "timeout", requeued=True, tokens=0)

    def _drop(self, group: int, reason: str, *, requeued: bool, tokens: int) -> None:
        self.ledger.record([Dropped(group, reason, requeued)])
        self.answerer.recorder.instant(DROPPED_INSTANT, reason=reason, group=group, tokens=tokens)

    def _count(self) -> None:
        self.answerer.recorder.counter("running", len(self.open) * self.sampling.n)
        self.answerer.recorder.counter("queue", len(self._waiting))
