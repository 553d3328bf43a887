"""Everything of a trainer rank that a checkpoint holds, as named tensors: the same names and code for saving and restoring.

- `param.NAME`: this rank's share of a model parameter, flat. Data-parallel ranks divide the parameters among themselves as
  megatron-core's distributed optimizer divides their steps, so that over all ranks every element is saved once.
- `master.NAME`: its float32 master, where the parameter is not float32 itself; `exp_avg.NAME`, `exp_avg_sq.NAME`: Adam's moments.
- `adam.step`: how many steps Adam has taken; `rng.*`: see `stages.trainer.rng`.

Where a master or a moment lives (GPU, or host memory with `megatron_optimizer_cpu_offload`) makes no difference to the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from stages.trainer.optimizer import TrainableModel
from stages.trainer.rng import PREFIX, rng_state, set_rng_state

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "adam.step"


class OptimizerStateError(RuntimeError):
    """The optimizer holds something that a checkpoint would not hold."""


@dataclass(frozen=True)
class Slot:
    """One parameter of the module, as far as this rank's optimizer steps it.

    `shard` is a flat view of the live parameter, `master` what Adam steps (for a float32 model without offload the same
    memory). `adam` holds its moments, under `master`, and `group` is the one of its groups that has it.
    """

    name: str
    shard: torch.Tensor
    master: torch.Tensor
    adam: torch.optim.Optimizer
    group: dict[str, Any]

    @property
    def has_own_master(self) -> bool:
        return self.shard.dtype != torch.float32

    @property
    def moments(self) -> dict[str, Any]:
        found: dict[str, Any] = self.adam.state.get(self.master, {})
        return found

    @property
    def step(self) -> float:
        """From the parameter's state (torch's Adam), else from its group (fused Adams of other libraries)."""
        step = self.moments.get("step", self.group.get("step", 0))
        return float(step)


def slots(trainable: TrainableModel) -> Iterator[Slot]:
    """In the order of the model. Empty on a rank that steps nothing."""
    names = {parameter: name for name, parameter in trainable.module.named_parameters()}
    for distributed in trainable.optimizer.chained_optimizers:
        places = _places(distributed.optimizer)
        for parameter, (group, order) in distributed.model_param_group_index_map.items():
            part = distributed._get_model_param_range_map(parameter)["param"]
            stepped = distributed.optimizer.param_groups[group]["params"][order]
            if isinstance(distributed.optimizer, HybridDeviceOptimizer):
                stepped = distributed.optimizer.param_to_inner_param[stepped]
            shard = parameter.detach().view(-1)[part.start : part.end]
            yield Slot(names[parameter], shard, stepped, *places[id(stepped)])


def _places(optimizer: torch.optim.Optimizer) -> dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """For each tensor that is stepped, by id, the Adam that does it and the group in it."""
    adams = optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]
    return {id(tensor): (adam, group) for adam in adams for group in adam.param_groups for tensor in group["params"]}


def state_to_save(trainable: TrainableModel) -> dict[str, torch.Tensor]:
    """The live tensors where possible: they must not change until they are written.

    Raises OptimizerStateError when parameters were stepped a different number of times, or one never.
    """
    tensors: dict[str, torch.Tensor] = {}
    steps = set()
    for slot in slots(trainable):
        if not slot.moments:
            raise OptimizerStateError(f"{slot.name} has no Adam state: no step has reached it")
        steps.add(slot.step)
        tensors |= _weights(slot) | {f"{moment}.{slot.name}": slot.moments[moment] for moment in MOMENTS}
    if len(steps) > 1:
        raise OptimizerStateError(f"parameters were stepped {sorted(steps)} times; a checkpoint has one number")
    return tensors | _scalars(trainable, next(iter(steps), 0.0))


def state_to_fill(trainable: TrainableModel) -> dict[str, torch.Tensor]:
    """Tensors of the same names and shapes to read a checkpoint into; `restore` makes of them what the optimizer needs."""
    tensors: dict[str, torch.Tensor] = {}
    for slot in slots(trainable):
        tensors |= _weights(slot)
        # Beside the live ones, if any: a checkpoint that turns out to be damaged leaves no half state.
        tensors |= {f"{moment}.{slot.name}": torch.empty_like(slot.master, requires_grad=False) for moment in MOMENTS}
    return tensors | _scalars(trainable, 0.0)


def restore(trainable: TrainableModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Take over what was read into `state_to_fill`; collective over the data-parallel ranks, which share their parameters."""
    step = float(tensors[STEP])
    with torch.no_grad():
        for slot in slots(trainable):
            if not slot.has_own_master and slot.master.data_ptr() != slot.shard.data_ptr():
                slot.master.copy_(slot.shard)
            _set_moments(slot, {moment: tensors[f"{moment}.{slot.name}"] for moment in MOMENTS}, step)
    for distributed in trainable.optimizer.chained_optimizers:
        if isinstance(distributed.optimizer, HybridDeviceOptimizer):
            distributed.optimizer._sync_sub_optimizers_state_to_hdo()
    with trainable.grid.optimizer_calls():
        trainable.wrapped.start_param_sync()
    set_rng_state({name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}, trainable.grid.device)


def _weights(slot: Slot) -> dict[str, torch.Tensor]:
    own_master = {f"master.{slot.name}": slot.master.detach()} if slot.has_own_master else {}
    return {f"param.{slot.name}": slot.shard, **own_master}


def _scalars(trainable: TrainableModel, step: float) -> dict[str, torch.Tensor]:
    return {STEP: torch.tensor(step, dtype=torch.float64), **rng_state(trainable.grid.device)}


def _set_moments(slot: Slot, moments: dict[str, torch.Tensor], step: float) -> None:
    if not isinstance(slot.adam, torch.optim.Adam):
        slot.adam.state[slot.master] = dict(moments)
        slot.group["step"] = int(step)
        return
    # Where torch's Adam puts the count when it makes it (torch.optim.adam._init_group).
    on_device = slot.group.get("fused") or slot.group.get("capturable")
    count = torch.tensor(step, dtype=torch.float32, device=slot.master.device if on_device else None)
    slot.adam.state[slot.master] = {"step": count, **moments}
