"""A job that outlives its supervisor is ended by its instances, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from stages.context import StageContext
from stages.orphaned import LOOK_S, SILENT_S, SupervisorLostError, SupervisorWatch
from stages.rundir import RunDir
from tests.fake_runs import fake_config, fake_plan
from tests.weights_kit import make_context


@dataclass
class Cluster:
    """What Slurm says of the job, and what it was asked."""

    batch_host: str = "node0"
    hosts: tuple[str, ...] = ("node0", "node1")
    asked: list[str] = field(default_factory=list)
    now_s: float = 0.0

    def ask(self, words: Sequence[str]) -> str:
        self.asked.append(" ".join(words))
        if words[0] == "squeue":
            return f"{self.batch_host}|node[...]\n" if self.hosts else ""
        return "\n".join(self.hosts) if "hostnames" in words else ""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = replace(RunDir.create(tmp_path / "run"), writer="supervisor")
    beat(made, 7)
    return made


def beat(run: RunDir, heartbeat: int, phase: str = "running") -> None:
    run.write(run.state_json, {"phase": phase, "heartbeat": heartbeat})


def watch(run: RunDir, cluster: Cluster, *, again: bool = True) -> SupervisorWatch:
    return SupervisorWatch(run, "41", again, clock=lambda: cluster.now_s, ask=cluster.ask)


def pass_time(found: SupervisorWatch, cluster: Cluster, seconds: float) -> None:
    end_s = cluster.now_s + seconds
    while cluster.now_s < end_s:
        found.look()
        cluster.now_s += 1.0


LOST = ("node1",)


@pytest.mark.parametrize("again, wish", [(True, "scontrol requeue 41"), (False, "scancel 41")])
def test_a_job_that_has_lost_its_batch_host_is_run_again_or_ended(run: RunDir, again: bool, wish: str) -> None:
    cluster = Cluster(hosts=LOST)

    with pytest.raises(SupervisorLostError):
        pass_time(watch(run, cluster, again=again), cluster, 2 * SILENT_S)

    assert cluster.asked[-1] == wish
    assert SILENT_S <= cluster.now_s < SILENT_S + 2 * LOOK_S


def test_nobody_asks_slurm_while_the_supervisor_lives(run: RunDir) -> None:
    cluster = Cluster(hosts=LOST)
    found = watch(run, cluster)
    for heartbeat in range(20):
        beat(run, heartbeat)
        pass_time(found, cluster, SILENT_S - LOOK_S - 1.0)

    assert cluster.asked == []


def test_a_silent_supervisor_whose_node_is_there_is_left_alone(run: RunDir) -> None:
    cluster = Cluster()

    pass_time(watch(run, cluster), cluster, 10 * SILENT_S)

    assert not any(words.startswith(("scontrol requeue", "scancel")) for words in cluster.asked)


def test_a_slurm_that_does_not_answer_ends_nothing(run: RunDir) -> None:
    cluster = Cluster(hosts=())

    pass_time(watch(run, cluster), cluster, 3 * SILENT_S)

    assert all(words.startswith("squeue") for words in cluster.asked)


@pytest.mark.parametrize("phase", ["succeeded", "failed", "requeued"])
def test_a_supervisor_that_has_said_its_last_word_is_not_missed(run: RunDir, phase: str) -> None:
    beat(run, 8, phase)
    cluster = Cluster(hosts=LOST)

    pass_time(watch(run, cluster), cluster, 3 * SILENT_S)

    assert cluster.asked == []


@pytest.mark.parametrize("layout, job_id", [("single", "41"), ("hetjob", "")])
def test_only_a_job_that_outlives_its_first_node_is_watched(
    run: RunDir, layout: str, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    context: StageContext = make_context(run)
    context.plan = fake_plan(layout)
    context.config = fake_config("slurm")

    found = SupervisorWatch.of(context)

    assert (found.job_id, found.again) == (job_id, True)
