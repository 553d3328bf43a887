"""What a checkpoint belongs to, and whether a run may go on from it."""

from __future__ import annotations

from pathlib import Path

from conf.schema import LibraConfig
from stages.checkpoint.errors import LayoutMismatchError, ModelMismatchError, TaskMismatchError
from stages.checkpoint.find import Checkpoint
from stages.checkpoint.manifest import Fingerprint, Layout
from stages.files import read_json
from stages.weights.hf_folder import CONFIG_FILE
from stages.weights.manifest import canonical, model_config_digest, xxh3_128

TOKENIZER_FILE = "tokenizer.json"


def fingerprint(config: LibraConfig) -> Fingerprint:
    """Of the configured model, tokenizer and task. Raises FileNotFoundError when model_path has no config.json."""
    path = Path(config.model_path) / CONFIG_FILE
    hf_config = read_json(path)
    if hf_config is None:
        raise FileNotFoundError(f"{path} does not exist; set model_path to a HF model folder")
    tokenizer = Path(config.tokenizer_path or config.model_path) / TOKENIZER_FILE
    task = {"name": config.task.name, "params": dict(config.task.params), "seed": config.seed}
    return Fingerprint(
        architecture=str((hf_config.get("architectures") or ["unknown"])[0]),
        config=model_config_digest(hf_config),
        tokenizer=xxh3_128(tokenizer.read_bytes()) if tokenizer.is_file() else "",
        task=xxh3_128(canonical(task)),
    )


def check_fits(checkpoint: Checkpoint, layout: Layout, model: Fingerprint) -> None:
    """Raise LayoutMismatchError, ModelMismatchError or TaskMismatchError, naming wanted, available and what to change."""
    name, found = checkpoint.path.name, checkpoint.manifest
    _check_layout(name, layout, found.layout)
    if (model.architecture, model.config) != (found.model.architecture, found.model.config):
        wanted, available = (f"{each.architecture} (config.json {each.config[:8]})" for each in (model, found.model))
        raise ModelMismatchError(name, "model", wanted, available, "set model_path as it was when the run began")
    if model.tokenizer != found.model.tokenizer:
        wanted, available = (each.tokenizer[:8] or "none" for each in (model, found.model))
        change = "set tokenizer_path as it was when the run began"
        raise ModelMismatchError(name, "tokenizer (digest of tokenizer.json)", wanted, available, change)
    if model.task != found.model.task:
        change = "set task.name, task.params and seed as they were; other prompts need a new run"
        raise TaskMismatchError(
            name, "task (digest of name, params, seed)", model.task[:8], found.model.task[:8], change
        )


def _check_layout(name: str, wanted: Layout, found: Layout) -> None:
    if (wanted.tp, wanted.world_size) != (found.tp, found.world_size):
        raise LayoutMismatchError(
            name,
            "division over ranks",
            f"{wanted.world_size} ranks of train_tp_size {wanted.tp}",
            f"{found.world_size} ranks of train_tp_size {found.tp}",
            f"set train_gpus={found.world_size} train_tp_size={found.tp} (checkpoints are not divided anew yet)",
        )
    if wanted.dtype != found.dtype:
        raise LayoutMismatchError(name, "number format", wanted.dtype, found.dtype, f"set train_dtype={found.dtype}")
