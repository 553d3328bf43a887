"""The only module that touches vLLM's interfaces in the server process; works with vLLM 0.25 to 0.32.

(`compat_scheduler` and `compat_model` are what the engine core and the workers load.)

What it relies on, beyond the public options: the functions that make and serve the app (moved to
`vllm.entrypoints.launchers` by 0.32), `AsyncLLM.from_vllm_config`, `AsyncLLM.engine_core.pause_scheduler_async`,
`AsyncLLM.add_request`, and that `AsyncLLM` calls `output_processor.process_outputs(outputs, timestamp, ...)`.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from stages.rollout.versions import Segment, VersionTimeline, segments

PROOF_PRIORITY = -1
"""Ahead of every other request, whose priority is 0: the proof must not queue behind the requests it holds up."""

PROOF_REQUEST = "libra-proof-"
"""What the ids of proofs begin with. vLLM puts something before the ids of requests that come over HTTP, whatever they ask for."""

_SCHEDULERS = "stages.rollout.compat_scheduler"


def _first_module(*names: str) -> Any:
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name and name.startswith(error.name)):
                raise
    return importlib.import_module(names[-1])


def parse_arguments(arguments: list[str]) -> Namespace:
    """The options of vLLM's own server. Exits with vLLM's message for one that it does not know."""
    cli = _first_module("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
    api = importlib.import_module("vllm.entrypoints.serve.utils.api_utils")
    parser_class = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    api.cli_env_setup()
    args = cli.make_arg_parser(parser_class(description="vLLM server of a Libra rollout instance")).parse_args(
        arguments
    )
    cli.validate_parsed_serve_args(args)
    return cast(Namespace, args)


async def build_and_serve(engine: Any, address: str, sock: socket.socket, args: Namespace) -> Awaitable[None]:
    """Make vLLM's app, with the middleware named in `args`, and serve it on `sock` until asked to stop."""
    entry = _first_module("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.openai.api_server")
    return cast(Awaitable[None], await entry.build_and_serve(engine, address, sock, args))


def run(main: Coroutine[Any, Any, None]) -> None:
    importlib.import_module("uvloop").run(main)


def engine_config(args: Namespace, *, fork: bool) -> Any:
    """vLLM's checked configuration. `fork`: the engine core will be a fork of this process, so import all it needs."""
    if fork:
        register_model_in_process(args.model)
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    config = arg_utils.AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=_usage_context())
    # Not an argument: which of the two fits is known once vLLM has checked whether it can schedule ahead.
    scheduling = config.scheduler_config
    name = "ProofAloneAsyncScheduler" if scheduling.async_scheduling else "ProofAloneScheduler"
    scheduling.scheduler_cls = f"{_SCHEDULERS}.{name}"
    if fork:
        prefer_fork()
    importlib.import_module("vllm.v1.engine.async_llm")
    return config


@asynccontextmanager
async def running_engine(config: Any, args: Namespace) -> AsyncIterator[Any]:
    """vLLM's AsyncLLM, shut down at the end."""
    async_llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    engine = async_llm.from_vllm_config(
        vllm_config=config, usage_context=_usage_context(), disable_log_stats=args.disable_log_stats
    )
    try:
        await engine.reset_mm_cache()
        yield engine
    finally:
        engine.shutdown()


async def start_workers(engine: Any, run_id: str, start_folder: str, weights_dtype: str) -> None:
    """Let every worker find out how versions get into its engine; says what is slower than it could be."""
    reports = await engine.collective_rpc("libra_start", args=(run_id, start_folder, weights_dtype))
    for rank, report in enumerate(reports):
        if report["why_reload"]:
            print(f"worker {rank}: new weights go through vLLM's own reload: {report['why_reload']}", flush=True)
        if report["why_private"]:
            print(f"worker {rank}: new weights are staged in memory of its own: {report['why_private']}", flush=True)


def _usage_context() -> Any:
    return importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER


def register_model_in_process(model: str) -> None:
    """Import the model's class here instead of letting vLLM look at it in a subprocess that imports everything again.

    Worth 8 s of processor time the first time (vLLM remembers its findings in the user's cache afterwards); the fork
    needs the module anyway. An architecture that vLLM does not know is left for vLLM to report.
    """
    transformers = importlib.import_module("transformers")
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture in transformers.AutoConfig.from_pretrained(model).architectures or []:
        if (lazy := registry.models.get(architecture)) is not None:
            registry.register_model(architecture, lazy.load_model_cls())


def prefer_fork() -> None:
    """vLLM's CPU platform asks for spawn when it checks the configuration, for the OpenMP settings of its worker
    processes. With one worker inside the engine core those settings are this process's own, so a fork inherits them.
    """
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    for module in (
        *("vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor", "vllm.v1.engine.core"),
        _SCHEDULERS,
    ):
        importlib.import_module(module)


