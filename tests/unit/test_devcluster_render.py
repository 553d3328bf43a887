"""Site -> slurm.conf and gres.conf, against stored texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.devcluster.errors import DevClusterRequestError
from launch.devcluster.render import render_gres_conf, render_slurm_conf
from launch.devcluster.topology import MAX_ROOT_LENGTH, Site, Topology, checked_root

SITE = Site(Path("/home/ada/dc"), "vm", "ada", Topology(), 20_001, (20_002, 20_003, 20_004, 20_005))


def test_the_default_cluster_has_the_stored_slurm_conf(golden: Callable[[str, str], None]) -> None:
    golden("devcluster/slurm.conf", render_slurm_conf(SITE))


def test_the_default_cluster_has_the_stored_gres_conf(golden: Callable[[str, str], None]) -> None:
    golden("devcluster/gres.conf", render_gres_conf(SITE))


def test_a_cluster_without_gpus_names_none() -> None:
    site = Site(Path("/dc"), "vm", "ada", Topology(nodes=1, gpus_per_node=0), 20_001, (20_002,))

    assert "Gres=" not in render_slurm_conf(site)
    assert "Name=gpu" not in render_gres_conf(site)


@given(st.integers(1, 64), st.integers(0, 16))
def test_every_node_has_its_own_port_and_every_gpu_its_own_file(nodes: int, gpus: int) -> None:
    site = Site(Path("/dc"), "vm", "ada", Topology(nodes, gpus), 20_000, tuple(range(20_001, 20_001 + nodes)))

    lines = [line for line in render_slurm_conf(site).splitlines() if line.startswith("NodeName=")]
    files = [line.partition("File=")[2] for line in render_gres_conf(site).splitlines() if "File=" in line]

    assert len({line.split()[0] for line in lines}) == nodes
    assert len({line.split()[3] for line in lines}) == nodes
    assert len(set(files)) == gpus


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": 65}, {"gpus_per_node": -1}, {"gpus_per_node": 17}])
def test_an_impossible_size_names_the_option_and_its_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(DevClusterRequestError, match=f"--{next(iter(wrong)).replace('_', '-')} from"):
        Topology(**wrong)


@pytest.mark.parametrize("root", ["/tmp/with space", "/tmp/a,b", "/tmp/100%", "/tmp/../etc"])
def test_a_root_that_slurm_would_misread_is_refused(root: str) -> None:
    with pytest.raises(DevClusterRequestError, match="LIBRA_DEVCLUSTER_ROOT"):
        checked_root(Path(root))


def test_a_root_without_room_for_socket_names_is_refused() -> None:
    with pytest.raises(DevClusterRequestError, match=f"at most {MAX_ROOT_LENGTH}"):
        checked_root(Path("/tmp") / ("x" * MAX_ROOT_LENGTH))
