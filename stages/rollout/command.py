"""The command line and the environment of a vLLM server, from the run's options."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conf.schema import LibraConfig
from stages.rollout.errors import RolloutOptionError
from stages.rollout.server import FORK_VARIABLE, MIDDLEWARE, WORKER_EXTENSION
from stages.rollout.settings import SERVER_ID_VARIABLE, ServerSettings

SERVED_MODEL_NAME = "policy"

_NEUTRAL_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

_OURS = {
    "--model": "model_path",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--root-path": "",
    "--api-key": "",
    "--middleware": "",
    "--worker-extension-cls": "",
    "--served-model-name": "",
    "--scheduling-policy": "",
    "--scheduler-cls": "",
    "--logprobs-mode": "",
    "--api-server-count": "",
    "--data-parallel-size": "rollout_gpus",
    "--tensor-parallel-size": "vllm_tp_size",
    "--dtype": "rollout.dtype",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "rollout.max_num_seqs",
    "--enforce-eager": "rollout.enforce_eager",
    "--gpu-memory-utilization": "rollout.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "rollout.kv_cache_bytes",
    "--distributed-executor-backend": "",
}
"""Options of vLLM that Libra sets itself, and the option of ours that decides each (empty: none does)."""

_UNSAFE_VARIABLES = (
    "VLLM_API_KEY",
    "VLLM_SERVER_DEV_MODE",
    "VLLM_ALLOW_INSECURE_SERIALIZATION",
)


@dataclass(frozen=True)
class ServerCommand:
    arguments: list[str]
    environment: dict[str, str]


def server_command(
    config: LibraConfig,
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    tp: int,
    server_id: str,
    scratch: Path,
    num_threads: int,
    inherited: Mapping[str, str] = os.environ,
) -> ServerCommand:
    """`scratch` is a node-local folder for the server's sockets; `num_threads` processors may be used by each worker.

    Raises RolloutOptionError for an entry of rollout.extra_args that would undo what Libra sets.
    """
    on_cpu = config.hardware.device == "cpu"
    arguments = [sys.executable, "-m", "stages.rollout.server"]
    arguments += ["--model", settings.start_folder, "--served-model-name", SERVED_MODEL_NAME]
    if config.tokenizer_path:
        arguments += ["--tokenizer", config.tokenizer_path]
    arguments += ["--host", host, "--port", str(port), "--middleware", MIDDLEWARE]
    arguments += ["--worker-extension-cls", WORKER_EXTENSION]
    arguments += ["--dtype", config.rollout.dtype, "--max-model-len", str(config.max_model_len)]
    arguments += ["--max-num-seqs", str(config.rollout.max_num_seqs), "--tensor-parallel-size", str(tp)]
    # The proof goes ahead of waiting requests; all others have equal priority and keep their order.
    arguments += ["--scheduling-policy", "priority"]
    # Behaviour log-probs are those of the distribution that was sampled from: after temperature and nucleus.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    # generation_config.json gives end-of-sequence ids; its sampling defaults would silently change the distribution.
    arguments += ["--override-generation-config", json.dumps(_NEUTRAL_SAMPLING)]
    arguments += ["--seed", str(config.seed)]
    arguments += ["--disable-log-stats", "--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if config.rollout.enforce_eager:
        arguments.append("--enforce-eager")
    if on_cpu and config.rollout.kv_cache_bytes:
        arguments += ["--kv-cache-memory-bytes", str(int(config.rollout.kv_cache_bytes))]
    else:
        arguments += ["--gpu-memory-utilization", str(config.rollout.gpu_memory_utilization)]
    if on_cpu and tp == 1:
        arguments += ["--distributed-executor-backend", "uni"]
    environment = {key: value for key, value in inherited.items() if key not in _UNSAFE_VARIABLES}
    environment |= _common_environment(scratch, server_id) | settings.to_environment()
    if on_cpu:
        environment |= _cpu_environment(config, tp, scratch, num_threads)
    return ServerCommand(arguments + checked_extra_arguments(config.rollout.extra_args), environment)


def checked_extra_arguments(extra: list[str]) -> list[str]:
    """Raises RolloutOptionError for an option that Libra sets itself."""
    for argument in extra:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS or name in ("-tp", "-dp"):
            instead = _OURS.get(name) or "nothing: Libra needs it as it is"
            raise RolloutOptionError(
                f"rollout.extra_args holds {argument!r}, which Libra sets itself; change {instead}"
            )
    return list(extra)


def _common_environment(scratch: Path, server_id: str) -> dict[str, str]:
    return {
        SERVER_ID_VARIABLE: server_id,
        # setproctitle otherwise overwrites /proc/PID/environ, by which a server's processes are found again.
        "SPT_NOENV": "1",
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's 5 s equal the time after which httpx drops idle connections: one may close just as a request goes out.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "PYTHONUNBUFFERED": "1",
    }


def _cpu_environment(config: LibraConfig, tp: int, scratch: Path, num_threads: int) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": str(num_threads),
        # Binding would put the workers of all instances of a node on the same processors.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TMPDIR": str(scratch),
    }
    if config.rollout.enforce_eager:
        # --enforce-eager leaves some compiled helpers, which stall the first request for 5 to 13 s.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if tp == 1:
        # Not what its name says for a server: with it vLLM accepts an executor inside the engine core on a CPU.
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", FORK_VARIABLE: "1"}
    return environment


def threads_per_worker(config: LibraConfig, num_cpus: int) -> int:
    """Processors for one worker (a "GPU" of a CPU run) when all slots of the node are in use; at least 1.

    `num_cpus` is what this process may use; the plan fills a node with at most hardware.gpus_per_node workers.
    """
    share = min(num_cpus, config.hardware.cpus_per_node) // config.hardware.gpus_per_node
    return max(1, share)
