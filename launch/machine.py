"""What only this machine can answer before a run starts: is there a Slurm, is there room, is the model there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.schema import LibraConfig
from launch.errors import ConfigError
from planner.architecture import Architecture
from planner.memory import DTYPE_BYTES

SLURM_PING_TIMEOUT_S = 5.0
MAX_CONFIG_BYTES = 10_000_000


def has_slurm(which: Callable[[str], str | None] = shutil.which, run: Callable[..., Any] = subprocess.run) -> bool:
    """True when sbatch is on PATH and the controller answers (`scontrol ping`, exit code 0)."""
    if which("sbatch") is None or which("scontrol") is None:
        return False
    try:
        answer = run(["scontrol", "ping"], capture_output=True, text=True, timeout=SLURM_PING_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return bool(answer.returncode == 0 and " is UP" in answer.stdout)


def choose_mode(mode: str) -> str:
    """launch.mode with "auto" settled: "slurm" where a Slurm answers, else "local"."""
    if mode != "auto":
        return mode
    return "slurm" if has_slurm() else "local"


def read_hf_config(model_path: Path) -> dict[str, Any] | None:
    """config.json of a HF folder; None when there is no such folder or file. Raises ConfigError for anything but an object."""
    path = model_path / "config.json"
    if not os.path.isfile(path):
        return None
    if os.path.getsize(path) > MAX_CONFIG_BYTES:
        raise ConfigError([f"model_path={model_path}: config.json has more than {MAX_CONFIG_BYTES} bytes"])
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"model_path={model_path}: config.json cannot be read ({error.strerror})"]) from error
    except (ValueError, RecursionError) as error:  # also other bytes than UTF-8, numbers and brackets without end
        raise ConfigError([f"model_path={model_path}: config.json is not JSON ({error})"]) from error
    if not isinstance(config, dict):
        raise ConfigError([f"model_path={model_path}: config.json holds no object but a {type(config).__name__}"])
    return config


def model_folder_problems(model_path: Path) -> list[str]:
    """Why `model_path` cannot be trained from: missing folder, missing config, no safetensors."""
    if not model_path.is_dir():
        return [
            f"model_path={model_path} is not a folder; set model_path to a HF model folder (config.json and *.safetensors)"
        ]
    problems = []
    if not (model_path / "config.json").is_file():
        problems.append(f"model_path={model_path} has no config.json; set model_path to a HF model folder")
    if not any(model_path.glob("*.safetensors")):
        problems.append(
            f"model_path={model_path} has no *.safetensors; convert the weights to safetensors or change model_path"
        )
    return problems


MASTER_BYTES, MOMENTS_BYTES = 4, 8
"""Of the optimizer, for one parameter: the float32 master beside a narrower parameter, and Adam's two moments."""
BATCH_BYTES_PER_TOKEN = 16


def run_bytes(config: LibraConfig, arch: Architecture) -> int:
    """Disk that a run may hold at once: weight versions, checkpoints (of each what is kept and one being written), batches."""
    weights = arch.parameters * DTYPE_BYTES[config.weights.dtype] * (config.weights.keep_versions + 2)
    batch = config.batch_size * config.max_model_len * BATCH_BYTES_PER_TOKEN
    # Batches are kept from the oldest checkpoint on, which may have to be gone on from.
    trained = max(config.weights.keep_batches, num_checkpoints(config) * config.save_interval)
    batches = batch * (trained + config.max_head_offpolicyness + 4)
    return int(weights + checkpoint_bytes(config, arch) * num_checkpoints(config) + batches + 64e6)


def checkpoint_bytes(config: LibraConfig, arch: Architecture) -> int:
    """Parameters, masters where they are apart, and moments, each once over all ranks."""
    width = DTYPE_BYTES[config.train_dtype]
    return int(arch.parameters * (width + MOMENTS_BYTES + (0 if width == MASTER_BYTES else MASTER_BYTES)))


def num_checkpoints(config: LibraConfig) -> int:
    """The kept ones and one being written; without save_interval the one of a stop beside the one before it."""
    return config.keep_latest_checkpoints + 1 if config.save_interval else 2


@contextmanager
def about_run_dir(run_dir: Path) -> Iterator[None]:
    """What the system refuses in here concerns the run directory: said with the option. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename not in (None, str(run_dir)) else ""
        reason = f"{error.strerror or error}{place}"
        raise ConfigError([f"launch.run_dir={run_dir}: {reason}; choose another launch.run_dir"]) from error


def space_problems(config: LibraConfig, arch: Architecture, run_dir: Path) -> list[str]:
    """Free bytes of the file system that will hold the run directory, against `run_bytes`."""
    existing = next(place for place in (run_dir, *run_dir.parents) if os.path.lexists(place))
    if not os.path.isdir(existing):
        return [f"launch.run_dir={run_dir}: {existing} is no folder; choose another launch.run_dir"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"launch.run_dir={run_dir}: {existing} is not writable; choose another launch.run_dir"]
    wanted, available = run_bytes(config, arch), shutil.disk_usage(existing).free
    if available >= wanted:
        return []
    return [
        f"launch.run_dir={run_dir}: the run wants {wanted / 1e9:.2f} GB there ({config.weights.keep_versions + 2} versions of the"
        f" weights, {num_checkpoints(config)} checkpoints, batches), available {available / 1e9:.2f} GB; choose another"
        " launch.run_dir, or lower weights.keep_versions or keep_latest_checkpoints"
    ]