def canary_prompt(probe: tuple[int, ...], block_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """A prompt just long enough to fill one block of the prefix cache, for token ids of a vocabulary of at least two.

    It begins unlike the probe: a probe that fills a block leaves it in the cache, made with the new weights, and would
    pass for a block of the old ones (seen with vLLM 0.25.1 on a GPU, where a block has 16 tokens).
    """
    unlike = ((probe[0] + 1) % vocab_size, *probe[1:])
    return (unlike * (block_tokens // len(unlike) + 1))[: block_tokens + 1]


@dataclass(frozen=True)
class ProbeAnswer:
    """`logprobs[i]` belongs to prompt token i + 1, in nats; `cached_tokens` prompt tokens came from the prefix cache."""

    logprobs: list[float]
    cached_tokens: int


class VllmEngine:
    """The engine as the reload needs it: pause, swap, prove, resume, and who generated what."""

    def __init__(self, engine: Any, start_version: int) -> None:
        self._engine = engine
        self.timeline = VersionTimeline(start_version)
        self.segments = SegmentLog(engine.output_processor, self.timeline)
        config = engine.vllm_config
        self.max_model_len = int(config.model_config.max_model_len)
        self.vocab_size = int(config.model_config.get_vocab_size())
        self._block_size = int(config.cache_config.block_size)
        self._caches_prefixes = bool(config.cache_config.enable_prefix_caching)
        self._proofs = 0

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker (`stages.rollout.worker.WeightWorker`); one result per rank."""
        return cast(list[Any], await self._engine.collective_rpc(method, args=arguments))

    async def pause(self) -> float:
        """Hold all requests where they are; returns a moment after their last token so far, in monotonic seconds.

        Not `pause_generation`: that sleeps 20 ms so that outputs are processed first, which the time stamps make
        unnecessary. Caches are reset after the swap, explicitly.
        """
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        return time.monotonic()  # not the event loop's clock: uvloop's stands still within one iteration

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def reset_caches(self) -> None:
        """Forget every key and value of the old weights, also of requests under way: those are computed anew.

        Raises RuntimeError when the engine says that it could not.
        """
        if not await self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")

    def canary(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """`canary_prompt` for this engine's cache; empty when it keeps no prefixes or no prompt can fill a block."""
        if not self._caches_prefixes or self._block_size + 1 >= self.max_model_len:
            return ()
        return canary_prompt(token_ids, self._block_size, self.vocab_size)

    async def submit(self, token_ids: tuple[int, ...], *, logprobs: bool) -> Awaitable[ProbeAnswer]:
        """Queue a prompt ahead of all others; on return it is on its way to the engine, also while that is paused.

        Without `logprobs` the prompt may be served from the prefix cache (vLLM never does so for prompt log-probs).
        """
        sampling = importlib.import_module("vllm.sampling_params")
        params = sampling.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0 if logprobs else None,
            detokenize=False,
            output_kind=sampling.RequestOutputKind.FINAL_ONLY,
        )
        self._proofs += 1
        request_id = f"{PROOF_REQUEST}{self._proofs}"
        prompt = {"prompt_token_ids": list(token_ids)}
        collector = await self._engine.add_request(request_id, prompt, params, priority=PROOF_PRIORITY)
        return self._answer(request_id, collector)

    async def _answer(self, request_id: str, collector: Any) -> ProbeAnswer:
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
        finally:
            if not finished:
                await self._engine.abort(request_id)
        ids, scores = output.prompt_token_ids, output.prompt_logprobs or []
        logprobs = [float(score[token].logprob) for token, score in zip(ids, scores, strict=False) if score is not None]
        return ProbeAnswer(logprobs, int(output.num_cached_tokens or 0))


class SegmentLog:
    """Wraps `process_outputs` of one vLLM output processor and remembers, for the requests of interest, who generated what.

    Per call it compares one time stamp; per finished sequence it does a few dictionary look-ups; only at a switch of
    versions it visits all running sequences. vLLM 0.32 keeps such spans itself (`CompletionOutput.weight_versions`),
    earlier versions do not, and /v1/completions shows them in neither.
    """

    def __init__(self, processor: Any, timeline: VersionTimeline) -> None:
        self._processor = processor
        self._timeline = timeline
        self._current = timeline.newest
        self._boundaries: dict[str, list[tuple[int, int]]] = {}
        self._finished: dict[str, dict[tuple[int, int], list[Segment]]] = {}
        self._process: Callable[..., Any] = processor.process_outputs
        processor.process_outputs = self._process_outputs

    def follow(self, request_id: str) -> None:
        """Keep the segments of all sequences of a /v1/completions request until `take`; the id is vLLM's ("cmpl-...")."""
        self._finished[request_id] = {}

    def take(self, request_id: str) -> list[list[Segment]]:
        """Segments of the request's finished sequences in the order of its choices: prompt by prompt, sample by sample."""
        return [found for _, found in sorted(self._finished.pop(request_id, {}).items())]

    def _process_outputs(self, outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
        if timestamp is not None and (version := self._timeline.at(timestamp)) != self._current:
            self._mark_boundaries()
            self._current = version
        states = self._processor.request_states
        touched = [states.get(output.request_id) for output in outputs]
        result = self._process(outputs, timestamp, *args, **kwargs)
        for state in touched:
            if state is not None and state.request_id not in states:
                self._finish(state)
        return result

    def _mark_boundaries(self) -> None:
        states = self._processor.request_states
        gone = self._boundaries.keys() - states.keys()
        for request_id in gone:  # aborted: nothing asks for them any more
            del self._boundaries[request_id]
        for request_id, state in states.items():
            if state.detokenizer is not None:
                mark = (self._current, state.detokenizer.num_output_tokens())
                self._boundaries.setdefault(request_id, []).append(mark)

    def _finish(self, state: Any) -> None:
        boundaries = self._boundaries.pop(state.request_id, [])
        request_id, _, prompt_index = state.external_req_id.rpartition("-")
        if request_id in self._finished and state.detokenizer is not None:
            found = segments(boundaries, self._current, state.detokenizer.num_output_tokens())
            self._finished[request_id][int(prompt_index), state.request_index] = found
