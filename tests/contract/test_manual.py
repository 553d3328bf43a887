"""The manual is what people copy: its commands work as printed, and what they are shown to print is what they print."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import LibraConfig
from launch import pipeline
from launch.compose import Tree, compose
from launch.doctor import profile
from launch.doctor.probes import judge_all
from launch.prepare import prepare
from tests.doctor_kit import healthy

PROJECT = Path(__file__).parents[2]
README = PROJECT / "README.md"
PAGES = ("README.md", "docs/cluster.md", "docs/configure.md", "docs/migrate.md", "docs/planner.md", "docs/tutorial.md")
DRY_RUN = "python -m launch +experiment=grpo_7b launch.run_dir=/shared/runs/first launch.dry_run=true"
ANSWERS = {"--help", "--cfg", "--info", "launch.dry_run=true"}
"""With one of these nothing is started, as the page prints it."""
PYTHON = "launch.python=/shared/libra/.venv/bin/python"
TIMEOUT_S = 60
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
"""config.json of a model that has no file in conf/model."""


def blocks(page: str) -> Iterator[str]:
    """Indented blocks of text, without the indentation."""
    text = (PROJECT / page).read_text(encoding="utf-8")
    for block in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, flags=re.MULTILINE):
        yield re.sub(r"^ {4}", "", block, flags=re.MULTILINE).strip("\n")


def commands(page: str, module: str) -> Iterator[str]:
    """Lines `python -m MODULE ...` of a page, continued lines joined, without the remark at their end."""
    for block in blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(f"python -m {module} "):
                yield re.sub(r"\s{2,}# .*| # .*$", "", line).strip()


LAUNCHES = list(dict.fromkeys(command for page in PAGES for command in commands(page, "launch")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages take for granted: files of one's own, an earlier run, a file of the published system."""
    folder = tmp_path_factory.mktemp("manual")
    alpine = (PROJECT / "docs/cluster.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    (experiment,) = (block for block in blocks("docs/configure.md") if block.startswith("# @package _global_"))
    for name, text in {
        "cluster/alpine": alpine,
        "cluster/site": "# @package _global_\nlaunch: {mode: slurm}\nslurm: {partition: gpu}\n",
        "experiment/arithmetic": experiment,
    }.items():
        path = folder / "mine" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    site, evidence = folder / "libra_site/cluster/site.yaml", healthy()
    profile.write(site, profile.text_of(evidence, judge_all(evidence), LibraConfig(), datetime.date(2026, 3, 1)))
    shutil.copytree(PROJECT / "tests/golden/import_reference", folder / "configs")
    (folder / "configs/r2e_gym.yaml").write_text(
        "base_config: six_nodes.yaml\nmax_seq_length: 8192\nmax_new_tokens: 4096\n"
    )
    (folder / "shared/models/my-llama").mkdir(parents=True)
    (folder / "shared/models/my-llama/config.json").write_text(json.dumps(LLAMA))
    (folder / "runs/first").mkdir(parents=True)
    (folder / "runs/first/config.yaml").write_text(typed(folder, "python -m launch +experiment=demo --cfg job"))
    typed(folder, "python -m conf.import_reference configs/r2e_gym.yaml --out mine")
    return folder


def typed(folder: Path, command: str) -> str:
    """What `command` prints when it is typed in `folder`, with /shared below it. Fails where it fails."""
    _, *words = shlex.split(command.replace("/shared/", f"{folder}/shared/"))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_the_pages_have_commands() -> None:
    assert len(LAUNCHES) > 15
    assert DRY_RUN in LAUNCHES


@pytest.mark.parametrize("command", [command for command in LAUNCHES if " -sc " not in command])
def test_a_command_of_the_manual_is_one_that_works(command: str, place: Path) -> None:
    """A start becomes a dry run."""
    answers = ANSWERS.intersection(command.split()) or "launch.explain=" in command

    assert typed(place, command if answers else f"{command} launch.dry_run=true")


def test_forms_of_values_in_the_manual_can_be_typed() -> None:
    table = (PROJECT / "docs/configure.md").read_text(encoding="utf-8").split("| you want | you type |")[1]
    cells = [row.split("|")[2] for row in table.split("\n\n")[0].splitlines() if row.count("|") == 3]
    forms = [form for cell in cells for form in re.findall(r"`([^`]+)`", cell) if "=" in form or form.startswith("~")]

    assert len(forms) > 6
    for form in forms:
        compose(["+experiment=demo", *shlex.split(form)])


def test_the_experiment_in_the_manual_can_be_planned_with_any_site(place: Path) -> None:
    words = ["+experiment=arithmetic", "cluster=site", "launch.mode=slurm", f"launch.run_dir={place}/run"]

    plan = prepare(words, Tree(extra=str(place / "mine"))).plan

    assert plan.memory_bytes["trainer"]["total"] < 0.9 * plan.memory_bytes["trainer"]["budget"]


def test_the_readme_shows_the_stored_dry_run() -> None:
    words = shlex.split(DRY_RUN)[3:]
    wanted = pipeline.dry_run_text(prepare([*words, PYTHON])).strip("\n")
    text = README.read_text(encoding="utf-8")
    (shown,) = (block for block in blocks("README.md") if block.startswith("run directory"))
    if os.environ.get("LIBRA_UPDATE_GOLDEN"):
        text = text.replace(indented(shown), indented(wanted))
        README.write_text(text, encoding="utf-8")
        shown = wanted

    assert shown == wanted, "`make golden` renews it"


def indented(block: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in block.splitlines())
