"""How a run starts, and what is asked of Slurm: the groups `launch` and `slurm`."""

from __future__ import annotations

from dataclasses import dataclass

from conf.options import option


@dataclass
class LaunchConfig:
    """How a run starts."""

    mode: str = option(
        "auto",
        effect="slurm submits a job, local runs here; auto takes slurm when sbatch answers",
        choices=("auto", "slurm", "local"),
    )
    run_dir: str = option("", effect="Run directory; empty means runs/<experiment>-<time>", unit="path")
    explain: str = option(
        "",
        effect="Print value, default, source, unit, range, effect and readers of this option (or group), and stop",
        unit="option name",
    )
    dry_run: bool = option(False, effect="Stop before submitting; print plan and script")
    follow: bool = option(True, effect="Stay attached and show progress until the run ends")
    replace_finished: bool = option(
        False, effect="Move a run directory that is not in use aside (to NAME.1, NAME.2, ...) instead of refusing"
    )
    cache_dir: str = option(
        "", effect="Folder of made starter policies; empty means $XDG_CACHE_HOME/libra or ~/.cache/libra", unit="path"
    )
    python: str = option("", effect="Python of the steps; empty means the one that runs the launcher", unit="path")
    setup: list[str] = option(
        factory=list, effect="Shell lines at the start of the job script (module load ...)", unit="shell lines"
    )
    stop_grace_s: float = option(
        5.0, effect="Time a stage has between TERM and KILL when a run fails", unit="s", minimum=0.1
    )
    evaluate: bool = option(True, effect="Answer the held-out problems before and after training")


@dataclass
class SlurmConfig:
    """What goes into the job script. Empty or 0 leaves the line out."""

    layout: str = option(
        "hetjob",
        effect="hetjob: trainer and rollout components; single: one job with exact steps",
        choices=("hetjob", "single"),
    )
    partition: str = option("", effect="Partition of all components", unit="name")
    account: str = option("", effect="Account", unit="name")
    qos: str = option("", effect="Quality of service", unit="name")
    job_name: str = option("libra", effect="Job name", unit="name")
    time_min: int = option(60, effect="Time limit of the whole job", unit="min", minimum=1)
    mem_per_node_bytes: float = option(
        0.0, effect="Memory asked for on each node; 0 asks for all of it", unit="bytes", minimum=0.0
    )
    controller_cpus: int = option(1, effect="Processors of the controller step", minimum=1, unit="processors")
    extra: list[str] = option(
        factory=list, effect="Further #SBATCH lines for every component, without the prefix", unit="sbatch options"
    )
