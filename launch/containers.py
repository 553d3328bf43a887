"""What stands around the Python of a step: a container, a wrapper, further options of srun. Pure.

A step of Slurm is `srun OPTIONS EXTRA PREFIX python -u -m stages.start FOLDER`. pyxis and enroot live in EXTRA
(`--container-image=...`), apptainer and everything else that ends in an exec in PREFIX. On one machine without Slurm there is
PREFIX alone. Both may differ between trainer and rollout; the controller has a prefix of its own and the common EXTRA.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from conf.schema import LibraConfig

CONTAINER_FLAG = "--container-"
"""How the options of pyxis begin."""


@dataclass(frozen=True)
class Surroundings:
    """`prefixes` and `srun_extra` by role; a role that is not named has neither. `asks_for_gpus`: nodes have GPUs to ask for."""

    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    srun_extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    asks_for_gpus: bool = True

    def prefix(self, role: str) -> tuple[str, ...]:
        return self.prefixes.get(role, ())

    def srun_words(self, role: str) -> tuple[str, ...]:
        return self.srun_extra.get(role, ())


BARE = Surroundings()
"""Nothing around: the Python of the machine itself."""


def surroundings(config: LibraConfig) -> Surroundings:
    launch, slurm = config.launch, config.slurm
    return Surroundings(
        prefixes={
            "trainer": tuple(launch.trainer_prefix or launch.prefix),
            "rollout": tuple(launch.rollout_prefix or launch.prefix),
            "controller": tuple(launch.controller_prefix or launch.prefix),
        },
        srun_extra={
            "trainer": tuple(slurm.trainer.srun_extra or slurm.srun_extra),
            "rollout": tuple(slurm.rollout.srun_extra or slurm.srun_extra),
            "controller": tuple(slurm.srun_extra),
        },
        asks_for_gpus=slurm.gpu_flag != "none",
    )


def is_contained(config: LibraConfig) -> bool:
    """Do steps run in another file system than the job's own shell? Then launch.python is a path in there."""
    around = surroundings(config)
    words = [word for found in around.srun_extra.values() for word in found]
    return any(around.prefixes.values()) or any(word.startswith(CONTAINER_FLAG) for word in words)


def outer_python(config: LibraConfig) -> str:
    """The interpreter of the supervisor, which needs srun and therefore stays outside of every container."""
    inner = config.launch.python or sys.executable
    return config.launch.supervisor_python or (sys.executable if is_contained(config) else inner)
