"""The made tokenizer, the key of the cache, and policies that appear complete or not at all."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.schema import LibraConfig
from conf.sections import ModelConfig, TaskConfig, WarmupConfig
from stages.controller.tasks import make_task
from stages.controller.tokenizer import PolicyTokenizer, TokenizerError
from stages.warmup import make
from stages.warmup.answering import generate
from stages.warmup.compare import continue_supervised, learning_rate
from stages.warmup.errors import WarmupError
from stages.warmup.key import cached_policy_path, damage, warmup_key
from stages.warmup.supervised import IGNORED, PROBLEMS_APART, Example, Progress, collate, labelled_data, train
from stages.warmup.vocabulary import EOS_ID, build_tokenizer, encode_strictly, save_tokenizer

QUESTION = "spell this word backward (example: sun -> nus): "
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def small_config(**warmup: object) -> LibraConfig:
    options = {"steps": 3, "batch_size": 8, "alphabet": LETTERS, "phrases": [QUESTION], **warmup}
    return LibraConfig(
        model=ModelConfig("LlamaForCausalLM", 1, 32, 64, 1, 1, 32, 0, False, 10000.0, 32),
        task=TaskConfig(
            params={
                "dataset": "spell_backward",
                "options": {"min_word_len": 3, "max_word_len": 3},
                "lower": True,
                "test_share": 0.2,
            },
            test_size=20,
            test_samples=2,
        ),
        warmup=WarmupConfig(**options),  # type: ignore[arg-type]
        max_new_tokens=6,
    )


# ---- tokenizer ---------------------------------------------------------------------------------------------------


def test_text_survives_the_tokenizer_and_phrases_are_one_token() -> None:
    tokenizer = build_tokenizer(LETTERS, [QUESTION])

    ids = tokenizer.encode(QUESTION + "sun").ids

    assert len(ids) == 5  # bos, the question, three letters
    assert tokenizer.decode(ids) == QUESTION + "sun"


def test_the_longest_phrase_wins_and_spaces_are_kept() -> None:
    tokenizer = build_tokenizer("", ["ab", "abc  ("])

    assert tokenizer.encode("abc  (ab d .").tokens[1:] == ["abc  (", "ab", " ", "d", " ", "."]
    assert tokenizer.decode(tokenizer.encode("a , b\n .").ids) == "a , b\n ."


def test_transformers_and_the_controller_read_the_same_ids(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(LETTERS, [QUESTION]), tmp_path, max_length=32)

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = PolicyTokenizer(tmp_path)

    ids = ours.encode(QUESTION + "cat")
    assert theirs(QUESTION + "cat").input_ids == ids
    assert theirs.eos_token_id == EOS_ID
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode([ids])[0] == QUESTION + "cat"


def test_a_character_without_a_token_is_named() -> None:
    tokenizer = build_tokenizer("ab", [])

    with pytest.raises(WarmupError, match=r"no token for 'xz' in 'azbx'"):
        encode_strictly(tokenizer, "azbx", special=False)


@pytest.mark.parametrize("alphabet, phrases", [("aa", []), ("a", ["x", "x"]), ("a", [""]), ("a", ["a"])])
def test_a_token_twice_is_refused(alphabet: str, phrases: list[str]) -> None:
    with pytest.raises(WarmupError, match="more than once"):
        build_tokenizer(alphabet, phrases)


def test_a_folder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="set tokenizer_path"):
        PolicyTokenizer(tmp_path)


def test_a_chat_prompt_needs_a_chat_template(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer(LETTERS, []), tmp_path, max_length=32)

    with pytest.raises(TokenizerError, match="no chat template"):
        PolicyTokenizer(tmp_path).encode_chat("hello")


def test_a_chat_template_of_the_folder_is_applied(tmp_path: Path) -> None:
    save_tokenizer(build_tokenizer("", []), tmp_path, max_length=64)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}>")
    tokenizer = PolicyTokenizer(tmp_path)

    assert tokenizer.decode([tokenizer.encode_chat("hi")]) == ["[hi]>"]


# ---- key ---------------------------------------------------------------------------------------------------------


def test_the_key_changes_with_what_shapes_the_policy_and_with_nothing_else() -> None:
    config = small_config()
    key = warmup_key(config)

    assert warmup_key(small_config(steps=4)) != key
    assert warmup_key(replace(config, model=replace(config.model, hidden_size=64))) != key
    assert warmup_key(replace(config, task=replace(config.task, params={}))) != key
    assert warmup_key(replace(config, learning_rate=1.0, total_steps=7, seed=5)) == key
    assert cached_policy_path(config, Path("cache")) == Path(f"cache/policy-{key}")


def test_the_launcher_gets_the_key_without_importing_torch() -> None:
    code = (
        "import sys; from conf.schema import LibraConfig; from stages.warmup.key import warmup_key, cached_policy_path;"
        "warmup_key(LibraConfig()); print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )

    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert printed.stdout.strip() == "[]"


# ---- supervised steps --------------------------------------------------------------------------------------------


def test_only_answer_tokens_are_targets() -> None:
    ids, targets = collate([Example([1, 5], [7, 2]), Example([1, 5, 6], [8, 9, 2])])

    assert ids.tolist() == [[1, 5, 7, 0, 0], [1, 5, 6, 8, 9]]
    assert targets.tolist() == [[IGNORED, 7, 2, IGNORED, IGNORED], [IGNORED, IGNORED, 8, 9, 2]]


@pytest.mark.parametrize("examples", [30, 0])
def test_what_is_learned_is_neither_kept_apart_nor_held_out(examples: int) -> None:
    config = small_config(examples=examples, batch_size=300, target_reward=0.5)
    task, tokenizer = make_task(config.task, seed=0), build_tokenizer(LETTERS, [QUESTION])

    batches, apart = labelled_data(task, tokenizer, config.warmup)

    seen = {tuple(example.prompt) for example in next(batches)}
    forbidden = {tuple(tokenizer.encode(problem.prompt).ids) for problem in (*apart, *task.test_problems())}
    assert len(apart) == PROBLEMS_APART
    assert not seen & forbidden
    assert len(seen) == examples if examples else len(seen) > 100


def test_more_labelled_examples_than_problems_is_an_error() -> None:
    digits = {"dataset": "chain_sum", "options": {"max_terms": 2, "min_digits": 1, "max_digits": 1}}
    task = make_task(TaskConfig(params=digits), seed=0)  # 162 questions

    with pytest.raises(WarmupError, match=r"gave only 1\d\d different .*lower warmup\.examples"):
        labelled_data(task, build_tokenizer("", []), WarmupConfig(examples=300))


def test_the_warm_up_stops_at_its_target_and_not_before() -> None:
    rewards = iter([0.2, 0.4, 0.6, 0.8])
    reported: list[Progress] = []
    options = WarmupConfig(steps=100, target_reward=0.5)

    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(8, 8)

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(logits=self.table(input_ids))

    batches = itertools.repeat([Example([1, 3], [4, 2])])
    train(Policy(), batches, options, lambda: next(rewards), reported.append)

    assert (reported[-1].step, reported[-1].reward) == (36, 0.6)


def test_the_rate_of_the_comparison_rises_and_falls_over_its_time() -> None:
    rates = [learning_rate(share / 100, peak=1.0) for share in range(101)]

    assert rates[0] == 0.0
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)


# ---- making ------------------------------------------------------------------------------------------------------


def test_a_made_policy_is_an_ordinary_folder_that_transformers_loads(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "policy"

    assert make.ensure_policy(small_config(), folder)

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == model.generation_config.eos_token_id == EOS_ID
    assert model.config.vocab_size == 4 + 1 + 26
    assert json.loads((folder / "warmup.json").read_text())["key"] == warmup_key(small_config())
    assert [path.name for path in folder.parent.iterdir() if ".tmp-" in path.name] == []


def test_the_same_options_make_the_same_weights(tmp_path: Path) -> None:
    for name in ("first", "second"):
        make.ensure_policy(small_config(), tmp_path / name)

    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_policy_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_policy(tmp_path / "policy")
    monkeypatch.setattr(make, "_make", lambda config, folder: pytest.fail("made again"))

    assert not make.ensure_policy(small_config(), tmp_path / "policy")


def put_policy(folder: Path) -> None:
    """The files of a policy, as a made one has them."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    save_file({"a": torch.ones(3), "b": torch.ones(500)}, folder / "model.safetensors")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "no tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
    "no *.safetensors": lambda folder: (folder / "model.safetensors").unlink(),
    "model.safetensors is cut short": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "model.safetensors is cut short, in its header": lambda folder: os.truncate(folder / "model.safetensors", 40),
    "model.safetensors is cut short, to nothing": lambda folder: os.truncate(folder / "model.safetensors", 0),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_policy_in_the_cache_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    config = small_config()
    folder = cached_policy_path(config, tmp_path)
    put_policy(folder)
    DAMAGES[what](folder)
    monkeypatch.setattr(make, "_make", lambda config, folder: put_policy(folder))

    assert make.ensure_policy(config, folder)

    assert damage(folder) == ""
    assert what.partition(",")[0] in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if "trash" in path.name] == []


