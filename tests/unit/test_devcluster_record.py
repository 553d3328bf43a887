"""The folder of a cluster: whose it is, who may work on it, and on which ports."""

from __future__ import annotations

import random
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.devcluster import cluster
from launch.devcluster.__main__ import NOT_RUNNING, main
from launch.devcluster.errors import DevClusterError, DevClusterRequestError
from launch.devcluster.lock import exclusive, remove_parents
from launch.devcluster.ports import free_ports, is_free
from launch.devcluster.processes import Process
from launch.devcluster.record import FILE_NAME, Record, read_record, write_record
from launch.devcluster.topology import Site, Topology


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A shorter path than pytest's own, which leaves no room for unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="libra-") as folder:
        yield Path(folder)


def record_in(root: Path) -> Record:
    site = Site(root, "vm", "ada", Topology(nodes=1), 20_001, (20_002,))
    return Record(site, (Process("munged", 17, 4711, "boot"),), (root.parent,))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_record(record_in(tmp_path))

    assert read_record(tmp_path) == record_in(tmp_path)


def test_there_is_no_record_where_nothing_is(tmp_path: Path) -> None:
    assert read_record(tmp_path / "absent") is None
    assert read_record(tmp_path) is None


def test_a_folder_of_others_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(DevClusterRequestError, match=r"not made by launch\.devcluster"):
        cluster.down(tmp_path)

    assert (tmp_path / "thesis.tex").exists()


def test_a_copied_record_does_not_make_a_folder_ours(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    write_record(record_in(tmp_path))
    (tmp_path / FILE_NAME).rename(tmp_path / "copy" / FILE_NAME)

    with pytest.raises(DevClusterRequestError, match="not the record of"):
        cluster.down(tmp_path / "copy")


def test_a_link_to_a_cluster_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_record(record_in(tmp_path / "real"))
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(DevClusterRequestError, match="not made by"):
        cluster.down(tmp_path / "link")


def test_a_torn_record_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"made_by": "libra')

    with pytest.raises(DevClusterError, match=FILE_NAME):
        cluster.down(tmp_path)


def test_leftovers_of_a_crashed_machine_are_deleted_without_touching_who_has_the_numbers_now(tmp_path: Path) -> None:
    root = tmp_path / "dc"
    root.mkdir()
    write_record(record_in(root))

    assert cluster.down(root)

    assert not root.exists()


def test_down_where_nothing_is_makes_nothing(tmp_path: Path) -> None:
    assert not cluster.down(tmp_path / "a" / "b" / "dc")
    assert list(tmp_path.iterdir()) == []


def test_status_where_nothing_is_has_its_own_exit_code(tmp_path: Path) -> None:
    assert main(["status", "--root", str(tmp_path / "dc")]) == NOT_RUNNING


def test_an_impossible_size_ends_with_a_message_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--root", str(tmp_path / "dc"), "--nodes", "0"]) == 2
    assert "--nodes from 1 to 64" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_second_worker_waits_for_the_lock_and_then_says_so(tmp_path: Path) -> None:
    with exclusive(tmp_path / "dc", 1.0), pytest.raises(DevClusterError, match="another"):
        with exclusive(tmp_path / "dc", 0.1):
            pass


def test_a_lock_on_a_parent_that_was_deleted_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    root = tmp_path / "new" / "dc"
    entered = threading.Event()

    def second() -> None:
        with exclusive(root, 20.0):
            assert root.parent.is_dir()
            entered.set()

    waiting = threading.Thread(target=second)
    with exclusive(root, 1.0) as created:
        waiting.start()
        assert not entered.wait(0.2)
        remove_parents(created)
    waiting.join(20.0)

    assert entered.is_set()


def test_chosen_ports_are_free_different_and_below_the_ephemeral_range() -> None:
    ports = free_ports(20, random.Random(1))

    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert len(set(ports)) == 20
    assert all(is_free(port) and port < max(first_ephemeral, 22_000) for port in ports)


def test_a_taken_port_is_not_chosen() -> None:
    (first,) = free_ports(1, random.Random(2))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen(1)

        (second,) = free_ports(1, random.Random(2))

    assert second != first
