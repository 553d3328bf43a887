"""Rules of options that depend on others, or whose unit was wrong."""

from __future__ import annotations

from conf.import_reference.rules import OPTIONS, Kind, Outcome, Published, Rule, same

PLANNER = "global_resource_planner"
INSTANCE_TP = "heterogeneous_rollout.instances[].tp"
ROLLOUT_LEN = "heterogeneous_rollout.max_model_len"
SUM_OF_BOTH_DIRECTIONS = (400e9, 600e9, 900e9, 1800e9)
"""NVLink rates as data sheets of A800, A100, H100/H200 and B200 print them, bytes/s."""
LEAST_WRONG_NETWORK = 1e11
"""No single port moves this many bytes/s: a number from here on is a link rate in Gb/s with nine zeros."""


def train_tp(view: Published, name: str) -> Outcome:
    if view.whole("train_tp_size") > 0:
        return same(view, name)
    return Outcome(Kind.FIXED, {name: _train_tp(view)}, "0 meant: take tp_size")


def tp(view: Published, name: str) -> Outcome:
    if view.whole("train_tp_size") > 0:
        return Outcome(Kind.DROPPED, why="train_tp_size overwrote it there as well")
    if view.number(name) >= 1:
        return Outcome(Kind.RENAMED, {"train_tp_size": view[name]})
    return Outcome(Kind.FIXED, {"train_tp_size": 1}, "less than 1 meant 1")


def _train_tp(view: Published) -> int:
    given = view.whole("train_tp_size")
    return given if given > 0 else max(1, view.whole("tp_size"))


