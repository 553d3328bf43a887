"""Completions from one vLLM server: token ids in, token ids, log-probs and weight versions out, all of it checked.

aiohttp, because a request costs it 0.3 ms of processor where httpx takes 15 ms when 512 are open at once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, TypeGuard

import aiohttp

from stages.controller.groups import Completion

MODEL = "policy"
LOGPROB_SLACK = 1e-4  # a log-softmax may end a rounding error above 0
IMPOSSIBLE_LOGPROB = -9000.0  # vLLM writes -9999 for a log-prob of minus infinity


class GenerationError(RuntimeError):
    """A generation request brought no usable answer. It may be sent again."""


class InstanceUnreachableError(GenerationError):
    """No connection, or it broke, or the deadline passed."""


class ServerFailedError(GenerationError):
    """The server answered with an error of its own (HTTP 5xx, 429)."""


class InstanceDiedError(GenerationError):
    """The instance ended while it had the request: no fault of the request."""


class InvalidAnswerError(GenerationError):
    """The answer breaks the contract: lengths, values, versions."""


class RequestRefusedError(RuntimeError):
    """The server refuses this request (HTTP 4xx): sending it again can not help."""


@dataclass(frozen=True)
class Sampling:
    """`n` answers to each prompt, each of at most `max_tokens` tokens. Temperature 0 is greedy."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float = 1.0


class CompletionClient:
    """One HTTP session for all instances of a run.

    Args:
        token: the run's bearer token.
        timeout_s: deadline of a whole request, from connecting to the last byte.
    """

    def __init__(self, token: str, timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 10.0)),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self.timeout_s = timeout_s

    async def complete(self, base_url: str, prompts: list[list[int]], sampling: Sampling) -> list[list[Completion]]:
        """For each prompt (token ids) its `sampling.n` answers.

        Raises GenerationError when the same request may succeed later or elsewhere, RequestRefusedError when not.
        """
        body = {"model": MODEL, "prompt": prompts, "logprobs": 0, "return_token_ids": True, **asdict(sampling)}
        try:
            async with self._session.post(f"{base_url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise _refusal(base_url, response.status, await response.text())
                answer = await response.json()
        except TimeoutError as error:
            raise InstanceUnreachableError(f"{base_url} did not answer within {self.timeout_s} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InstanceUnreachableError(f"{base_url}: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise InvalidAnswerError(f"{base_url} answered something that is not JSON: {error}") from error
        return parse_answer(answer, prompts=len(prompts), sampling=sampling)

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> CompletionClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


def parse_answer(answer: Any, *, prompts: int, sampling: Sampling) -> list[list[Completion]]:
    """The checked completions in the JSON body of /v1/completions, grouped by prompt.

    vLLM numbers choices prompt by prompt (`index` = prompt * n + sample). Raises InvalidAnswerError naming the field.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    wanted = prompts * sampling.n
    if not isinstance(choices, list) or sorted(_index(choice) for choice in choices) != list(range(wanted)):
        found = len(choices) if isinstance(choices, list) else type(choices).__name__
        raise InvalidAnswerError(f"choices: wanted {wanted} numbered from 0, got {found}")
    ordered = sorted(choices, key=_index)
    completions = [_parse_choice(choice, sampling) for choice in ordered]
    return [completions[start : start + sampling.n] for start in range(0, wanted, sampling.n)]


def _index(choice: Any) -> int:
    index = choice.get("index") if isinstance(choice, dict) else None
    if not isinstance(index, int):
        raise InvalidAnswerError(f"choices: index is {index!r}, wanted an integer")
    return index


def _parse_choice(choice: dict[str, Any], sampling: Sampling) -> Completion:
    where = f"choice {choice['index']}"
    token_ids = choice.get("token_ids")
    if not _are_counts(token_ids) or not 1 <= len(token_ids) <= sampling.max_tokens:
        raise InvalidAnswerError(
            f"{where}: token_ids must be 1 to {sampling.max_tokens} token ids, got {_short(token_ids)}"
        )
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise InvalidAnswerError(f"{where}: finish_reason is {reason!r}, wanted stop or length")
    return Completion(
        token_ids=token_ids,
        logprobs=_parse_logprobs(choice, len(token_ids), where),
        versions=_parse_versions(choice.get("version_segments"), len(token_ids), where),
        finished=reason == "stop",
    )


def _parse_logprobs(choice: dict[str, Any], length: int, where: str) -> list[float]:
    record = choice.get("logprobs")
    values = record.get("token_logprobs") if isinstance(record, dict) else None
    if not isinstance(values, list) or len(values) != length:
        raise InvalidAnswerError(f"{where}: logprobs.token_logprobs must have {length} values, got {_short(values)}")
    for value in values:
        if (
            not isinstance(value, float | int)
            or not math.isfinite(value)
            or not IMPOSSIBLE_LOGPROB < value <= LOGPROB_SLACK
        ):
            raise InvalidAnswerError(f"{where}: {value!r} is not the log-prob of a token that was sampled")
    return [min(float(value), 0.0) for value in values]


def _parse_versions(segments: Any, length: int, where: str) -> list[int]:
    """One version for each token, from [[version, number of tokens], ...]."""
    if not isinstance(segments, list) or not all(_are_counts(pair) and len(pair) == 2 for pair in segments):
        raise InvalidAnswerError(f"{where}: version_segments must be [[version, tokens], ...], got {_short(segments)}")
    versions = [version for version, tokens in segments for _ in range(tokens)]
    if len(versions) != length:
        raise InvalidAnswerError(f"{where}: version_segments cover {len(versions)} tokens of {length}")
    if versions != sorted(versions):
        raise InvalidAnswerError(f"{where}: version_segments go back in version: {segments}")
    return versions


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list) else repr(value)[:100]


def _refusal(base_url: str, status: int, text: str) -> Exception:
    message = f"{base_url} answered HTTP {status}: {text[:500]}"
    if status >= 500 or status == 429:
        return ServerFailedError(message)
    return RequestRefusedError(message)
