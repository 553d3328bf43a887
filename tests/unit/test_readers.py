"""Which code reads which option: found in small texts, and in Libra itself."""

from __future__ import annotations

import pytest

from conf.options import declared
from conf.pending import pending
from conf.readers import PROJECT, options_read, readers
from conf.schema import LibraConfig

IGNORED = "global_resource_planner.elastic_hybrid_max_workers"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("def f(config: LibraConfig):\n return config.total_steps", {"total_steps"}),
        ("def f(config: 'LibraConfig'):\n return config.algorithm.clip_low", {"algorithm.clip_low"}),
        ("def f(config: schema.LibraConfig | None):\n return config.seed", {"seed"}),
        ("def f(options: WeightsConfig):\n return lambda: options.dtype", {"weights.dtype"}),
        ("def f(context):\n return context.config.seed", {"seed"}),
        ("def f(context):\n config = context.config\n return config.seed", {"seed"}),
        ("def f(self):\n run, config = self.run, self.context.config\n return config.seed", {"seed"}),
        ("def f(config: LibraConfig):\n warmup = config.warmup\n return warmup.steps", {"warmup.steps"}),
        ("def f(config: LibraConfig):\n new = replace(config, seed=1)\n return new.seed", {"seed"}),
        ("class A:\n config: LibraConfig\n def f(self):\n  return self.config.seed", {"seed"}),
        ("class A:\n options: WarmupConfig\n def f(self):\n  return self.options.steps", {"warmup.steps"}),
        ("def make() -> LibraConfig: ...\ndef f():\n config = make()\n return config.seed", {"seed"}),
        ("def f(config: LibraConfig):\n def inner():\n  return config.seed\n return inner", {"seed"}),
        ("async def f(config: LibraConfig):\n return [n for n in range(config.seed)]", {"seed"}),
    ],
)
def test_a_read_is_found(source: str, wanted: set[str]) -> None:
    assert options_read(source) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: LibraConfig):\n return g(config=config, options=config.weights)",
        "def f(config: LibraConfig):\n config.seed = 3",
        "def f(config: LibraConfig):\n return replace(config, seed=3)",
        "def f(config: TransformerConfig):\n return config.seed",
        "def f(config):\n return config.seed",
        "def f(config: LibraConfig):\n config = OptimizerConfig()\n return config.seed",
        "class A:\n config: TransformerConfig\n def f(self):\n  return self.config.seed",
        "def f(config: LibraConfig):\n return config.seeed",
        "def f(sampling):\n return sampling.temperature",
    ],
)
def test_what_is_no_read_is_not_taken_for_one(source: str) -> None:
    assert options_read(source) == set()


def test_the_files_of_an_option_are_named_from_the_project() -> None:
    assert readers()["learning_rate"] == ("stages/trainer/schedule.py",)
    assert "stages/weights/publish.py" in readers()["weights.max_file_bytes"], "through an annotated field"
    assert "stages/context.py" in readers()["trace.directory"], "through the result of `load`"
    assert all((PROJECT / file).is_file() for files in readers().values() for file in files)


def test_the_validator_is_not_named_as_a_reader() -> None:
    assert {file for files in readers().values() for file in files}.isdisjoint(
        {"planner/validate.py", "conf/pending.py"}
    )


def test_every_option_that_can_be_changed_is_read_somewhere() -> None:
    changeable = [name for name in declared(LibraConfig) if name not in pending() and name != IGNORED]

    assert [name for name in changeable if not readers()[name]] == []
