"""The pages name only what there is: links, files, options, commands with their flags, targets of make, variables."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from conf.typed import options, sections
from launch.help import help_text
from launch.tree import HOUSE
from stages.rundir import RunDir

PROJECT = Path(__file__).parents[2]
PAGES = sorted([PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").glob("*.md")])
FIRST_FOLDERS = {path.name for path in PROJECT.iterdir() if path.is_dir()} - {"runs"}
PUBLISHED = {"hardware.bw_inter_node", "hardware.bw_intra_node"}
"""Of the published system, on the page for people who come from it."""
FILES = {"trace.png"}
FOREIGN = {"weights", "traces", "planner", "launch", "conf"}
"""Sections of the options and packages of the house share these names."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def words(page: Path) -> list[str]:
    """What stands between backticks on one line, and every line of an indented block."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ {4}(.*)$", text, flags=re.MULTILINE)
    return [*re.findall(r"`([^`\n]+)`", re.sub(r"^ {4}.*$|^```.*$", "", text, flags=re.MULTILINE)), *blocks]


def links(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


@each_page
def test_a_link_leads_somewhere(page: Path) -> None:
    assert [str(target) for target in links(page) if not target.exists()] == []


def test_every_page_can_be_reached_from_the_readme_by_a_link() -> None:
    readme = links(PROJECT / "README.md")

    assert {page for page in PAGES if page.name != "README.md"} <= readme


@each_page
def test_a_file_that_is_named_is_there(page: Path) -> None:
    named = [
        name
        for word in words(page)
        for name in re.findall(r"[\w.{},/-]+\.(?:py|md|yaml|sbatch|in|lock|cfg|sh)\b", word)
    ]
    paths = [name for name in named if "/" in name and name.split("/")[0] in FIRST_FOLDERS and "{" not in name]
    tests = [name for name in named if re.fullmatch(r"test_\w+\.py", name)]

    missing = [name for name in paths if not (PROJECT / name).exists()]
    missing += [name for name in tests if not list((PROJECT / "tests").rglob(name))]

    assert missing == []


@each_page
def test_an_option_that_is_named_is_one(page: Path) -> None:
    """What may follow a section's name and a dot: an option, a deeper section, `*`, or a module of a package of that name."""
    found = [
        name for word in words(page) for name in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+)(?![\w/-])", word)
    ]
    named = [name for name in found if name.split(".")[0] in sections()]
    known = {*options(), *sections(), *PUBLISHED, *FILES}
    left = [name for name in named if name not in known and not is_module(name)]

    assert [
        name for name in left if not name.endswith((".py", ".md", ".yaml")) and not name.startswith("task.params.")
    ] == []


def is_module(name: str) -> bool:
    if name.split(".")[0] not in FOREIGN:
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@each_page
def test_a_command_that_is_named_has_the_flags_that_are_shown(page: Path) -> None:
    for word in words(page):
        for module, rest in re.findall(r"python -m ([a-z_.]+[a-z_])(.*)", word):
            if module.split(".")[0] not in FIRST_FOLDERS:
                continue
            spec = importlib.util.find_spec(module)
            assert spec is not None, word
            source = sources(module)
            flags = re.findall(r"(?<!\S)\[?(--[a-z][a-z-]+)", rest.split("#")[0])
            assert [flag for flag in flags if f'"{flag}"' not in source] == [], word


def sources(module: str) -> str:
    """Text of a command's own files; those of python -m launch are read by Hydra's parser."""
    base = PROJECT / module.replace(".", "/")
    files = [*base.rglob("*.py")] if base.is_dir() else [base.with_suffix(".py")]
    hydra = [Path(str(importlib.util.find_spec("hydra._internal.utils").origin))] if module == "launch" else []  # type: ignore[union-attr]
    return "".join(file.read_text(encoding="utf-8") for file in (*files, *hydra))


@each_page
def test_a_target_of_make_is_one(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = [name for word in words(page) for name in re.findall(r"(?:^|\s)make ([a-z-]+)", word)]

    assert set(named) <= targets


@each_page
def test_a_variable_of_the_house_is_read_by_some_code(page: Path) -> None:
    named = {name for word in words(page) for name in re.findall(r"\bLIBRA_[A-Z_]+|\bRL_TRAIN_PHASE\w+", word)}
    code = "".join(
        file.read_text(encoding="utf-8") for folder in ("launch", "stages") for file in (PROJECT / folder).rglob("*.py")
    )

    assert {name for name in named if name not in code} == set()


def test_every_path_of_a_run_directory_is_on_its_page() -> None:
    text = (PROJECT / "docs/run-directory.md").read_text(encoding="utf-8")
    run = RunDir(Path("/run"), "id", 0, "test")
    paths = [getattr(run, name) for name, value in vars(RunDir).items() if isinstance(value, property)]

    named = [path.name for path in paths if path.parent.name != "attempts"]

    assert len(named) > 25
    assert [name for name in named if name not in text] == []


def test_the_help_and_the_page_about_clusters_tell_of_the_doctor() -> None:
    assert "python -m launch.doctor" in help_text(HOUSE)
    assert "python -m launch.doctor" in (PROJECT / "docs/cluster.md").read_text(encoding="utf-8")


def test_what_a_user_s_commands_leave_in_the_checkout_is_not_committed() -> None:
    ignored = (PROJECT / ".gitignore").read_text(encoding="utf-8").split()

    assert {"/runs/", "/libra_site/", "/outputs/", ".venv/"} <= set(ignored)
