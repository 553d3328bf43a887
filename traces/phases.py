"""The phase names of a run: what each means, and where its seconds go in the GPU-hour ledger.

The first group are the names of the reference system, kept so that its traces and ours compare. A stage may record a
phase that is not listed; it is exported like any other, and the ledger counts it with the phase around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LedgerClass(StrEnum):
    """Where a second of a GPU (on CPU: of a worker slot) went. Earlier members win when phases of one slot overlap."""

    PAUSED = "paused"
    USEFUL_TRAIN = "useful train"
    USEFUL_DECODE = "useful decode"
    SET_UP = "set-up"
    WAITING_FOR_WEIGHTS = "waiting for weights"
    WAITING_FOR_DATA = "waiting for data"
    OTHER = "other"
    THROWN_AWAY = "thrown away"
    LOST = "lost to failure"


@dataclass(frozen=True)
class Phase:
    """`ledger` None: a frame around other phases; what none of them covers is OTHER."""

    name: str
    ledger: LedgerClass | None
    meaning: str


_REFERENCE = [
    Phase("step", None, "One optimizer step, from the first look for data to the published weights."),
    Phase("collect_batch", LedgerClass.WAITING_FOR_DATA, "Gathering the trajectories of one step."),
    Phase("distribute", LedgerClass.WAITING_FOR_DATA, "Sending each trainer rank its share of the batch."),
    Phase("rollout_rank_wait", LedgerClass.WAITING_FOR_DATA, "A trainer rank waiting for the rank that collects."),
    Phase("align", LedgerClass.USEFUL_TRAIN, "Bringing all trainer ranks to the same batch shape."),
    Phase("advantage", LedgerClass.USEFUL_TRAIN, "Advantages from the rewards of each group."),
    Phase("recompute_logprobs", LedgerClass.USEFUL_TRAIN, "Proximal log-probs under the trainer's own weights."),
    Phase("grpo_update", LedgerClass.USEFUL_TRAIN, "Forward, backward and optimizer update on one batch."),
    Phase("reward_compute", LedgerClass.USEFUL_TRAIN, "Scoring, where the trainer does it itself."),
    Phase("weight_sync", LedgerClass.WAITING_FOR_WEIGHTS, "The whole weight exchange as the trainer sees it."),
    Phase("resource_planner", LedgerClass.OTHER, "Deciding whether another split of the GPUs would pay."),
    Phase("follow_reconfig", LedgerClass.OTHER, "A trainer rank following a reconfiguration before the step."),
    Phase("follow_reconfig_after_step", LedgerClass.OTHER, "A trainer rank following one after the step."),
]

_ALL_STAGES = [
    Phase("set_up", LedgerClass.SET_UP, "Imports, process groups, model and data, until the stage can work."),
    Phase("import", LedgerClass.SET_UP, "Importing libraries."),
    Phase("load_model", LedgerClass.SET_UP, "Reading the model's weights at the start."),
    Phase("warm_up", LedgerClass.SET_UP, "Supervised steps before reinforcement learning begins."),
    Phase("restore_checkpoint", LedgerClass.SET_UP, "Reading trainer or controller state on resume."),
    Phase("save_checkpoint", LedgerClass.OTHER, "Writing trainer or controller state."),
    Phase("shut_down", LedgerClass.OTHER, "Leaving in order."),
]

_TRAINER = [
    Phase("wait_for_batch", LedgerClass.WAITING_FOR_DATA, "The trainer waiting for the controller's next batch."),
    Phase("load_batch", LedgerClass.USEFUL_TRAIN, "Reading a batch file and packing it to the token budget."),
    Phase("forward_backward", LedgerClass.USEFUL_TRAIN, "Forward and backward of the micro-batches."),
    Phase("reduce_gradients", LedgerClass.USEFUL_TRAIN, "Gradient exchange that is not hidden by the backward pass."),
    Phase("optimizer_step", LedgerClass.USEFUL_TRAIN, "Clipping and the optimizer's update."),
    Phase("publish_weights", LedgerClass.WAITING_FOR_WEIGHTS, "The trainer held while its weights are copied."),
    Phase("wait_acks", LedgerClass.WAITING_FOR_WEIGHTS, "The trainer waiting until every instance acknowledged."),
    Phase("write_version", None, "Beside the training: writing the shards and the manifest of a version."),
    Phase("serve_version", None, "Beside the training: from the request until every instance acknowledged."),
    Phase("collect_old", None, "Beside the training: deleting versions, batches and records that nobody needs."),
]

_ROLLOUT = [
    Phase("start_server", LedgerClass.SET_UP, "From starting the vLLM process to its first healthy answer."),
    Phase("stop_server", LedgerClass.OTHER, "Stopping the vLLM process."),
    Phase("prepare_weights", None, "Reading and verifying a version while the engine still generates."),
    Phase("read_weights", None, "The agent reading a version into the node's memory, for the engines there."),
    Phase("read_ahead", None, "The same, while the trainer is still writing the version."),
    Phase("commit_weights", LedgerClass.PAUSED, "The engine held: weights swapped, proved, requests resumed."),
    Phase("pause", LedgerClass.PAUSED, "Holding the engine's requests."),
    Phase("swap_weights", LedgerClass.PAUSED, "Copying the new weights into the engine."),
    Phase("reset_prefix_cache", LedgerClass.PAUSED, "Dropping cached keys and values of the old weights."),
    Phase("prove_weights", LedgerClass.PAUSED, "Comparing what the engine holds with what was published."),
    Phase("resume", LedgerClass.PAUSED, "Letting the engine's requests go on."),
    Phase("wait_for_request", None, "An instance's agent waiting for the next version; the engine is free."),
]

_CONTROLLER = [
    Phase("generate", LedgerClass.USEFUL_DECODE, "One request, from sending the prompt to the last token."),
    Phase("score", LedgerClass.OTHER, "The task's verifier on finished trajectories."),
    Phase("evaluate", LedgerClass.OTHER, "Answering the held-out problems."),
    Phase("build_batch", LedgerClass.OTHER, "Turning finished groups into the files of one step."),
    Phase("wait_for_weights", LedgerClass.WAITING_FOR_WEIGHTS, "No prompt may start until a newer version is served."),
    Phase("wait_for_instances", LedgerClass.SET_UP, "Waiting for the first rollout instances to register."),
    Phase("wait_for_trainer", LedgerClass.WAITING_FOR_WEIGHTS, "The controller waiting for the trainer's step."),
]

PHASES: dict[str, Phase] = {
    phase.name: phase for phase in [*_REFERENCE, *_ALL_STAGES, *_TRAINER, *_ROLLOUT, *_CONTROLLER]
}

FLOWS: dict[str, str] = {
    "prompt": "From the prompt ledger (start) to each request made of it (end, once per sample or group).",
    "trajectory": "From the end of its generation (start) to the batch that takes it (end).",
    "batch": "From the controller that wrote the batch (start) to the trainer ranks that read it (end), id = step.",
    "step": "From the optimizer update (start) to the publication of its weights (end), id = step.",
    "version": "From the publication (start) through each prepare (step) to each commit (end), id = version.",
}

COUNTERS: dict[str, str] = {
    "staleness": "Versions between the oldest token of a trajectory and the version being trained.",
    "running": "Trajectories being generated.",
    "queue": "Groups finished and waiting for a batch.",
    "tokens_per_s": "Generated tokens per second.",
    "reward": "Mean reward of a step.",
    "version": "Version that this process trains from or serves.",
}

# An instant of this name, with a `tokens` detail, says that generated tokens will never be trained on.
DROPPED_INSTANT = "dropped"
