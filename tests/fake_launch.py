"""`python -m tests.fake_launch WORDS`: `python -m launch WORDS` whose stages are fakes (tests/fake_stages.py).

FAKE_BEHAVIOURS holds JSON: what they are told to do, beside tests.fake_runs.WORKING. Everything else is the product's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from conf.schema import LibraConfig
from launch import command_line, executors
from launch.submission import Submission
from planner.plan import Plan
from stages.files import make_directory
from stages.rundir import RunDir
from tests.fake_runs import WORKING
from tests.fake_stages import entry

submit = executors.submit


def submit_fakes(config: LibraConfig, plan: Plan, run: RunDir) -> Submission:
    told = {instance.name: {"do": "serve"} for instance in plan.rollout.instances}
    told |= WORKING | json.loads(os.environ.get("FAKE_BEHAVIOURS", "{}"))
    make_directory(run.root / "ready")
    (run.root / "fake.json").write_text(json.dumps(told))
    return submit(config, plan, run, entry=entry)


def make_model(folder: Path) -> list[str]:
    """The words for a model that nobody loads, in `folder`."""
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return ["+experiment=demo", "cluster=devcluster", "model=from_path", f"model_path={folder}", "warmup.steps=0"]


if __name__ == "__main__":
    executors.submit = submit_fakes  # type: ignore[assignment]
    sys.exit(command_line.run(sys.argv[1:]))