def _train_dp(view: Published) -> int:
    """Data-parallel replicas as the published system counts them, at least 1."""
    given = view.whole("train_dp_size")
    ranks = _train_tp(view) * max(1, view.whole("train_pp_size")) * max(1, view.whole("train_cp_size"))
    return given if given > 0 else max(1, view.whole("train_gpus") // ranks)


def train_dp(view: Published, name: str) -> Outcome:
    return Outcome(Kind.DROPPED, why="derived: train_gpus / (train_tp_size x train_pp_size x train_cp_size)")


def concurrency(view: Published, name: str) -> Outcome:
    each, replicas = max(1, view.whole(name)), _train_dp(view)
    if replicas == 1 and view.number(name) >= 1:
        return same(view, name)
    why = f"counted for each of {replicas} data-parallel replica(s) there, for the whole run here; less than 1 meant 1"
    return Outcome(Kind.FIXED, {name: each * replicas}, why)


def rollout_tp(view: Published, name: str) -> Outcome:
    sizes = _instance_sizes(view)
    if len(sizes) == 1 and sizes[0] != view.whole(name):
        why = f"all of heterogeneous_rollout.instances had TP {sizes[0]}, and they were the ones that were started"
        return Outcome(Kind.FIXED, {name: sizes[0]}, why)
    return same(view, name)


def instance_tp(view: Published, name: str) -> Outcome:
    if not view.switch("heterogeneous_rollout.enabled"):
        return Outcome(Kind.DROPPED, why="no effect there either: heterogeneous_rollout.enabled is false")
    sizes, total = _instance_sizes(view), _instance_gpus(view)
    gpus = "" if total == view.whole("rollout_gpus") else f"rollout_gpus: the instances had {total} GPUs together"
    if len(sizes) == 1:
        return Outcome(Kind.RENAMED, {"vllm_tp_size": sizes[0]}, todo=gpus)
    listed = ", ".join(str(size) for size in sizes) or "nothing that is a whole number"
    todo = f"vllm_tp_size: one size for all instances; they had {listed}"
    why = "rollout instances of different tensor-parallel sizes are not built here yet"
    return Outcome(Kind.DROPPED, why=why, todo=f"{todo}; {gpus}" if gpus else todo)


def _instance_sizes(view: Published) -> list[int]:
    """The different TP sizes of the instances that the published system would use."""
    if not view.switch("heterogeneous_rollout.enabled"):
        return []
    return sorted(set(_tp_of_instances(view)))


def _instance_gpus(view: Published) -> int:
    return sum(_tp_of_instances(view))


def _tp_of_instances(view: Published) -> list[int]:
    values = view[INSTANCE_TP]
    return [value for value in values if type(value) is int] if isinstance(values, list) else []


def context_length(view: Published, name: str) -> Outcome:
    """One rule for three places: what was used is written to max_model_len, the others say why they were not."""
    length, used, why = _context_length(view)
    if name == used:
        kind = Kind.FIXED if name == "max_model_len" else Kind.RENAMED
        return Outcome(kind, {"max_model_len": length}, why)
    if name == "max_model_len":
        why = f"at top level it was ignored in silence; {used}={length} was used and is written"
        todo = (
            f"max_model_len: the input also has {view[name]} at top level, which {why.removeprefix('at top level it ')}"
        )
        return Outcome(Kind.DROPPED, why=why, todo="" if view[name] == length else todo)
    if view.number(name) <= 0:
        return Outcome(Kind.DROPPED, why="0 meant: take max_seq_length")
    return Outcome(Kind.DROPPED, why=f"max_model_len={length} comes from {used}: {why}")


def _context_length(view: Published) -> tuple[object, str, str]:
    """(value, name of the option that it comes from, why)."""
    engine, trained = view.number(ROLLOUT_LEN), view.number("max_seq_length")
    one_length = "one length for the engine and for training"
    if engine > 0 and "max_seq_length" in view and trained < engine:
        return view["max_seq_length"], "max_seq_length", "the shorter one: training cut trajectories there"
    if engine > 0:
        return view[ROLLOUT_LEN], ROLLOUT_LEN, one_length
    if "max_seq_length" in view or "max_model_len" not in view:
        return view["max_seq_length"], "max_seq_length", one_length
    why = f"at top level it was ignored in silence and the default of max_seq_length, {trained:g}, was used; it counts here"
    return view["max_model_len"], "max_model_len", why


def cpu_offload(view: Published, name: str) -> Outcome:
    if view.switch(name) and view.number("megatron_optimizer_offload_fraction") == 0:
        why = "with megatron_optimizer_offload_fraction=0 it offloaded nothing there, in silence"
        return Outcome(Kind.FIXED, {name: False}, why)
    return same(view, name)


def sync_interval(view: Published, name: str) -> Outcome:
    if view.number(name) > 0:
        return same(view, name)
    why = "0 never synced, so that rollouts kept their first weights; Libra always syncs"
    return Outcome(Kind.FIXED, {name: 1}, why)


def kept_versions(view: Published, name: str) -> Outcome:
    """There it is the number of weight folders in sync_path, which are also what it calls checkpoints."""
    if name in OPTIONS:
        return same(view, name)
    versions = max(2, view.whole(name))
    if versions == view.number(name):
        return Outcome(Kind.RENAMED, {"weights.keep_versions": versions})
    why = "at least two: an instance may still be reading the one before the newest"
    return Outcome(Kind.FIXED, {"weights.keep_versions": versions}, why)


def ready_timeout(view: Published, name: str) -> Outcome:
    """`heterogeneous_rollout.startup_timeout` and the planner's `vllm_ready_timeout_s` say the same; the longer counts."""
    planner, rollout = f"{PLANNER}.vllm_ready_timeout_s", "heterogeneous_rollout.startup_timeout"
    longest = max((given for given in (planner, rollout) if given in view), key=view.number)
    if name != longest:
        return Outcome(Kind.DROPPED, why=f"{longest} says the same and is as long")
    if view.number(name) > 0:
        return Outcome(Kind.RENAMED, {"rollout.ready_timeout_s": view[name]})
    return Outcome(Kind.DROPPED, why="0 waited for ever; the default of rollout.ready_timeout_s is taken")


def strategy(view: Published, name: str) -> Outcome:
    """`configured` wherever the published file already says what runs."""
    if not view.switch(f"{PLANNER}.enabled"):
        why = "no effect there: global_resource_planner.enabled is false, so the split in the file was used"
    elif view.switch(f"{PLANNER}.initial_allocation_applied"):
        why = "initial_allocation_applied: the split in the file is what the planner had chosen"
    else:
        return same(view, name)
    return same(view, name) if view[name] == "configured" else Outcome(Kind.FIXED, {name: "configured"}, why)


def network(view: Published, name: str) -> Outcome:
    rate = view.number(name)
    if rate >= LEAST_WRONG_NETWORK:
        why = f"a link of {rate / 1e9:g} Gb/s, written as {rate / 1e9:g} GB/s: divided by 8"
        return Outcome(Kind.FIXED, {"hardware.network_bytes_per_s": rate / 8}, why)
    why = "taken as bytes/s; if it is a link rate in bits/s, divide it by 8"
    return Outcome(Kind.RENAMED, {"hardware.network_bytes_per_s": view[name]}, why)


def link(view: Published, name: str) -> Outcome:
    rate = view.number(name)
    if rate in SUM_OF_BOTH_DIRECTIONS:
        why = f"{rate / 1e9:g} GB/s is the data sheet's sum of both directions; one direction is half"
        return Outcome(Kind.FIXED, {"hardware.link_bytes_per_s": rate / 2}, why)
    return Outcome(Kind.RENAMED, {"hardware.link_bytes_per_s": view[name]}, "taken as one direction")


def gpus_per_node(view: Published, name: str) -> Outcome:
    """`gpus_per_node_override` wins over `hardware.gpus_per_node` when it is set."""
    override = view.whole("gpus_per_node_override") > 0
    if name == "gpus_per_node_override":
        if not override:
            return Outcome(Kind.DROPPED, why="0 meant: take hardware.gpus_per_node")
        return Outcome(Kind.RENAMED, {"hardware.gpus_per_node": view[name]})
    if override:
        return Outcome(Kind.DROPPED, why="gpus_per_node_override replaced it")
    return same(view, name)


def head_dim(view: Published, name: str) -> Outcome:
    if view.number(name) > 0:
        return Outcome(Kind.RENAMED, {"model.head_dim": view[name]})
    return Outcome(Kind.DROPPED, why="0 meant d_model / n_heads, which is wrong for some models; config.json says it")


def experts(target: str) -> Rule:
    """Only of a mixture of experts; a dense model of the published system has 1 expert."""

    def rule(view: Published, name: str) -> Outcome:
        if not view.switch("model_arch.is_moe"):
            return Outcome(Kind.DROPPED, why="model_arch.is_moe is false: a dense model has no experts")
        if view.number(name) > 0:
            return Outcome(Kind.RENAMED, {target: view[name]})
        return Outcome(Kind.FIXED, {target: view["model_arch.intermediate_size"]}, "0 meant: take intermediate_size")

    return rule
