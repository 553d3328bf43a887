"""The site profile: it holds what was measured and given, and composes."""

from __future__ import annotations

import datetime
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.options import Option, walk
from conf.schema import LibraConfig
from conf.typed import options
from launch.compose import compose
from launch.doctor import profile
from launch.doctor.evidence import Evidence, GpuAsking, HetjobStory, JobStory
from launch.doctor.probes import judge_all
from launch.errors import ConfigError
from launch.tree import tree_at
from tests.doctor_kit import card, changed, healthy

TODAY = datetime.date(2026, 3, 1)


def text_of(evidence: Evidence, *overrides: str) -> str:
    return profile.text_of(evidence, judge_all(evidence), compose(overrides), TODAY)


def composed(text: str, folder: Path, *overrides: str) -> LibraConfig:
    """What a run gets that uses the profile."""
    file = folder / "libra_site" / "cluster" / "site.yaml"
    profile.check_place(file)
    profile.write(file, text)
    return compose(["cluster=site", *overrides], tree_at(None, None, str(file.parent.parent)))


def test_a_run_gets_what_was_measured(tmp_path: Path) -> None:
    config = composed(text_of(healthy()), tmp_path)

    assert config.launch.mode == "slurm"
    assert (config.hardware.gpus_per_node, config.hardware.cpus_per_node) == (2, 4)
    assert config.hardware.gpu_memory_bytes == pytest.approx(143771 * 2**20, rel=1e-3)
    assert config.hardware.gpu_memory_bytes <= 143771 * 2**20
    assert config.slurm.layout == LibraConfig().slurm.layout


def test_a_link_that_is_not_the_configured_one_s_is_corrected(tmp_path: Path) -> None:
    evidence = healthy(configured={"hardware.link_bytes_per_s": 450e9, "hardware.network_bytes_per_s": 450e9})

    config = composed(text_of(evidence), tmp_path)

    assert config.hardware.link_bytes_per_s == 450e9, "80 % of it were reached: it can be right"
    assert config.hardware.network_bytes_per_s == 4.2e10


def test_it_wins_over_the_hardware_group_of_an_experiment(tmp_path: Path) -> None:
    config = composed(text_of(healthy()), tmp_path, "+experiment=grpo_7b", "hardware=a100_80g", "model_path=/m")

    assert config.hardware.gpus_per_node == 2
    assert config.hardware.gpu_flops == 312e12, "what was not measured stays"


def test_what_was_given_is_kept(tmp_path: Path) -> None:
    given = (
        "slurm.partition=gpu",
        "slurm.account=my lab",
        "slurm.qos=normal",
        "slurm.extra=['--constraint=\"h100&ib\"']",
        "launch.setup=['module load cuda','export X=\\${HOME}/x']",
    )
    config = composed(text_of(healthy(), *given), tmp_path)

    assert (config.slurm.partition, config.slurm.account, config.slurm.qos) == ("gpu", "my lab", "normal")
    assert config.slurm.extra == compose(given).slurm.extra
    assert config.launch.setup == compose(given).launch.setup
    assert "${HOME}" in config.launch.setup[1]


def test_what_was_given_for_one_side_and_for_containers_is_kept(tmp_path: Path) -> None:
    given = (
        "slurm.trainer.partition=h100",
        "slurm.rollout.srun_extra=['--container-image=x']",
        "launch.prefix=[apptainer,exec]",
    )

    config = composed(text_of(healthy(), *given), tmp_path)

    assert config.slurm.trainer.partition == "h100"
    assert config.slurm.rollout.srun_extra == ["--container-image=x"]
    assert config.launch.prefix == ["apptainer", "exec"]


def different(option: Option, text: str) -> Any:
    """A value that the option does not have by default and may have; `text` wherever text may be."""
    if option.choices:
        other = [choice for choice in option.choices if choice != option.default]
        return other[:1] if option.is_list else other[0]
    element: Any = {str: text, bool: True, int: 3, float: 123456789012.25}[option.element_type]
    if option.is_list:
        return [element, element]
    return not option.default if element is True else element


TEXTS = (
    "007",
    "null",
    r"a\${HOME}\\${oc.env:HOME}\\",
    " # a: 'b' \"c\" [d, {e}] ",
    "ü\ttab\x7f",
    "!!python/none &a *b",
)


@pytest.mark.parametrize("text", TEXTS)
def test_every_option_that_a_profile_keeps_comes_back_as_it_was_given(tmp_path: Path, text: str) -> None:
    given = LibraConfig()
    kept = options_of_a_profile()
    for option in kept:
        put(given, option.name, different(option, text))

    config = composed(profile.text_of(healthy(), judge_all(healthy()), given, TODAY), tmp_path)

    values, wanted = ({name: value for name, _, value in walk(found)} for found in (config, given))
    assert len(kept) > 35
    assert {option.name: values[option.name] for option in kept} == {
        option.name: wanted[option.name] for option in kept
    }


def options_of_a_profile() -> list[Option]:
    return [option for name, option in options().items() if name.startswith("slurm.") or name in profile.SURROUNDINGS]


