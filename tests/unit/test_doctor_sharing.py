"""What the doctor makes of the network, the filesystem, clocks, collectives and a reloaded engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Status
from launch.doctor.probes import (
    bandwidth,
    clock,
    collective,
    engine,
    filesystem,
    ports,
    sharing,
)
from tests.doctor_kit import changed, healthy, only

# ---- ports, files, clocks --------------------------------------------------------------------------------------------------------


def test_a_node_that_cannot_be_reached_is_a_problem() -> None:
    evidence = changed(healthy(), "node1", "ports", reached={"address": "timed out"})
    findings = ports.judge(evidence)

    assert only(findings, "nodes reach one another").status is Status.PROBLEM
    assert "timed out" in only(findings, "nodes reach one another").seen


def test_a_node_without_an_address_is_a_problem_for_several_nodes() -> None:
    evidence = changed(healthy(), "node1", "ports", address="", no_address="host n has no address", reached={})

    assert only(ports.judge(evidence), "ports").status is Status.PROBLEM


def test_one_node_alone_was_not_reached_by_others() -> None:
    evidence = healthy()
    evidence = replace(evidence, nodes={"node0": evidence.nodes["node0"]})

    assert only(ports.judge(evidence), "nodes reach one another").status is Status.NOT_TRIED


@pytest.mark.parametrize(
    "values, name, status",
    [
        ({"kind": "ext4"}, "filesystem of the run root", Status.NOTE),
        ({"kind": "lustre"}, "filesystem of the run root", Status.OK),
        ({"free": 2e8}, "room on the run root", Status.PROBLEM),
        ({"free": 2e10}, "room on the run root", Status.NOTE),
        ({"files": 50}, "room on the run root", Status.PROBLEM),
        ({"publish_s": 0.8}, "publishing a record", Status.NOTE),
    ],
)
def test_the_filesystem_is_judged(values: dict[str, Any], name: str, status: Status) -> None:
    assert only(filesystem.judge(changed(healthy(), "node1", "filesystem", **values)), name).status is status


def seen_by_node0(**found: float | None) -> Evidence:
    return changed(healthy(), "node0", "sharing", seen=[{"writer": 1, "listed_s": 0.02, "lag_s": 0.0, **found}])


@pytest.mark.parametrize(
    "found, name, status",
    [
        ({"listed_s": 12.0}, "seen by other nodes", Status.OK),
        ({"listed_s": None, "lag_s": None}, "seen by other nodes", Status.PROBLEM),
        ({"listed_s": None, "lag_s": None}, "exists() after a miss", Status.NOT_TRIED),
        ({"lag_s": 29.0}, "exists() after a miss", Status.NOTE),
        ({"lag_s": None}, "exists() after a miss", Status.NOTE),
    ],
)
def test_visibility_between_nodes_is_judged(found: dict[str, float | None], name: str, status: Status) -> None:
    assert only(sharing.judge(seen_by_node0(**found)), name).status is status


def test_a_name_with_two_winners_is_a_problem() -> None:
    evidence = changed(healthy(), "node1", "sharing", won=list(range(9, 20)))

    finding = only(sharing.judge(evidence), "exclusive creation")

    assert finding.status is Status.PROBLEM
    assert "of 20 names 1 had several winners" in finding.seen


@pytest.mark.parametrize("values, status", [({"torn": 1}, Status.PROBLEM), ({"last": 12}, Status.NOTE)])
def test_a_torn_record_is_a_problem_and_an_old_one_is_noted(values: dict[str, int], status: Status) -> None:
    evidence = changed(healthy(), "node1", "sharing", **values)

    assert only(sharing.judge(evidence), "replacing a record").status is status


def test_bandwidth_is_said_for_each_number_of_threads_in_order() -> None:
    finding = only(bandwidth.judge(healthy()), "write bandwidth of the run root")

    assert finding.seen.startswith("1.0 GB/s with 1, 2.0 GB/s with 4, 3.0 GB/s with 16 threads")
    assert finding.libra == "write the weights of a 7B model in about 5.1 s at best"


def test_a_small_file_is_said_to_be_small() -> None:
    assert "a cache may answer" in bandwidth.judge(healthy(quick=True))[0].seen


@pytest.mark.parametrize(
    "offset_s, uncertainty_s, status", [(0.002, 0.001, Status.OK), (-7.5, 0.1, Status.NOTE), (2.0, 5.0, Status.OK)]
)
def test_a_clock_is_noted_only_beyond_what_is_uncertain(offset_s: float, uncertainty_s: float, status: Status) -> None:
    evidence = changed(healthy(), "node1", "clock", offset_s=offset_s, uncertainty_s=uncertainty_s)

    (finding,) = clock.judge(evidence)

    assert finding.status is status
    assert "node1" in finding.seen


# ---- programs ------------------------------------------------------------------------------------------------------------------


def with_program(name: str, **values: Any) -> Evidence:
    evidence = healthy()
    return replace(evidence, programs={**evidence.programs, name: {**evidence.programs[name], **values}})


def test_nccl_rates_are_compared_with_their_options() -> None:
    findings = collective.judge(healthy())

    assert [finding.status for finding in findings] == [Status.OK, Status.OK]
    assert "361.2 GB/s bus bandwidth inside a node" in findings[0].seen
    assert "80% of hardware.link_bytes_per_s=4.5e+11" in findings[0].seen
    assert "84% of hardware.network_bytes_per_s=5e+10" in findings[1].seen
    assert collective.corrected_rates(healthy()) == {}


@pytest.mark.parametrize("measured", [2.2e10, 6e11])
def test_a_rate_that_cannot_be_the_configured_hardware_s_is_corrected(measured: float) -> None:
    evidence = with_program("collective", bus_bytes_per_s={"inside a node": measured})

    (finding,) = collective.judge(evidence)

    assert finding.status is Status.NOTE
    assert collective.corrected_rates(evidence) == {"hardware.link_bytes_per_s": measured}


def test_gloo_is_not_called_nccl() -> None:
    evidence = with_program("collective", backend="gloo", bus_bytes_per_s={"between nodes": 1e9})

    (finding,) = collective.judge(evidence)

    assert finding.name == "gloo all-reduce (no GPU: NCCL was not tried)"
    assert "the profile takes nothing from it" in finding.libra


def test_a_collective_that_failed_is_a_problem() -> None:
    (finding,) = collective.judge(with_program("collective", error="rank 3: unhandled system error"))

    assert finding.status is Status.PROBLEM
    assert "unhandled system error" in finding.seen


@pytest.mark.parametrize(
    "step, status",
    [
        ({"skipped": "no GPU on one node"}, Status.NOT_TRIED),
        ({"said": "not over after 420 s"}, Status.PROBLEM),
        (None, Status.NOT_TRIED),
    ],
)
def test_a_collective_without_a_report_is_judged_by_its_step(step: dict[str, str] | None, status: Status) -> None:
    evidence = healthy(programs={}, steps={} if step is None else {"collective": step})

    (finding,) = collective.judge(evidence)

    assert finding.status is status


def test_reloaded_weights_with_the_same_log_probs_are_fine() -> None:
    assert {finding.status for finding in engine.judge(healthy())} == {Status.OK}


@pytest.mark.parametrize("found", [0.42, math.inf, math.nan])
def test_a_reload_that_changes_the_log_probs_is_a_problem(found: float) -> None:
    evidence = with_program("engine", differences={"after the same weights": 0.0, "after others and back": found})

    finding = only(engine.judge(evidence), engine.IDENTITY)

    assert finding.status is Status.PROBLEM
    assert "rollout_weight_reload_method=restart" in finding.libra


def test_a_reload_that_changes_nothing_is_a_problem() -> None:
    finding = only(engine.judge(with_program("engine", moved=0.0)), engine.IDENTITY)

    assert finding.status is Status.PROBLEM
    assert "changes nothing" in finding.seen


def test_an_engine_that_failed_is_a_problem_with_its_words() -> None:
    (finding,) = engine.judge(with_program("engine", error="VllmStartError: no", stage="starting the server"))

    assert finding.status is Status.PROBLEM
    assert finding.seen == "starting the server: VllmStartError: no"


def test_the_quick_mode_tries_neither_program() -> None:
    evidence = healthy(programs={}, quick=True)

    assert [finding.status for finding in (*collective.judge(evidence), *engine.judge(evidence))] == [
        Status.NOT_TRIED
    ] * 2
