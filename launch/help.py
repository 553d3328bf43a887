"""The page of `python -m launch --help`."""

from __future__ import annotations

import textwrap

from conf.typed import options
from launch.tree import Tree, groups

WIDTH = 110
MOST_USED = (
    "model_path",
    "train_gpus",
    "rollout_gpus",
    "train_tp_size",
    "vllm_tp_size",
    "batch_size",
    "n_samples",
    "max_model_len",
    "max_new_tokens",
    "total_steps",
    "learning_rate",
    "max_head_offpolicyness",
    "seed",
    "launch.run_dir",
    "launch.dry_run",
    "slurm.partition",
    "slurm.time_min",
)
USAGE = """\
usage: python -m launch [+GROUP=CHOICE ...] [OPTION=VALUE ...] [FLAG ...]

Composes and checks the configuration, plans the run, writes one Slurm job, submits it and follows it.

examples
  python -m launch +experiment=demo                               train a small policy on this machine
  python -m launch +experiment=grpo_7b launch.dry_run=true        plan and job script, nothing is started
  python -m launch +experiment=grpo_7b train_gpus=16              another size
  python -m launch --config-dir MY +experiment=mine               your own MY/experiment/mine.yaml
  python -m launch -m +experiment=demo seed=1,2,3                 one run for each value
  python -m launch --config-path RUN launch.run_dir=NEW           a run again, from its config.yaml
  python -m launch +experiment=demo launch.explain=batch_size     one option: value, source, range, effect
"""
FLAGS = """\
flags
  -m, --multirun             a sweep: one run, with its own run directory, for each combination of values
  -cd, --config-dir DIR      one more folder of groups, beside the house's
  -cp, --config-path PLACE   folder of another root file (config.yaml), or the file itself
  -cn, --config-name NAME    name of the root file
  -c, --cfg job              print the configuration that the run would get, with the source of every value
  -i, --info; --cfg hydra    how Hydra composed it; --hydra-help, --version: Hydra itself
  -sc, --shell-completion    install=bash prints the completion for bash: docs/configure.md
"""
COMMANDS = """\
before the first run on a cluster (docs/doctor.md)
  python -m launch.doctor [--quick] [--partition P] [OPTION=VALUE ...]
                                          tries what the site does, and writes a profile of it for cluster=

once a run is made (docs/runs.md)
  python -m launch.status RUN | --all     what it is doing, where its time goes, what to do next
  python -m launch.follow RUN             stay with it; Ctrl-C leaves it running
  python -m launch.logs RUN [WHO] [-f]    all stages and ranks in one stream
  python -m launch.cancel RUN [--checkpoint]
  python -m launch.resume RUN [OPTION=VALUE ...]
  python -m launch.list                   a table of runs
"""
REST = """\
All {count} options: docs/configuration.md, or launch.explain=OPTION (or a group, such as launch.explain=slurm).
How to set them: docs/configure.md.
"""


def help_text(tree: Tree) -> str:
    parts = [USAGE, COMMANDS, _groups(tree), _most_used(), FLAGS, REST.format(count=len(options()))]
    return "\n".join(parts).rstrip("\n")


def _groups(tree: Tree) -> str:
    found = groups(tree)
    width = max(len(name) for name in found)
    lines = [_hanging(f"  {name:<{width}}  ", ", ".join(choices)) for name, choices in found.items()]
    return "\n".join(["groups", *lines, ""])


def _most_used() -> str:
    width = max(len(name) for name in MOST_USED)
    lines = [_hanging(f"  {name:<{width}}  ", options()[name].effect) for name in MOST_USED]
    return "\n".join(["options that are set most", *lines, ""])


def _hanging(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
