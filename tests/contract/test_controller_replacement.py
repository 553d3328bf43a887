"""Instances that die and come back: their requests are no prompt's fault, and nobody asks them while they are away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from stages.controller.ledger import read_ledger
from tests.controller_kit import Reply, Request, ScriptedServer, until
from tests.controller_scene import scene


def dying(server: ScriptedServer, number: int) -> Callable[[Request], Reply]:
    """The server dies with its request `number`."""

    def script(request: Request) -> Reply:
        server.is_dead = server.is_dead or (request.number == number and server.incarnation == 0)
        return Reply()

    return script


def test_requests_that_die_with_an_instance_are_asked_again_elsewhere_without_blame(tmp_path: Path) -> None:
    options = {"max_retries": 0, "heartbeat_interval_s": 0.05}
    played = scene(tmp_path, instances=2, launch={"evaluate": False}, rollout=options)
    played.servers[0].script = dying(played.servers[0], number=0)

    summary = played.play()

    assert summary["steps"] == 3
    (died,) = (
        request for request in played.servers[0].requests[:1]
    )  # all four prompts where it was the first to serve
    assert summary["groups"]["dropped"] == {"interrupted": len(died.prompts)}
    prompts = [int(prompt) for prompt in asked_of(played.servers)]
    assert set(prompts) == set(range(10, 22))  # no prompt skipped, none new


def test_the_only_instance_is_waited_for_while_it_is_replaced_and_used_again(tmp_path: Path) -> None:
    options = {"max_retries": 0, "heartbeat_interval_s": 0.05}
    planner = {"runtime_batch_collection_timeout_s": 0.5}
    played = scene(
        tmp_path, total_steps=2, launch={"evaluate": False}, rollout=options, global_resource_planner=planner
    )
    server = played.servers[0]
    server.script = dying(server, number=0)
    path = played.run.ledger / "attempt_000.jsonl"

    def come_back() -> None:
        until(lambda: path.exists() and read_ledger(path).dropped == 4)
        time.sleep(0.8)  # longer than a batch may take
        server.come_back()

    thread = threading.Thread(target=come_back, daemon=True)
    thread.start()
    summary = played.play()
    thread.join()

    assert summary["steps"] == 2
    assert summary["groups"]["dropped"] == {"interrupted": 4}


def asked_of(servers: list[ScriptedServer]) -> list[str]:
    return [prompt for server in servers for request in server.requests for prompt in request.prompts]
