"""What the doctor tells the programs of its job, through `order.json` in its folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.containers import Surroundings
from stages.files import DamagedRecordError, read_json, write_json_atomic

ORDER_FILE = "order.json"
FOLDER_PREFIX = ".libra-doctor-"


@dataclass(frozen=True)
class Limits:
    """How long and how much. `listed_s` and `exists_s`: when a file that another node published counts as unseen.

    `import_s` bounds the first thing that every node does, so nodes are at most so far apart when they first meet.
    """

    import_s: float
    peers_s: float
    step_s: float
    listed_s: float
    exists_s: float
    transfer_bytes: int
    transfer_s: float
    clock_rounds: int
    program_s: float


QUICK = Limits(
    import_s=15.0,
    peers_s=10.0,
    step_s=8.0,
    listed_s=5.0,
    exists_s=3.0,
    transfer_bytes=32 << 20,
    transfer_s=1.5,
    clock_rounds=5,
    program_s=0.0,
)
# An NFS client may not see a new name for acdirmax, 60 s by default (nfs(5)).
FULL = Limits(
    import_s=120.0,
    peers_s=60.0,
    step_s=60.0,
    listed_s=180.0,
    exists_s=90.0,
    transfer_bytes=512 << 20,
    transfer_s=20.0,
    clock_rounds=20,
    program_s=420.0,
)


@dataclass(frozen=True)
class Order:
    """Sizes are per node. `mode` is "slurm" or "local"; `token` is in the name of everything that is made.

    Steps get whole cores, of `threads` processors each. `gpu_flag` is how GPUs are asked for (slurm.gpu_flag), `gpu_type` which
    (slurm.gpu_type). `prefixes` and `srun_extra` stand around the Python of a step, by role.
    """

    token: str
    folder: str
    mode: str
    quick: bool
    python: str
    nodes: int
    cpus: int
    gpus: int
    mem_bytes: int
    limits: Limits
    threads: int = 1
    gpu_flag: str = "gpus-per-node"
    gpu_type: str = ""
    prefixes: dict[str, list[str]] = field(default_factory=dict)
    srun_extra: dict[str, list[str]] = field(default_factory=dict)

    @property
    def step_cpus(self) -> int:
        """Of the step that measures on each node; the full mode takes all that the job has."""
        return min(2 * self.threads, self.cpus) if self.quick else self.cpus

    @property
    def around(self) -> Surroundings:
        return Surroundings(
            {role: tuple(words) for role, words in self.prefixes.items()},
            {role: tuple(words) for role, words in self.srun_extra.items()},
            asks_for_gpus=self.gpu_flag != "none",
        )

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @property
    def reports(self) -> Path:
        return self.path / "reports"

    def write(self) -> None:
        write_json_atomic(self.path / ORDER_FILE, asdict(self))


def read_order(folder: Path) -> Order:
    """Raises DamagedRecordError when the folder holds none."""
    record: dict[str, Any] | None = read_json(folder / ORDER_FILE)
    if record is None:
        raise DamagedRecordError(f"{folder} has no {ORDER_FILE}; is the run root the same folder on every node?")
    return Order(**{**record, "limits": Limits(**record["limits"])})
