"""The node's own folder of a run: private, held by whoever uses it, and gone once nobody does."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stages.files import WaitTimeoutError
from stages.rollout import node_folder as module
from stages.rollout.memory_folder import ForeignFolderError
from stages.rollout.node_folder import (
    leave_node_folder,
    node_folder,
    node_folder_path,
    node_lock,
    remove_node_folder,
    sweep_node_folders,
)
from stages.rollout.server_process import clear_scratch
from stages.rollout.settings import SERVER_ID_VARIABLE
from tests.fake_runs import until

ROOT = Path(__file__).parents[2]
DAY_S = 86400.0


@pytest.fixture(autouse=True)
def local_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "_MAX_SOCKET_FOLDER_LENGTH", 1000)
    yield tmp_path
    for folder in list(module._holds):
        module._release(folder)


@contextmanager
def another_process(run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """An instance of the run, which holds the folder until it is killed. It has a child, as an instance has a server."""
    code = (
        "import subprocess, sys, tempfile, time\n"
        "from stages.rollout import node_folder as module\n"
        "tempfile.tempdir, module._MAX_SOCKET_FOLDER_LENGTH = sys.argv[1], 1000\n"
        "folder = module.node_folder(sys.argv[2])\n"
        "(folder / 'rollout_000-12').mkdir()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, "-c", code, tempfile.gettempdir(), run_id]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def old(run_id: str, age_s: float) -> Path:
    """What a version without locks left."""
    folder = node_folder_path(run_id)
    folder.mkdir(mode=0o700)
    (folder / "reload.lock").touch()
    os.utime(folder, (time.time() - age_s,) * 2)
    return folder


# ---- whose it is ----------------------------------------------------------------------------------------------------


def test_the_node_s_folder_is_private(local_tmp: Path) -> None:
    folder = node_folder("abc")

    assert folder.parent == local_tmp
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_enter_is_refused() -> None:
    node_folder("abc").chmod(0o755)

    with pytest.raises(ForeignFolderError):
        node_folder("abc")


def test_a_link_in_place_of_the_folder_is_refused(local_tmp: Path) -> None:
    (local_tmp / "target").mkdir(mode=0o700)
    node_folder_path("abc").symlink_to(local_tmp / "target")

    with pytest.raises(ForeignFolderError):
        node_folder("abc")


# ---- its end --------------------------------------------------------------------------------------------------------


def test_the_last_instance_takes_the_folder_with_it_and_what_killed_ones_left() -> None:
    with another_process("abc") as other:
        folder = node_folder("abc")
        leave_node_folder("abc")
        assert folder.exists()

        node_folder("abc")
        other.kill()
        other.wait()
        leave_node_folder("abc")

    assert not folder.exists()


def test_the_end_of_a_run_does_not_take_the_folder_from_a_living_instance() -> None:
    with another_process("abc"):
        remove_node_folder("abc")

        assert (node_folder_path("abc") / "rollout_000-12").exists()


def test_a_removal_that_was_cut_short_is_finished_at_the_end_of_the_run() -> None:
    folder = node_folder("abc")
    (folder / "rollout_000-12").mkdir()
    module._release(folder)
    begun = folder.rename(folder.with_name(f"{folder.name}.0123abcd"))

    remove_node_folder("abc")

    assert not begun.exists()


def test_a_process_that_ends_leaves_no_folder() -> None:
    code = "import sys, tempfile; tempfile.tempdir = sys.argv[1]; from stages.rollout import node_folder as m"
    code += "; m._MAX_SOCKET_FOLDER_LENGTH = 1000; assert m.node_folder('abc').exists()"

    subprocess.run([sys.executable, "-c", code, tempfile.gettempdir()], cwd=ROOT, check=True, timeout=60)

    assert not node_folder_path("abc").exists()


def test_an_instance_removes_what_its_killed_servers_left_and_nothing_of_its_neighbours() -> None:
    folder = node_folder("abc")
    for name in ("rollout_001-aa", "rollout_001-bb", "rollout_0010-cc"):
        (folder / name).mkdir()
    server = subprocess.Popen(["sleep", "60"], env={**os.environ, SERVER_ID_VARIABLE: "rollout_001-bb"})

    try:
        clear_scratch("abc", "rollout_001")
    finally:
        server.kill()
        server.wait()

    assert sorted(path.name for path in folder.glob("rollout*")) == ["rollout_001-bb", "rollout_0010-cc"]


# ---- what others left -------------------------------------------------------------------------------------------------


def test_the_next_run_on_the_node_removes_the_folder_of_a_killed_one_and_not_that_of_a_living_one() -> None:
    with another_process("aaaa") as killed, another_process("bbbb"):
        killed.kill()
        killed.wait()

        node_folder("cccc")

        assert not node_folder_path("aaaa").exists()
        assert (node_folder_path("bbbb") / "rollout_000-12").exists()


@pytest.mark.parametrize("age_s, is_swept", [(60.0, False), (DAY_S, True)])
def test_a_folder_without_a_lock_is_swept_once_it_is_old(age_s: float, is_swept: bool) -> None:
    folder = old(secrets.token_hex(8), age_s)

    assert sweep_node_folders() == ([folder] if is_swept else [])
    assert folder.exists() is not is_swept


def test_a_folder_without_a_lock_whose_run_lives_is_never_swept() -> None:
    run_id = secrets.token_hex(8)
    folder = old(run_id, DAY_S)
    instance = subprocess.Popen(["sleep", "60"], env={**os.environ, "LIBRA_STEP_ID": f"{run_id}.0.rollout_000/"})

    try:
        until(lambda: run_id.encode() in Path(f"/proc/{instance.pid}/environ").read_bytes(), 10.0, "the instance")
        assert sweep_node_folders() == []
    finally:
        instance.kill()
        instance.wait()
    assert sweep_node_folders() == [folder]


def test_only_folders_of_runs_are_swept(local_tmp: Path) -> None:
    (local_tmp / "target").mkdir(mode=0o700)
    node_folder_path("abc").symlink_to(local_tmp / "target")
    foreign = old("def", DAY_S)
    foreign.chmod(0o755)
    (local_tmp / f"libra-{os.geteuid()}-notes").write_text("mine")

    assert sweep_node_folders() == []
    assert len(list(local_tmp.iterdir())) == 4


def test_who_comes_while_the_folder_is_being_removed_gets_another_one() -> None:
    folder = node_folder("abc")
    module._release(folder)
    first = folder.stat().st_ino
    sweeper = os.open(folder / "held", os.O_RDWR)
    fcntl.flock(sweeper, fcntl.LOCK_EX)
    comer = threading.Thread(target=node_folder, args=("abc",))

    comer.start()
    folder.rename(folder.with_name(f"{folder.name}.gone"))
    os.close(sweeper)
    comer.join(10.0)

    assert not comer.is_alive()
    assert folder.stat().st_ino != first
    assert module._is_at(module._holds[folder], folder / "held")


# ---- one at a time ----------------------------------------------------------------------------------------------------


def test_one_reload_at_a_time_holds_the_node_s_lock(local_tmp: Path) -> None:
    checks: list[bool] = []

    with node_lock("abc", deadline_s=5, check=lambda: None):
        with pytest.raises(WaitTimeoutError, match="reload lock"):
            with node_lock("abc", deadline_s=0.05, check=lambda: checks.append(True)):
                pass
        with node_lock("another-run", deadline_s=0.05, check=lambda: None) as waited_s:
            assert waited_s < 0.05
    with node_lock("abc", deadline_s=0.05, check=lambda: None) as waited_s:
        assert waited_s < 0.05
    assert checks
