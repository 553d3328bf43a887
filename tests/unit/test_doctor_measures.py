"""What the doctor's programs measure: two of them as threads over one folder, and the parts that read system files."""

from __future__ import annotations

import os
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Status
from launch.doctor.inside.meeting import Meeting, Scene
from launch.doctor.inside.node import measure_all
from launch.doctor.order import QUICK, Limits, Order, read_order
from launch.doctor.probes import (
    MEASURES,
    bandwidth,
    clock,
    filesystem,
    gpus,
    interpreter,
    memory,
    packages,
    ports,
    sharing,
    shm,
)
from stages.files import DamagedRecordError, WaitTimeoutError, list_names, make_directory, read_json
from tests.doctor_kit import slurm_facts

SMALL = replace(QUICK, peers_s=20.0, listed_s=10.0, transfer_bytes=1 << 20)


def make_order(folder: Path, nodes: int, limits: Limits = SMALL) -> Order:
    order = Order("0a1b", str(folder), "slurm", True, "python", nodes, 2, 0, 0, limits)
    make_directory(order.reports)
    order.write()
    return order


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Two node programs at the same time, in one process."""
    order = make_order(tmp_path_factory.mktemp("doctor"), 2)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda rank: measure_all(order, rank, f"n{rank}"), range(2)))
    assert reports == [read_json(order.reports / f"node.{rank}.json") for rank in range(2)]
    here: dict[str, Any] = {"packages": packages.measure(), "interpreter": interpreter.place()}
    nodes = {report["node"]: report for report in reports}
    return Evidence(mode="slurm", quick=True, here=here, slurm=slurm_facts(), nodes=nodes)


def test_every_probe_measures_something_on_every_node(measured: Evidence) -> None:
    for node, report in measured.nodes.items():
        assert report["done"], node
        assert {key for key, _ in MEASURES} <= report.keys()
        assert {key: value for key, value in report.items() if isinstance(value, dict) and "error" in value} == {}


def test_what_this_process_is_is_what_the_nodes_are(measured: Evidence) -> None:
    statuses = {finding.name: finding.status for finding in (*packages.judge(measured), *interpreter.judge(measured))}

    assert statuses["Python and pickling as here"] is Status.OK
    assert statuses["the same code"] is Status.OK
    assert statuses["import of launch and stages"] is Status.OK


def test_files_of_one_are_seen_by_the_other(measured: Evidence) -> None:
    assert {finding.name: finding.status for finding in sharing.judge(measured)} == {
        "seen by other nodes": Status.OK,
        "exists() after a miss": Status.OK,
        "exclusive creation": Status.OK,
        "replacing a record": Status.OK,
    }


def test_one_clock_has_no_offset_beyond_its_uncertainty(measured: Evidence) -> None:
    facts = measured.nodes["n1"]["clock"]

    assert abs(facts["offset_s"]) <= facts["uncertainty_s"]
    assert measured.nodes["n0"]["clock"] == {"reference": "n0"}


def test_both_ways_and_all_thread_counts_are_measured(measured: Evidence) -> None:
    for way in ("write", "read"):
        rates = bandwidth.rates(measured, way)
        assert list(rates) == [1, 4, 16]
        assert min(rates.values()) > 0


def test_measuring_leaves_no_large_file(measured: Evidence, tmp_path: Path) -> None:
    order = make_order(tmp_path / "doctor", 1)

    measure_all(order, 0, "n0")

    assert list_names(order.path / "bandwidth") == []


def test_a_node_whose_peers_never_come_says_so_and_goes_on(tmp_path: Path) -> None:
    limits = replace(SMALL, import_s=0.2, peers_s=0.2, listed_s=0.2, exists_s=0.2, transfer_s=0.1)

    report = measure_all(make_order(tmp_path, 2, limits), 0, "n0")

    assert report["done"]
    assert "node number 1" in report["clock"]["error"] or "the other nodes" in report["clock"]["error"]
    assert "WaitTimeoutError" in report["sharing"]["error"]
    assert report["filesystem"]["free"] > 0


def test_a_folder_without_an_order_is_an_error_that_asks_about_the_run_root(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecordError, match="run root"):
        read_order(tmp_path)


def test_an_order_is_read_back_as_it_was(tmp_path: Path) -> None:
    order = make_order(tmp_path, 3)

    assert read_order(tmp_path) == order


def test_who_is_not_heard_in_time_is_named(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 0, 2, deadline_s=0.05)

    with pytest.raises(WaitTimeoutError, match="'hello' from node number 1"):
        meeting.hear("hello", 1)


# ---- files -----------------------------------------------------------------------------------------------------------------

MOUNTS = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 21 0:26 / /shared rw,relatime shared:2 - nfs4 filer:/export rw,vers=4.2
31 30 0:27 / /shared/fast\\040disk rw - lustre 10.0.0.1@o2ib:/fast rw
32 21 0:28 / /shared/over rw - ext4 /dev/old rw
33 32 0:29 / /shared/over rw - beegfs beegfs_nodev rw
"""


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/home/me", ("ext4", "/dev/vda")),
        ("/shared", ("nfs4", "filer:/export")),
        ("/shared/runs/a", ("nfs4", "filer:/export")),
        ("/sharedlike", ("ext4", "/dev/vda")),
        ("/shared/fast disk/runs", ("lustre", "10.0.0.1@o2ib:/fast")),
        ("/shared/over/x", ("beegfs", "beegfs_nodev")),
    ],
)
def test_the_mount_of_a_path_is_the_longest_that_holds_it(path: str, kind: tuple[str, str]) -> None:
    assert filesystem.mount_of(path, MOUNTS) == kind


