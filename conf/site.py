"""How a run starts, and what is asked of Slurm: the groups `launch` and `slurm`."""

from __future__ import annotations

from dataclasses import dataclass, field

from conf.options import option

MAIL_TYPES = (
    "NONE",
    "BEGIN",
    "END",
    "FAIL",
    "REQUEUE",
    "ALL",
    "INVALID_DEPEND",
    "STAGE_OUT",
    "TIME_LIMIT",
    "TIME_LIMIT_90",
    "TIME_LIMIT_80",
    "TIME_LIMIT_50",
)
"""sbatch(1), --mail-type, without ARRAY_TASKS: a run is no array."""


@dataclass
class LaunchConfig:
    """How a run starts."""

    mode: str = option(
        "auto",
        effect="slurm submits a job, allocation starts the steps in the job that this shell has, local runs here; auto takes"
        " allocation inside a job, slurm where sbatch answers, else local",
        choices=("auto", "slurm", "allocation", "local"),
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
        "",
        effect="Folder of made starter policies, and of what is known about tasks; empty means $XDG_CACHE_HOME/libra or"
        " ~/.cache/libra",
        unit="path",
    )
    python: str = option(
        "",
        effect="Python of the steps, inside their container where they have one; empty means the one that runs the launcher",
        unit="path",
    )
    supervisor_python: str = option(
        "",
        effect="Python of the supervisor, which runs in the job's own shell; empty means launch.python, or the launcher's own"
        " where steps run in a container",
        unit="path",
    )
    prefix: list[str] = option(
        factory=list,
        effect="Words in front of the Python of every step, such as [apptainer,exec,--nv,IMAGE]; they must exec it",
        unit="words",
    )
    trainer_prefix: list[str] = option(factory=list, effect="In place of launch.prefix for the trainer", unit="words")
    rollout_prefix: list[str] = option(
        factory=list, effect="In place of launch.prefix for rollout instances", unit="words"
    )
    controller_prefix: list[str] = option(
        factory=list, effect="In place of launch.prefix for the controller", unit="words"
    )
    setup: list[str] = option(
        factory=list, effect="Shell lines at the start of the job script (module load ...)", unit="shell lines"
    )
    stop_grace_s: float = option(
        5.0, effect="Time a stage has between TERM and KILL when a run fails", unit="s", minimum=0.1
    )
    max_restarts: int = option(
        10,
        effect="Times that a run is started again by itself (time limit, preemption, lost node) before a person has to",
        unit="restarts",
        minimum=0,
    )
    max_restarts_without_progress: int = option(
        1,
        effect="Such restarts in a row that may pass without a new checkpoint; the next one is not made",
        unit="restarts",
        minimum=0,
    )
    evaluate: bool = option(True, effect="Answer the held-out problems before and after training")


@dataclass
class SlurmRoleConfig:
    """What one side asks of Slurm in place of the common option. Empty (null for memory) takes the common one."""

    partition: str = option("", effect="In place of slurm.partition", unit="name")
    qos: str = option("", effect="In place of slurm.qos", unit="name")
    constraint: str = option("", effect="In place of slurm.constraint", unit="features")
    reservation: str = option("", effect="In place of slurm.reservation", unit="name")
    exclude: str = option("", effect="In place of slurm.exclude", unit="nodes")
    gpu_type: str = option("", effect="In place of slurm.gpu_type", unit="name")
    mem_per_node_bytes: float | None = option(
        None, effect="In place of slurm.mem_per_node_bytes; 0 asks for all of a node", unit="bytes", minimum=0.0
    )
    extra: list[str] = option(factory=list, effect="In place of slurm.extra", unit="sbatch options")
    srun_extra: list[str] = option(factory=list, effect="In place of slurm.srun_extra", unit="srun options")


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
    constraint: str = option("", effect="Features that every node must have, such as h100&nvme", unit="features")
    reservation: str = option("", effect="Reservation to run in", unit="name")
    exclude: str = option("", effect="Nodes that the job must not get", unit="nodes")
    licenses: str = option(
        "", effect="Licenses of the whole job, such as matlab:2; Slurm takes them on component 0 only", unit="licenses"
    )
    job_name: str = option("libra", effect="Job name", unit="name")
    comment: str = option("", effect="Comment of the job, as squeue and the administrators' tools show it", unit="text")
    wckey: str = option("", effect="Workload characterization key, where the site accounts by it", unit="name")
    mail_user: str = option("", effect="Address for Slurm's mail; empty means yours on the cluster", unit="address")
    mail_type: list[str] = option(
        factory=list, effect="Events that Slurm mails about, once for the whole job", choices=MAIL_TYPES
    )
    time_min: int = option(60, effect="Time limit of the whole job", unit="min", minimum=1)
    requeue: str = option(
        "auto",
        effect="How a run goes on after its time limit, a preemption or a lost node: requeue runs the same job again, chain"
        " submits another that waits for this one, auto chains where requeueing is refused, never leaves it to launch.resume",
        choices=("auto", "requeue", "chain", "never"),
    )
    mem_per_node_bytes: float = option(
        0.0, effect="Memory asked for on each node; 0 asks for all of it", unit="bytes", minimum=0.0
    )
    gpu_flag: str = option(
        "gpus-per-node",
        effect="How GPUs are asked for: --gpus-per-node=N, --gres=gpu:N (older select plugins), or none: a cluster without"
        " GPUs, for hardware.device=cpu",
        choices=("gpus-per-node", "gres", "none"),
    )
    gpu_type: str = option("", effect="Type of GPU where a partition has several, as in gpu:h100:8", unit="name")
    controller_cpus: int = option(1, effect="Processors of the controller step", minimum=1, unit="processors")
    rollout_component_nodes: list[int] = option(
        factory=list,
        effect="Nodes of each rollout component of a hetjob; empty makes up to 8 equal ones. Each component counts as a job"
        " against limits, and can be handed back on its own",
        unit="nodes",
        minimum=1,
    )
    extra: list[str] = option(
        factory=list, effect="Further #SBATCH lines for every component, without the prefix", unit="sbatch options"
    )
    srun_extra: list[str] = option(
        factory=list,
        effect="Further options of every step's srun, such as --container-image=... of pyxis",
        unit="srun options",
    )
    trainer: SlurmRoleConfig = field(default_factory=SlurmRoleConfig)
    rollout: SlurmRoleConfig = field(default_factory=SlurmRoleConfig)
