"""What a partition holds, against what a job asks for."""

from __future__ import annotations

from typing import Any

import pytest

from launch.hetjob import Component, HetJobSpec
from launch.partitions import parse_duration_s, parse_gres, parse_sinfo, partition_problems, plain_features, waiting_for

SINFO = """\
dev*|node[0-2]|4|8000|gpu:2|(null)|idle|infinite|1-infinite
dev*|node3|4|8000|gpu:2|(null)|down*|infinite|1-infinite
gpu|gpu[01-10]|96|1031000|gpu:h100:8(S:0-1)|h100,nvme,ib|mixed|2-00:00:00|1-8
gpu|gpu[11-12]|96|1031000|gpu:h100:8(S:0-1)|h100,nvme,ib|drained|2-00:00:00|1-8
gpu|gpu[21-24]|64|515000|gpu:a100:4(S:0-1),tmpfs:900|a100,ib|allocated|2-00:00:00|1-8
cpu|cn[001-100]|128+|257000+|(null)|(null)|idle~|12:00:00|1-16
"""
NODES = parse_sinfo(SINFO)


def component(role: str = "trainer", nodes: int = 1, **changes: Any) -> Component:
    sizes: dict[str, Any] = {"cpus": 64, "gpus_per_node": 8, "mem_bytes": 0, "partition": "gpu"} | changes
    return Component(roles=(role,), nodes=nodes, **sizes)


def job(*components: Component, time_min: int = 60) -> HetJobSpec:
    return HetJobSpec("libra", time_min, "/runs/log", components)


def problems(*components: Component, time_min: int = 60) -> str:
    return "\n".join(partition_problems(job(*components, time_min=time_min), NODES))


def test_a_line_of_sinfo_is_nodes_that_are_alike() -> None:
    default, down, mixed = NODES[:3]

    assert (default.partition, default.is_default, default.names) == (
        "dev",
        True,
        frozenset({"node0", "node1", "node2"}),
    )
    assert (default.cpus, default.memory_bytes, default.gpus) == (4, 8000 * 2**20, (("", 2),))
    assert (default.limit_s, default.most_nodes, default.features) == (None, None, frozenset())
    assert [node.is_usable for node in NODES] == [True, False, True, False, True, True]
    assert (mixed.gpus, mixed.features) == ((("h100", 8),), frozenset({"h100", "nvme", "ib"}))
    assert (mixed.limit_s, mixed.most_nodes) == (172800, 8)
    assert (NODES[5].cpus, NODES[5].memory_bytes) == (128, 257000 * 2**20)
    assert down.names == {"node3"}


def test_lines_that_are_none_are_skipped() -> None:
    assert parse_sinfo("\nslurm_load_partitions: warning\n") == []


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("(null)", []),
        ("gpu:8", [("", 8)]),
        ("gpu:h100:8(S:0-1)", [("h100", 8)]),
        ("gpu:a100:4(S:0),gpu:1g.10gb:7(S:1),shard:8", [("a100", 4), ("1g.10gb", 7)]),
        ("craynetwork:4,gpu:2", [("", 2)]),
    ],
)
def test_gpus_are_read_from_generic_resources(text: str, wanted: list[tuple[str, int]]) -> None:
    assert list(parse_gres(text)) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("infinite", None),
        ("n/a", None),
        ("30", 1800),
        ("10:00", 600),
        ("12:00:00", 43200),
        ("7-00", 604800),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
    ],
)
def test_durations_are_read_as_slurm_writes_them(text: str, wanted: int | None) -> None:
    assert parse_duration_s(text) == wanted


@pytest.mark.parametrize(
    ("constraint", "wanted"),
    [
        ("", set()),
        ("h100", {"h100"}),
        ("h100&nvme", {"h100", "nvme"}),
        ("[r1|r2]", set()),
        ("a|b", set()),
        ("a*2", set()),
    ],
)
def test_only_plain_features_are_judged_here(constraint: str, wanted: set[str]) -> None:
    assert plain_features(constraint) == wanted


def test_a_job_that_fits_has_no_problem() -> None:
    assert problems(component(nodes=4), component("rollout", nodes=8, constraint="h100&nvme")) == ""


