"""What stands around the Python of a step: in the srun command, and in front of a local process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch.containers import is_contained, outer_python, surroundings
from launch.srun import INTO_OWN_LOG, Allocation, srun_command
from launch.steps import Incarnation
from launch.subprocesses import SubprocessRunner
from stages.desired import StepSpec
from stages.rundir import RunDir
from tests.fake_runs import await_ready, fake_config, fake_plan, fake_run, until
from tests.fake_stages import entry

APPTAINER = ["apptainer", "exec", "--nv", "/images/libra v1.sif"]
PYXIS = ["--container-image=nvcr.io#nvidia/pytorch:25.01-py3", "--container-mounts=/shared:/shared"]
HOSTS = Allocation(12, (12, 13), (("gpu01",), ("gpu02",)), True)
BOTTLE = """\
#!/bin/sh
# Stands in for a container: sets a mark, then becomes what it was asked to run.
echo "$@" >> "$(dirname "$0")/calls"
IN_THE_BOTTLE="$1" exec /usr/bin/env -u UNUSED "$2" "$3" "$4" "$5" "$6"
"""


def spec(role: str) -> StepSpec:
    name = "rollout_000" if role == "rollout" else role
    return StepSpec(name, role, int(role == "rollout"), 0, 1, 1, 1, 2, int(role != "controller"))


def command(config: LibraConfig, role: str) -> list[str]:
    """Without the shell between srun and the task, which opens the task's log."""
    incarnation = Incarnation(spec(role), RunDir(Path("/runs/a b"), "id", 0, "test"), "12")
    words = srun_command(incarnation, HOSTS, "/venv/bin/python", surroundings(config))
    shell = words.index("/bin/sh")
    assert words[shell + 1 : shell + 4] == ["-c", INTO_OWN_LOG, f"/runs/a b/attempts/0/logs/{spec(role).name}"]
    return words[:shell] + words[shell + 4 :]


def test_without_a_container_a_step_is_the_python_of_the_machine() -> None:
    words = command(LibraConfig(), "trainer")

    assert words[-5:] == [
        "/venv/bin/python",
        "-u",
        "-m",
        "stages.start",
        "/runs/a b/attempts/0/submitit/trainer",
    ]
    assert not is_contained(LibraConfig())


def test_a_prefix_stands_between_srun_and_python_word_by_word() -> None:
    config = LibraConfig()
    config.launch.prefix = APPTAINER

    for role in ("trainer", "rollout", "controller"):
        words = command(config, role)
        assert words[-9:-5] == APPTAINER
        assert words[-10].startswith("--"), "the last of srun's own options"


def test_each_role_has_its_own_image_or_the_common_one() -> None:
    config = LibraConfig()
    config.launch.prefix, config.launch.rollout_prefix = ["common"], ["enter", "vllm.sif"]
    config.slurm.srun_extra, config.slurm.rollout.srun_extra = ["--container-image=a"], ["--container-image=b"]

    assert command(config, "trainer")[-7:-4] == ["--container-image=a", "common", "/venv/bin/python"]
    assert command(config, "controller")[-7:-4] == ["--container-image=a", "common", "/venv/bin/python"]
    assert command(config, "rollout")[-8:-4] == ["--container-image=b", "enter", "vllm.sif", "/venv/bin/python"]


def test_options_of_pyxis_come_after_our_own() -> None:
    config = LibraConfig()
    config.slurm.srun_extra = PYXIS

    words = command(config, "rollout")

    assert words[-7:-5] == PYXIS
    assert words.index("--exact") < words.index(PYXIS[0])


def test_a_cluster_without_gpus_is_not_asked_for_any() -> None:
    config = LibraConfig()
    config.slurm.gpu_flag = "none"

    assert not [word for word in command(config, "rollout") if "gpu" in word.partition("=")[0]]


@pytest.mark.parametrize(
    ("python", "prefix", "srun_extra", "wanted"),
    [
        ("", [], [], sys.executable),
        ("/venv/bin/python", [], [], "/venv/bin/python"),
        ("/usr/bin/python3", APPTAINER, [], sys.executable),
        ("python3", [], PYXIS, sys.executable),
        ("/venv/bin/python", [], ["--cpu-freq=high"], "/venv/bin/python"),
    ],
)
def test_the_supervisor_stays_outside_of_the_container(
    python: str, prefix: list[str], srun_extra: list[str], wanted: str
) -> None:
    config = LibraConfig()
    config.launch.python, config.launch.rollout_prefix, config.slurm.srun_extra = python, prefix, srun_extra

    assert outer_python(config) == wanted


def test_the_supervisors_python_can_be_said() -> None:
    config = LibraConfig()
    config.launch.python, config.launch.prefix, config.launch.supervisor_python = (
        "python3",
        APPTAINER,
        "/venv/bin/python",
    )

    assert outer_python(config) == "/venv/bin/python"


def test_a_local_step_runs_in_its_container_too(tmp_path: Path) -> None:
    bottle = tmp_path / "bottle"
    bottle.write_text(BOTTLE)
    bottle.chmod(0o700)
    config = fake_config()
    config.launch.trainer_prefix = [str(bottle), "ship in it"]
    run = fake_run(tmp_path / "run", config, fake_plan(), {"trainer": {"do": "serve"}})
    incarnation = Incarnation(spec("trainer"), run, "77")
    incarnation.write_pickle(entry, 60)
    runner = SubprocessRunner(sys.executable, None, surroundings(config))

    step = runner.start(incarnation)
    try:
        pid = await_ready(run, ["trainer.0"])["trainer.0"]
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    finally:
        runner.kill([step])
        until(lambda: step.status().ended, 10.0, "the end of the killed step")

    assert b"IN_THE_BOTTLE=ship in it" in environment
    assert (tmp_path / "calls").read_text().split()[:3] == ["ship", "in", "it"]
    assert pid == step.pid, "the wrapper has become the stage"
