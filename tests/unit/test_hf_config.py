"""A config.json that lies: text for numbers, sizes below one, lists, nulls. Planner and trainer say what they want instead."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import LibraConfig
from launch.errors import ConfigError
from launch.machine import MAX_CONFIG_BYTES, read_hf_config
from planner.errors import PlanError
from planner.hf_config import HfConfig
from planner.model import resolve, rope_theta
from stages.trainer.architecture import ModelError, read_architecture

ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": ROPE,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention"],
    "attention_bias": False,
    "hidden_act": "silu",
    "quantization_config": None,
}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400) | st.just("24")
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2)
)
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
WRONG_SIZES: tuple[Any, ...] = ("24", -1, 0, 1.5, 24.0, True, [24], {}, math.nan, math.inf, 2**60, 10**400)


def judged(values: dict[str, Any]) -> None:
    """Nothing but the errors that name config.json."""
    for judge, error in (
        (lambda: resolve(values, LibraConfig().model), PlanError),
        (lambda: rope_theta(values), PlanError),
        (lambda: read_architecture(values), ModelError),
    ):
        try:
            judge()
        except error as refused:
            assert str(refused)  # noqa: PT017  # any sentence will do; another kind of error fails the test


@given(key=st.sampled_from(sorted(MIXTURE)), value=JSON, base=st.sampled_from([DENSE, MIXTURE]))
def test_any_value_of_any_key_is_read_or_refused(key: str, value: Any, base: dict[str, Any]) -> None:
    judged({**base, key: value})
    judged({name: kept for name, kept in base.items() if name != key})


@given(key=st.sampled_from(sorted(ROPE)), value=JSON, where=st.sampled_from(["rope_scaling", "rope_parameters"]))
def test_so_is_any_value_of_the_rotary_embedding(key: str, value: Any, where: str) -> None:
    judged({**DENSE, where: {**ROPE, "rope_theta": 1e4, key: value}})


@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", WRONG_SIZES, ids=lambda value: str(value)[:8])
def test_a_size_that_is_none_is_named_with_what_is_wanted(key: str, value: Any) -> None:
    wanted = f"config.json says {key} {value!r}; wanted a whole number of at least 1"

    with pytest.raises(PlanError) as planned:
        resolve({**DENSE, key: value}, LibraConfig().model)
    with pytest.raises(ModelError) as trained:
        read_architecture({**DENSE, key: value})

    assert wanted in str(planned.value)
    assert wanted in str(trained.value)


@pytest.mark.parametrize("value", ["false", 0, [], {}])
def test_a_switch_is_no_text_and_no_number(value: Any) -> None:
    with pytest.raises(PlanError, match=r"tie_word_embeddings .*; wanted true or false"):
        resolve({**DENSE, "tie_word_embeddings": value}, LibraConfig().model)


def test_a_width_that_heads_do_not_divide_needs_a_head_dim() -> None:
    with pytest.raises(PlanError, match="hidden_size 65, no multiple of num_attention_heads 8, and no head_dim"):
        resolve({**DENSE, "hidden_size": 65, "head_dim": None}, LibraConfig().model)
    assert resolve({**DENSE, "hidden_size": 65}, LibraConfig().model).head_dim == 8


@pytest.mark.parametrize("names", ["LlamaForCausalLM", ["LlamaForCausalLM", "Qwen2ForCausalLM"], [1], {"0": "x"}, 3])
def test_architectures_is_a_list_of_one_name(names: Any) -> None:
    with pytest.raises(ValueError, match=r"config.json says architectures .*; wanted a list of one name"):
        HfConfig({"architectures": names}).architecture()


# ---- the file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"[]", "holds no object but a list"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), f"more than {MAX_CONFIG_BYTES} bytes"),
    ],
    ids=["empty", "list", "bytes", "brackets", "digits", "large"],
)
def test_a_file_that_is_no_object_is_refused_by_the_option(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        read_hf_config(tmp_path)

    (problem,) = caught.value.problems
    assert problem.startswith(f"model_path={tmp_path}: config.json")
    assert reason in problem


def test_what_is_no_file_is_not_there(tmp_path: Path) -> None:
    assert read_hf_config(tmp_path) is None
    assert read_hf_config(Path("a" * 300)) is None
    (tmp_path / "config.json").symlink_to("config.json")
    assert read_hf_config(tmp_path) is None


def test_a_file_that_may_not_be_read_is_refused_by_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))

    def denied(*arguments: object, **options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)  # tests may run as root, who may read all

    with pytest.raises(ConfigError, match=r"config.json cannot be read \(Permission denied\)"):
        read_hf_config(tmp_path)
