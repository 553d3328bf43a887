"""What goes into the job script and in front of the steps, and what Libra writes there itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from conf.schema import LibraConfig

INSTEAD = {
    "--nodes": "train_gpus and rollout_gpus",
    "-N": "train_gpus and rollout_gpus",
    "--ntasks": "train_gpus and rollout_gpus",
    "-n": "train_gpus and rollout_gpus",
    "--ntasks-per-node": "hardware.gpus_per_node",
    "--cpus-per-task": "hardware.cpus_per_node",
    "-c": "hardware.cpus_per_node",
    "--gpus-per-node": "hardware.gpus_per_node",
    "--gres": "hardware.gpus_per_node and slurm.gpu_flag",
    "--gpus": "train_gpus and rollout_gpus",
    "-G": "train_gpus and rollout_gpus",
    "--mem": "slurm.mem_per_node_bytes",
    "--partition": "slurm.partition",
    "-p": "slurm.partition",
    "--account": "slurm.account",
    "-A": "slurm.account",
    "--qos": "slurm.qos",
    "-q": "slurm.qos",
    "--constraint": "slurm.constraint",
    "-C": "slurm.constraint",
    "--reservation": "slurm.reservation",
    "--exclude": "slurm.exclude",
    "-x": "slurm.exclude",
    "--licenses": "slurm.licenses",
    "-L": "slurm.licenses",
    "--comment": "slurm.comment",
    "--wckey": "slurm.wckey",
    "--mail-type": "slurm.mail_type",
    "--mail-user": "slurm.mail_user",
    "--job-name": "slurm.job_name",
    "-J": "slurm.job_name",
    "--time": "slurm.time_min",
    "-t": "slurm.time_min",
    "--output": "launch.run_dir",
    "-o": "launch.run_dir",
    "--error": "launch.run_dir",
    "-e": "launch.run_dir",
    "--no-kill": "slurm.layout",
    "hetjob": "slurm.layout",
    "--requeue": "slurm.requeue",
    "--no-requeue": "slurm.requeue",
    "--signal": "",
    "--open-mode": "",
    "--array": "",
    "-a": "",
    "--wrap": "",
}
"""Options of sbatch that the job script already has, and the option of ours that decides each (empty: none does)."""

OURS_IN_SRUN = frozenset(
    [
        "--jobid",
        "--het-group",
        "--nodelist",
        "-w",
        "--nodes",
        "-N",
        "--ntasks",
        "-n",
        "--ntasks-per-node",
        "--cpus-per-task",
        "-c",
        "--gpus-per-node",
        "--gpus",
        "-G",
        "--gres",
        "--mem",
        "--exact",
        "--overlap",
        "--immediate",
        "-I",
        "--mpi",
        "--kill-on-bad-exit",
        "-K",
        "--wait",
        "-W",
        "--open-mode",
        "--job-name",
        "-J",
        "--output",
        "-o",
        "--error",
        "-e",
        "--pty",
        "--multi-prog",
        "--label",
        "-l",
    ]
)
"""Options of srun that every step already has, or that would take its output away."""

NO_BLANKS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "exclude",
    "licenses",
    "wckey",
    "mail_user",
    "gpu_type",
)
"""Names and expressions of Slurm; a blank in one is a slip of the hand."""
UNQUOTABLE = re.compile(r"""["'\\\x00-\x1f\x7f]""")
"""What Slurm's reader of #SBATCH lines takes for its own syntax, and line breaks, for which it has no quotes."""
SIDES = ("trainer", "rollout")
NOT_EMPTIED = ("partition", "qos")
"""Slurm may carry them over to the next component, and has no word that takes them back."""


def a_local_run_is_followed(config: LibraConfig) -> Iterator[str]:
    kind = {"local": "a local run", "allocation": "a run in the job of this shell"}.get(config.launch.mode)
    if kind and not config.launch.follow:
        yield (
            f"launch.follow=false: {kind} ends with its launcher, so the launcher has to stay; set launch.follow=true"
        )


def texts_fit_into_a_line(config: LibraConfig) -> Iterator[str]:
    for name, text in _texts(config):
        found = UNQUOTABLE.search(text)
        if found:
            yield f"{name}={text!r} has the character {found[0]!r}, which an #SBATCH line cannot hold; change {name}"
        elif name.rpartition(".")[2] in NO_BLANKS and re.search(r"\s", text):
            yield f"{name}={text!r} has a blank in it; Slurm takes one word, several are separated by commas"


def extra_lines_are_sbatch_options(config: LibraConfig) -> Iterator[str]:
    for name, lines in _lists(config, "extra"):
        for line in lines:
            word = (line.split() or [""])[0].partition("=")[0]
            if "#SBATCH" in line:
                yield f"{name} holds {line!r}: leave #SBATCH out, it is written in front of every line of {name}"
            elif not line.isprintable():
                yield f"{name} holds {line!r}, which has a line break or the like; make it two entries of {name}"
            elif not word.startswith("-") and word != "hetjob":
                yield f"{name} holds {line!r}, which is no option of sbatch (--name=value); change {name}"
            elif word in INSTEAD:
                instead = INSTEAD[word] or "nothing: Libra needs it as it is"
                yield f"{name} holds {line!r}, which the job script has already; change {instead}"


def extra_words_are_srun_options(config: LibraConfig) -> Iterator[str]:
    for name, words in _lists(config, "srun_extra"):
        for word in words:
            flag = word.partition("=")[0]
            if not word.startswith("-") or "\0" in word or "\n" in word:
                yield f"{name} holds {word!r}, which is no option of srun in one word (--name=value); change {name}"
            elif flag in OURS_IN_SRUN:
                yield f"{name} holds {word!r}, which every step's srun has already; take it out of {name}"


