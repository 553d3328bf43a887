"""Slurm is installed only where that is ours to do; elsewhere the message has the command for an administrator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.devcluster import programs
from launch.devcluster.errors import DevClusterError, SlurmMissingError

LOG = "commands.log"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Slurm: nothing on PATH but what a test puts into the returned folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", ())
    monkeypatch.setattr(programs, "POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def put_program(folder: Path, name: str, script: str = "exit 0") -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def put_apt_get(folder: Path, installs: str) -> None:
    """An apt-get that notes its arguments and the policy in force, and on `install` runs the line `installs`."""
    log, policy = folder.parent / LOG, folder.parent / "policy-rc.d"
    note = f'echo "$DEBIAN_FRONTEND $* policy=$(/bin/ls {policy} 2>/dev/null)" >> {log}'
    put_program(folder, "apt-get", f'{note}\nif [[ "$*" == *install* ]]; then {installs}; fi')


def make_all(folder: Path) -> str:
    names = " ".join(programs.PROGRAMS)
    return f"for p in {names}; do printf '#!/bin/bash\\n' > {folder}/$p; /bin/chmod 755 {folder}/$p; done"


def test_nothing_is_done_where_everything_is_there(machine: Path) -> None:
    for name in programs.PROGRAMS:
        put_program(machine, name)
    put_apt_get(machine, "exit 1")

    programs.ensure()

    assert not (machine.parent / LOG).exists()


def test_root_installs_slurm_without_starting_services(machine: Path) -> None:
    put_apt_get(machine, make_all(machine))

    programs.ensure()

    update, install = (machine.parent / LOG).read_text().splitlines()
    assert update.startswith("noninteractive")
    assert " update " in update
    assert "slurm-wlm munge" in install
    assert install.endswith(f"policy={machine.parent / 'policy-rc.d'}")
    assert not (machine.parent / "policy-rc.d").exists()


def test_a_policy_of_the_administrator_stays(machine: Path) -> None:
    policy = machine.parent / "policy-rc.d"
    policy.write_text("theirs")
    put_apt_get(machine, make_all(machine))

    programs.ensure()

    assert policy.read_text() == "theirs"


def test_an_ordinary_user_gets_the_command_for_an_administrator(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_apt_get(machine, make_all(machine))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(SlurmMissingError, match=r"needs root.*apt-get install -y"):
        programs.ensure()

    assert not (machine.parent / LOG).exists()


def test_a_part_of_a_slurm_is_never_completed_from_another(machine: Path) -> None:
    put_program(machine, "sbatch")
    put_apt_get(machine, make_all(machine))

    with pytest.raises(SlurmMissingError, match="could replace it"):
        programs.ensure()

    assert not (machine.parent / LOG).exists()


def test_a_machine_without_apt_is_told_what_is_missing(machine: Path) -> None:
    with pytest.raises(SlurmMissingError, match="no apt-get"):
        programs.ensure()


def test_a_failing_apt_get_shows_its_last_lines_and_takes_its_policy_back(machine: Path) -> None:
    put_apt_get(machine, "echo E: Unable to fetch; exit 100")

    with pytest.raises(DevClusterError, match=r"(?s)exit code 100.*Unable to fetch"):
        programs.ensure()

    assert not (machine.parent / "policy-rc.d").exists()


def test_packages_that_bring_not_all_programs_are_an_error(machine: Path) -> None:
    put_apt_get(machine, "true")

    with pytest.raises(DevClusterError, match=r"slurmctld.* still missing"):
        programs.ensure()
