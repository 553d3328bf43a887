"""Publish a HF folder by hand as the next version of a run that no trainer works on.

The version goes through the code that the trainer publishes with, so it has a manifest, a digest for every byte and a probe,
and an instance proves it like any other. Names, shapes and config.json must be the run's. The log-probs of the probe come from
transformers on the CPU, not from the trainer's model: it needs no process group and no optimizer, reads every architecture
that a folder can have, and shares no code with what is proved by them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from conf.schema import LibraConfig
from stages.rundir import RunDir
from stages.weights.errors import PublishError, WeightsError
from stages.weights.hf_folder import CONFIG_FILE, other_tokenizer
from stages.weights.hf_tensors import HfTensors, opened
from stages.weights.manifest import Manifest, Probe
from stages.weights.probe_tokens import probe_tokens
from stages.weights.publish import publish
from stages.weights.reader import load_manifest
from stages.weights.tensors import LocalTensor

WRITER = "push"
"""Names versions that were published by hand, in their manifest."""
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)
"""Keys of config.json that do not change what a loaded model computes. The version gets the run's own."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Shapes = Mapping[str, tuple[int, ...]]


class PushRefusedError(WeightsError):
    """The folder does not fit the run, or somebody else may be publishing right now. Nothing was written."""


def push(run: RunDir, config: LibraConfig, folder: Path) -> Manifest:
    """Publish the HF model in `folder` as the version after the newest. The caller knows that no trainer of the run lives.

    Raises PushRefusedError, HfFolderError, PublishError (nothing is visible then), FencedError when a newer attempt began meanwhile.
    """
    with _alone(run):
        manifests = _sound_manifests(run)
        source = _own_folder(run, config, manifests)
        hf_config = _same_config(folder, source)
        is_tied = bool(hf_config.get("tie_word_embeddings"))
        with opened(folder, is_tied=is_tied) as tensors:
            _check_shapes(tensors, _own_shapes(manifests, source, is_tied))
            tokens = _tokens(manifests, config, hf_config)
            probe = Probe(tokens, logprobs(folder, tokens, config.weights.dtype))
            version = _next_version(run)
            return publish(
                run,
                version=version,
                step=version,
                tensors=[LocalTensor.whole(name, tensors.read(name)) for name in tensors.files],
                probe=probe,
                source_folder=source,
                options=config.weights,
                tokenizer_folder=_own_tokenizer(config, source),
            )


def logprobs(folder: Path, token_ids: tuple[int, ...], weights_dtype: str) -> tuple[float, ...]:
    """log p(token i | tokens before i) for i = 1 .. n - 1, of the values that `weights_dtype` publishes.

    Computed in float32 (4 bytes of host memory for a parameter): so only the engine's own rounding counts against
    weights.proof_tolerance.
    """
    from transformers import AutoModelForCausalLM  # takes seconds

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, weights_dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, RuntimeError) as problem:
        raise PushRefusedError(f"transformers does not load {folder}: {problem}") from problem
    tokens = torch.tensor([token_ids])
    with torch.inference_mode():
        logits = model.float().eval()(tokens).logits[0, :-1]
    return tuple(logits.log_softmax(dim=-1).gather(1, tokens[0, 1:, None])[:, 0].tolist())


@contextmanager
def _alone(run: RunDir) -> Iterator[None]:
    """One push at a time. Two that are kept apart by nothing else would take the same version number."""
    fd = os.open(run.run_json, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only what is open for writing; nothing is written
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PushRefusedError(f"another push into {run.root} is under way; wait for it") from None
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise
            print(f"the filesystem of {run.root} has no locks: push from one place at a time", flush=True)
        yield
    finally:
        os.close(fd)


def _sound_manifests(run: RunDir) -> list[Manifest]:
    """Newest first; a damaged one says nothing about the run."""
    found = []
    for version in sorted(run.published_versions(), reverse=True):
        try:
            found.append(load_manifest(run, version))
        except (WeightsError, OSError):
            continue
    return found


def _own_folder(run: RunDir, config: LibraConfig, manifests: list[Manifest]) -> Path:
    """Whose config.json and tokenizer the version gets: model_path's; the newest version's when that is gone."""
    folders = [Path(config.model_path), *(run.weights_version(manifest.version) for manifest in manifests)]
    for folder in folders:
        if (folder / CONFIG_FILE).is_file():
            return folder
    raise PushRefusedError(
        f"model_path={config.model_path} has no {CONFIG_FILE} and {run.root} no sound version: nothing says which model this run has"
    )


def _own_tokenizer(config: LibraConfig, source: Path) -> Path | None:
    """A version that stands in for model_path has the tokenizer's files already."""
    return other_tokenizer(config) if source == Path(config.model_path) else None


def _same_config(folder: Path, source: Path) -> dict[str, Any]:
    """config.json of `folder` as transformers reads it, when it is that of `source` but for what has no effect."""
    if not folder.is_dir():
        raise PushRefusedError(f"{folder} is not a folder; wanted a HF model folder")
    if not (folder / CONFIG_FILE).is_file():
        raise PushRefusedError(f"{folder} has no {CONFIG_FILE}; wanted a HF model folder")
    found, wanted = _normalised(folder), _normalised(source)
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    different = [name for name in names if name not in _WITHOUT_EFFECT]
    if different:
        words = ", ".join(f"{name} is {found.get(name)!r}, wanted {wanted.get(name)!r}" for name in different)
        raise PushRefusedError(f"{folder} is another architecture than {source}: in config.json {words}")
    return found


def _normalised(folder: Path) -> dict[str, Any]:
    """With the defaults of the model's type filled in, and keys that transformers renamed under their new names."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as problem:
        raise PushRefusedError(f"{folder / CONFIG_FILE} is not one that transformers reads: {problem}") from problem
    values: dict[str, Any] = loaded.to_dict()
    return values


def _own_shapes(manifests: list[Manifest], source: Path, is_tied: bool) -> tuple[str, Shapes]:
    """(whose they are, name -> shape) of the run's model: as it was published, else as model_path has it."""
    if manifests:
        newest = manifests[0]
        return f"version {newest.version}", {name: entry.shape for name, entry in newest.tensors.items()}
    with opened(source, is_tied=is_tied) as own:
        return str(source), own.shapes()


def _check_shapes(tensors: HfTensors, own: tuple[str, Shapes]) -> None:
    whose, wanted = own
    found = tensors.shapes()
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            raise PushRefusedError(f"{tensors.folder} lacks tensor {name}, which {whose} has")
        if name not in wanted:
            raise PushRefusedError(f"{tensors.folder} has a tensor {name}, which {whose} has not")
        if found[name] != tuple(wanted[name]):
            raise PushRefusedError(
                f"{tensors.folder}: tensor {name} has shape {list(found[name])}, in {whose} it has {list(wanted[name])}"
            )


def _tokens(manifests: list[Manifest], config: LibraConfig, hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    return manifests[0].probe.token_ids if manifests else probe_tokens(config, int(hf_config["vocab_size"]))


def _next_version(run: RunDir) -> int:
    """Above everything that has a number, also above a folder that is damaged, and above LATEST.json."""
    latest = run.read(run.latest_json, any_attempt=True, skip_damaged=True)
    named = latest.get("version", -1) if latest else -1
    if type(named) is not int:
        raise PublishError(f"{run.latest_json} names version {named!r}; wanted a number")
    return max([*run.published_versions(), named], default=-1) + 1
