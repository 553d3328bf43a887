"""Site -> text of slurm.conf and gres.conf. Pure; compared with stored texts in tests/golden.

Options are those of Slurm 22.05 (man slurm.conf, man gres.conf) and still known to newer releases.
"""

from __future__ import annotations

from launch.devcluster.topology import Site

# How long a job credential lives, in seconds; it is also how long a requeued job waits before it may start
# again (man slurm.conf, AuthInfo, cred_expire). The default, 120, makes a test of requeueing wait two minutes.
CREDENTIAL_LIFETIME_S = 15
# Unanswered for so long, a node is DOWN. The controller pings at a third of it, and each answer also wakes
# the backfill loop, which otherwise sleeps while nothing changes and forgets a requeued heterogeneous job
# whose waiting time is over (seen with 22.05: restarted after 36 s instead of 150 s).
NODE_TIMEOUT_S = 30


def render_slurm_conf(site: Site) -> str:
    return "\n".join([*_identity(site), *_folders(site), *_scheduling(), *_limits(), *_nodes(site), ""])


def render_gres_conf(site: Site) -> str:
    """Every node names the same device files: they are only counted and numbered, never opened."""
    topology = site.topology
    if topology.gpus_per_node == 0:
        return "# no GPUs\n"
    nodes = ",".join(topology.node_names)
    lines = [f"NodeName={nodes} Name=gpu File={site.fake_gpu(i)}" for i in range(topology.gpus_per_node)]
    return "\n".join([*lines, ""])


def _identity(site: Site) -> list[str]:
    return [
        "ClusterName=libra-dev",
        f"SlurmctldHost={site.hostname}(127.0.0.1)",
        f"SlurmctldPort={site.controller_port}",
        f"SlurmUser={site.user}",
        f"SlurmdUser={site.user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        f"AuthInfo=socket={site.munge_socket},cred_expire={CREDENTIAL_LIFETIME_S}",
    ]


def _folders(site: Site) -> list[str]:
    root = site.root
    return [
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool/%n",
        f"SlurmctldPidFile={root}/run/slurmctld.pid",
        f"SlurmdPidFile={root}/run/%n.pid",
        f"SlurmctldLogFile={root}/log/slurmctld.log",
        f"SlurmdLogFile={root}/log/%n.log",
        "SlurmctldSyslogDebug=quiet",
        "SlurmdSyslogDebug=quiet",
    ]


def _scheduling() -> list[str]:
    return [
        # Heterogeneous jobs start only from the backfill loop, whose default interval is 30 s.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "GresTypes=gpu",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
        "JobCompType=jobcomp/none",
        "MailProg=/bin/true",
    ]


def _limits() -> list[str]:
    return [
        "KillWait=5",
        "MinJobAge=300",
        "ReturnToService=2",
        f"SlurmdTimeout={NODE_TIMEOUT_S}",
        # The default of 10 s is short for a machine whose few cores are all busy with the jobs themselves.
        "MessageTimeout=30",
        # Nodes may claim more processors than the machine has.
        "SlurmdParameters=config_overrides",
    ]


def _nodes(site: Site) -> list[str]:
    topology = site.topology
    gres = f" Gres=gpu:{topology.gpus_per_node}" if topology.gpus_per_node else ""
    size = f"CPUs={topology.cpus_per_node} RealMemory={topology.memory_per_node_mb}{gres}"
    nodes = [
        f"NodeName={name} NodeHostname={site.hostname} NodeAddr=127.0.0.1 Port={port} {size} State=UNKNOWN"
        for name, port in zip(topology.node_names, site.node_ports, strict=True)
    ]
    partition = f"PartitionName={topology.partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    return [*nodes, partition]
