"""The small files of a HF folder, which a published version takes over from the model that training started from."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from stages.files import list_names
from stages.weights.errors import PublishError

CONFIG_FILE = "config.json"
_TAKEN_OVER = (
    "generation_config.json",
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


def small_files(source: Path, dtype: str) -> dict[str, bytes]:
    """Contents of config.json (its number format set to `dtype`, for example "bfloat16"), tokenizer and generation files.

    Raises PublishError when `source` has no usable config.json.
    """
    files = {CONFIG_FILE: (json.dumps(_config(source, dtype), indent=2) + "\n").encode()}
    for name in list_names(source):
        path = source / name
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _TAKEN_OVER) and path.is_file():
            files[name] = path.read_bytes()
    return files


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
