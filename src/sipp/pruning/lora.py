"""Masks what LoRA adds to held weights during training, and merges it into them at the end.

LoRA adds a dense product B A to a weight W, and merging it fills every zero. Where W is held, the layer computes with
mask * (W + B A) instead, and `merge` of peft adds mask * B A.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sipp.errors import ModelError
from sipp.inputs import lora_layers

HOLD_STATE = "_sipp_hold"  # key in the __dict__ of a module whose weights are held (`masking.py`)
WEIGHT, BIAS = "weight", "bias"
PATCHED = ("get_delta_weight", "forward")


def check_lora(model: nn.Module) -> None:
    """Raises a ModelError if an adapter is not a plain LoRA (DoRA and other variants)."""
    for name, layer in lora_layers(model):
        if getattr(layer, "lora_variant", None):
            kind = type(next(iter(layer.lora_variant.values()))).__name__
            raise ModelError(f"the adapter is not a plain LoRA ({kind})", where=name, fix="use LoRA without variants")


def mask_lora(model: nn.Module) -> None:
    """Masks what adapters add to held weights; the masks are read at every call."""
    for _, layer in lora_layers(model):
        if _mask(layer) is not None and WEIGHT in layer.base_layer._parameters:
            layer.get_delta_weight, layer.forward = partial(_masked_delta, layer), partial(_masked_forward, layer)


def merge_lora(model: nn.Module) -> None:
    """Merges the masked adapters into held weights, and removes the patches from the layers."""
    for _, layer in lora_layers(model):
        if isinstance(vars(layer).get(PATCHED[0]), partial):
            if not layer.merged:
                layer.merge()
            for name in PATCHED:
                delattr(layer, name)


@contextmanager
def lora_merged(model: nn.Module) -> Iterator[None]:
    """A context in which weights include their adapters, so that the sum is scored and cut.

    Changes written to a weight inside it stay; an unchanged weight gets its exact bits back.
    """
    changed: list[tuple[Any, Tensor, Any]] = []
    try:
        for _, layer in lora_layers(model):
            if not layer.merged and not layer.disable_adapters:
                weight = layer.base_layer.weight
                changed.append((layer, weight.detach().clone(), vars(layer).get("forward")))
                weight.data.copy_(_with_lora(layer, weight.detach()))
                layer.forward = partial(_base_alone, layer)
        yield
    finally:
        for layer, before, own in changed:
            written = layer.base_layer.weight.detach() - _with_lora(layer, before)
            layer.base_layer.weight.data.copy_(before + written)
            del layer.forward
            if own is not None:
                layer.forward = own


def _mask(layer: Any) -> Tensor | None:
    state = vars(layer.base_layer).get(HOLD_STATE)
    return None if state is None else state.masks.get(WEIGHT)


def _active_adapters(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


@torch.no_grad()
def _with_lora(layer: Any, weight: Tensor) -> Tensor:
    total = weight.clone()
    for adapter in _active_adapters(layer):
        total += layer.get_delta_weight(adapter).to(total.dtype)
    return total


def _masked_delta(layer: Any, adapter: str) -> Tensor:
    """What an adapter adds to a weight, where the weight is kept."""
    delta: Tensor = type(layer).get_delta_weight(layer, adapter)
    mask = _mask(layer)
    return delta if mask is None else torch.where(mask.to(delta.device), delta, 0)


def _base_alone(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return layer.base_layer(x, *args, **kwargs)


def _masked_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The layer's output, with the products of its adapters masked."""
    if layer.merged or layer.disable_adapters:
        return type(layer).forward(layer, x, *args, **kwargs)
    if kwargs.get("adapter_names") is not None:
        raise ModelError(
            "a different adapter for each input (adapter_names) cannot be masked", fix="use one adapter per batch"
        )
    base = layer.base_layer
    result = base(x, *args, **kwargs)
    added = result
    for adapter in _active_adapters(layer):
        delta, last = layer.get_delta_weight(adapter), layer.lora_B[adapter]
        parts = {WEIGHT: delta}
        if getattr(base, BIAS, None) is not None:
            parts[BIAS] = torch.zeros_like(base.bias, dtype=delta.dtype)
        dropped = layer.lora_dropout[adapter](x.to(delta.dtype))
        added = added + functional_call(base, parts, (dropped, *args), kwargs)
        if last.bias is not None:
            added = added + last.bias * layer.scaling[adapter]
    return added.to(result.dtype)
