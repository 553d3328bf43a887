"""What a job asks for and what its steps get, on the private Slurm: options of each side, containers, set-up, shares of nodes.

Stages are fakes; the script, Slurm and the supervisor are real.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch import slurm
from launch.executors import submit
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout
from stages.rundir import RunDir
from tests.fake_launch import make_model
from tests.fake_runs import await_ready, fake_plan, fake_run, go, state, until
from tests.fake_stages import entry
from tests.leftovers import Belongings
from tests.slurm_kit import slurm_config

pytestmark = pytest.mark.slurm

PROJECT = Path(__file__).parents[2]
SERVING = {"do": "serve"}
TASKS = ("trainer.0", "controller.0", "rollout_000.0", "rollout_001.0")
BOTTLE = '#!/bin/sh\n# Stands in for a container.\nname=$1; shift\nexport IN_THE_BOTTLE="$name"\nexec "$@"\n'

Begin = Callable[..., "Job"]


class Job:
    """A run that was submitted; its fakes work until `go`."""

    def __init__(self, root: Path, config: LibraConfig, plan: Plan) -> None:
        fakes = {instance.name: SERVING for instance in plan.rollout.instances} | {"trainer": {"do": "work"}}
        self.run: RunDir = fake_run(root, config, plan, fakes)
        self.job_id = int(submit(config, plan, self.run, entry=entry).job_id)

    def component(self, offset: int) -> dict[str, str]:
        """scontrol's record of one component."""
        lines = slurm.command(["scontrol", "-o", "show", "job", str(self.job_id)]).splitlines()
        records = [dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", line)) for line in lines]
        return next(record for record in records if record.get("HetJobOffset", "0") == str(offset))

    def resources(self) -> dict[str, dict[str, str]]:
        """Step name -> what Slurm has given to it, with the nodes."""
        text = slurm.command(["scontrol", "-o", "show", "step", str(self.job_id)])
        found = {}
        for line in text.splitlines():
            values = dict(re.findall(r"(\w+)=(\S*)", line))
            shares = dict(part.partition("=")[::2] for part in values.get("TRES", "").split(",") if "=" in part)
            found[values["Name"]] = shares | {"nodes": values.get("NodeList", "")}
        return found

    def end(self) -> str:
        go(self.run)
        held = Belongings.of(self.run)
        until(lambda: slurm.fold(slurm.query(self.job_id)).phase.is_over, 60.0, "the end of the job")
        held.assert_gone()
        return str(state(self.run).get("phase"))


@pytest.fixture
def begin(tmp_path: Path, slurm_conf: Path) -> Iterator[Begin]:
    made: list[Job] = []

    def beginner(config: LibraConfig | None = None, plan: Plan | None = None) -> Job:
        made.append(Job(tmp_path / "first light", config or slurm_config(), plan or fake_plan("hetjob")))
        return made[-1]

    yield beginner
    for job in made:
        slurm.cancel_job(job.job_id)
        until(lambda job=job: slurm.fold(slurm.query(job.job_id)).phase.is_over, 30.0, "the cancelled job")  # type: ignore[misc]


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.fixture
def reservation(slurm_conf: Path) -> Iterator[str]:
    """Two nodes of the cluster."""
    create = ["ReservationName=class", "StartTime=now", "Duration=10", "Nodes=node[0-1]", "Users=root"]
    create[-1] = f"Users={os.environ.get('USER') or subprocess.check_output(['id', '-un'], text=True).strip()}"
    slurm.command(["scontrol", "create", "reservation", *create])
    yield "class"
    slurm.command(["scontrol", "delete", "ReservationName=class"])


def test_what_the_trainer_asks_for_is_not_asked_for_rollout(begin: Begin, reservation: str) -> None:
    config = slurm_config()
    config.slurm.trainer = replace(
        config.slurm.trainer, reservation=reservation, exclude="node0", mem_per_node_bytes=3e9
    )
    config.slurm.comment = "night run #3"

    job = begin(config)
    await_ready(job.run, TASKS, 90.0)
    trainer, rollout = job.component(0), job.component(1)

    assert (trainer["Reservation"], trainer["ExcNodeList"], trainer["NodeList"]) == (reservation, "node0", "node1")
    assert (rollout.get("Reservation", ""), rollout["ExcNodeList"]) == ("", "")
    assert rollout["NodeList"] in ("node2", "node3"), "outside of the reservation"
    assert (trainer["MinMemoryNode"], rollout["MinMemoryNode"]) == ("2862M", "1908M")
    assert job.end() == "succeeded"


@pytest.mark.parametrize("flag", ["gres", "none"])
def test_gpus_can_be_asked_for_in_other_words_or_not_at_all(begin: Begin, flag: str) -> None:
    config = slurm_config()
    config.slurm.gpu_flag = flag

    job = begin(config)
    pids = await_ready(job.run, TASKS, 90.0)
    seen = {name: environment(pid).get("CUDA_VISIBLE_DEVICES", "") for name, pid in pids.items()}

    wanted = {"0", "1"} if flag == "gres" else {""}
    assert {seen["rollout_000.0"], seen["rollout_001.0"]} == wanted
    assert seen["controller.0"] == ""
    assert job.end() == "succeeded"


def test_a_hetjob_of_several_rollout_components_starts_all_its_instances(begin: Begin) -> None:
    instances = tuple(InstancePlacement(f"rollout_{i:03d}", 1, 1 + i // 2, 0) for i in range(4))
    plan = replace(fake_plan("hetjob"), rollout=RolloutLayout(4, 2, 2, instances))

    job = begin(plan=plan)
    await_ready(job.run, [*TASKS, "rollout_002.0", "rollout_003.0"], 90.0)

    assert [job.component(offset)["NumNodes"] for offset in range(3)] == ["1", "1", "1"]
    assert job.end() == "succeeded"


# ---- around the steps -----------------------------------------------------------------------------------------------


def test_each_role_runs_in_its_container_and_the_supervisor_outside(begin: Begin, tmp_path: Path) -> None:
    bottle = tmp_path / "a bottle"
    bottle.write_text(BOTTLE)
    bottle.chmod(0o700)
    config = slurm_config()
    config.launch.prefix = [str(bottle), "common $HOME"]
    config.launch.rollout_prefix = [str(bottle), "vllm.sif"]
    config.launch.python = sys.executable
    config.slurm.srun_extra = ["--propagate=NONE"]

    job = begin(config)
    pids = await_ready(job.run, TASKS, 90.0)
    where = {name: environment(pid).get("IN_THE_BOTTLE") for name, pid in pids.items()}
    supervisor = environment(int(state(job.run)["pid"]))

    assert where["trainer.0"] == where["controller.0"] == "common $HOME"
    assert where["rollout_000.0"] == where["rollout_001.0"] == "vllm.sif"
    assert "IN_THE_BOTTLE" not in supervisor
    assert job.end() == "succeeded"


def test_the_lines_of_the_site_run_before_the_steps_and_reach_them(begin: Begin, tmp_path: Path) -> None:
    config = slurm_config()
    config.launch.setup = ["export FROM_SETUP='a b'", f"ls '{tmp_path}/first light/ready' > {tmp_path}/before"]

    job = begin(config)
    pids = await_ready(job.run, TASKS, 90.0)

    assert all(environment(pid)["FROM_SETUP"] == "a b" for pid in pids.values())
    assert (tmp_path / "before").read_text() == "", "no step had started"
    assert job.end() == "succeeded"


def test_a_line_of_the_site_that_fails_ends_the_job_before_anything_starts(begin: Begin) -> None:
    config = slurm_config()
    config.launch.setup = ["module_that_is_not_there load cuda"]

    job = begin(config)
    until(lambda: slurm.fold(slurm.query(job.job_id)).phase.is_over, 60.0, "the end of the job")

    assert slurm.query(job.job_id)[0].exit_code == "127:0"
    assert "module_that_is_not_there: command not found" in (job.run.logs / "supervisor.log").read_text()
    assert state(job.run) == {}


# ---- shares of nodes ------------------------------------------------------------------------------------------------


def uneven() -> Plan:
    """A single job of two nodes: the trainer and an instance on the first, two instances on the second."""
    places = (("rollout_000", 0), ("rollout_001", 1), ("rollout_002", 1))
    placed = tuple(InstancePlacement(name, 1, 0, node) for name, node in places)
    return Plan("single", "a test says so", "cpu", TrainLayout(1, 1, 1, 1, 1, 1, 1, 1), RolloutLayout(3, 2, 2, placed))


def test_steps_of_a_single_job_get_exact_shares_of_their_nodes(begin: Begin) -> None:
    config = slurm_config()
    config.slurm.layout = "single"

    job = begin(config, uneven())
    await_ready(job.run, [*TASKS, "rollout_002.0"], 90.0)
    nodes = slurm.expand_nodes(slurm.query(job.job_id)[0].nodes)
    given = job.resources()

    assert {name: given[name]["nodes"] for name in ("trainer.0", "controller.0", "rollout_000.0")} == dict.fromkeys(
        ("trainer.0", "controller.0", "rollout_000.0"), nodes[0]
    )
    assert given["rollout_001.0"]["nodes"] == given["rollout_002.0"]["nodes"] == nodes[1]
    cpus = {name: int(given[name]["cpu"]) for name in given if "cpu" in given[name]}
    assert cpus == {"trainer.0": 1, "controller.0": 1, "rollout_000.0": 2, "rollout_001.0": 2, "rollout_002.0": 2}
    # A step without a limit of its own shares the job's memory on its node; the first one must not take it all.
    assert {given[name]["mem"] for name in cpus} == {"1908M"}
    assert job.end() == "succeeded"


# ---- the command ----------------------------------------------------------------------------------------------------


def launch(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_dry_run_shows_the_script_that_is_submitted_byte_for_byte(tmp_path: Path, slurm_conf: Path) -> None:
    words = [*make_model(tmp_path / "model"), f"launch.run_dir={tmp_path}/run", "slurm.extra=[--hold]"]
    words += ["launch.follow=false", "slurm.comment=night run", "launch.setup=[ulimit -c 0]"]

    shown = launch([*words, "launch.dry_run=true"], tmp_path)
    done = launch(words, tmp_path)

    assert done.returncode == 0, done.stderr
    script = (tmp_path / "run" / "job.sbatch").read_text()
    job_id = done.stdout.split()[-1]
    slurm.cancel_job(int(job_id))
    assert shown.stdout.partition("# ---- job.sbatch ----\n")[2] == script + "\n", (
        "print ends the text with its newline"
    )
    assert (tmp_path / f"run/attempts/0/submitit/{job_id}_submission.sh").read_text() == script
    assert re.search(r"sbatch --test-only: Job \d+ to start at .* in partition dev|to start at .* on node", done.stdout)


def test_a_cluster_that_is_too_small_is_refused_and_nothing_is_left(tmp_path: Path, slurm_conf: Path) -> None:
    words = [*make_model(tmp_path / "model"), f"launch.run_dir={tmp_path}/run", "train_gpus=2", "rollout_gpus=8"]

    done = launch(words, tmp_path)

    assert done.returncode == 1
    assert "the job wants 5 nodes (1 for trainer and controller and 4 for rollout), available 4" in done.stderr
    assert not (tmp_path / "run").exists()
    assert slurm.command(["squeue", "-h", "-o", "%i"]) == ""


def test_a_node_that_is_down_is_waited_for(tmp_path: Path, slurm_conf: Path) -> None:
    """sbatch --test-only refuses such a job with the same words as one that is too large."""
    words = [*make_model(tmp_path / "model"), f"launch.run_dir={tmp_path}/run", "train_gpus=2", "rollout_gpus=6"]
    slurm.command(["scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=test"])
    try:
        done = launch([*words, "launch.follow=false"], tmp_path)
    finally:
        slurm.command(["scontrol", "update", "NodeName=node3", "State=RESUME"])
    slurm.cancel_job(int(done.stdout.split()[-1]))

    assert (
        "the job will wait: trainer and controller and rollout want 4 of the 4 nodes that fit, and 3 of them are up"
        in done.stdout
    )
    assert done.returncode == 0