def test_nodes_that_are_down_count_but_are_waited_for() -> None:
    wanted = job(component(nodes=4), component("rollout", nodes=8))

    assert partition_problems(wanted, NODES) == []
    assert waiting_for(wanted, NODES) == (
        "trainer and rollout want 12 of the 12 nodes that fit, and 10 of them are up (down or drained: gpu11, gpu12)"
    )
    assert waiting_for(job(component(nodes=4)), NODES) == ""


def test_too_few_nodes_are_refused_with_wanted_and_available() -> None:
    assert problems(component(nodes=13, qos="any")) == (
        "trainer wants 13 node(s) with 8 GPUs, 64 processors in partition gpu, available 12 (it has 12 x 8 h100 GPUs, 96"
        " processors, 1081 GB; 4 x 4 a100 GPUs, 64 processors, 540 GB); lower train_gpus or rollout_gpus, or change"
        " slurm.partition, hardware.gpus_per_node or hardware.cpus_per_node"
    )


@pytest.mark.parametrize(
    ("changes", "available"),
    [
        ({"gpus_per_node": 4, "cpus": 32}, 16),
        ({"gpus_per_node": 4, "cpus": 32, "gpu_type": "a100"}, 4),
        ({"constraint": "a100"}, 0),
        ({"constraint": "ib"}, 12),
        ({"constraint": "(a100|h100)"}, 12),
        ({"cpus": 97}, 0),
        ({"mem_bytes": int(1.2e12)}, 0),
        ({"exclude": "gpu[01-03]"}, 9),
        ({"partition": "cpu", "gpu_flag": "none"}, 100),
        ({"partition": "cpu"}, 0),
        ({"partition": "gpu,dev", "gpus_per_node": 2, "cpus": 4}, 20),
        ({"partition": "", "gpus_per_node": 2, "cpus": 4}, 4),
    ],
)
def test_nodes_are_counted_by_what_the_job_asks_for(changes: dict[str, Any], available: int) -> None:
    assert f"available {available} (" in problems(component(nodes=101, qos="lifts limits", **changes))


@pytest.mark.parametrize(
    ("wish", "option"),
    [
        ({"constraint": "a100"}, "slurm.constraint"),
        ({"exclude": "gpu[01-03]"}, "slurm.exclude"),
        ({"gpu_type": "a100"}, "slurm.gpu_type"),
    ],
)
def test_a_wish_that_leaves_too_few_nodes_is_named_among_the_options(wish: dict[str, Any], option: str) -> None:
    assert f"change slurm.partition, {option}, " in problems(component(nodes=101, **wish))
    assert option not in problems(component(nodes=101))


def test_components_share_no_node() -> None:
    assert problems(component(nodes=7), component("rollout", nodes=8)) == (
        "trainer and rollout want 15 node(s) with 8 GPUs, 64 processors in partition gpu, available 12 (it has 12 x 8 h100"
        " GPUs, 96 processors, 1081 GB; 4 x 4 a100 GPUs, 64 processors, 540 GB); lower train_gpus or rollout_gpus, or change"
        " slurm.partition, hardware.gpus_per_node or hardware.cpus_per_node"
    )
    assert (
        "the job wants 17 nodes (4 for trainer and 13 for rollout), available 16: components share no node"
        in problems(
            component(nodes=4, constraint="h100", qos="q"),
            component("rollout", nodes=13, gpus_per_node=4, cpus=32, qos="q"),
        )
    )


def test_a_time_limit_beyond_the_partitions_would_wait_for_ever() -> None:
    assert "slurm.time_min=3000 is more than partition gpu allows, 2880 min" in problems(component(), time_min=3000)
    assert problems(component(), time_min=2880) == ""
    assert problems(component(qos="marathon"), time_min=3000) == "", "a quality of service may lift the limit"


def test_a_component_larger_than_the_partition_allows_is_refused() -> None:
    assert "trainer wants 9 nodes, partition gpu allows a job 8" in problems(component(nodes=9))


def test_a_partition_that_sinfo_does_not_show_is_slurms_to_judge() -> None:
    hidden = component(partition="hidden", nodes=1000)

    assert problems(hidden, component("rollout", nodes=1)) == ""
    assert waiting_for(job(hidden), NODES) == ""
