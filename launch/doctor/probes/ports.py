"""Ports and addresses: what the kernel hands out, what can be bound, and whether the nodes reach one another."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.doctor.evidence import Evidence, Report
from launch.doctor.finding import Finding, not_tried, note, ok, problem
from launch.doctor.inside.meeting import Scene
from launch.doctor.wording import by_value
from stages.rollout.address import NoAddressError, node_address

KEY = "ports"
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRIES_BELOW = 8
CALL_S = 5.0


def measure(scene: Scene) -> dict[str, Any]:
    """`floor`, `ceiling`: the ephemeral range. `below`: a port under it that could be bound, 0 for none.

    `reached`: whether the next node was reached by the "address" that its servers and ranks publish: "" where it was, else
    the error. Empty for a single node.
    """
    floor, ceiling = (int(word) for word in RANGE_FILE.read_text().split())
    try:
        address = node_address()
    except NoAddressError as error:
        return {"floor": floor, "ceiling": ceiling, "below": 0, "address": "", "no_address": str(error), "reached": {}}
    facts = {"floor": floor, "ceiling": ceiling, "below": bound_below(address, floor), "address": address}
    return {**facts, "no_address": "", "reached": _reach_next(scene, address) if scene.world > 1 else {}}


def bound_below(address: str, floor: int) -> int:
    """Other processes may have a port; several are tried."""
    for port in random.sample(range(max(1025, floor - 2000), floor), TRIES_BELOW):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    return 0


def _reach_next(scene: Scene, address: str) -> dict[str, str]:
    token = scene.order.token.encode()
    first_meeting_s = scene.order.limits.import_s + scene.order.limits.peers_s
    with _answering(address, token) as port:
        scene.meeting.say("ports", address=address, port=port)
        there = scene.meeting.hear("ports", (scene.rank + 1) % scene.world, first_meeting_s)
        reached = {"address": _call(there["address"], there["port"], token)}
        # Nobody closes before everybody has called.
        scene.meeting.say("called")
        scene.meeting.hear_all("called", deadline_s=first_meeting_s)
    return reached


@contextmanager
def _answering(host: str, token: bytes) -> Iterator[int]:
    """A port chosen by the kernel that sends `token` to whoever connects."""
    with socket.create_server((host, 0)) as server:
        stopped = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, token, stopped), daemon=True)
        server.settimeout(0.1)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stopped.set()
            thread.join()


def _serve(server: socket.socket, token: bytes, stopped: threading.Event) -> None:
    while not stopped.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            connection.sendall(token)


def _call(host: str, port: int, token: bytes) -> str:
    """Why `host` could not be reached; empty when it could."""
    try:
        with socket.create_connection((host, port), timeout=CALL_S) as connection:
            with connection.makefile("rb") as answer:
                return "" if answer.read(len(token)) == token else "somebody else answered"
    except OSError as error:
        return str(error)


def judge(evidence: Evidence) -> list[Finding]:
    answers = evidence.answers(KEY)
    if not answers:
        return [not_tried("ports", evidence.why_not(KEY), "let the kernel choose every port")]
    return [_range(answers), *(_reach(answers) if evidence.mode == "slurm" else [])]


def _range(answers: dict[str, Report]) -> Finding:
    name = "ports"
    texts = {
        node: f"the kernel hands out {facts['floor']} to {facts['ceiling']}; below it {_below(facts)}"
        for node, facts in answers.items()
    }
    libra = "let the kernel choose every port, keep it open, and publish it in the run directory"
    without = {node: str(facts["no_address"]) for node, facts in answers.items() if facts["no_address"]}
    if without and len(answers) > 1:
        return problem(
            name, by_value(without), "not reach this node's servers from others; give the host a name that resolves"
        )
    return ok(name, by_value(texts), libra)


def _below(facts: Report) -> str:
    if not facts["address"]:
        return "not tried: the node has no address but loopback"
    return f"one can be bound on {facts['address']}" if facts["below"] else f"none of {TRIES_BELOW} could be bound"


def _reach(answers: dict[str, Report]) -> list[Finding]:
    if len(answers) < 2:
        return [not_tried("nodes reach one another", "one node only (--nodes 2)", "find out with the first run")]
    return [_reached(answers)]


def _reached(answers: dict[str, Report]) -> Finding:
    name, libra = (
        "nodes reach one another",
        "let the controller ask rollout servers, and trainer ranks meet, by address",
    )
    failed = {node: facts["reached"]["address"] for node, facts in answers.items() if facts["reached"].get("address")}
    if failed:
        seen = f"a connection by address failed from {by_value(failed)}"
        return problem(name, seen, f"not be able to {libra}; ask the administrators (firewall, name service)")
    if any("address" not in facts["reached"] for facts in answers.values()):
        return note(name, "not from every node", libra)
    return ok(name, f"TCP by address between {len(answers)} nodes, ports of the kernel's choice", libra)
