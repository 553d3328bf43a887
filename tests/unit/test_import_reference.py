"""`python -m conf.import_reference`: from files of the published system to an experiment that composes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conf.import_reference.__main__ import main
from conf.import_reference.convert import convert
from conf.import_reference.groups import choose
from conf.import_reference.read import read
from conf.import_reference.report import report
from conf.import_reference.write import experiment_text
from launch.compose import Tree, compose

INPUTS = Path(__file__).parents[1] / "golden" / "import_reference"
PROJECT = Path(__file__).parents[2]
KNOWN = ("one_node.yaml", "six_nodes.yaml", "odd_values.json")


def written(text: str, folder: Path, name: str = "input.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", [*KNOWN, "misspelt.yaml"])
def test_experiment_and_report_are_the_stored_ones(name: str, golden: Callable[[str, str], None]) -> None:
    source = read(INPUTS / name)
    imported = choose(convert(source.settings))

    stem = Path(name).stem
    golden(f"import_reference/expected/{stem}.yaml", experiment_text(imported, stem))
    golden(f"import_reference/expected/{stem}.txt", report(source, imported, ()) + "\n")


@pytest.mark.parametrize("name", KNOWN)
def test_a_written_experiment_composes_from_its_folder(name: str, tmp_path: Path) -> None:
    code = main([str(INPUTS / name), "--out", str(tmp_path), "--name", "imported"])

    assert code == 0
    config = compose(["+experiment=imported"], Tree(extra=str(tmp_path)))
    assert config.slurm.job_name == "imported"


def test_the_options_of_the_input_arrive_in_the_configuration(tmp_path: Path) -> None:
    main([str(INPUTS / "six_nodes.yaml"), "--out", str(tmp_path)])

    config = compose(["+experiment=six_nodes"], Tree(extra=str(tmp_path)))

    assert (config.train_gpus, config.rollout_gpus, config.train_tp_size, config.n_samples) == (16, 32, 4, 16)
    assert config.max_model_len == 32768
    assert config.hardware.network_bytes_per_s == 25e9
    assert config.model.hidden_size == 5120
    assert config.trace.directory == "/shared/traces"
    assert config.global_resource_planner.min_train_gpus == 8


def test_without_out_the_yaml_is_all_that_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(INPUTS / "one_node.yaml")])

    shown = capsys.readouterr()
    assert code == 0
    assert shown.out.startswith("# @package _global_\n")
    assert "kept, same name" not in shown.out
    assert "kept, same name" in shown.err


def test_what_a_launch_would_still_refuse_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written("model_path: m\nbatch_size: 30\nn_samples: 16\nmax_new_tokens: 4096\n", tmp_path)

    code = main([str(file)])

    left = capsys.readouterr().err.partition("you still have to set")[2]
    assert code == 0
    assert "batch_size=30 is not a multiple of n_samples=16" in left
    assert "max_new_tokens=4096" in left


def test_an_input_that_says_everything_leaves_only_the_task_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (INPUTS / "one_node.yaml").read_text()
    (tmp_path / "parts").mkdir()
    for part in ("a800.yaml",):
        written((INPUTS / "parts" / part).read_text(), tmp_path / "parts", part)
    model = "model_arch: {d_model: 2048, n_layers: 36, n_heads: 16, n_kv_heads: 2, intermediate_size: 11008}\n"
    file = written(f"{text}{model}hardware_config: parts/a800.yaml\n", tmp_path)

    main([str(file)])

    left = capsys.readouterr().err.partition("you still have to set\n")[2]
    assert [line[:8] for line in left.splitlines()] == ["  - task"]


def test_unknown_keys_stop_the_import_and_all_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([str(INPUTS / "misspelt.yaml"), "--out", str(tmp_path)])

    shown = capsys.readouterr().err
    assert code == 1
    assert list(tmp_path.iterdir()) == []
    for hint in ("train_gpus?", "global_resource_planner.allowed_train_tp?", "global_resource_planner.enabled?"):
        assert f"did you mean {hint}" in shown
    assert "actor" in shown
    assert "did nothing there" in shown


def test_lenient_leaves_unknown_keys_out(tmp_path: Path) -> None:
    code = main([str(INPUTS / "misspelt.yaml"), "--out", str(tmp_path), "--lenient"])

    assert code == 0
    assert "trian_gpus" not in (tmp_path / "experiment" / "misspelt.yaml").read_text()


def test_a_key_that_is_a_secret_there_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(INPUTS / "six_nodes.yaml")])

    shown = capsys.readouterr()
    assert "nobody should read" not in shown.out + shown.err


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = written("mine\n", tmp_path, "theirs.yaml")
    command = [str(INPUTS / "one_node.yaml"), "--out", str(target)]

    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "mine\n"
    assert main([*command, "--force"]) == 0
    assert target.read_text().startswith("# @package _global_")
    assert [file.name for file in tmp_path.iterdir()] == ["theirs.yaml"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--name", "demo"], "'demo' is an experiment that comes with Libra"),
        (["--name", "../up"], "use letters, digits, _ and -"),
        (["--name", ""], "use letters, digits, _ and -"),
        (["--out", "there.yml"], "Hydra reads .yaml files only"),
        (["--out", "there.yaml", "--name", "here"], "disagree"),
        (["--out", "/proc/no"], "cannot be written"),
        (["--out", f"{'a' * 5000}.yaml"], "200 of them at most"),
        (["--out", "a" * 5000], "cannot be written"),
        (["--name", "a" * 201], "200 of them at most"),
        (["--name", "NULL"], "+experiment=NULL would choose nothing"),
    ],
)
def test_a_target_that_cannot_be_is_refused_in_a_sentence(
    options: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(INPUTS / "one_node.yaml"), *options])

    shown = capsys.readouterr().err
    assert code == 2
    assert wanted in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("words", [[""], ["one.yaml", "--out", ""]])
def test_an_empty_path_is_no_path(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert "an empty path" in capsys.readouterr().err


@pytest.mark.parametrize("base", ["loop.yaml", "a" * 300, "a/" * 3000])
def test_a_base_that_no_file_can_be_is_not_there(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    file = written(f"base_config: {base}\n", tmp_path)

    assert main([str(file)]) == 2
    assert main([str(tmp_path / base)]) == 2

    assert capsys.readouterr().err.count("there is no file") == 2


def test_the_name_is_made_of_the_files_name(tmp_path: Path) -> None:
    file = written("model_path: m\n", tmp_path, "R2E gym (6 nodes).yaml")

    main([str(file), "--out", str(tmp_path / "mine")])

    assert [found.name for found in (tmp_path / "mine" / "experiment").iterdir()] == ["R2E_gym_6_nodes_.yaml"]


def test_the_importer_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from conf.import_reference.__main__ import main; main([sys.argv[1]]);"
        " print('heavy:', *sorted({'torch', 'vllm', 'transformers', 'megatron'} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, str(INPUTS / "one_node.yaml")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=60)

    assert done.stderr.splitlines()[-1].strip() == "heavy:"
