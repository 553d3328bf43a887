"""Trajectories for one optimizer step, as files: batches/step_000012/.

The controller writes a batch, the trainer reads it; neither re-tokenises. Everything is flat, without padding. Numpy
only, so that the controller needs no torch. Symbols: S sequences, T tokens of all sequences together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from stages.rundir import STAMPS, RunDir

MANIFEST_FILE = "manifest.json"
TENSORS_FILE = "batch.safetensors"
LOGPROB_SLACK = 1e-4  # vLLM's log-softmax may end a rounding error above 0

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


class BatchError(ValueError):
    """A batch breaks its schema, or its files are not what its manifest says."""


@dataclass(frozen=True)
class Sequence:
    """One trajectory of n tokens, prompt first.

    `loss_mask[i]` is 1 where the policy generated token i; `behaviour_logprobs[i]` is then log p(token i | tokens
    before i) of the sampling distribution, `versions[i]` the weight version that produced it. Elsewhere 0 and -1.
    """

    token_ids: npt.ArrayLike
    loss_mask: npt.ArrayLike
    behaviour_logprobs: npt.ArrayLike
    versions: npt.ArrayLike
    reward: float
    advantage: float
    group_id: int

    @classmethod
    def of_completion(
        cls,
        prompt_ids: list[int],
        response_ids: list[int],
        logprobs: list[float],
        versions: list[int],
        *,
        reward: float,
        advantage: float,
        group_id: int,
    ) -> Sequence:
        """A single-turn trajectory: `logprobs` and `versions` have one entry for each response token."""
        p = len(prompt_ids)
        return cls(
            token_ids=[*prompt_ids, *response_ids],
            loss_mask=[0] * p + [1] * len(response_ids),
            behaviour_logprobs=[0.0] * p + list(logprobs),
            versions=[-1] * p + list(versions),
            reward=reward,
            advantage=advantage,
            group_id=group_id,
        )


@dataclass(frozen=True)
class Batch:
    """token_ids, loss_mask, behaviour_logprobs, versions: [T]; cu_seqlens: [S + 1]; others: [S].

    Tokens of sequence s are cu_seqlens[s] .. cu_seqlens[s + 1]. Raises BatchError when the schema is broken.
    """

    token_ids: Int32
    loss_mask: UInt8
    behaviour_logprobs: Float32
    versions: Int32
    cu_seqlens: Int32
    rewards: Float32
    advantages: Float32
    group_ids: Int32

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_values(self)

    @classmethod
    def pack(cls, sequences: Iterable[Sequence]) -> Batch:
        """Put trajectories end to end. Raises BatchError for an empty or inconsistent one."""
        rows = list(sequences)
        if not rows:
            raise BatchError("a batch needs at least one sequence")
        lengths = [len(np.atleast_1d(np.asarray(row.token_ids))) for row in rows]
        return cls(
            token_ids=_join([row.token_ids for row in rows], lengths, np.int32, "token_ids"),
            loss_mask=_join([row.loss_mask for row in rows], lengths, np.uint8, "loss_mask"),
            behaviour_logprobs=_join(
                [row.behaviour_logprobs for row in rows], lengths, np.float32, "behaviour_logprobs"
            ),
            versions=_join([row.versions for row in rows], lengths, np.int32, "versions"),
            cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            rewards=np.asarray([row.reward for row in rows], np.float32),
            advantages=np.asarray([row.advantage for row in rows], np.float32),
            group_ids=np.asarray([row.group_id for row in rows], np.int32),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_response_tokens(self) -> int:
        """Tokens that carry loss, over all sequences: the denominator of the loss."""
        return int(self.loss_mask.sum())

    @property
    def lengths(self) -> Int32:
        """Tokens of each sequence, int32[S]."""
        return np.diff(self.cu_seqlens)

    @property
    def oldest_version(self) -> int:
        return int(self.versions[self.loss_mask == 1].min())

    @property
    def newest_version(self) -> int:
        return int(self.versions[self.loss_mask == 1].max())


@dataclass(frozen=True)
class BatchManifest:
    """What batches/step_N/manifest.json says beside what the writer adds (generate_s, reward_std, ...) in `extra`."""

    step: int
    sequences: int
    tokens: int
    response_tokens: int
    oldest_version: int
    newest_version: int
    reward_mean: float
    bytes: int
    xxh3_128: str
    extra: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """One flat record: `extra` is merged into it."""
        record = asdict(self)
        extra = record.pop("extra")
        return {**extra, **record}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> BatchManifest:
        """Inverse of `to_dict`. Raises BatchError when a field is missing."""
        names = [field.name for field in fields(cls) if field.name != "extra"]
        missing = [name for name in names if name not in record]
        if missing:
            raise BatchError(f"batch manifest lacks {', '.join(missing)}")
        known = {name: record[name] for name in names}
        return cls(**known, extra={key: value for key, value in record.items() if key not in names})


def write_batch(run: RunDir, step: int, batch: Batch, **extra: object) -> BatchManifest:
    """Publish `batch` as batches/step_N; readers see it only when complete. `extra` goes into the manifest as it is."""
    data = save(
        {field.name: np.ascontiguousarray(getattr(batch, field.name)) for field in fields(Batch)},
        metadata={"schema": "libra.batch.v1"},
    )
    manifest = BatchManifest(
        step=step,
        sequences=batch.num_sequences,
        tokens=batch.num_tokens,
        response_tokens=batch.num_response_tokens,
        oldest_version=batch.oldest_version,
        newest_version=batch.newest_version,
        reward_mean=float(batch.rewards.mean()),
        bytes=len(data),
        xxh3_128=xxhash.xxh3_128_hexdigest(data),
        extra=dict(extra),
    )
    with run.publishing(run.batch(step)) as publication:
        _write_durable(publication.path / TENSORS_FILE, data)
        publication.commit(manifest.to_dict())
    return manifest


def read_batch(run: RunDir, step: int, *, own: bool = False) -> tuple[Batch, BatchManifest] | None:
    """The batch of optimizer step `step`; None when it is not published yet.

    With `own`, one that an older attempt left counts only once this attempt's controller took it over (`adopt_batch`).
    Raises BatchError when the files are not what the manifest says: size, digest, schema, counts, step.
    """
    if step not in run.published_batches():
        return None
    record = run.read(run.batch(step) / MANIFEST_FILE, any_attempt=not own)
    if record is None:
        return None
    path = run.batch(step) / TENSORS_FILE
    manifest = BatchManifest.from_dict(record)
    batch = _decode(_read_checked(path, manifest), path)
    found = (step, batch.num_sequences, batch.num_tokens, batch.num_response_tokens)
    wanted = (manifest.step, manifest.sequences, manifest.tokens, manifest.response_tokens)
    if found != wanted:
        raise BatchError(f"{path}: (step, sequences, tokens, response tokens) is {found}, its manifest says {wanted}")
    return batch, manifest


def adopt_batch(run: RunDir, step: int, groups: Iterable[int]) -> BatchManifest | None:
    """Take over, as it is, the batch of `groups` that an older attempt wrote; one that this attempt wrote needs nothing.

    None when there is none, or one of other groups. Raises BatchError for a damaged one. Only the controller may call this.
    """
    found = read_batch(run, step)
    if found is None or set(found[0].group_ids.tolist()) != set(groups):
        return None
    record = found[1].extra
    manifest = replace(found[1], extra={key: value for key, value in record.items() if key not in STAMPS})
    if record["attempt"] != run.attempt:
        run.write(run.batch(step) / MANIFEST_FILE, manifest.to_dict())
    return manifest


def _read_checked(path: Path, manifest: BatchManifest) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise BatchError(f"{path} is missing although its manifest exists") from error
    if len(data) != manifest.bytes:
        raise BatchError(f"{path} has {len(data)} bytes, its manifest says {manifest.bytes}")
    digest = xxhash.xxh3_128_hexdigest(data)
    if digest != manifest.xxh3_128:
        raise BatchError(f"{path} has digest {digest}, its manifest says {manifest.xxh3_128}: the file is damaged")
    return data


def _decode(data: bytes, path: Path) -> Batch:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise BatchError(f"{path} is not a safetensors file: {error}") from error
    names = {field.name for field in fields(Batch)}
    if set(tensors) != names:
        raise BatchError(f"{path} holds {sorted(tensors)}, wanted {sorted(names)}")
    return Batch(**tensors)


def _join(rows: list[npt.ArrayLike], lengths: list[int], dtype: npt.DTypeLike, name: str) -> npt.NDArray[Any]:
    arrays = [np.atleast_1d(np.asarray(row)) for row in rows]
    for index, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if array.shape != (length,):
            raise BatchError(f"sequence {index}: {name} has shape {array.shape}, wanted ({length},) like token_ids")
    joined: npt.NDArray[Any] = np.concatenate(arrays).astype(dtype)
    return joined


def _check_shapes(batch: Batch) -> None:
    if batch.cu_seqlens.ndim != 1 or len(batch.cu_seqlens) < 2:
        raise BatchError("a batch needs at least one sequence")
    tokens, sequences = int(batch.cu_seqlens[-1]), len(batch.cu_seqlens) - 1
    per_token = {"token_ids": np.int32, "loss_mask": np.uint8, "behaviour_logprobs": np.float32, "versions": np.int32}
    per_sequence = {"rewards": np.float32, "advantages": np.float32, "group_ids": np.int32}
    wanted = {name: (dtype, (tokens,)) for name, dtype in per_token.items()}
    wanted |= {name: (dtype, (sequences,)) for name, dtype in per_sequence.items()}
    wanted["cu_seqlens"] = (np.int32, (sequences + 1,))
    for name, (dtype, shape) in wanted.items():
        array = getattr(batch, name)
        if array.dtype != dtype or array.shape != shape:
            raise BatchError(f"{name} is {array.dtype}{list(array.shape)}, wanted {np.dtype(dtype)}{list(shape)}")


def _check_values(batch: Batch) -> None:
    if batch.cu_seqlens[0] != 0 or (batch.lengths <= 0).any():
        raise BatchError("broken batch: cu_seqlens must start at 0 and grow: sequences are not empty")
    starts, mask = batch.cu_seqlens[:-1], batch.loss_mask
    generated = mask == 1
    logprobs = batch.behaviour_logprobs
    rules = {
        "token_ids must not be negative": (batch.token_ids >= 0).all(),
        "loss_mask must hold only 0 and 1": (mask <= 1).all(),
        "the first token of a sequence has no context: its loss_mask must be 0": not generated[starts].any(),
        "a batch needs at least one generated token": generated.any(),
        "behaviour_logprobs must be finite and at most 0 where tokens were generated": np.isfinite(logprobs).all()
        and (logprobs[generated] <= LOGPROB_SLACK).all(),
        "behaviour_logprobs must be 0 where tokens were not generated": (logprobs[~generated] == 0).all(),
        "versions must be 0 or more where tokens were generated": (batch.versions[generated] >= 0).all(),
        "versions must be -1 where tokens were not generated": (batch.versions[~generated] == -1).all(),
        "rewards and advantages must be finite": np.isfinite(batch.rewards).all()
        and np.isfinite(batch.advantages).all(),
    }
    for rule, holds in rules.items():
        if not holds:
            raise BatchError(f"broken batch: {rule}")


def _write_durable(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
