"""Sparse differences: exact for every bit pattern, never put on another base, and damage is found before it is applied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.weights import delta as codec
from stages.weights.delta import Bytes, Delta, DeltaError, WrongBaseError, WrongResultError, apply, encode, overwrite
from stages.weights.errors import RecordError
from stages.weights.manifest import xxh3_128
from stages.weights.tensors import bytes_of


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have several."""
    monkeypatch.setattr(codec, "BLOCK_ELEMENTS", 700)


def two_versions(seed: int, elements: int, share: float, width: int = 2) -> tuple[Bytes, Bytes]:
    """Random bit patterns, and the same with about `share` of the elements drawn anew."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, (elements, width), np.uint8)
    new = base.copy()
    moved = rng.random(elements) < share
    new[moved] = rng.integers(0, 256, (int(moved.sum()), width), np.uint8)
    return base.reshape(-1), new.reshape(-1)


versions = st.builds(
    two_versions,
    st.integers(0, 2**32 - 1),
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9, 1.0]),
    st.sampled_from([2, 4]),
)


@settings(max_examples=60, deadline=None)
@given(versions, st.sampled_from([2, 4]))
def test_a_delta_turns_the_base_into_the_new_version_bit_for_bit(pair: tuple[Bytes, Bytes], width: int) -> None:
    base, new = (data[: len(data) // 4 * 4] for data in pair)

    delta, payload = encode(base, new, width)
    result = apply(delta, payload, base)

    assert result.tobytes() == new.tobytes()
    assert (delta.base, delta.result) == (xxh3_128(base), xxh3_128(new))
    words = new.view(f"<u{width}") != base.view(f"<u{width}")
    assert (delta.changed, delta.elements) == (int(words.sum()), len(words))


@settings(max_examples=30, deadline=None)
@given(versions, st.data())
def test_a_delta_that_was_cut_off_anywhere_is_completed_by_applying_it_again(
    pair: tuple[Bytes, Bytes], data: st.DataObject
) -> None:
    base, new = pair
    delta, payload = encode(base, new, 2)
    half = base.copy()
    done = np.array(data.draw(st.lists(st.booleans(), min_size=8, max_size=8)))
    reached = np.resize(done, len(half))  # a crash leaves any of the changes behind, in any order
    half[reached] = new[reached]

    overwrite(delta, payload, half, torn=True)

    assert half.tobytes() == new.tobytes()


def test_applying_a_delta_again_changes_nothing() -> None:
    base, new = two_versions(1, 2000, 0.05)
    delta, payload = encode(base, new, 2)
    target = base.copy()

    overwrite(delta, payload, target)
    overwrite(delta, payload, target)
    overwrite(delta, payload, target, torn=True)

    assert target.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_not_a_number_and_negative_zero_are_values_like_others(dtype: torch.dtype) -> None:
    base = torch.tensor([0.0, float("nan"), 1.0, float("inf")] * 300, dtype=dtype)
    new = base.clone()
    new[0], new[2], new[7] = -0.0, float("nan"), float("-inf")

    delta, payload = encode(bytes_of(base), bytes_of(new), base.element_size())

    assert delta.changed == 3
    assert apply(delta, payload, bytes_of(base)).tobytes() == bytes_of(new).tobytes()


def test_positions_far_apart_are_found_again() -> None:
    base = np.zeros(1400, np.uint8)
    new = base.copy()
    for element in (0, 255, 256, 511, 512, 699):  # gaps of 254, 0, 254, 0, 186, and over the limit of one byte below
        new[2 * element] = 1
    far = base.copy()
    far[2 * 256] = far[2 * 600] = 1

    for version in (new, far):
        delta, payload = encode(base, version, 2)
        assert apply(delta, payload, base).tobytes() == version.tobytes()


def test_threads_encode_and_apply_the_same() -> None:
    base, new = two_versions(3, 20_000, 0.05)

    with ThreadPoolExecutor(3) as pool:
        assert encode(base, new, 2, pool=pool) == encode(base, new, 2)
        delta, payload = encode(base, new, 2)
        assert apply(delta, payload, base, pool=pool).tobytes() == new.tobytes()


def test_an_unchanged_tensor_takes_four_bytes_a_block() -> None:
    base, _ = two_versions(4, 1400, 0.0)

    delta, payload = encode(base, base.copy(), 2)

    assert (len(payload), delta.changed) == (8, 0)


def test_a_tensor_that_changed_everywhere_takes_hardly_more_than_itself() -> None:
    base, new = two_versions(5, 1400, 1.0)

    _, payload = encode(base, new, 2)

    assert len(payload) <= len(new) + 32


def test_few_changes_of_real_weights_take_little() -> None:
    """2 % of the weights moved by one step of their format: 14 bits of new value and about 7 of position, at the most."""
    torch.manual_seed(0)
    weights = (torch.randn(140_000) * 0.02).bfloat16()
    moved = weights.clone().view(torch.int16)
    moved[torch.rand(len(moved)) < 0.02] += 1

    delta, payload = encode(bytes_of(weights), bytes_of(moved), 2)

    assert len(payload) < delta.changed * 3 + 40 * 200


# ---- refused -----------------------------------------------------------------------------------------------------------


def test_another_base_is_refused_and_left_as_it_is() -> None:
    base, new = two_versions(6, 2000, 0.05)
    delta, payload = encode(base, new, 2)
    other = base.copy()
    other[17] ^= 1
    before = other.tobytes()

    with pytest.raises(WrongBaseError, match=f"digest {delta.base}, these have {xxh3_128(other)}"):
        overwrite(delta, payload, other)

    assert other.tobytes() == before


def test_a_torn_base_that_was_another_one_is_found_by_its_result() -> None:
    base, new = two_versions(7, 2000, 0.05)
    delta, payload = encode(base, new, 2)
    other = base.copy()
    other[np.flatnonzero(base == new)[0]] ^= 1

    with pytest.raises(WrongResultError):
        overwrite(delta, payload, other, torn=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_payload_is_refused_before_anything_is_written(data: st.DataObject) -> None:
    base, new = two_versions(8, 2000, 0.05)
    delta, payload = encode(base, new, 2)
    spoilt = bytearray(payload)
    spoilt[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    target = base.copy()

    with pytest.raises(DeltaError, match="the payload's digest is"):
        overwrite(delta, bytes(spoilt), target)

    assert target.tobytes() == base.tobytes()


@pytest.mark.parametrize("share", [0.05, 1.0])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_payload_that_only_its_digest_speaks_for_ends_in_an_error_and_nowhere_else(
    share: float, data: st.DataObject
) -> None:
    """Whatever the bytes: no write outside the target, no endless unpacking, no other error than this."""
    base, new = two_versions(9, 2000, share)
    delta, payload = encode(base, new, 2)
    spoilt = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        spoilt[data.draw(st.integers(0, min(len(payload) - 1, 80)))] = data.draw(st.integers(0, 255))
    cut = bytes(spoilt[: data.draw(st.integers(0, len(spoilt)))]) if data.draw(st.booleans()) else bytes(spoilt)
    forged = replace(delta, payload=xxh3_128(cut), bytes=len(cut))

    try:
        result = apply(forged, cut, base)
    except DeltaError:
        return
    assert result.tobytes() == new.tobytes()


def test_sizes_that_do_not_fit_are_errors() -> None:
    base, new = two_versions(10, 2000, 0.05)
    delta, payload = encode(base, new, 2)

    with pytest.raises(ValueError, match="base has 1999 elements, the new version 2000"):
        encode(base[2:], new, 2)
    with pytest.raises(DeltaError, match="1999 elements"):
        apply(delta, payload, base[2:])
    with pytest.raises(ValueError, match="elements of 8 bytes"):
        encode(base, new, 8)


def test_a_record_comes_back_as_it_was() -> None:
    delta, _ = encode(*two_versions(11, 2000, 0.05), 2)

    assert Delta.from_record(delta.to_record(), "delta of a tensor") == delta


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"width": 3}, "width"), ({"changed": 5000}, "changed"), ({"base": ""}, "base"), ({"more": 1}, "more")],
)
def test_a_record_that_no_delta_has_is_refused(changes: dict[str, object], field: str) -> None:
    delta, _ = encode(*two_versions(12, 2000, 0.05), 2)

    with pytest.raises(RecordError) as refused:
        Delta.from_record({**delta.to_record(), **changes}, "delta of a tensor")

    assert refused.value.field == field
