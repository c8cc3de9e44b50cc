"""Hashes a network: SHA-256 of its state_dict and its non-persistent buffers.

Files do not store non-persistent buffers, only their hash: with it and the tensors of a file, the hash of the network
can be computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

WRAPPERS = frozenset({"module", "_orig_mod"})  # what DDP and torch.compile add to names


def of_model(model: nn.Module) -> str:
    """The hash of names, dtypes, shapes and bytes of parameters and buffers; the same inside DDP or torch.compile."""
    return with_buffers(of_state(model.state_dict()), of_buffers(model))


def of_buffers(model: nn.Module) -> str | None:
    """SHA-256 over non-persistent buffers, which the state_dict leaves out; None if there are none."""
    inside = model.state_dict().keys()
    buffers = model.named_buffers(remove_duplicate=False)
    outside = {name: buffer for name, buffer in buffers if name not in inside}
    return of_state(outside) if outside else None


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state_dict, without other state."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def of_state(state: Mapping[str, Any]) -> str:
    """SHA-256 over the tensors of a state_dict, sorted by canonical name."""
    digest = hashlib.sha256()
    for name in sorted(state, key=canonical):
        tensor = state[name]
        if isinstance(tensor, Tensor):
            # of a copy: a tensor that NumPy has seen can no longer be resized
            own = tensor.clone() if tensor.device.type == "cpu" else tensor
            digest.update(json.dumps([canonical(name), str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(raw_bytes(own).numpy().data)
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as a flat uint8 tensor on the CPU, for every dtype."""
    flat = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return flat.resolve_neg().resolve_conj().cpu().contiguous().reshape(-1).view(torch.uint8)


def class_name(model: object) -> str:
    """The qualified class name of a network, for files."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def canonical(name: str) -> str:
    """The name of a parameter or buffer without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def with_buffers(state: str, buffers: str | None) -> str:
    """Combines the hash of a state_dict with that of the non-persistent buffers, if there are any."""
    return state if buffers is None else hashlib.sha256(f"{state} {buffers}".encode()).hexdigest()
