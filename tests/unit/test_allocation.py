"""What a shell inside a job has been given; environments and scontrol's lines are those of Slurm 22.05."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launch import slurm
from launch.allocation import held, is_inside, parse_job, run_of_this_job
from launch.compose import Composed, draft
from launch.job_environment import AllocationError
from launch.settle import settle
from planner.given import GivenNodes
from stages.rundir import RunDir

HEAD = "UserId=me(1000) Priority=1 Account=(null) QOS=(null) JobState=RUNNING"
SALLOC = {
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "52",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "dev",
}
SALLOC_JOB = (
    f"JobId=52 JobName=interactive {HEAD} Restarts=0 BatchFlag=0 TimeLimit=UNLIMITED Partition=dev NodeList=node[0-1] NumNodes=2"
    " NumCPUs=4 CPUs/Task=2 TRES=cpu=4,mem=2000M,node=2,billing=4 JOB_GRES=gpu:4   Nodes=node[0-1] CPU_IDs=0-1 Mem=1000"
    " GRES=gpu:2(IDX:0-1) MinCPUsNode=2 Command=(null) WorkDir=/home/me TresPerNode=gres:gpu:2 \n"
)
HET_SALLOC = {
    "SLURM_GPUS_HET_GROUP_1": "3",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "4",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "2(x2)",
    "SLURM_JOB_ID": "53",
    "SLURM_JOB_ID_HET_GROUP_0": "53",
    "SLURM_JOB_ID_HET_GROUP_1": "54",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node0",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "big",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "small",
}
HET_JOB = (
    f"JobId=53 HetJobId=53 HetJobOffset=0 HetJobIdSet=53-54 {HEAD} BatchFlag=0 TimeLimit=01:30:00 JOB_GRES=gpu:2   Nodes=node0"
    " CPU_IDs=0-3 Mem=8000 GRES=gpu:2(IDX:0-1) MinCPUsNode=4 TresPerNode=gres:gpu:2 \n"
    f"JobId=54 HetJobId=53 HetJobOffset=1 HetJobIdSet=53-54 {HEAD} BatchFlag=0 TimeLimit=01:30:00 JOB_GRES=gpu:3   Nodes=node1"
    " CPU_IDs=0-1 Mem=8000 GRES=gpu:2(IDX:0-1)   Nodes=node2 CPU_IDs=0-1 Mem=8000 GRES=gpu:1(IDX:0) TresPerJob=gres:gpu:3 \n"
)
BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_JOB_CPUS_PER_NODE": "96",
    "SLURM_JOB_ID": "55",
    "SLURM_JOB_NODELIST": "gpu07",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "lab",
    "SLURM_JOB_QOS": "long",
}


def saying(text: str) -> Callable[[Sequence[str]], str]:
    return lambda command: text


def silent(command: Sequence[str]) -> str:
    raise slurm.SlurmCommandError("scontrol did not answer within 10 s")


@pytest.mark.parametrize(
    ("environ", "inside"),
    [
        ({}, False),
        ({"SLURM_CONF": "/etc/slurm.conf"}, False),
        (SALLOC, True),
        (BATCH, True),
        (HET_SALLOC, True),
        (SALLOC | {"SLURM_STEP_ID": "4294967290"}, True),
        (BATCH | {"SLURM_STEP_ID": "-5", "SLURM_STEPID": "-5"}, True),  # 26.05
        (SALLOC | {"SLURM_STEP_ID": "0"}, False),
        (SALLOC | {"SLURM_STEPID": "3"}, False),
        (BATCH | {"LIBRA_STEP_ID": "run.0.trainer/"}, False),
        (BATCH | {"SUBMITIT_EXECUTOR": "slurm"}, False),
    ],
    ids=[
        "no-slurm",
        "slurm-conf",
        "salloc",
        "batch",
        "het",
        "interactive-step",
        "negative-step",
        "srun-pty",
        "old-name",
        "our-step",
        "our-job",
    ],
)
def test_only_the_shell_of_a_job_is_inside(environ: dict[str, str], inside: bool) -> None:
    assert is_inside(environ) is inside


def test_nodes_processors_and_gpus_of_one_job() -> None:
    found = held(SALLOC, saying(SALLOC_JOB))

    assert found.given.components == (GivenNodes(2, 2, 2),)
    assert (found.job_id, found.is_batch, found.limit_min, found.partitions) == ("52", False, None, ("dev",))


def test_uneven_gpus_that_only_scontrol_knows_count_as_the_fewest() -> None:
    found = held(HET_SALLOC, saying(HET_JOB))

    assert found.given.components == (GivenNodes(1, 2, 4), GivenNodes(2, 1, 2))
    assert (found.limit_min, found.partitions) == (90, ("big", "small"))


def test_components_are_told_apart_in_any_order() -> None:
    lines = HET_JOB.splitlines(keepends=True)

    assert [record.values["JobId"] for record in parse_job("".join(reversed(lines)))] == ["53", "54"]
    assert parse_job(lines[1])[0].gpus == {"node1": 2, "node2": 1}


def test_types_of_gpus_do_not_matter_for_their_number() -> None:
    line = SALLOC_JOB.replace("gpu:2(IDX:0-1)", "gpu:h100:6(IDX:0-5),gpu:1g.10gb:2(IDX:6,7)")

    assert parse_job(line)[0].gpus == {"node0": 8, "node1": 8}


def test_the_environment_is_enough_where_it_says_the_gpus() -> None:
    assert held(BATCH, silent).given.components == (GivenNodes(1, 8, 96),)
    assert held(SALLOC | {"SLURM_GPUS_PER_NODE": "h100:2,a100:1"}, silent).given.components == (GivenNodes(2, 3, 2),)


def test_processors_are_those_of_the_smallest_node() -> None:
    uneven = SALLOC | {"SLURM_JOB_CPUS_PER_NODE": "64(x2),16,32(x3)"}

    assert held(uneven, saying(SALLOC_JOB)).given.components[0].cpus_per_node == 16


def test_a_batch_job_that_runs_again_knows_it() -> None:
    found = held(BATCH | {"SLURM_RESTART_COUNT": "2"}, silent)

    assert (found.is_batch, found.restarts, found.account, found.qos) == (True, 2, "lab", "long")


def test_gpus_that_nobody_tells_are_an_error() -> None:
    with pytest.raises(
        AllocationError, match="cannot be told: scontrol did not answer within 10 s; allocate them with"
    ):
        held({name: value for name, value in SALLOC.items() if "GPUS" not in name}, silent)


def test_an_environment_that_was_cut_is_an_error() -> None:
    with pytest.raises(AllocationError, match="SLURM_JOB_NODELIST is not set"):
        held({"SLURM_JOB_ID": "52"}, saying(SALLOC_JOB))


# ---- the configuration ----------------------------------------------------------------------------------------------


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Composed]:
    """What a command line becomes in salloc (or with another environment)."""

    def settled(*words: str, environ: dict[str, str] = SALLOC, job: str = SALLOC_JOB) -> Composed:
        monkeypatch.setattr("launch.allocation.held", lambda environ: held(environ, saying(job)))
        return settle(draft(["+experiment=demo", *words]), environ=environ)

    return settled


def test_inside_a_job_the_run_takes_what_the_job_has(inside: Callable[..., Composed]) -> None:
    cpus = {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    composed = inside("cluster=devcluster", environ=SALLOC | cpus)

    config, sources = composed.config, composed.sources
    assert (config.launch.mode, config.slurm.layout) == ("allocation", "single")
    assert (config.train_gpus, config.rollout_gpus, config.slurm.requeue) == (2, 2, "never")
    changed = ("train_gpus", "rollout_gpus", "launch.mode", "slurm.layout", "slurm.requeue")
    assert {sources[name] for name in changed} == {"allocation"}
    assert composed.conflicts == ()
    assert composed.said[0].startswith(
        "this run takes job 52: 2 node(s) with 2 GPUs and 4 processors: train_gpus 1 -> 2"
    )
    assert composed.said[0].endswith("(launch.mode=slurm submits a job of its own instead)")


def test_lines_for_the_job_script_are_not_run_in_a_shell_that_is_there(inside: Callable[..., Composed]) -> None:
    environ = SALLOC | {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    composed = inside("cluster=devcluster", "launch.setup=[module load cuda]", environ=environ)

    assert composed.said[1] == "launch.setup is not run here: the steps get the environment of this shell"


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["cluster=slurm"], "allocation"),
        (["cluster=auto"], "allocation"),
        (["cluster=slurm", "launch.mode=slurm"], "slurm"),
        (["cluster=local"], "local"),
        (["cluster=local", "launch.mode=allocation"], "allocation"),
    ],
)
def test_only_the_command_line_submits_from_inside_a_job(
    inside: Callable[..., Composed], words: list[str], mode: str
) -> None:
    assert inside(*words).config.launch.mode == mode


def test_what_the_command_line_says_stays_or_is_refused(inside: Callable[..., Composed]) -> None:
    environ = SALLOC | {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    fits = inside("cluster=devcluster", "train_gpus=1", "slurm.time_min=7", environ=environ)
    too_big = inside("cluster=devcluster", "train_gpus=64", environ=environ)

    assert (fits.config.train_gpus, fits.config.rollout_gpus, fits.config.slurm.time_min) == (1, 3, 7)
    assert fits.sources["train_gpus"] == "command line"
    assert "train_gpus=64 cannot be had from job 52" in too_big.conflicts[0]


def test_partitions_of_the_components_are_kept_for_a_job_that_follows(inside: Callable[..., Composed]) -> None:
    more = {"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "4(x2)"}
    config = inside("cluster=slurm", "hardware.threads_per_core=1", environ=HET_SALLOC | more, job=HET_JOB).config

    assert (config.slurm.trainer.partition, config.slurm.rollout.partition) == ("big", "small")
    assert config.slurm.time_min == 90


def test_a_script_that_slurm_runs_again_finds_its_run_although_it_names_none(inside: Callable[..., Composed]) -> None:
    environ, batch = SALLOC | {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"}, SALLOC_JOB.replace("BatchFlag=0", "BatchFlag=1")

    def run_dir(*words: str, job: str = batch) -> str:
        return Path(inside("cluster=devcluster", *words, environ=environ, job=job).config.launch.run_dir).name

    assert run_dir() == run_dir()
    assert run_dir().startswith("demo-52-")
    assert run_dir("seed=7") not in (run_dir(), run_dir("seed=8"))
    assert run_dir("launch.run_dir=/mine") == "mine"
    assert run_dir(job=SALLOC_JOB) != run_dir(job=SALLOC_JOB), "in salloc the same words start another run"


def test_outside_of_a_job_there_is_nothing_to_take(inside: Callable[..., Composed]) -> None:
    composed = inside("launch.mode=allocation", environ={})

    assert "this shell is in no Slurm job" in composed.conflicts[0]
    assert inside("cluster=local", environ={}).conflicts == ()


# ---- a job that runs again ------------------------------------------------------------------------------------------


def test_a_job_that_runs_again_finds_its_own_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    (run.submitit / "55_submitted.pkl").touch()
    run.start_attempt(1)

    found = run_of_this_job(run.root, "55", restarts=1)

    assert found is not None
    assert (found.attempt, found.run_id) == (0, run.run_id)
    assert run_of_this_job(run.root, "55", restarts=0) is None, "the first time it is a new run"
    assert run_of_this_job(run.root, "56", restarts=1) is None, "of another job"
    assert run_of_this_job(tmp_path / "none", "55", restarts=1) is None


def test_a_run_that_another_attempt_of_this_job_began_goes_on_there(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.start_attempt(1)
    resumed = replace(run, attempt=1)
    resumed.submitit.mkdir(parents=True, exist_ok=True)
    (resumed.submitit / "60_submitted.pkl").touch()

    found = run_of_this_job(run.root, "60", restarts=1)

    assert found is not None
    assert found.attempt == 1
