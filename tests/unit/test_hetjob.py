"""The job script: golden texts, and rules that hold for every plan."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from conf.site import SlurmRoleConfig
from launch.desired_steps import PlacementError, desired_steps
from launch.hetjob import JobSpecError, job_spec, render, render_job, supervisor_command
from planner.plan import InstancePlacement, Plan, RolloutLayout, TrainLayout

RUN = Path("/scratch/runs/first light")


def plan(layout: str, train: tuple[int, int], instances: list[tuple[int, int, int]]) -> Plan:
    """`train` is (nodes, GPUs per node); an instance is (tp, component, node)."""
    nodes, per_node = train
    placed = tuple(
        InstancePlacement(f"rollout_{i:03d}", tp, component, node) for i, (tp, component, node) in enumerate(instances)
    )
    gpus = sum(tp for tp, _, _ in instances)
    return Plan(
        layout=layout,
        layout_reason="",
        device="cuda",
        train=TrainLayout(nodes * per_node, nodes, per_node, 1, 1, 1, nodes * per_node, 1),
        rollout=RolloutLayout(gpus, 1, gpus, placed),
    )


def config(**slurm: object) -> LibraConfig:
    made = LibraConfig()
    made.launch.python = "/opt/libra/bin/python"
    for name, value in slurm.items():
        setattr(made.slurm, name, value)
    return made


def busy_site() -> LibraConfig:
    made = config(
        partition="gpu",
        account="lab",
        qos="long",
        job_name="grpo 7b",
        time_min=720,
        mem_per_node_bytes=400e9,
        constraint="h100&nvme",
        exclude="gpu[07-08]",
        licenses="matlab:2",
        comment="night run #3",
        wckey="rl",
        mail_user="me@example.org",
        mail_type=["END", "FAIL"],
        gpu_type="h100",
        extra=["--exclusive"],
    )
    made.launch.setup = ["module load cuda/12.8", "ulimit -c 0"]
    return made


def two_sides() -> LibraConfig:
    """Trainer and rollout on different partitions, and almost nothing in common."""
    made = config(account="lab", mem_per_node_bytes=400e9, extra=["--exclusive"])
    made.slurm.trainer = SlurmRoleConfig(
        partition="big",
        qos="long",
        constraint="h200",
        reservation="class",
        exclude="gpu01",
        gpu_type="h200",
        mem_per_node_bytes=0.0,
        extra=["--switches=1@5"],
    )
    made.slurm.rollout = SlurmRoleConfig(partition="small", qos="short", mem_per_node_bytes=200e9)
    made.slurm.gpu_flag = "gres"
    return made


def cpu_cluster() -> LibraConfig:
    made = config(partition="dev", mem_per_node_bytes=6e9, time_min=5, gpu_flag="none")
    made.hardware.device = "cpu"
    made.hardware.threads_per_core = 1
    made.hardware.gpus_per_node = 2
    made.hardware.cpus_per_node = 4
    return made


SCRIPTS = {
    "hetjob_two_sides": (config(), plan("hetjob", (1, 8), [(1, 1, 0)] * 8)),
    "hetjob_three_components": (
        busy_site(),
        plan("hetjob", (2, 8), [(4, component, node) for component in (1, 2) for node in (0, 1) for _ in (0, 1)]),
    ),
    "hetjob_unlike_sides": (two_sides(), plan("hetjob", (1, 8), [(4, 1, 0), (4, 1, 0)])),
    "single_shared_node": (config(layout="single"), plan("single", (1, 4), [(2, 0, 0), (2, 0, 0)])),
    "cpu_cluster": (cpu_cluster(), plan("hetjob", (1, 1), [(1, 1, 0), (1, 1, 0)])),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_equals_the_stored_text(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"scripts/{name}.sbatch", render_job(*SCRIPTS[name], RUN))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_passes_shellcheck(name: str) -> None:
    done = subprocess.run(
        ["shellcheck", "-"],
        input=render_job(*SCRIPTS[name], RUN),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stdout


SIDE_TEXTS = ("partition", "qos", "constraint", "reservation", "exclude")


@given(
    train_nodes=st.integers(1, 4),
    per_node=st.sampled_from([1, 2, 4, 8]),
    components=st.integers(1, 3),
    instances_per_component=st.integers(1, 8),
)
def test_every_component_states_every_resource(
    train_nodes: int, per_node: int, components: int, instances_per_component: int
) -> None:
    instances = [(1, 1 + c, 0) for c in range(components) for _ in range(instances_per_component)]
    made = config(**dict.fromkeys(SIDE_TEXTS, "p"))
    text = render_job(made, plan("hetjob", (train_nodes, per_node), instances), RUN)

    blocks = text.split("#SBATCH hetjob\n")
    assert len(blocks) == components + 1
    for block in blocks:
        for option in ("nodes", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "mem", *SIDE_TEXTS):
            assert block.count(f"--{option}=") == 1, (option, block)
    assert text.count("--time=") == text.count("--output=") == 1
    assert "--output=" in blocks[0]


@given(common=st.tuples(*[st.sampled_from(["", "c"])] * 5), trainer=st.tuples(*[st.sampled_from(["", "t"])] * 5))
def test_nothing_that_one_side_asks_for_reaches_the_other(common: tuple[str, ...], trainer: tuple[str, ...]) -> None:
    made = config(**dict(zip(SIDE_TEXTS, common, strict=True)))
    for name, value in zip(SIDE_TEXTS, trainer, strict=True):
        setattr(made.slurm.trainer, name, value)
    made.slurm.rollout = SlurmRoleConfig(partition="r", qos="r")  # what cannot be taken back (planner.conflicts.slurm)

    first, second = render_job(made, plan("hetjob", (1, 8), [(1, 1, 0)]), RUN).split("#SBATCH hetjob\n")

    for name, own, other in zip(SIDE_TEXTS[2:], trainer[2:], common[2:], strict=True):
        assert (f"--{name}={own or other}" in first) is bool(own or other)
        if other or (own and name != "constraint"):  # a constraint is never carried over
            assert f"#SBATCH --{name}={other}\n" in second
        else:
            assert f"--{name}" not in second
    assert "--partition=r\n" in second


def test_nodes_that_failed_before_are_left_out_of_every_component() -> None:
    made = config(exclude="gpu07")

    text = render_job(made, plan("hetjob", (1, 8), [(1, 1, 0)]), RUN, exclude=["gpu01", "gpu02"])

    assert text.count("#SBATCH --exclude=gpu07,gpu01,gpu02\n") == 2


@pytest.mark.parametrize(
    ("flag", "kind", "wanted"),
    [
        ("gpus-per-node", "", "--gpus-per-node=8"),
        ("gpus-per-node", "h100", "--gpus-per-node=h100:8"),
        ("gres", "", "--gres=gpu:8"),
        ("gres", "h100", "--gres=gpu:h100:8"),
        ("none", "", ""),
    ],
)
def test_gpus_are_asked_for_in_the_words_of_the_site(flag: str, kind: str, wanted: str) -> None:
    text = render_job(config(gpu_flag=flag, gpu_type=kind), plan("hetjob", (1, 8), [(8, 1, 0)]), RUN)

    assert [word for word in text.split() if "gpu" in word and word.startswith("--")] == [wanted] * 2 * bool(wanted)


@given(
    per_node=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4, 8]),
    cores=st.integers(9, 128),
    threads=st.sampled_from([1, 2, 4]),
)
def test_component_has_room_for_all_its_steps_in_whole_cores(per_node: int, tp: int, cores: int, threads: int) -> None:
    made = config()
    made.hardware.threads_per_core = threads
    made.hardware.cpus_per_node = cores * threads
    wanted = plan("hetjob", (1, per_node), [(tp, 1, 0)] * (8 // tp))

    spec = job_spec(made, wanted, RUN)

    for index, component in enumerate(spec.components):
        steps = [step for step in desired_steps(made, wanted).steps if step.component == index]
        assert all(step.cpus_per_task % threads == 0 for step in steps)
        assert component.cpus >= sum(step.tasks_per_node * step.cpus_per_task for step in steps)
        assert component.gpus_per_node >= sum(step.gpus_per_node for step in steps)
        assert component.cpus <= cores * threads


def test_single_layout_is_one_job_that_survives_a_lost_node() -> None:
    text = render_job(*SCRIPTS["single_shared_node"], RUN)

    assert "hetjob" not in text
    assert "#SBATCH --no-kill\n" in text


def test_supervisor_replaces_the_batch_shell() -> None:
    spec = job_spec(*SCRIPTS["hetjob_two_sides"], RUN)

    last = render(spec, supervisor_command("/opt/a b/python", RUN / "attempts/0/submitit")).rstrip().splitlines()[-1]

    assert last == "exec '/opt/a b/python' -u -m submitit.core._submit '/scratch/runs/first light/attempts/0/submitit'"


def test_warning_signal_leaves_a_short_job_most_of_its_time() -> None:
    assert job_spec(config(time_min=2), SCRIPTS["hetjob_two_sides"][1], RUN).signal_s == 30
    assert job_spec(config(time_min=600), SCRIPTS["hetjob_two_sides"][1], RUN).signal_s == 120


def test_a_node_with_too_few_processors_is_an_error_that_names_the_option() -> None:
    made = config(controller_cpus=4)
    made.hardware.threads_per_core = 1
    made.hardware.cpus_per_node = 8

    with pytest.raises(JobSpecError, match=r"wants 12, available 8; change hardware\.cpus_per_node"):
        job_spec(made, plan("hetjob", (1, 8), [(1, 1, 0)]), RUN)


def test_a_run_directory_that_slurm_would_expand_is_refused() -> None:
    with pytest.raises(JobSpecError, match=r"choose another launch\.run_dir"):
        render_job(config(), SCRIPTS["hetjob_two_sides"][1], Path("/scratch/50%j"))


def test_ranks_that_do_not_fill_their_nodes_are_an_error() -> None:
    wanted = plan("hetjob", (2, 4), [(1, 1, 0)])
    broken = Plan(**{**vars(wanted), "train": TrainLayout(7, 2, 4, 1, 1, 1, 7, 1)})

    with pytest.raises(PlacementError, match="7 trainer ranks do not fill 2 nodes x 4"):
        desired_steps(config(), broken)


def test_a_component_without_a_step_is_an_error() -> None:
    with pytest.raises(JobSpecError, match="no step of the plan is on component 1"):
        job_spec(config(), plan("hetjob", (1, 1), [(1, 2, 0)]), RUN)


def test_controller_takes_its_processors_from_the_trainers_node() -> None:
    made = config(controller_cpus=7)

    steps = {step.name: step for step in desired_steps(made, plan("hetjob", (1, 8), [(1, 1, 0)])).steps}

    assert steps["controller"].gpus_per_node == 0
    assert steps["controller"].cpus_per_task == 8  # whole cores of two threads
    assert steps["trainer"].cpus_per_task == 10  # (96 - 8) / 8 = 11
    assert steps["rollout_000"].cpus_per_task == 12


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_wrappers_pass_shellcheck_and_become_the_launcher() -> None:
    wrappers = sorted((Path(__file__).parents[2] / "launch" / "wrappers").glob("*.sbatch"))

    done = subprocess.run(["shellcheck", *wrappers], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout
    assert [wrapper.name for wrapper in wrappers] == ["libra-hetjob.sbatch", "libra-submit.sbatch", "libra.sbatch"]
    assert all(wrapper.read_text().rstrip().splitlines()[-1].startswith("exec ") for wrapper in wrappers)