def test_a_damaged_folder_that_is_not_of_the_cache_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("precious")

    with pytest.raises(WarmupError, match=r"mine cannot be used \(no \*\.safetensors\)"):
        make.ensure_policy(small_config(), tmp_path / "mine")

    assert (tmp_path / "mine" / "config.json").read_text() == "precious"


def test_of_two_at_once_one_makes_and_the_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, entered, go_on = [], threading.Event(), threading.Event()

    def slow_make(config: LibraConfig, folder: Path) -> None:
        made.append(folder)
        entered.set()
        assert go_on.wait(20)
        put_policy(folder)

    monkeypatch.setattr(make, "_make", slow_make)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(make.ensure_policy(small_config(), tmp_path / "policy")))
        for _ in range(2)
    ]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(20)

    assert sorted(results) == [False, True]
    assert len(made) == 1


def test_without_file_locks_the_first_rename_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_while_another_finishes(config: LibraConfig, folder: Path) -> None:
        (folder / "config.json").write_text("ours")
        (tmp_path / "policy").mkdir()
        (tmp_path / "policy" / "config.json").write_text("theirs")

    monkeypatch.setattr(make, "_make", make_while_another_finishes)
    make.ensure_policy(small_config(), tmp_path / "policy")

    assert (tmp_path / "policy" / "config.json").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".policy.lock", "policy"]


