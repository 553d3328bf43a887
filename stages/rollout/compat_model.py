"""What the weight worker has to know about vLLM's layers; works with vLLM 0.25 to 0.32.

What it relies on, beyond torch modules: the class names below, `layer.quant_method.process_weights_after_loading`, and for
the CPU backend `layer.cpu_linear` and the sizes that a linear layer hands to `quant_method.create_weights`. Nothing of
vLLM is imported: what is not found is reported as a layer that has to be reloaded by vLLM itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""Their parameters are what was loaded, and on a GPU nothing is derived from them."""
_PLAIN_LAYERS = frozenset({"Attention"})
"""Have a step after loading that touches scales of a quantised cache only."""
_AFTER_LOADING = "process_weights_after_loading"


def why_not_copied(model: torch.nn.Module) -> str:
    """The first layer whose weights vLLM derives something from after loading, so that copies alone would leave that old.

    Empty when there is none. Copies that the CPU backend packs for its products are no obstacle: see `packed_layers`.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method).__name__ not in _PLAIN_METHODS:
            return f"{name} ({type(layer).__name__}) is loaded by {type(method).__name__}"
        if callable(getattr(layer, _AFTER_LOADING, None)) and type(layer).__name__ not in _PLAIN_LAYERS:
            return f"{name} ({type(layer).__name__}) processes its weights after loading"
        for attribute, value in vars(layer).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and type(layer).__name__ not in _PLAIN_LAYERS:
                return (
                    f"{name} ({type(layer).__name__}) keeps a tensor {attribute!r} that is neither parameter nor buffer"
                )
    return ""


def packed_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers that multiply with a packed copy of their weight (CPU backend), by name. The weight itself may be gone."""
    return {name: layer for name, layer in model.named_modules() if _is_packed(layer)}


def _is_packed(layer: torch.nn.Module) -> bool:
    """The copy hides in the closure of `cpu_linear`; the variant without one multiplies with the weight that it is given."""
    return getattr(layer.__dict__.get("cpu_linear"), "__closure__", None) is not None


@contextmanager
def unpacked(layers: Mapping[str, torch.nn.Module]) -> Iterator[set[str]]:
    """Within: every layer has a weight of full size again; of those that are yielded (names of parameters) the content is undefined.

    At the end the weights are as before, but for a layer that is not packed any more (vLLM may give up packing).
    """
    emptied = {name: layer for name, layer in layers.items() if _weight(layer).numel() == 0}
    before = {name: _weight(layer) for name, layer in emptied.items()}
    try:
        for layer in emptied.values():
            _create_weight(layer)
        yield {f"{name}.weight" for name in emptied}
    finally:
        for name, layer in emptied.items():
            if _is_packed(layer):
                layer.weight = before[name]


def _create_weight(layer: Any) -> None:
    """As the layer's constructor does it."""
    layer.quant_method.create_weights(
        layer,
        getattr(layer, "input_size_per_partition", layer.input_size),
        layer.output_partition_sizes,
        layer.input_size,
        layer.output_size,
        layer.params_dtype,
        weight_loader=getattr(layer, "weight_loader_v2", layer.weight_loader),
    )


def pack(layer: Any) -> None:
    """Make the packed copy anew from `layer.weight`."""
    layer.quant_method.process_weights_after_loading(layer)


def packed_columns(layer: Any, width: int, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the layer multiplies with: the given columns (int64[n]) of its matrix of `width` columns, as [rows, n].

    Read by multiplying unit vectors, which is exact: every other product is zero.
    """
    units = torch.zeros(len(columns), width, dtype=dtype)
    units[torch.arange(len(columns)), columns] = 1
    result: torch.Tensor = layer.cpu_linear(units, _weight(layer), None)
    return result.T


def _weight(layer: Any) -> torch.nn.Parameter:
    weight: torch.nn.Parameter = layer.weight
    return weight


@torch.no_grad()
def reload(runner: Any, tensors: Mapping[str, torch.Tensor], *, on_cpu: bool) -> None:
    """vLLM's own reload of a loaded model."""
    runner.reload_weights(weights_iterator=iter(tensors.items()))
    if on_cpu:
        _pack_shared(runner.get_model())


def _pack_shared(model: torch.nn.Module) -> None:
    """Pack anew the layers whose weight belongs to another layer too (a head tied to the embedding).

    vLLM's layer-wise reload loads a shared weight through one of its layers and packs it there; the other one keeps
    multiplying with the old copy (seen with vLLM 0.32: HTTP 200, log-probs off by 0.4).
    """
    owner: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.numel() == 0:
            continue
        first = owner.setdefault(id(weight), layer)
        if first is not layer:
            for sharer in (first, layer):
                if hasattr(sharer, "cpu_linear"):
                    pack(sharer)
