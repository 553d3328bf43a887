"""Files of users that are no configuration: said with the name of the file, before anything grows without end."""

from __future__ import annotations

from pathlib import Path

import pytest

import conf
from launch.compose import Tree, compose
from launch.config_files import MAX_FILE_BYTES, MAX_VALUES, check_text
from launch.errors import ConfigError

PACKAGE = "# @package _global_\n"
BOMB = "x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 10)
)

UNUSABLE = {
    "a list": (b"- seed\n", "it holds a list, not a mapping of options"),
    "a number": (b"5\n", "int"),
    "a tag of Python": (b"seed: !!python/object/apply:os.getcwd []\n", "python/object/apply"),
    "a tag that does not fit": (b"seed: !!int x\n", "invalid literal"),
    "a set": (b"task:\n  params: !!set {a}\n", "not a supported primitive type"),
    "a key that is no text": (b"null: 1\n", "Incompatible key type"),
    "a bomb of lists": (BOMB.encode(), f"more than {MAX_VALUES} values"),
    "a bomb of mappings": (BOMB.replace("[", "{a: [").replace("]", "]}").encode(), f"more than {MAX_VALUES} values"),
    "a list that holds itself": (b"warmup:\n  phrases: &all [*all]\n", "the anchor in line 3 holds itself"),
    "a mapping that merges itself": (b"task: &task\n  params:\n    <<: *task\n", "the anchor in line 2 holds itself"),
    "nesting without end": (b"task: {params: " + b"{a: " * 2000 + b"1" + b"}" * 2000 + b"}\n", "nested too deeply"),
    "a whole number of many digits": (b"seed: " + b"9" * 5000 + b"\n", "4300"),
    "a broken interpolation": (b"model_path: 'a${b'\n", "${b"),
    "more than a configuration": (b"# comment\n" * (MAX_FILE_BYTES // 10 + 1), f"more than {MAX_FILE_BYTES}"),
    "other bytes than UTF-8": (b"model_path: \xff\n", "utf-8"),
    "a defaults list that is none": (b"defaults: model\n", "defaults must be a list"),
    "an entry of the defaults list that is none": (b"defaults: [1]\n", "Unsupported type in defaults"),
}


def refused(folder: Path, content: bytes, *words: str) -> tuple[str, ...]:
    file = folder / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=mine", *words], Tree(extra=str(folder)))
    return caught.value.problems


@pytest.mark.parametrize(("content", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    problems = refused(tmp_path, PACKAGE.encode() + content)

    assert any("mine.yaml" in problem and reason in problem for problem in problems)


@pytest.mark.parametrize(("content", "reason"), UNUSABLE.values(), ids=UNUSABLE)
def test_so_is_a_root_file(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.yaml").write_bytes(PACKAGE.encode() + content)

    with pytest.raises(ConfigError) as caught:
        compose([], Tree(root=str(tmp_path)))

    assert any("config.yaml" in problem and reason in problem for problem in caught.value.problems)


def test_a_byte_order_mark_is_named_as_what_hides_the_first_line(tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, b"\xef\xbb\xbf" + PACKAGE.encode() + b"seed: 1\n")

    assert "mine.yaml: it begins with a byte-order mark" in problem


def test_anchors_that_stay_small_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("a: &a [1, 2]\nb: [*a, *a]\nc:\n  <<: &d {e: 1}\n  f: *d\n")

    check_text(str(file))


@pytest.mark.parametrize(
    "names", [("mine",), ("mine", "other")], ids=["a file that includes itself", "two that include one another"]
)
def test_defaults_lists_in_a_circle_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    (tmp_path / "experiment").mkdir()
    for name, following in zip(names, (*names[1:], names[0]), strict=True):
        (tmp_path / "experiment" / f"{name}.yaml").write_text(f"{PACKAGE}defaults: [/experiment/{following}]\n")

    with pytest.raises(ConfigError, match=r"experiment=mine: the defaults lists include one another without end"):
        compose(["+experiment=mine"], Tree(extra=str(tmp_path)))


def test_what_no_file_is_to_blame_for_is_said_with_the_words_that_chose(tmp_path: Path) -> None:
    problems = refused(tmp_path, PACKAGE.encode() + b"hydra: [1]\n", "model=demo")

    assert any(problem.startswith("+experiment=mine, model=demo: ") for problem in problems)


def test_a_group_from_the_top_of_the_tree_needs_a_slash(tmp_path: Path) -> None:
    problems = refused(tmp_path, PACKAGE.encode() + b"defaults:\n  - model: demo\n")

    assert any("there is no experiment/model 'demo'; available: none" in problem for problem in problems)
    assert any("/model: demo" in problem for problem in problems)


@pytest.mark.parametrize("entry", ["optional /model: demo", "overide /model: demo"])
def test_a_group_that_is_chosen_twice_is_named_however_hydra_says_it(tmp_path: Path, entry: str) -> None:
    problems = refused(tmp_path, f"{PACKAGE}defaults:\n  - {entry}\n".encode())

    assert any("the group 'model' is chosen in two places" in problem for problem in problems)


# ---- folders ------------------------------------------------------------------------------------------------------------


def unlistable(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """As for a user who may not list them; tests may run as root, who may."""
    listed = Path.iterdir

    def iterdir(path: Path) -> object:
        if path in folders:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)


def test_a_folder_of_choices_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiment").mkdir()
    unlistable(monkeypatch, tmp_path / "experiment")

    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=mine"], Tree(extra=str(tmp_path)))

    assert f"{tmp_path / 'experiment'}: Permission denied" in caught.value.problems


def test_other_folders_that_cannot_be_listed_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lost+found", "experiment"):
        (tmp_path / name).mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{PACKAGE}seed: 3\n")
    unlistable(monkeypatch, tmp_path / "lost+found")

    assert compose(["+experiment=mine"], Tree(extra=str(tmp_path))).seed == 3


def test_what_is_no_file_is_no_choice(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "gone.yaml").symlink_to("nowhere")
    (tmp_path / "experiment" / "_self_.yaml").write_text(PACKAGE)

    for name in ("gone", "_self_"):
        with pytest.raises(ConfigError, match=f"there is no experiment '{name}'") as caught:
            compose([f"+experiment={name}"], Tree(extra=str(tmp_path)))
        assert f"{name}," not in str(caught.value)


def test_the_tree_of_the_house_may_be_named_as_a_folder_of_the_user() -> None:
    assert compose(["+experiment=demo"], Tree(extra=str(Path(conf.__file__).parent))).warmup.steps > 0
