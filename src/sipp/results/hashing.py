"""Hashes a network: SHA-256 of its state_dict and its non-persistent buffers.

Files do not store non-persistent buffers, only their hash: with it and the tensors of a file, the hash of the network
can be computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sipp.errors import ModelError

WRAPPERS = frozenset({"module", "_orig_mod"})  # what DDP and torch.compile add to names

Entry = tuple[list[Any], bytes | memoryview]  # dtype and shape, or repr of the value; bytes
Value = TypeVar("Value")


def of_model(model: nn.Module) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of parameters and buffers; the same inside DDP or torch.compile."""
    return with_buffers(of_state(model.state_dict()), of_buffers(model))


def of_buffers(model: nn.Module) -> str | None:
    """The same over non-persistent buffers, which the state_dict leaves out; None if there are none."""
    outside = buffers_outside(model)
    return of_state(outside) if outside else None


def buffers_outside(model: nn.Module) -> dict[str, Tensor]:
    """The non-persistent buffers by name."""
    inside = model.state_dict().keys()
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: buffer for name, buffer in buffers if name not in inside}


def of_tensors(model: nn.Module) -> str:
    """The hash over tensors alone; works for any network, and detects changes of its weights and buffers."""
    return with_buffers(of_state(tensors(model)), of_buffers(model))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state_dict, without other state."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def of_state(state: Mapping[str, Any]) -> str:
    """SHA-256 of a state_dict."""
    return of_entries(state, _entry)


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


def canonical(name: str) -> str:
    """The name of a parameter or buffer without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def of_entries(values: Mapping[str, Value], read: Callable[[str, Value], Entry]) -> str:
    """SHA-256 over all values, sorted by canonical name; each is read when its turn comes."""
    digest = hashlib.sha256()
    for name in sorted(values, key=canonical):
        kind, data = read(name, values[name])
        digest.update(json.dumps([canonical(name), *kind]).encode())
        digest.update(data)
    return digest.hexdigest()


def with_buffers(state: str, buffers: str | None) -> str:
    """Combines the hash of a state_dict with that of the non-persistent buffers, if there are any."""
    return state if buffers is None else hashlib.sha256(f"{state} {buffers}".encode()).hexdigest()
