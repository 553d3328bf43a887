"""The small files of a HF folder, which a published version takes over from the folders that training started from."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from stages.files import list_names
from stages.weights.errors import PublishError

CONFIG_FILE = "config.json"
_MODEL_FILES = ("generation_config.json",)
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)
_DTYPE_KEYS = ("torch_dtype", "dtype")  # transformers renamed the first to the second in 4.56 and reads both


def other_tokenizer(config: LibraConfig) -> Path | None:
    """tokenizer_path where it is not model_path, which has a tokenizer of its own."""
    is_own = config.tokenizer_path in ("", config.model_path)
    return None if is_own else Path(config.tokenizer_path)


def small_files(source: Path, dtype: str, tokenizer: Path | None = None) -> dict[str, bytes]:
    """Contents of config.json (its number format set to `dtype`, for example "bfloat16"), tokenizer and generation files.

    With `tokenizer`, another folder, all tokenizer files come from there and none from `source`: parts of two tokenizers
    in one folder would be read as a third. Raises PublishError when `source` has no usable config.json, `tokenizer` no
    tokenizer.
    """
    files = {CONFIG_FILE: (json.dumps(_config(source, dtype), indent=2) + "\n").encode()}
    files |= _matching(source, _MODEL_FILES)
    found = _matching(source if tokenizer is None else tokenizer, _TOKENIZER_FILES)
    if tokenizer is not None and not found:
        raise PublishError(
            f"tokenizer_path={tokenizer} has no tokenizer files; set it to a HF folder, or leave it empty"
        )
    return files | found


def _matching(folder: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    names = [name for name in list_names(folder) if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _config(source: Path, dtype: str) -> dict[str, Any]:
    try:
        config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PublishError(f"{source} has no {CONFIG_FILE}; model_path must be a HF model folder") from None
    except ValueError as problem:
        raise PublishError(f"{source / CONFIG_FILE} is not JSON: {problem}") from None
    if not isinstance(config, dict):
        raise PublishError(f"{source / CONFIG_FILE} holds {type(config).__name__}, wanted a JSON object")
    keys = [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(keys, dtype)}
