"""Files of the published system, its three inclusion keys, and what is wrong with files in one sentence each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conf.import_reference.__main__ import main
from conf.import_reference.errors import ImportReferenceError
from conf.import_reference.read import MAX_FILE_BYTES, as_number, read


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_file_wins_over_its_includes_and_those_over_the_base(tmp_path: Path) -> None:
    written(tmp_path, "base.yaml", "seed: 1\nbatch_size: 8\nhardware: {mem_bw: 1, mem_capacity: 1, flops_peak: 1}\n")
    written(tmp_path, "gpu.yaml", "mem_capacity: 2\nflops_peak: 2\n")
    file = written(
        tmp_path, "top.yaml", "base_config: base.yaml\nhardware_config: gpu.yaml\nseed: 3\nhardware: {flops_peak: 3}\n"
    )

    settings = dict(read(file).settings)

    assert settings == {
        "seed": 3,
        "batch_size": 8,
        "hardware.mem_bw": 1,
        "hardware.mem_capacity": 2,
        "hardware.flops_peak": 3,
    }


def test_includes_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    written(tmp_path, "a/b/model.json", '{"d_model": 64}')
    written(tmp_path, "a/b/base.yml", "model_arch_config: model.json\nseed: 1\n")
    written(tmp_path, "a/base.yaml", "base_config: b/base.yml\n")
    file = written(tmp_path, "runs/top.yaml", "base_config: ../a/base.yaml\n")

    source = read(file)

    assert dict(source.settings) == {"model_arch.d_model": 64, "seed": 1}
    assert source.origins["model_arch.d_model"].name == "model.json"
    assert source.origins["seed"].name == "base.yml"


def test_lists_replace_and_mappings_merge(tmp_path: Path) -> None:
    written(
        tmp_path,
        "base.yaml",
        "global_resource_planner: {allowed_train_tp: [1, 2, 4], allowed_train_pp: [1], verbose: true}\n",
    )
    file = written(tmp_path, "top.yaml", "base_config: base.yaml\nglobal_resource_planner: {allowed_train_tp: [8]}\n")

    settings = read(file).settings

    assert settings["global_resource_planner.allowed_train_tp"] == [8]
    assert settings["global_resource_planner.allowed_train_pp"] == [1]


def test_numbers_as_text_count_in_sections_and_stay_text_at_top_level(tmp_path: Path) -> None:
    file = written(tmp_path, "top.yaml", "learning_rate: 1e-6\nhardware: {flops_peak: 312e12, gpus_per_node: '8'}\n")

    settings = dict(read(file).settings)

    assert settings == {"learning_rate": "1e-6", "hardware.flops_peak": 312e12, "hardware.gpus_per_node": 8}
    assert isinstance(settings["hardware.gpus_per_node"], int)


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("7.0", 7.0), ("1e3", 1000.0), ("007", 7), ("x7", "x7"), ("", ""), (None, None)]
)
def test_text_becomes_a_whole_number_only_without_point_and_exponent(text: object, number: object) -> None:
    found = as_number(text)

    assert found == number
    assert type(found) is type(number)


def test_the_options_of_rollout_instances_become_columns(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "top.yaml",
        "heterogeneous_rollout: {instances: [{tp: 1, port: 1}, {tp: '4'}], gpu: {total_gpus: 8}}\n",
    )

    assert dict(read(file).settings) == {
        "heterogeneous_rollout.instances[].tp": [1, 4],
        "heterogeneous_rollout.instances[].port": [1],
        "heterogeneous_rollout.gpu.total_gpus": 8,
    }


def test_a_key_with_a_dot_is_not_an_option_of_a_section(tmp_path: Path) -> None:
    file = written(tmp_path, "top.yaml", "hardware.mem_bw: 5\n")

    assert dict(read(file).settings) == {"'hardware.mem_bw'": 5}


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert dict(read(written(tmp_path, "top.yaml", "# nothing\n")).settings) == {}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)

FAULTS = {
    "broken.yaml": ("a: 1\nb: [1, 2\nc: 3\n", "line 3"),
    "tab.yaml": ("a: 1\n\tb: 2\n", "line 2"),
    "two.yaml": ("a: 1\n---\nb: 2\n", "line 2"),
    "list.yaml": ("- 1\n- 2\n", "holds a list, not a mapping"),
    "text.yaml": ("just words\n", "holds a str, not a mapping"),
    "twice.yaml": ("seed: 1\ntotal_steps: 3\nseed: 2\n", "line 3: 'seed' is given twice"),
    "tag.yaml": ("a: !!python/object/apply:os.getcwd []\n", "line 1: could not determine a constructor"),
    "bomb.yaml": (BOMB, "more than 50000 values"),
    "loop.yaml": ("a: &a [*a]\n", "nested too deeply"),
    "deep.yaml": ("a: " + "[" * 2000, "nested too deeply"),
    "control.yaml": ("a: 1\nb: \x07\n", "line 2: a character that YAML does not allow"),
    "date.yaml": ("a: 2024-99-99\n", "month must be in 1..12"),
    "broken.json": ('{"a": 1,\n "b": }', "line 2"),
    "list.json": ("[1]", "holds a list"),
    "twice.json": ('{"seed": 1, "seed": 2}', "'seed' is given twice"),
    "digits.json": ('{"seed": ' + "9" * 5000 + "}", "digits"),
    "wrong.toml": ("a = 1\n", "'.toml' is not one of .yaml, .yml, .json"),
    "large.yaml": ("#" * (MAX_FILE_BYTES + 1), f"larger than {MAX_FILE_BYTES} bytes"),
    "section.yaml": ("hardware: h100\n", "hardware='h100' is not a section"),
    "path.yaml": ("base_config: [a.yaml]\n", "is not the path of a file"),
    "absent.yaml": ("hardware_config: nowhere/gpu.yaml\n", "nowhere/gpu.yaml: there is no file"),
    "self.yaml": ("base_config: self.yaml\n", "goes round in a circle: self.yaml -> self.yaml"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, wanted = FAULTS[name]
    file = written(tmp_path, name, text)

    code = main([str(file)])

    shown = capsys.readouterr()
    assert code == 2
    assert wanted in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_a_circle_over_several_files_and_a_link_is_found(tmp_path: Path) -> None:
    written(tmp_path, "a.yaml", "base_config: link.yaml\n")
    written(tmp_path, "b.yaml", "base_config: a.yaml\n")
    (tmp_path / "link.yaml").symlink_to("b.yaml")

    with pytest.raises(ImportReferenceError, match=r"circle: a\.yaml -> b\.yaml -> a\.yaml"):
        read(tmp_path / "a.yaml")


def test_one_base_of_two_files_is_no_circle(tmp_path: Path) -> None:
    written(tmp_path, "gpu.yaml", "mem_bw: 1\n")
    written(tmp_path, "base.yaml", "hardware_config: gpu.yaml\n")
    file = written(tmp_path, "top.yaml", "base_config: base.yaml\nhardware_config: gpu.yaml\n")

    assert dict(read(file).settings) == {"hardware.mem_bw": 1}


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo], ids=["folder", "pipe"])
def test_only_files_are_read(make: object, tmp_path: Path) -> None:
    path = tmp_path / "thing.yaml"
    make(path)  # type: ignore[operator]

    with pytest.raises(ImportReferenceError, match="there is no file"):
        read(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9\n")

    with pytest.raises(ImportReferenceError, match="not UTF-8 text"):
        read(tmp_path / "latin.yaml")