@pytest.mark.parametrize("threads", bandwidth.THREADS)
def test_all_bytes_are_written_and_read(tmp_path: Path, threads: int) -> None:
    path, size = tmp_path / "file", 1 << 20

    assert bandwidth.write(path, size, threads, 10.0)[0] == size
    assert path.stat().st_size == size
    assert bandwidth.read(path, size, threads, 10.0)[0] == size


def test_a_slow_transfer_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "CHUNK_BYTES", 4096)

    done, _ = bandwidth.write(tmp_path / "file", 1 << 20, 4, most_s=-1.0)

    assert done == 4 * 4096


def test_memory_limits_of_both_cgroup_versions_are_found(tmp_path: Path) -> None:
    for folder, name, value in [
        ("slurm/job_7", "memory.max", "4294967296"),
        ("slurm/job_7/step_0", "memory.max", "max"),
        ("memory/slurm/uid_1/job_7", "memory.limit_in_bytes", "8589934592"),
        ("memory/slurm", "memory.limit_in_bytes", "9223372036854771712"),
    ]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(f"{value}\n")

    assert memory.cgroup_limit("0::/slurm/job_7/step_0\n", tmp_path) == 4 << 30
    assert memory.cgroup_limit("9:cpuset:/x\n4:memory:/slurm/uid_1/job_7\n", tmp_path) == 8 << 30
    assert memory.cgroup_limit("0::/elsewhere\n", tmp_path) == 0


def test_leftovers_are_ours_and_belong_to_nobody_alive(tmp_path: Path) -> None:
    for name in ("libra-7-aaaa", "libra-7-bbbb", "libra-8-cccc", "other"):
        (tmp_path / name).mkdir()

    found = shm.leftovers([tmp_path], 7, [b"HOME=/x\0LIBRA_STEP_ID=bbbb.0.trainer/"])

    assert found == [str(tmp_path / "libra-7-aaaa")]


def test_a_changed_file_changes_the_digest_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "a.py").write_text("x = 1\n")
    before = interpreter.code_digest(tmp_path)
    (tmp_path / "launch" / "a.py").write_text("x = 10\n")

    assert interpreter.code_digest(tmp_path) != before


# ---- clock, ports, GPUs --------------------------------------------------------------------------------------------------------


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 5)), min_size=1, max_size=8),
)
def test_the_true_offset_of_a_clock_lies_within_the_uncertainty(true_offset: float, ways: list[Any]) -> None:
    rounds, now = [], 1000.0
    for there, back, thinking in ways:
        heard = now + there
        answered = heard + thinking
        rounds.append((now + true_offset, heard, answered, answered + back + true_offset))
        now = answered + back + 1

    found, uncertainty = clock.offset(rounds)

    assert abs(found - true_offset) <= uncertainty + 1e-6
    assert uncertainty <= min(there + back for there, back, _ in ways) / 2 + 1e-6


def test_a_port_below_the_ephemeral_range_is_bound_and_given_back() -> None:
    port = bound = ports.bound_below("127.0.0.1", 32768)

    assert 30768 <= port < 32768
    with socket.create_server(("127.0.0.1", bound)):
        pass


def test_no_port_below_the_range_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(random, "sample", lambda _range, count: [taken] * count)

        assert ports.bound_below("127.0.0.1", 40000) == 0


def test_the_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")

    assert gpus.visible_list(gpus.visibility()) == ["2", "3"]


def test_versions_are_told_without_importing_anything() -> None:
    found = packages.measure()

    assert found["python"] == ".".join(map(str, os.sys.version_info[:3]))  # type: ignore[attr-defined]
    assert found["submitit"][0].isdigit()
    assert packages.SAME_AS_HERE[0] in found


def test_an_import_that_takes_too_long_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "IMPORTS", "import time; time.sleep(60)")
    scene = Scene(make_order(tmp_path, 1, replace(SMALL, import_s=0.1)), "n0", Meeting(tmp_path, 0, 1, 1.0))

    found = interpreter.measure(scene)

    assert (found["import_s"], found["import_error"]) == (None, "not over after 0.1 s")


def test_an_import_that_fails_is_told_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "IMPORTS", "import no_such_module")
    scene = Scene(make_order(tmp_path, 1), "n0", Meeting(tmp_path, 0, 1, 1.0))

    found = interpreter.measure(scene)

    assert (found["import_s"], found["import_error"]) == (None, "ModuleNotFoundError: No module named 'no_such_module'")
