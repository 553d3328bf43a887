"""The server's command line and environment, its address, and the node's own folder."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from stages.rollout import address
from stages.rollout.address import LOOPBACK, NoAddressError, bound_socket, listen_address, node_address
from stages.rollout.command import ServerCommand, checked_extra_arguments, server_command, threads_per_worker
from stages.rollout.errors import RolloutOptionError
from stages.rollout.settings import ServerSettings

TOKEN = "s3cret-token-of-the-run"


def command(config: LibraConfig, tp: int = 1, inherited: dict[str, str] | None = None) -> ServerCommand:
    settings = ServerSettings(
        "/run", "abc", 0, "rollout_000", "/run/token", "/model", 0, False, "float32", 1e-3, os.getpid(), 7
    )
    return server_command(
        config,
        settings,
        host=LOOPBACK,
        port=4242,
        tp=tp,
        server_id="rollout_000-1",
        scratch=Path("/tmp/scratch"),
        num_threads=3,
        inherited=inherited or {},
    )


def cpu_config() -> LibraConfig:
    config = LibraConfig(model_path="/model")
    config.hardware.device = "cpu"
    config.rollout.kv_cache_bytes = 64e6
    config.rollout.enforce_eager = True
    return config


def value_of(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


def test_every_server_is_guarded_and_can_be_reloaded() -> None:
    arguments = command(LibraConfig()).arguments

    assert value_of(arguments, "--middleware") == "stages.rollout.guard.GuardMiddleware"
    assert value_of(arguments, "--worker-extension-cls") == "stages.rollout.worker.WeightWorker"
    assert value_of(arguments, "--host") == LOOPBACK


def test_the_token_is_on_no_command_line_and_in_no_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    made = command(LibraConfig())

    assert TOKEN not in " ".join([*made.arguments, *made.environment.values()])


@pytest.mark.exercises("max_model_len")
def test_options_of_the_run_reach_vllm() -> None:
    config = LibraConfig(max_model_len=512, seed=5)
    config.rollout.max_num_seqs = 9

    arguments = command(config, tp=2).arguments

    assert value_of(arguments, "--max-model-len") == "512"
    assert value_of(arguments, "--max-num-seqs") == "9"
    assert value_of(arguments, "--tensor-parallel-size") == "2"
    assert value_of(arguments, "--seed") == "5"
    assert value_of(arguments, "--gpu-memory-utilization") == "0.9"


@pytest.mark.exercises("tokenizer_path")
def test_a_tokenizer_of_its_own_reaches_vllm() -> None:
    assert value_of(command(LibraConfig(tokenizer_path="/tokens")).arguments, "--tokenizer") == "/tokens"
    assert "--tokenizer" not in command(LibraConfig()).arguments, "vLLM takes the model's"


def test_one_worker_on_a_cpu_is_forked_with_the_engine_core() -> None:
    made = command(cpu_config())

    assert value_of(made.arguments, "--distributed-executor-backend") == "uni"
    assert value_of(made.arguments, "--kv-cache-memory-bytes") == "64000000"
    assert made.environment["LIBRA_ROLLOUT_FORK"] == "1"
    assert made.environment["OMP_NUM_THREADS"] == "3"
    assert made.environment["TORCHDYNAMO_DISABLE"] == "1"


def test_several_workers_and_gpus_are_started_as_vllm_does_it() -> None:
    for made in (command(cpu_config(), tp=2), command(LibraConfig())):
        assert "--distributed-executor-backend" not in made.arguments
        assert "LIBRA_ROLLOUT_FORK" not in made.environment


def test_variables_that_would_open_the_server_do_not_reach_it() -> None:
    inherited = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PATH": "/bin"}

    environment = command(LibraConfig(), inherited=inherited).environment

    assert environment["PATH"] == "/bin"
    assert not inherited.keys() & environment.keys() - {"PATH"}


@pytest.mark.parametrize(
    "argument, instead",
    [
        ("--host=0.0.0.0", "Libra needs it"),
        ("--middleware", "Libra needs it"),
        ("--dtype=half", "rollout.dtype"),
        ("--max_model_len=9", "max_model_len"),
        ("-tp=2", "Libra needs it"),
    ],
)
def test_an_extra_argument_that_undoes_ours_is_refused_by_name(argument: str, instead: str) -> None:
    with pytest.raises(RolloutOptionError, match=instead):
        checked_extra_arguments(["--enable-chunked-prefill", argument])


def test_other_extra_arguments_are_passed_on() -> None:
    config = LibraConfig()
    config.rollout.extra_args = ["--block-size", "32"]

    assert command(config).arguments[-2:] == ["--block-size", "32"]


@pytest.mark.parametrize("slots, num_cpus, wanted", [(2, 2, 1), (1, 2, 2), (4, 2, 1), (2, 96, 48), (2, 3, 1)])
def test_a_worker_gets_its_share_of_the_processors(slots: int, num_cpus: int, wanted: int) -> None:
    config = LibraConfig()
    config.hardware.gpus_per_node, config.hardware.cpus_per_node = slots, 96

    assert threads_per_worker(config, num_cpus) == wanted


# ---- address ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_JOB_NUM_NODES": "1"}, {"SLURM_NNODES": "1", "SLURM_HET_SIZE": "1"}]
)
def test_a_run_on_one_node_listens_on_loopback(environment: dict[str, str]) -> None:
    assert listen_address(environment) == LOOPBACK


@pytest.mark.parametrize("environment", [{"SLURM_JOB_NUM_NODES": "2"}, {"SLURM_NNODES": "1", "SLURM_HET_SIZE": "2"}])
def test_a_run_on_several_nodes_listens_on_the_node_s_address(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "node_address", lambda: "10.1.2.3")

    assert listen_address(environment) == "10.1.2.3"


def test_a_host_name_that_means_loopback_is_not_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    monkeypatch.setattr(address, "_address_towards_others", lambda: "10.1.2.3")

    assert node_address() == "10.1.2.3"


def test_a_node_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(address, "_address_towards_others", lambda: "")

    with pytest.raises(NoAddressError):
        node_address()


def test_two_servers_of_a_node_never_get_the_same_port() -> None:
    sockets = [bound_socket(LOOPBACK) for _ in range(50)]
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 50
    finally:
        for bound in sockets:
            bound.close()
