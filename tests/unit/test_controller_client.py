"""What the client accepts as an answer of a vLLM server."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from stages.controller.client import InvalidAnswerError, Sampling, parse_answer

SAMPLING = Sampling(n=2, max_tokens=3, temperature=1.0)


def choice(index: int) -> dict[str, Any]:
    return {
        "index": index,
        "text": "ignored",
        "finish_reason": "stop",
        "token_ids": [10 + index, 2],
        "logprobs": {"token_logprobs": [-0.25, -0.5]},
        "version_segments": [[4, 1], [5, 1]],
    }


ANSWER = {"choices": [choice(index) for index in range(4)]}


def test_answers_are_grouped_by_prompt_whatever_their_order() -> None:
    answer = {"choices": [choice(index) for index in (3, 0, 2, 1)]}

    groups = parse_answer(answer, prompts=2, sampling=SAMPLING)

    assert [[completion.token_ids[0] for completion in group] for group in groups] == [[10, 11], [12, 13]]


def test_every_token_gets_its_log_prob_and_version() -> None:
    completion = parse_answer(ANSWER, prompts=2, sampling=SAMPLING)[0][0]

    assert (completion.logprobs, completion.versions, completion.finished) == ([-0.25, -0.5], [4, 5], True)


def test_an_answer_cut_off_by_the_token_limit_is_not_finished() -> None:
    answer = copy.deepcopy(ANSWER)
    answer["choices"][1]["finish_reason"] = "length"

    assert not parse_answer(answer, prompts=2, sampling=SAMPLING)[0][1].finished


def test_a_rounding_error_above_zero_becomes_zero() -> None:
    answer = copy.deepcopy(ANSWER)
    answer["choices"][0]["logprobs"] = {"token_logprobs": [1e-7, -0.5]}

    assert parse_answer(answer, prompts=2, sampling=SAMPLING)[0][0].logprobs == [0.0, -0.5]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("token_ids", [], "token_ids"),
        ("token_ids", [1, 2, 3, 4], "token_ids"),
        ("token_ids", [1, -2], "token_ids"),
        ("token_ids", None, "token_ids"),
        ("token_ids", ["1", "2"], "token_ids"),
        ("logprobs", None, "token_logprobs"),
        ("logprobs", {"token_logprobs": [-0.5]}, "must have 2 values"),
        ("logprobs", {"token_logprobs": [-0.5, None]}, "log-prob"),
        ("logprobs", {"token_logprobs": [-0.5, 0.1]}, "log-prob"),
        ("logprobs", {"token_logprobs": [-0.5, float("nan")]}, "log-prob"),
        ("logprobs", {"token_logprobs": [-0.5, -9999.0]}, "log-prob"),
        ("version_segments", None, "version_segments"),
        ("version_segments", [[4, 1]], "cover 1 tokens of 2"),
        ("version_segments", [[4, 3]], "cover 3 tokens of 2"),
        ("version_segments", [[5, 1], [4, 1]], "go back"),
        ("version_segments", [[4, 1, 1]], "version_segments"),
        ("version_segments", [[-1, 2]], "version_segments"),
        ("finish_reason", "abort", "finish_reason"),
        ("index", 7, "choices"),
        ("index", None, "index"),
    ],
)
def test_a_field_that_breaks_the_contract_is_named(field: str, value: Any, message: str) -> None:
    answer = copy.deepcopy(ANSWER)
    answer["choices"][2][field] = value

    with pytest.raises(InvalidAnswerError, match=message):
        parse_answer(answer, prompts=2, sampling=SAMPLING)


@pytest.mark.parametrize("answer", [None, [], {}, {"choices": None}, {"choices": [choice(0)]}, {"choices": ["x"] * 4}])
def test_an_answer_without_all_choices_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidAnswerError, match="choices"):
        parse_answer(answer, prompts=2, sampling=SAMPLING)
