"""A private Slurm of several nodes on one machine, for development and tests.

Everything lives in one folder: keys, configuration, state, logs, fake GPUs. Commands reach it through
`SLURM_CONF` only, daemons listen on ports that were free, and they obey only credentials made with the key
in that folder, through a munge daemon of their own. A Slurm or munge that the machine already has is neither
used nor touched.

    python -m launch.devcluster up        start it, wait until every node is idle, print the export line
    python -m launch.devcluster status    what runs
    python -m launch.devcluster down      stop it and delete its folder

What it does not do: no accounting (`sacct` knows nothing), no cgroups (a task may use more memory or
processors than it asked for), and all nodes share one file system and one clock. Slurm can bind its ports to
loopback only where the host's own name resolves to it, which a container's does not; so they are open on all
interfaces, and the key is what protects them.
"""
