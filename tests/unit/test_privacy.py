"""A run directory is its owner's: whatever the umask, whoever owned the folder, whatever another user tries."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.pipeline import new_token
from stages import privacy
from stages.files import make_directory, write_bytes_atomic
from stages.rollout.node_folder import node_folder
from stages.rundir import NotPrivateError, OutsideRunError, RunDir
from tests.fake_runs import fake_config, fake_plan, fake_run

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def fill(root: Path) -> RunDir:
    """A run directory with a file of every kind that our own code writes."""
    run = fake_run(root, fake_config(), fake_plan())
    (root / "fake.json").unlink()  # written by the tests' own hand
    write_bytes_atomic(run.token_file, new_token())
    with run.publishing(run.weights_version(1)) as publication:
        write_bytes_atomic(publication.path / "model.safetensors", b"weights")
        publication.commit({"version": 1})
    make_directory(run.acks(1))
    run.write(run.ack_json(1, "rollout_000", "loaded"), {})
    return run


def readable_by_others(root: Path) -> list[str]:
    paths = [root, *root.rglob("*")]
    return [f"{path} {stat.S_IMODE(path.stat().st_mode):04o}" for path in paths if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077], ids="{:04o}".format)
def test_no_umask_opens_a_run_to_others(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        run = fill(tmp_path / "deep" / "er" / "run")
    finally:
        os.umask(before)

    assert readable_by_others(tmp_path / "deep") == []
    assert {path.name for path in run.root.iterdir()} >= {"run.json", "config.yaml", "plan.json", "token", "weights"}


def test_a_folder_that_was_open_before_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)

    assert readable_by_others(fill(tmp_path / "run").root) == []


def test_a_filesystem_without_modes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)

    with pytest.raises(
        NotPrivateError, match=r"has mode 0777, wanted user \d+ and 0700.*choose another launch.run_dir"
    ):
        RunDir.create(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", NOBODY, NOBODY)

    with pytest.raises(NotPrivateError, match=f"belongs to user {NOBODY}"):
        RunDir.create(tmp_path / "run")


def test_a_folder_whose_mode_may_not_be_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "chmod", refuse)

    assert "wanted user" in privacy.make_private(tmp_path)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777], ids="{:04o}".format)
def test_a_run_that_others_may_write_into_is_not_opened(tmp_path: Path, mode: int) -> None:
    run = fill(tmp_path / "run")
    run.root.chmod(mode)

    with pytest.raises(NotPrivateError, match="look what others may have put there, then: chmod go-w"):
        RunDir.open(run.root, writer="test")


def test_a_run_that_its_owner_lets_others_read_is_opened(tmp_path: Path) -> None:
    run = fill(tmp_path / "run")
    run.root.chmod(0o755)

    assert RunDir.open(run.root, writer="test").run_id == run.run_id


# ---- another user of the same machine ---------------------------------------------------------------------------------


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


ATTEMPTS = (os.listdir, lambda path: os.open(path, os.O_RDONLY), lambda path: os.mkdir(f"{path}/mine"), connect)


def reached_by_nobody(paths: list[Path]) -> list[str]:
    """The paths that a process of another user can list, read, put something into or connect to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps([str(path) for path in paths if is_reached(path)]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found: list[str] = json.loads(answer.read())
    os.waitpid(child, 0)
    return found


def is_reached(path: Path) -> bool:
    for attempt in ATTEMPTS:
        try:
            attempt(str(path))
        except PermissionError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ECONNREFUSED, errno.ENXIO):
                continue
            raise
        return True
    return False


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can pass through; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="libra-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_another_user_reaches_no_file_of_a_run(reachable: Path) -> None:
    run = fill(reachable / "run")
    (reachable / "open").write_text("for comparison")

    everything = [run.root, *run.root.rglob("*")]

    assert reached_by_nobody(everything) == []
    assert reached_by_nobody([reachable / "open"]) == [str(reachable / "open")]


@needs_root
def test_another_user_reaches_no_socket_in_the_runs_folder_on_a_node(
    reachable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(reachable))
    folder = node_folder("abc")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as other:
        server.bind(str(folder / "engine"))
        other.bind(str(reachable / "open"))
        for listener, path in ((server, folder / "engine"), (other, reachable / "open")):
            path.chmod(0o777)
            listener.listen()

        assert reached_by_nobody([folder, folder / "engine"]) == []
        assert reached_by_nobody([reachable / "open"]) == [str(reachable / "open")]


# ---- links ------------------------------------------------------------------------------------------------------------


def test_a_record_replaces_a_link_in_its_place_and_not_what_it_leads_to(tmp_path: Path) -> None:
    run = fill(tmp_path / "run")
    (tmp_path / "precious").write_text("precious")
    run.state_json.symlink_to(run.root / "link")
    (run.root / "link").symlink_to(run.run_json)
    before = run.run_json.read_bytes()

    run.write(run.state_json, {"phase": "running"})

    assert run.run_json.read_bytes() == before
    assert not run.state_json.is_symlink()


@pytest.mark.parametrize("place", ["control", "weights", "instances"])
def test_a_folder_that_leads_out_of_the_run_is_not_written_through(tmp_path: Path, place: str) -> None:
    run = fill(tmp_path / "run")
    shutil.rmtree(run.root / place)
    (tmp_path / "elsewhere").mkdir()
    (run.root / place).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OutsideRunError):
        run.write(run.root / place / "record.json", {})
    assert list((tmp_path / "elsewhere").iterdir()) == []
