"""What can go wrong with the development cluster, by who has to act."""

from __future__ import annotations

from launch.errors import LibraError


class DevClusterError(LibraError):
    """The cluster could not be started, used or stopped; the message holds the daemons' last log lines."""


class DevClusterRequestError(LibraError, ValueError):
    """The user asked for something that cannot be: a wrong size, a foreign folder, a taken root."""

    exit_code = 2


class SlurmMissingError(LibraError):
    """Slurm or munge programs are not installed, and installing them is not ours to do here."""