def put(config: LibraConfig, name: str, value: Any) -> None:
    *groups, leaf = name.split(".")
    setattr(functools.reduce(getattr, groups, config), leaf, value)


def test_the_way_to_ask_for_gpus_that_sbatch_takes_is_written(tmp_path: Path) -> None:
    evidence = healthy(asking=GpuAsking(2, "gres", "gpus-per-node", {"gpus-per-node": "Invalid TRES"}))

    assert composed(text_of(evidence), tmp_path).slurm.gpu_flag == "gres"
    assert "slurm" not in values_of(replace(evidence, job=JobStory(state="REFUSED", trouble="no")))


def test_where_hetjobs_are_refused_the_layout_is_single(tmp_path: Path) -> None:
    config = composed(text_of(healthy(hetjob=HetjobStory(False, "no"))), tmp_path)

    assert config.slurm.layout == "single"


def values_of(evidence: Evidence) -> dict[str, Any]:
    found = yaml.safe_load(text_of(evidence))
    assert isinstance(found, dict)
    return found


def test_nothing_is_written_that_was_not_measured() -> None:
    evidence = healthy(nodes={}, programs={})

    slurms_own = {"gpus_per_node": 2, "cpus_per_node": 4, "threads_per_core": 1}
    assert values_of(evidence)["hardware"] == slurms_own


def test_gloo_says_nothing_about_the_links_of_gpus() -> None:
    evidence = healthy(
        programs={"collective": {"backend": "gloo", "ranks": 2, "bytes": 8, "bus_bytes_per_s": {"between nodes": 1e9}}}
    )

    assert "network_bytes_per_s" not in values_of(evidence)["hardware"]


def test_a_local_machine_without_gpus_keeps_only_its_processors(tmp_path: Path) -> None:
    evidence = Evidence(mode="local", quick=True, absent="no sbatch", nodes=healthy().nodes)
    for node in evidence.nodes:
        evidence = changed(evidence, node, "gpus", cards=[])

    assert values_of(evidence) == {"launch": {"mode": "local"}, "hardware": {"cpus_per_node": 4}}
    assert composed(text_of(evidence), tmp_path).launch.mode == "local"


@pytest.mark.parametrize("visible, count", [(None, 3), ("2", 1), ("", 0)])
def test_a_local_machine_has_the_gpus_that_are_visible(visible: str | None, count: int) -> None:
    evidence = Evidence(mode="local", quick=True, absent="no sbatch", nodes={"here": healthy().nodes["node0"]})
    evidence = changed(evidence, "here", "gpus", cards=[card(0), card(1), card(2)], visible=visible)

    assert values_of(evidence)["hardware"].get("gpus_per_node", 0) == count


def slow_with_many_threads(quick: bool) -> Evidence:
    evidence = changed(healthy(quick=quick), "node0", "bandwidth", write={"1": 1e9, "4": 3e9, "16": 1e9})
    return changed(evidence, "node1", "bandwidth", read={"1": 1e9, "4": 3e9, "16": 1.5e9})


def test_fewer_threads_are_chosen_where_they_are_clearly_faster() -> None:
    assert values_of(slow_with_many_threads(quick=False))["weights"] == {"io_threads": 4}


def test_the_quick_modes_small_file_chooses_no_threads() -> None:
    assert "weights" not in values_of(slow_with_many_threads(quick=True))
    assert "weights" not in values_of(healthy())


def test_findings_are_comments_with_the_date() -> None:
    text = text_of(healthy(hetjob=HetjobStory(False, "hetjobs\nare off")))

    assert text.startswith("# @package _global_\n")
    assert "2026-03-01, Slurm 22.05.8, cluster libra-dev" in text
    assert "# heterogeneous jobs [note]: refused: hetjobs are off" in text
    assert text.endswith("\n")


@pytest.mark.parametrize("place", ["site.yaml", "cluster/site.yml", "site/clusters/site.yaml"])
def test_a_file_that_hydra_would_not_find_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="folder named cluster"):
        profile.check_place(tmp_path / place)


def test_a_file_that_the_doctor_did_not_write_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "cluster" / "site.yaml"
    file.parent.mkdir()
    file.write_text("# @package _global_\nlaunch:\n  mode: slurm\n")

    with pytest.raises(ConfigError, match="was not written by the doctor"):
        profile.check_place(file)

    profile.write(file, text_of(healthy()))
    profile.check_place(file)


def test_how_to_use_it_names_folder_and_file() -> None:
    assert profile.usage(Path("/home/me/libra_site/cluster/big.yaml")).startswith(
        "python -m launch --config-dir /home/me/libra_site cluster=big "
    )


def test_a_heterogeneous_partition_promises_only_its_smallest_node() -> None:
    evidence = healthy()
    assert evidence.slurm is not None
    nodes = (replace(evidence.slurm.nodes[0], cpus=2, gres="gpu:1"), *evidence.slurm.nodes[1:])

    assert values_of(replace(evidence, slurm=replace(evidence.slurm, nodes=nodes)))["hardware"]["gpus_per_node"] == 1
