"""How far the clocks of the nodes are apart, from messages through files both ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from launch.doctor.evidence import Evidence
from launch.doctor.finding import Finding, not_tried, note, ok
from launch.doctor.inside.meeting import Scene, get, put
from launch.doctor.wording import seconds
from stages.files import WaitTimeoutError, list_names

KEY = "clock"
NAME = "clocks of the nodes"
POLL_S = 0.001
WORTH_KNOWING_S = 1.0


def measure(scene: Scene) -> dict[str, Any]:
    """`offset_s` of this node's clock against the first node's, known to `uncertainty_s`; both absent on the first node."""
    if scene.world == 1:
        return {"alone": True}
    folder = scene.place("clock")
    deadline_s = time.monotonic() + scene.order.limits.peers_s
    if scene.rank == 0:
        _answer_all(scene, deadline_s)
        return {"reference": scene.node}
    rounds = [_round(scene, number, deadline_s) for number in range(scene.order.limits.clock_rounds)]
    offset_s, uncertainty_s = offset(rounds)
    put(folder / f"done.{scene.rank}.json", {})
    return {"offset_s": offset_s, "uncertainty_s": uncertainty_s, "rounds": len(rounds)}


def offset(rounds: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """(offset, uncertainty) in seconds of the asking clock, from (asked, heard, answered, received) of each round.

    asked and received are on the asking clock, the others on the reference's. The round with the shortest way counts
    (Cristian 1989; RFC 5905): the true offset is within half of the time that both messages took together.
    """
    ways = [
        ((received - asked) - (answered - heard), index)
        for index, (asked, heard, answered, received) in enumerate(rounds)
    ]
    way_s, index = min(ways)
    asked, heard, answered, received = rounds[index]
    return ((asked - heard) + (received - answered)) / 2, way_s / 2


def _round(scene: Scene, number: int, deadline_s: float) -> tuple[float, float, float, float]:
    folder = scene.place("clock")
    wanted = f"pong.{scene.rank}.{number}.json"
    asked = time.time()
    put(folder / f"ping.{scene.rank}.{number}.json", {})
    while wanted not in list_names(folder):
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError("an answer about the time", "the first node", scene.order.limits.peers_s)
        time.sleep(POLL_S)
    received = time.time()
    pong = get(folder / wanted)
    return asked, float(pong["heard"]), float(pong["answered"]), received


def _answer_all(scene: Scene, deadline_s: float) -> None:
    folder, answered = scene.place("clock"), set[str]()
    wanted = {f"done.{rank}.json" for rank in range(1, scene.world)}
    while True:
        names = set(list_names(folder))
        heard = time.time()
        for name in sorted(name for name in names - answered if name.startswith("ping.")):
            answered.add(name)
            put(folder / name.replace("ping.", "pong.", 1), {"heard": heard, "answered": time.time()})
        if wanted <= names:
            return
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError("questions about the time", "the other nodes", scene.order.limits.peers_s)
        time.sleep(POLL_S)


def judge(evidence: Evidence) -> list[Finding]:
    if evidence.mode == "local":
        return []
    answers = evidence.answers(KEY)
    measured = {node: facts for node, facts in answers.items() if "offset_s" in facts}
    if not measured:
        alone = any("alone" in facts for facts in answers.values())
        why = "one node only (--nodes 2)" if alone else evidence.why_not(KEY)
        return [not_tried(NAME, why, "compare no clocks when it decides; traces are aligned by their messages")]
    reference = next((facts["reference"] for facts in answers.values() if "reference" in facts), "the first node")
    node, worst = max(measured.items(), key=lambda item: abs(item[1]["offset_s"]))
    seen = (
        f"{node} {worst['offset_s'] * 1e3:+.1f} ms against {reference}, known to {seconds(worst['uncertainty_s'])}"
        f" ({worst['rounds']} rounds through files)"
    )
    if abs(worst["offset_s"]) - worst["uncertainty_s"] > WORTH_KNOWING_S:
        return [
            note(NAME, seen, "compare no clocks when it decides; wall times in logs of different nodes do not agree")
        ]
    return [ok(NAME, seen, "compare no clocks when it decides; traces are aligned by their messages")]
