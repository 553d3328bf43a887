"""What one node sees of another's files: how soon, whether exists() lies, who wins, and whether a record is ever torn."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value, seconds
from stages.files import DamagedRecordError, list_names, read_json, write_json_atomic

KEY = "sharing"
POLL_S = 0.005
CREATED = 20
REPLACED = 100
LAG_S = 1.0


def measure(scene: Scene) -> dict[str, Any]:
    """`alone` for one node. Else `seen`: for each round {"writer", "listed_s", "lag_s"} (readers only, None: not in time);
    `won`: names that this node created first; `reads`, `torn`, `last`: of a record that the first node kept replacing."""
    if scene.world == 1:
        return {"alone": True}
    writers = [scene.world - 1] if scene.order.quick else [scene.world - 1, 0]
    seen = [found for number, writer in enumerate(writers) if (found := _visibility(scene, number, writer))]
    return {"seen": seen, "won": _create_first(scene), **_replaced(scene)}


def _visibility(scene: Scene, number: int, writer: int) -> dict[str, Any] | None:
    """Two files at once in two folders: one is looked for by listing, the other by exists(), which was asked before.

    Apart, because listing a folder also refreshes what the client knows about the names in it.
    """
    listed, asked = scene.place(f"listed.{number}"), scene.place(f"asked.{number}")
    readers = [rank for rank in range(scene.world) if rank != writer]
    limits, topic = scene.order.limits, f"looked.{number}"
    longest_s = limits.peers_s + limits.listed_s + limits.exists_s
    if scene.rank == writer:
        scene.meeting.hear_all(topic, readers)
        write_json_atomic(asked / "published", {})
        write_json_atomic(listed / "published", {})
        scene.meeting.hear_all(f"seen.{number}", readers, longest_s)
        return None
    list_names(listed)
    (asked / "published").exists()
    scene.meeting.say(topic)
    found = _look(listed, asked / "published", limits.listed_s, limits.exists_s)
    scene.meeting.say(f"seen.{number}")
    return {"writer": writer, **found}


def _look(listed: Path, asked: Path, listed_deadline_s: float, exists_deadline_s: float) -> dict[str, float | None]:
    """`listed_s` from the look before to the sight of it: an upper bound. `lag_s`: how much later exists() agreed."""
    started_s = time.monotonic()
    listed_at: float | None = None
    exists_at: float | None = None
    while listed_at is None or exists_at is None:
        now_s = time.monotonic()
        if listed_at is None and "published" in list_names(listed):
            listed_at = now_s
        if exists_at is None and asked.exists():
            exists_at = now_s
        if listed_at is None and now_s - started_s > listed_deadline_s:
            break
        if listed_at is not None and now_s - listed_at > exists_deadline_s:
            break
        time.sleep(POLL_S)
    return {
        "listed_s": None if listed_at is None else listed_at - started_s,
        "lag_s": None if listed_at is None or exists_at is None else max(0.0, exists_at - listed_at),
    }


def _create_first(scene: Scene) -> list[int]:
    """All nodes create the same names with O_EXCL at the same time; each name must have one winner."""
    folder = scene.place("created")
    scene.meeting.say("creating")
    scene.meeting.hear_all("creating")
    won = []
    for turn in range(CREATED):
        number = (turn + scene.rank * CREATED // scene.world) % CREATED  # nobody is the first everywhere
        try:
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            continue
        won.append(number)
    return won


def _replaced(scene: Scene) -> dict[str, Any]:
    """The first node replaces one record many times; the others read it all the while."""
    path = scene.place("replaced") / "record.json"
    filling = "x" * 8192
    if scene.rank == 0:
        for number in range(REPLACED):
            write_json_atomic(path, {"number": number, "filling": filling})
        scene.meeting.hear_all("read", range(1, scene.world), scene.order.limits.listed_s + scene.order.limits.peers_s)
        return {"reads": 0, "torn": 0, "last": REPLACED - 1}
    reads, torn, last = 0, 0, -1
    deadline_s = time.monotonic() + scene.order.limits.listed_s
    while last < REPLACED - 1 and time.monotonic() < deadline_s:
        try:
            record = read_json(path)
        except DamagedRecordError:
            torn += 1
            continue
        time.sleep(POLL_S / 5)
        if record is not None:
            reads, last = reads + 1, max(last, int(record["number"]))
            torn += record["filling"] != filling
    scene.meeting.say("read")
    return {"reads": reads, "torn": torn, "last": last}


def judge(evidence: Evidence) -> list[Finding]:
    if evidence.mode == "local":
        return []
    answers = {node: facts for node, facts in evidence.answers(KEY).items() if "alone" not in facts}
    if not answers:
        alone = bool(evidence.answers(KEY))
        why = "one node only (--nodes 2)" if alone else evidence.why_not(KEY)
        return [not_tried("seen by other nodes", why, "find out with the first run")]
    return [_listed(answers), _lag(answers), _winners(answers), _torn(answers)]


def _rounds(answers: dict[str, Report]) -> dict[str, list[Report]]:
    return {node: facts["seen"] for node, facts in answers.items() if facts["seen"]}


def _listed(answers: dict[str, Report]) -> Finding:
    name = "seen by other nodes"
    rounds = _rounds(answers)
    if not rounds:
        return not_tried(name, "no node had to look", "wait by listing folders")
    blind = {node: "not in time" for node, seen in rounds.items() if any(found["listed_s"] is None for found in seen)}
    if blind:
        return problem(
            name,
            f"a published file did not show in a listing on {', '.join(blind)}",
            "not work there: the run root must be one filesystem for all nodes; choose another --run-root and launch.run_dir",
        )
    slowest_s = max(found["listed_s"] for seen in rounds.values() for found in seen)
    return ok(name, f"in a listing within {seconds(slowest_s)}", "wait by listing folders, never by exists()")


def _lag(answers: dict[str, Report]) -> Finding:
    name = "exists() after a miss"
    lags = [found["lag_s"] for seen in _rounds(answers).values() for found in seen if found["listed_s"] is not None]
    if not lags:
        return not_tried(name, "nothing was seen at all", "never wait by exists()")
    libra = "never wait by exists(); do the same in your own scripts"
    if any(lag is None for lag in lags):
        return note(name, "still said no at the end of the measurement, after the listing had the file", libra)
    if max(lags) > LAG_S:
        return note(name, f"{seconds(max(lags))} later than the listing: misses are cached", libra)
    return ok(name, f"at most {seconds(max(lags))} later than the listing", "never wait by exists() all the same")


def _winners(answers: dict[str, Report]) -> Finding:
    name = "exclusive creation"
    winners = [sum(number in facts["won"] for facts in answers.values()) for number in range(CREATED)]
    shares = by_value({node: f"{len(facts['won'])} won" for node, facts in answers.items()})
    if all(count == 1 for count in winners):
        return ok(name, f"{CREATED} names, one winner each ({shares})", "let one of two launchers have a run directory")
    twice = sum(count > 1 for count in winners)
    return problem(
        name,
        f"of {CREATED} names {twice} had several winners",
        "not notice a second launcher in one run directory; use one at a time",
    )


def _torn(answers: dict[str, Report]) -> Finding:
    name = "replacing a record"
    reads, torn = (sum(facts[key] for facts in answers.values()) for key in ("reads", "torn"))
    stale = [node for node, facts in answers.items() if facts["last"] < REPLACED - 1]
    seen = f"replaced {REPLACED} times, read {reads} times by other nodes, {torn} times damaged"
    if torn:
        return problem(name, seen, "stop with DamagedRecordError: rename is not atomic here; choose another run root")
    if stale:
        return note(
            name, f"{seen}; {', '.join(stale)} did not see the last one in time", "see news late on this filesystem"
        )
    return ok(name, seen, "replace records by rename")
