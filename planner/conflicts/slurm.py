"""What goes into the job script, and what Libra writes there itself."""

from __future__ import annotations

from collections.abc import Iterator

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
    "--gpus": "train_gpus and rollout_gpus",
    "-G": "train_gpus and rollout_gpus",
    "--mem": "slurm.mem_per_node_bytes",
    "--partition": "slurm.partition",
    "-p": "slurm.partition",
    "--account": "slurm.account",
    "-A": "slurm.account",
    "--qos": "slurm.qos",
    "-q": "slurm.qos",
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
    "--requeue": "",
    "--no-requeue": "",
    "--signal": "",
    "--open-mode": "",
    "--array": "",
    "-a": "",
    "--wrap": "",
}
"""Options of sbatch that the job script already has, and the option of ours that decides each (empty: none does)."""


def a_local_run_is_followed(config: LibraConfig) -> Iterator[str]:
    if config.launch.mode == "local" and not config.launch.follow:
        yield (
            "launch.follow=false: a local run ends with its launcher, so the launcher has to stay; set launch.follow=true"
        )


def extra_lines_are_sbatch_options(config: LibraConfig) -> Iterator[str]:
    for line in config.slurm.extra:
        word = (line.split() or [""])[0].partition("=")[0]
        if "#SBATCH" in line:
            yield f"slurm.extra holds {line!r}: leave #SBATCH out, it is written in front of every line of slurm.extra"
        elif "\n" in line:
            yield f"slurm.extra holds {line!r}, which has a line break; make it two entries of slurm.extra"
        elif not word.startswith("-") and word != "hetjob":
            yield f"slurm.extra holds {line!r}, which is no option of sbatch (--name=value); change slurm.extra"
        elif word in INSTEAD:
            instead = INSTEAD[word] or "nothing: Libra needs it as it is"
            yield f"slurm.extra holds {line!r}, which the job script has already; change {instead}"


def setup_lines_are_shell(config: LibraConfig) -> Iterator[str]:
    for line in config.launch.setup:
        if "#SBATCH" in line:
            yield (
                f"launch.setup holds {line!r}: sbatch reads no options there; put it into slurm.extra, without #SBATCH"
            )


def memory_of_a_node(config: LibraConfig) -> Iterator[str]:
    wanted = config.slurm.mem_per_node_bytes
    if 0 < wanted < 1e8:
        yield (
            f"slurm.mem_per_node_bytes={wanted:g} is less than 1e8 bytes: 500 GB is 500e9, and 0 asks for all of a node"
        )


RULES = (a_local_run_is_followed, extra_lines_are_sbatch_options, setup_lines_are_shell, memory_of_a_node)
