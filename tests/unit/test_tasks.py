"""Tasks: the split holds by construction, streams repeat exactly, mistakes are named."""

from __future__ import annotations

import pytest

from conf.sections import TaskConfig
from stages.controller.tasks import make_task
from stages.controller.tasks.base import Problem, Task, TaskError
from stages.controller.tasks.reasoning_gym import ReasoningGymTask

CHAIN_SUM = {"dataset": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def chain_sum(seed: int = 0, test_size: int = 10, **params: object) -> Task:
    return make_task(TaskConfig(params={**CHAIN_SUM, **params}, test_size=test_size), seed=seed)


class CountingTask(Task):
    """A user's own task."""

    def __init__(self, *, seed: int, test_size: int, limit: int) -> None:
        super().__init__(seed=seed, test_size=test_size)
        self.limit = limit

    def train_problem(self, index: int) -> Problem:
        return Problem(str(index), str(index + 1))

    def test_problems(self) -> list[Problem]:
        return [Problem(str(-i), str(1 - i)) for i in range(1, self.test_size + 1)]

    def score(self, completion: str, problem: Problem) -> float:
        return float(completion == problem.answer)


def test_no_test_problem_is_ever_trained_on() -> None:
    task = chain_sum()  # 162 different questions: three thousand draws meet every one of them

    trained = {task.train_problem(index).prompt for index in range(3000)}

    assert not trained & {problem.prompt for problem in task.test_problems()}
    assert len(trained) > 100


def test_test_problems_are_different_and_as_many_as_asked_for() -> None:
    problems = make_task(TaskConfig(params={"dataset": "spell_backward"}, test_size=200), seed=0).test_problems()

    assert len({problem.prompt for problem in problems}) == 200


def test_test_problems_do_not_depend_on_the_seed() -> None:
    first, second = chain_sum(seed=1).test_problems(), chain_sum(seed=2).test_problems()

    assert [problem.prompt for problem in first] == [problem.prompt for problem in second]


def test_training_problems_follow_from_seed_and_index_alone() -> None:
    forward = [chain_sum(seed=3).train_problem(index).prompt for index in range(50)]
    task = chain_sum(seed=3)
    backward = [task.train_problem(index).prompt for index in reversed(range(50))]

    assert forward == backward[::-1]
    assert forward != [chain_sum(seed=4).train_problem(index).prompt for index in range(50)]


def test_the_verifier_of_the_library_is_the_reward() -> None:
    task = make_task(TaskConfig(params={"dataset": "spell_backward"}), seed=0)
    problem = task.train_problem(0)
    half_right = problem.answer[0] + "#" * (len(problem.answer) - 1)

    assert task.score(problem.answer, problem) == 1.0
    assert task.score(half_right, problem) == pytest.approx(1 / len(problem.answer), abs=1e-6)
    assert task.score("", problem) == 0.0


def test_partial_credit_can_be_ruled_out() -> None:
    params = {"dataset": "spell_backward", "whole_only": True}
    task = make_task(TaskConfig(params=params), seed=0)
    problem = task.train_problem(0)

    wrong_end = problem.answer[:-1] + ("a" if problem.answer[-1] != "a" else "b")
    assert (task.score(problem.answer, problem), task.score(wrong_end, problem)) == (1.0, 0.0)


def test_prompt_and_answer_can_be_put_in_lower_case_with_a_template() -> None:
    task = make_task(
        TaskConfig(params={"dataset": "spell_backward", "lower": True, "template": "Q: {question} A:"}), seed=0
    )

    problem = task.train_problem(0)

    assert problem.prompt.startswith("q: spell this word backward")
    assert problem.prompt.endswith(" a:")
    assert problem.answer.islower()


def test_only_the_tagged_answer_counts_when_a_tag_is_set() -> None:
    task = chain_sum(answer_tag="answer")
    problem = task.train_problem(0)
    value = problem.data["answer"]

    assert problem.answer == f"<answer>{value}</answer>"
    assert task.score(f"I think <answer> {value} </answer>", problem) == 1.0
    assert task.score(value, problem) == 0.0


def test_a_generator_that_indexes_by_size_can_be_drawn_from_without_end() -> None:
    task = make_task(TaskConfig(params={"dataset": "list_functions"}), seed=0)

    assert task.train_problem(5_000_000).prompt


def test_a_problem_space_too_small_for_the_test_set_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"gave only \d+ different test problems .* raise task.params.test_share"):
        chain_sum(test_size=200).test_problems()


def test_a_class_outside_the_package_is_a_task() -> None:
    task = make_task(TaskConfig(name=f"{__name__}:CountingTask", params={"limit": 3}), seed=0)

    assert task.score("8", task.train_problem(7)) == 1.0


@pytest.mark.parametrize(
    "config, message",
    [
        (TaskConfig(name="reasoning_gim"), r"did you mean reasoning_gym\?"),
        (TaskConfig(name="no_such_module:Task"), "No module named"),
        (TaskConfig(name="pathlib:Path"), "not a subclass"),
        (TaskConfig(params={"datset": "chain_sum"}), r"task.params.datset .*did you mean dataset\?"),
        (TaskConfig(params={}), "missing 1 required keyword-only argument: 'dataset'"),
        (TaskConfig(params={"dataset": "chain_sums"}), r"did you mean chain_sum\?"),
        (TaskConfig(params={"dataset": "chain_sum", "options": {"min_term": 2}}), r"did you mean min_terms\?"),
        (TaskConfig(params={"dataset": "chain_sum", "options": {"min_terms": 9, "max_terms": 2}}), "refuses"),
        (TaskConfig(params={"dataset": "chain_sum", "options": {"seed": 1}}), "options.seed is not an option"),
        (TaskConfig(params={"dataset": "chain_sum", "test_share": 1.5}), "test_share"),
        (TaskConfig(params={"dataset": "chain_sum", "template": "hello"}), "must contain"),
    ],
)
def test_a_mistake_in_the_task_is_named(config: TaskConfig, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        make_task(config, seed=0)


def test_the_share_of_test_prompts_is_what_was_asked_for() -> None:
    task = make_task(TaskConfig(params={"dataset": "spell_backward", "test_share": 0.25}), seed=0)
    assert isinstance(task, ReasoningGymTask)

    sides = [task._is_test(f"question {index}") for index in range(4000)]

    assert sum(sides) / len(sides) == pytest.approx(0.25, abs=0.03)
