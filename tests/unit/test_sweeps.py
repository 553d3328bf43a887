"""A sweep: every point is checked before the first is submitted; one that fails does not stop the others; Ctrl-C does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.default_element import ResultDefault

from launch import pipeline
from launch.errors import ConfigError, InterruptedRunError, RunFailedError
from launch.hydra_internals import Loader, TreeFile
from launch.pipeline import Prepared
from launch.sweeps import expand, launch_sweep
from launch.tree import Tree
from stages.rundir import RunDir


@dataclass
class FakeSubmission:
    mode: str
    job_id: str

    @property
    def is_own(self) -> bool:
        return self.mode != "slurm"


class Started:
    """Stands in for submitting and following; `follow` is called with each local run, and may raise."""

    def __init__(self) -> None:
        self.runs: list[Prepared] = []
        self.warmed: list[str] = []
        self.follow: Callable[[int], None] = lambda number: None

    def start(self, run: RunDir, prepared: Prepared) -> FakeSubmission:
        assert run.config_yaml.is_file()
        self.runs.append(prepared)
        return FakeSubmission(prepared.config.launch.mode, f"{100 + len(self.runs)}")

    def stay(self, run: RunDir, submission: FakeSubmission, prepared: Prepared) -> None:
        self.follow(len(self.runs))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    fake = Started()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "start", fake.start)
    monkeypatch.setattr(pipeline, "stay", fake.stay)
    monkeypatch.setattr(pipeline, "check_machine", lambda prepared: None)
    monkeypatch.setattr(pipeline, "warm_up", lambda config: fake.warmed.append(config.model_path))
    return fake


# ---- the grammar --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["seed=1,2"], ["seed=1", "seed=2"]),
        (["seed=range(1,4)"], ["seed=1", "seed=2", "seed=3"]),
        (["seed=choice(5,7)"], ["seed=5", "seed=7"]),
        (["seed=1,2", "n_samples=4,8"], [f"seed={a} n_samples={b}" for a in (1, 2) for b in (4, 8)]),
        (["+experiment=demo,grpo_7b"], ["experiment=demo", "experiment=grpo_7b"]),
        (["hardware=glob(h*)"], ["hardware=h100_80g", "hardware=h200_141g"]),
        (["slurm.account='a,b',c"], ["slurm.account='a,b'", "slurm.account=c"]),
        (["slurm.extra=[a,b],[c]"], ["slurm.extra=[a,b]", "slurm.extra=[c]"]),
        (["seed=1"], [""]),
    ],
)
def test_values_are_combined_as_hydra_does(words: list[str], labels: list[str]) -> None:
    assert [point.label for point in expand(words)] == labels


def test_fixed_words_are_in_every_point() -> None:
    points = expand(["+experiment=demo", "seed=1,2", "~algorithm"])

    assert [point.words for point in points] == [("+experiment=demo", "~algorithm", f"seed={seed}") for seed in (1, 2)]


def test_a_sweep_wins_over_a_value_that_was_typed_before_it() -> None:
    assert [point.words[-1] for point in expand(["seed=3", "seed=1,2"])] == ["seed=1", "seed=2"]


def test_a_glob_sees_the_choices_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "local_lab.yaml").touch()

    points = expand(["cluster=glob(local*)"], Tree(extra=str(tmp_path)))

    assert [point.label for point in points] == ["cluster=local", "cluster=local_lab"]


def test_folders_are_short_sorted_and_need_no_quotes() -> None:
    points = expand(["learning_rate=range(1,12)", "+model_path='/a b/c=d',x"])

    names = [point.name for point in points]
    assert names[0] == "00_learning_rate-1_model_path-a-b-c-d"
    assert sorted(names) == names
    assert all(len(name) <= 84 and not set(name) & set("=,/' ") for name in names)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["seed=interval(0,1)"], "an interval has no end of values"),
        (["model=glob(nothing*)"], "model=glob(nothing*): there is no such value"),
        (["seed=1,2", "seed=3,4"], "seed is swept twice"),
        (["seed=1,2", "++seed=3,4"], "seed is swept twice"),
        (["seed=1,2", "+seed=3"], "+seed=3 comes after the sweep of seed"),
        (["seed=range(0,10000000)"], "more than 1000 values"),
        (["seed=shuffle(range(0,1000000000))"], "more than 1000 values"),
        (["learning_rate=range(0,1,1e-12)"], "more than 1000 values"),
        (["learning_rate=range(0,1,0.0)"], "its step is not 0"),
        (["learning_rate=range(0,inf)"], "finite"),
        (["seed=range(0,100)", "total_steps=range(1,101)"], "make 10000 points, the most allowed are 1000"),
        (
            [f"{name}=range(1,1001)" for name in ("seed", "total_steps", "n_samples", "batch_size")],
            "make 1000000000000",
        ),
        (["hydra.verbose=true,false"], "'hydra.verbose' has no effect here"),
    ],
)
def test_what_cannot_be_swept_is_refused(words: list[str], wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(words)

    assert wanted in str(caught.value)


# ---- all points are checked first ---------------------------------------------------------------------------------------


def test_problems_of_all_points_are_listed_before_anything_starts(started: Started) -> None:
    with pytest.raises(ConfigError) as caught:
        launch_sweep(["+experiment=demo", "seed=1,x", "batch_size=10,384", "foo=3"])

    problems = caught.value.problems
    assert problems[0].startswith("unknown option 'foo'")
    assert any(text.startswith("point 0 (seed=1 batch_size=10), point 2") and "multiple" in text for text in problems)
    assert any(text.startswith("point 2") and "seed=x: wanted a whole number" in text for text in problems)
    assert started.runs == []
    assert started.warmed == []


def test_a_machine_that_cannot_start_one_point_starts_none(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(prepared: Prepared) -> None:
        if prepared.config.seed == 2:
            raise ConfigError(["no room"])

    monkeypatch.setattr(pipeline, "check_machine", check)

    with pytest.raises(ConfigError, match=r"point 1 \(seed=2\): no room"):
        launch_sweep(["+experiment=demo", "seed=1,2"])

    assert started.runs == []


def test_two_points_cannot_share_a_run_directory(started: Started) -> None:
    with pytest.raises(ConfigError, match="is that of point 0"):
        launch_sweep(["+experiment=demo", "launch.run_dir=a,a"])


@pytest.mark.parametrize("folders", ["a,b/../a", "a,a/b", "a/b/c,a"])
def test_no_run_directory_is_inside_or_the_same_as_another_by_any_path(started: Started, folders: str) -> None:
    with pytest.raises(ConfigError, match=r"launch.run_dir=.* (is inside|is that of)"):
        launch_sweep(["+experiment=demo", f"launch.run_dir={folders}"])

    assert started.runs == []


def test_points_that_are_one_run_twice_are_noted(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    launch_sweep(["+experiment=demo", "seed=1,2,1", "launch.dry_run=true"])

    assert "warning: point 2 (seed=1) is the same run as point 0 (seed=1)" in capsys.readouterr().err


def test_files_that_all_points_share_are_read_once(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = Loader._read

    def noting(loader: Loader, default: ResultDefault) -> TreeFile:
        names.append(str(default.config_path))
        return read(loader, default)

    monkeypatch.setattr(Loader, "_read", noting)

    launch_sweep(["+experiment=grpo_7b", "seed=1,2,3", "launch.dry_run=true"])

    assert len(names) == len(set(names)) > 0


def test_explain_is_about_one_configuration(started: Started) -> None:
    with pytest.raises(ConfigError, match="leave out -m"):
        launch_sweep(["+experiment=demo", "seed=1,2", "launch.explain=seed"])


# ---- runs ---------------------------------------------------------------------------------------------------------------


def test_every_point_has_its_own_folder_below_the_run_directory(started: Started, tmp_path: Path) -> None:
    assert launch_sweep(["+experiment=demo", "seed=1,2", "launch.run_dir=sweep"]) == 0

    assert [prepared.run_dir for prepared in started.runs] == [tmp_path / "sweep/0_seed-1", tmp_path / "sweep/1_seed-2"]
    assert [prepared.config.seed for prepared in started.runs] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep"]


def test_without_a_run_directory_the_points_share_one_new_folder(started: Started, tmp_path: Path) -> None:
    launch_sweep(["+experiment=demo", "seed=1,2"])

    folders = {prepared.run_dir.parent for prepared in started.runs}
    assert len(folders) == 1
    assert folders.pop().name.startswith("demo-")


def test_a_swept_run_directory_is_taken_as_given(started: Started, tmp_path: Path) -> None:
    launch_sweep(["+experiment=demo", "launch.run_dir=a,b"])

    assert [prepared.run_dir for prepared in started.runs] == [tmp_path / "a", tmp_path / "b"]


def test_an_empty_run_directory_among_others_is_a_new_folder(started: Started, tmp_path: Path) -> None:
    launch_sweep(["+experiment=demo", "launch.run_dir='',mine"])

    first, second = (run.run_dir for run in started.runs)
    assert first.parent.parent == tmp_path / "runs"
    assert second == tmp_path / "mine"


def test_every_starter_policy_is_made_before_the_first_run(started: Started) -> None:
    started.follow = lambda number: started.warmed.append("run")

    launch_sweep(["+experiment=demo", "total_steps=1,2"])

    assert started.warmed[2:] == ["run", "run"]
    assert started.warmed[0] == started.warmed[1]


def test_a_failing_point_does_not_stop_the_next_and_the_worst_code_counts(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = {1: 3, 2: 137}

    def follow(number: int) -> None:
        if number in codes:
            raise RunFailedError("it broke", codes[number])

    started.follow = follow

    assert launch_sweep(["+experiment=demo", "seed=1,2,3"]) == 137

    said = capsys.readouterr().err
    assert len(started.runs) == 3
    assert "point 0 (seed=1) failed (exit code 3); going on with the next:\nit broke" in said


def test_ctrl_c_stops_the_sweep_and_names_what_was_not_started(started: Started) -> None:
    def follow(number: int) -> None:
        raise InterruptedRunError("stopped")

    started.follow = follow

    with pytest.raises(
        InterruptedRunError, match=r"interrupted in point 0 \(seed=1\); not started: point 1 \(seed=2\)"
    ):
        launch_sweep(["+experiment=demo", "seed=1,2"])

    assert len(started.runs) == 1


def test_on_slurm_nobody_stays_and_a_table_says_what_was_submitted(
    started: Started, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def follow(number: int) -> None:
        raise AssertionError("nobody follows a job of a sweep")

    started.follow = follow

    assert launch_sweep(["+experiment=demo", "cluster=devcluster", "seed=1,2", "launch.run_dir=sweep"]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["point", "0", "(seed=1)", str(tmp_path / "sweep/0_seed-1"), "101"] in lines
    assert ["point", "1", "(seed=2)", str(tmp_path / "sweep/1_seed-2"), "102"] in lines


def test_a_dry_run_prints_the_plan_of_every_point_and_writes_nothing(
    started: Started, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch_sweep(["+experiment=demo", "seed=1,2", "launch.dry_run=true"]) == 0

    text = capsys.readouterr().out
    assert text.count("# ---- job.sbatch ----") == 2
    assert "# ==== point 1 (seed=2) ====" in text
    assert list(tmp_path.iterdir()) == []


def test_a_warning_that_all_points_share_is_said_once(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+experiment=demo", "seed=1,2", "global_resource_planner.elastic_hybrid_max_workers=3"]

    launch_sweep(words)

    assert capsys.readouterr().err.count("elastic_hybrid_max_workers=3 is deprecated") == 1


def test_doubtful_choices_are_said_before_the_first_point_starts(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_sweep(["+experiment=demo", "total_steps=3,5", "algorithm.lr_warmup_steps=3"])

    said = capsys.readouterr().err
    assert said.count("total_steps=3 ends inside algorithm.lr_warmup_steps=3") == 1
    assert "total_steps=5" not in said
