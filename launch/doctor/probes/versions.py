"""Which Slurm this is, and whether its parts are of one release."""

from __future__ import annotations

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.slurm_facts import SlurmFacts, release
from launch.doctor.wording import nodes

OLDEST = (22, 5)
TRIED = "22.05"
CRASHING_SLURMD = (25, 5)
"""slurmd from 25.05 on crashed on heterogeneous steps of an srun up to 24.11 (fixed in 25.05.8 and 25.11.6, changelog)."""
LAST_OLD_SRUN = (24, 11)
FIXED_SLURMD = {(25, 5): 8, (25, 11): 6}


def judge(evidence: Evidence) -> list[Finding]:
    facts = evidence.slurm
    if evidence.silent:
        return [
            problem(
                "Slurm",
                f"{evidence.absent}; only this machine was examined, and no profile is written",
                "not submit anything before it answers; say launch.mode=local if this machine is meant",
            )
        ]
    if facts is None:
        return [
            note(
                "Slurm",
                f"none here: {evidence.absent}; only this machine was examined",
                "run everything on this machine (launch.mode=local)",
            )
        ]
    return [_version(facts), _mixture(facts)]


def _version(facts: SlurmFacts) -> Finding:
    found = facts.config.get("SLURM_VERSION") or facts.versions.get("scontrol", "")
    if not found:
        return not_tried("Slurm version", facts.trouble or "Slurm does not say", "write scripts for 22.05 and later")
    if release(found) < OLDEST:
        return problem(
            "Slurm version",
            f"{found}, older than {TRIED}",
            "not work: its steps need what came with 22.05 (--exact beside --overlap, hetjob in steps)",
        )
    if release(found) == OLDEST:
        return ok("Slurm version", found, "use what was tried with this release")
    return ok("Slurm version", found, f"use options that the manuals have since {TRIED}; only that release was tried")


def _mixture(facts: SlurmFacts) -> Finding:
    """Major releases of client programs, controller and node daemons."""
    name = "releases of client and daemons"
    parts = {f"{program} here": version for program, version in facts.versions.items() if version}
    controller = facts.config.get("SLURM_VERSION", "")
    if controller:
        parts["slurmctld"] = controller
    by_node: dict[str, list[str]] = {}
    for node in facts.nodes:
        if node.version:
            by_node.setdefault(node.version, []).append(node.name)
    parts |= {f"slurmd of {nodes(names)}": version for version, names in by_node.items()}
    if len({release(version) for version in parts.values()}) <= 1:
        versions = ", ".join(sorted(set(parts.values()))) or "none known"
        return ok(name, f"all of one release ({versions})", "rely on it")
    seen = ", ".join(f"{part} {version}" for part, version in parts.items())
    crashing = [version for version in by_node if _crashes(version, facts.versions.get("srun", ""))]
    if crashing:
        return problem(
            name,
            seen,
            f"lose nodes with layout hetjob: slurmd {crashing[0]} crashes on heterogeneous steps of this srun; use"
            " slurm.layout=single, or a newer srun",
        )
    return note(name, seen, "work if Slurm does: it supports clients that are at most two releases older")


def _crashes(slurmd: str, srun: str) -> bool:
    if release(slurmd) < CRASHING_SLURMD or release(srun) > LAST_OLD_SRUN or not srun:
        return False
    patch = slurmd.split(".")[2:3]
    fixed_in = FIXED_SLURMD.get(release(slurmd))
    return fixed_in is not None and (not patch or int(patch[0]) < fixed_in)
