"""What ranks send each other: declared types come back as they were, and everything else is refused without running it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages import exchange
from stages.checkpoint import errors as checkpoint_errors
from stages.checkpoint.manifest import FileEntry
from stages.exchange import ExchangeError, Failure, decode, encode, pack_error, unpack_error
from stages.rundir import FencedError
from stages.weights import errors as weights_errors
from stages.weights.boxes import Box
from stages.weights.errors import NoSpaceError, PublishError, WeightsError
from stages.weights.layout import Offer, Slice
from stages.weights.ranks import RankGroup, SingleRank, agree, first_rank_says
from tests.weights_kit import run_ranks

ERRORS: list[Exception] = [
    weights_errors.RecordError("manifest", "step", "missing"),
    PublishError("it failed"),
    NoSpaceError("/run/weights", 10, 5),
    weights_errors.VersionNotPublishedError(3, "/run/weights/v000003"),
    weights_errors.NotInFullError(3, 2),
    weights_errors.ManifestMismatchError(3, "digest", "a", "b"),
    weights_errors.SignatureMismatchError("embed", "has another shape"),
    weights_errors.SizeMismatchError("model.safetensors", 10, None),
    weights_errors.DigestMismatchError("embed", "model.safetensors", "a", "b"),
    weights_errors.WeightRefreshError(3, ("rollout_000", "rollout_001"), "silent"),
    weights_errors.InstanceSilentError("rollout_000", 61.5, "serving"),
    weights_errors.InstanceLateError("rollout_000", 61.5),
    checkpoint_errors.SaveError("it failed"),
    checkpoint_errors.NoCheckpointSpaceError("/run/checkpoints", 10, 5),
    checkpoint_errors.LoadError("it failed"),
    checkpoint_errors.DamagedCheckpointError("step_000010", "rank_00000.safetensors is short"),
    checkpoint_errors.NoSoundCheckpointError("/run/checkpoints", (10, 20)),
    checkpoint_errors.LayoutMismatchError("step_000010", "tp", "2", "1", "set train_tp_size=1"),
    FencedError("attempt 0 is over"),
]
ALLOWED = (WeightsError, *checkpoint_errors.TRAVELS)


class Trap:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error: Exception) -> None:
    arrived = unpack_error(decode(encode(pack_error(error)), Failure), ALLOWED)

    assert (type(arrived), arrived.args, str(arrived)) == (type(error), error.args, str(error))


def _kinds(base: type[Exception]) -> Iterator[type[Exception]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


def test_every_error_that_ranks_may_send_is_tried_here() -> None:
    modules = (weights_errors.__name__, checkpoint_errors.__name__)
    kinds = {kind for base in (WeightsError, checkpoint_errors.CheckpointError) for kind in _kinds(base)}

    untried = {kind.__name__ for kind in kinds if kind.__module__ in modules} - {
        type(error).__name__ for error in ERRORS
    }
    assert untried <= {
        "CheckpointMismatchError",
        "ModelMismatchError",
        "TaskMismatchError",
    }  # of LayoutMismatchError's form


@pytest.mark.parametrize(
    "data",
    [pickle.dumps(Trap()), b"\x80\x05.", b"", b"{", b'{"kind": 1, "args": []}', b'["kind"]', b"[" * 100_000],
    ids=["pickle", "empty-pickle", "nothing", "half", "wrong-type", "list", "deep"],
)
def test_anything_but_the_declared_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ExchangeError):
        decode(data, Failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "kind", ["SystemExit", "Popen", "OSError", "stages.weights.errors.PublishError", "", "x" * 10_000]
)
def test_an_error_of_another_kind_is_refused(kind: str) -> None:
    with pytest.raises(ExchangeError, match="none of the errors that ranks may send") as caught:
        unpack_error(Failure(kind, ("rm -rf",)), ALLOWED)
    assert len(str(caught.value)) < 200


def test_an_error_with_other_arguments_is_refused() -> None:
    with pytest.raises(ExchangeError, match="NoSpaceError, but its arguments do not fit"):
        unpack_error(Failure("NoSpaceError", ()), ALLOWED)


def test_more_than_any_rank_sends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_BYTES", 10)

    with pytest.raises(ExchangeError, match="has 13 bytes, at most 10 are taken"):
        encode("eleven long")
    with pytest.raises(ExchangeError, match="at most 10"):
        decode(b'"eleven long"', str)


def test_what_json_cannot_hold_is_refused_where_it_is_sent() -> None:
    with pytest.raises(ExchangeError, match="Trap cannot be sent"):
        encode(Trap())


_numbers = st.tuples(st.integers(0, 2**40), st.integers(1, 2**40))


@given(st.text(max_size=20), st.lists(st.tuples(st.text(max_size=20), _numbers, _numbers), max_size=4))
def test_what_a_rank_offers_arrives_as_it_was(
    host: str, slices: list[tuple[str, tuple[int, int], tuple[int, int]]]
) -> None:
    offer = Offer(host, tuple(Slice(name, "BF16", shape, Box(start, shape)) for name, start, shape in slices))

    assert decode(encode(offer), Offer) == offer


# ---- agreeing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forger:
    """A group in which somebody else answers for rank 0."""

    forged: bytes
    rank: int = 1
    size: int = 2

    def gather(self, data: bytes) -> list[bytes]:
        return [self.forged, data]


@pytest.mark.parametrize(
    "forged",
    [
        b"+" + pickle.dumps(Trap()),
        b"-" + pickle.dumps(Trap()),
        b'-{"kind":"SystemExit","args":[]}',
        b"",
        b'+{"bytes":"8"}',
    ],
    ids=["value", "failure", "kind", "nothing", "field"],
)
def test_a_forged_answer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: bytes) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ExchangeError):
        agree(Forger(forged), lambda: FileEntry(8, "0" * 32), FileEntry)
    assert list(tmp_path.iterdir()) == []


def test_every_rank_gets_all_results_in_order() -> None:
    done = run_ranks(3, lambda ranks: agree(ranks, lambda: FileEntry(ranks.rank, "x"), FileEntry))

    assert [future.result() for future in done] == [[FileEntry(rank, "x") for rank in range(3)]] * 3


def test_the_lowest_failing_rank_speaks_for_all() -> None:
    def body(ranks: RankGroup) -> list[None]:
        def action() -> None:
            if ranks.rank > 0:
                raise OSError(f"disk {ranks.rank}")

        return agree(ranks, action, None)

    errors = [future.exception() for future in run_ranks(3, body)]

    assert {str(error) for error in errors} == {"publishing failed on trainer rank 1 of 3: OSError: disk 1"}
    assert {type(error) for error in errors} == {PublishError}


def test_an_error_with_arguments_that_cannot_travel_arrives_in_words() -> None:
    def body(ranks: RankGroup) -> list[None]:
        def action() -> None:
            if ranks.rank == 0:
                raise PublishError(Path("/run"), threading.Lock())

        return agree(ranks, action, None)

    first, second = [future.exception() for future in run_ranks(2, body)]

    assert isinstance(first, PublishError) and first.args[0] == Path("/run")  # noqa: PT018
    assert str(second).startswith("publishing failed on trainer rank 0 of 2: PublishError: (PosixPath('/run')")


def test_a_lone_rank_keeps_its_own_error() -> None:
    error = NoSpaceError("/run", 2, 1)

    def fail() -> None:
        raise error

    with pytest.raises(NoSpaceError) as caught:
        agree(SingleRank(), fail, None)
    assert caught.value is error


def test_what_the_first_rank_says_counts() -> None:
    with ThreadPoolExecutor():
        done = run_ranks(2, lambda ranks: first_rank_says(ranks, (ranks.rank, 7), tuple[int, ...]))

    assert [future.result() for future in done] == [(0, 7), (0, 7)]