def test_a_failure_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(WarmupError, match=r"add it to warmup\.alphabet"):
        make.ensure_policy(small_config(alphabet="abc"), tmp_path / "policy")

    assert [path.name for path in tmp_path.iterdir()] == [".policy.lock"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"warmup": WarmupConfig(steps=0)}, "set model_path"),
        ({"model": ModelConfig(architecture="LlamaForCausalLM")}, "model.num_hidden_layers.* must be set"),
        ({"model": ModelConfig(architecture="")}, "LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"model": ModelConfig("LlamaForCausalLM", 1, 32, 64, 1, 1, 32, 8, False, 1e4, 32)}, "vocab_size is 8"),
    ],
)
def test_options_that_can_not_make_a_policy_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(WarmupError, match=message):
        make.ensure_policy(replace(small_config(), **change), tmp_path / "policy")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_every_supported_architecture_can_be_made(tmp_path: Path, architecture: str) -> None:
    config = small_config(steps=1)
    make.ensure_policy(replace(config, model=replace(config.model, architecture=architecture)), tmp_path / "policy")

    assert json.loads((tmp_path / "policy" / "config.json").read_text())["architectures"] == [architecture]


# ---- comparing ---------------------------------------------------------------------------------------------------


def test_further_supervised_steps_are_measured_on_the_held_out_problems(tmp_path: Path) -> None:
    config = small_config()
    make.ensure_policy(config, tmp_path / "policy")

    result = continue_supervised(config, tmp_path / "policy", 2.0, fresh=False)

    assert result["steps"] > 0
    assert result["after"]["sampled_reward"] > result["before"]["sampled_reward"]


def test_generation_stops_at_the_end_of_sequence_token(tmp_path: Path) -> None:
    make.ensure_policy(small_config(), tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    torch.manual_seed(0)

    answers = generate(model, torch.tensor([[1, 4, 5]] * 64), max_tokens=6, greedy=False)

    assert all(EOS_ID not in answer[:-1] for answer in answers)
    assert all(len(answer) == 6 or answer[-1] == EOS_ID for answer in answers)
