"""Hashes a network: its state_dict and its non-persistent buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.results.hashing import Entry, entries_hash, with_buffers

HOLD_STATE = "_sipp_hold"  # key in the __dict__ of a module whose weights are held (`sipp.hold`)
MASK_SUFFIX = "_mask"  # of the buffers that hold the masks


def model_hash(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of parameters and buffers; the same inside DDP or torch.compile."""
    return with_buffers(state_hash(model.state_dict()), buffers_hash(model))


def buffers_hash(model: nn.Module) -> str | None:
    """The same over non-persistent buffers, which the state_dict leaves out; None if there are none."""
    outside = buffers_outside(model)
    return state_hash(outside) if outside else None


def buffers_outside(model: nn.Module) -> dict[str, Tensor]:
    """The non-persistent buffers by name, without the masks of `hold`, which the weights already obey."""
    inside = model.state_dict().keys()
    outside: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        state = module.__dict__.get(HOLD_STATE)
        masks = () if state is None else {name + MASK_SUFFIX for name in state.names}
        for local, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{local}" if prefix else local
            if name not in inside and local not in masks:
                outside[name] = buffer
    return outside


def tensors_hash(model: nn.Module) -> str:
    """The hash over tensors alone; works for any network, and detects changes of its weights and buffers."""
    return with_buffers(state_hash(tensors_of(model)), buffers_hash(model))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state_dict, without other state."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def state_hash(state: Mapping[str, Any]) -> str:
    """SHA-256 of a state_dict."""
    return entries_hash(state, _entry)


def _entry(name: str, value: Any) -> Entry:
    if isinstance(value, Tensor):
        # of a copy: a tensor that NumPy has seen can no longer be resized
        own = value.clone() if value.device.type == "cpu" else value
        return [str(value.dtype), list(value.shape)], raw_bytes(own).numpy().data
    if value is not None and not isinstance(value, (str, int, float, bytes)):
        raise ModelError(f"state_dict entry {name!r} is a {type(value).__name__}, whose content has no stable hash")
    return [repr(value)], b""


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as a flat uint8 tensor on the CPU, for every dtype."""
    flat = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return flat.resolve_neg().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)


def class_name(model: object) -> str:
    """The qualified class name of a network, for files."""
    return f"{type(model).__module__}.{type(model).__qualname__}"
