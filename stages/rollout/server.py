"""`python -m stages.rollout.server <vLLM's options>`: vLLM's own OpenAI server behind our guard, started by the agent.

On a CPU with one worker the engine core is forked from this process instead of spawned twice over: one import of torch
and vLLM instead of three (start in 10 s instead of 37 on two cores, 0.9 GB of memory instead of 2.4).
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from argparse import Namespace

from stages.process import die_with_parent
from stages.rollout.orphans import bind_forks, bind_spawned
from stages.rollout.settings import ServerSettings

FORK_VARIABLE = "LIBRA_ROLLOUT_FORK"
MIDDLEWARE = "stages.rollout.guard.GuardMiddleware"
WORKER_EXTENSION = "stages.rollout.worker.WeightWorker"

if __name__ == "__mp_main__":  # multiprocessing imports the main module under this name first in a spawned child
    bind_spawned()


def main(arguments: list[str]) -> None:
    """Serve until TERM. Dies with the agent."""
    settings = ServerSettings.from_environment()
    die_with_parent(settings.agent_pid)
    bind_forks()
    # Collecting garbage among a million objects that are here to stay costs a fifth of the imports' time.
    gc.disable()
    from stages.rollout import compat

    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    fork = os.environ.get(FORK_VARIABLE) == "1"
    args = compat.parse_arguments(arguments)
    listening = socket.socket(fileno=settings.listen_fd)
    os.register_at_fork(after_in_child=listening.close)
    compat.run(serve(args, listening, settings, fork=fork))


async def serve(args: Namespace, listening: socket.socket, settings: ServerSettings, *, fork: bool) -> None:
    from stages.rollout import compat

    address = "http://{}:{}".format(*listening.getsockname()[:2])
    config = compat.engine_config(args, fork=fork)
    gc.freeze()
    gc.enable()
    async with compat.running_engine(config, args) as engine:
        await compat.start_workers(engine, settings.run_id, settings.start_folder, settings.weights_dtype)
        stopped = await compat.build_and_serve(engine, address, listening, args)
    try:
        await stopped
    finally:
        listening.close()


if __name__ == "__main__":
    main(sys.argv[1:])