def prefixes_are_commands(config: LibraConfig) -> Iterator[str]:
    launch = config.launch
    for name, words in (
        ("launch.prefix", launch.prefix),
        ("launch.trainer_prefix", launch.trainer_prefix),
        ("launch.rollout_prefix", launch.rollout_prefix),
        ("launch.controller_prefix", launch.controller_prefix),
    ):
        if words and (not words[0] or words[0].startswith("-")):
            yield f"{name}={words} does not begin with a program, such as [apptainer,exec,--nv,IMAGE]; change {name}"
        elif any(word == ":" or "\0" in word for word in words):
            yield f"{name}={words}: srun takes a word ':' for the start of another component; take it out of {name}"


def a_run_directory_that_slurm_can_name(config: LibraConfig) -> Iterator[str]:
    if unwritable := no_path_for_slurm(config.launch.run_dir):
        yield unwritable


def no_path_for_slurm(run_dir: str) -> str:
    """Why a job script cannot name this run directory, or "". Slurm and submitit expand `%`, and Slurm's option parser has
    no way to quote a line break."""
    if not any(character in run_dir for character in "%\n\\\"'"):
        return ""
    return f"launch.run_dir={run_dir!r} has a quote, %, backslash or line break; choose another launch.run_dir"


def setup_lines_are_shell(config: LibraConfig) -> Iterator[str]:
    for line in config.launch.setup:
        if "#SBATCH" in line:
            yield (
                f"launch.setup holds {line!r}: sbatch reads no options there; put it into slurm.extra, without #SBATCH"
            )


def memory_of_a_node(config: LibraConfig) -> Iterator[str]:
    slurm = config.slurm
    for name, wanted in (
        ("slurm.mem_per_node_bytes", slurm.mem_per_node_bytes),
        ("slurm.trainer.mem_per_node_bytes", slurm.trainer.mem_per_node_bytes),
        ("slurm.rollout.mem_per_node_bytes", slurm.rollout.mem_per_node_bytes),
    ):
        if wanted is not None and 0 < wanted < 1e8:
            yield f"{name}={wanted:g} is less than 1e8 bytes: 500 GB is 500e9, and 0 asks for all of a node"


def sides_of_a_hetjob(config: LibraConfig) -> Iterator[str]:
    """What only one side sets. A single job is one component: one partition, one constraint, one of everything."""
    slurm = config.slurm
    if slurm.layout == "single" and config.launch.mode == "slurm":
        for side, role in (("trainer", slurm.trainer), ("rollout", slurm.rollout)):
            for spec in fields(role):
                if spec.name != "srun_extra" and getattr(role, spec.name) not in ("", None, []):
                    yield (
                        f"slurm.{side}.{spec.name} is for slurm.layout=hetjob; with slurm.layout=single both sides are one"
                        f" component: set slurm.{spec.name}"
                    )
        if slurm.rollout_component_nodes:
            yield (
                f"slurm.rollout_component_nodes={slurm.rollout_component_nodes} is for slurm.layout=hetjob; a single job has"
                " one component: set slurm.rollout_component_nodes=[]"
            )
        return
    for name in NOT_EMPTIED:
        trainer, rollout = getattr(slurm.trainer, name), getattr(slurm.rollout, name)
        if trainer and not rollout and not getattr(slurm, name):
            yield (
                f"slurm.trainer.{name}={trainer} without one for rollout: some releases of Slurm carry it over to the next"
                f" component; set slurm.rollout.{name} or slurm.{name}"
            )


def gpus_are_asked_for(config: LibraConfig) -> Iterator[str]:
    slurm = config.slurm
    if slurm.gpu_flag == "none" and config.hardware.device == "cuda":
        yield (
            "slurm.gpu_flag=none asks for no GPU, and hardware.device=cuda needs them; set slurm.gpu_flag=gpus-per-node, or"
            " hardware=cpu"
        )
    if slurm.gpu_flag == "none" and (slurm.gpu_type or slurm.trainer.gpu_type or slurm.rollout.gpu_type):
        yield "slurm.gpu_type names a GPU, and slurm.gpu_flag=none asks for none; change one of them"


def _texts(config: LibraConfig) -> Iterator[tuple[str, str]]:
    """(dotted name, value) of every text that goes into the head of the job script."""
    slurm = config.slurm
    for prefix, group in (("slurm", slurm), ("slurm.trainer", slurm.trainer), ("slurm.rollout", slurm.rollout)):
        for spec in fields(group):
            value = getattr(group, spec.name)
            if isinstance(value, str) and spec.name not in ("layout", "gpu_flag"):
                yield f"{prefix}.{spec.name}", value


def _lists(config: LibraConfig, field: str) -> Iterator[tuple[str, list[str]]]:
    slurm = config.slurm
    groups: tuple[tuple[str, object], ...] = (
        ("slurm", slurm),
        ("slurm.trainer", slurm.trainer),
        ("slurm.rollout", slurm.rollout),
    )
    for prefix, group in groups:
        yield f"{prefix}.{field}", getattr(group, field)


RULES = (
    a_local_run_is_followed,
    texts_fit_into_a_line,
    extra_lines_are_sbatch_options,
    extra_words_are_srun_options,
    prefixes_are_commands,
    setup_lines_are_shell,
    memory_of_a_node,
    sides_of_a_hetjob,
    gpus_are_asked_for,
    a_run_directory_that_slurm_can_name,
)
