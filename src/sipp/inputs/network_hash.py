"""Which network: its state_dict in, one SHA-256 out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs.identity import Entry, entries_hash
from sipp.inputs.pointkeys import raw_bytes


def model_hash(model: nn.Module) -> str:
    """SHA-256 over the state_dict's names, dtypes, shapes and bytes, sorted by name; DDP and compile change nothing."""
    return state_hash(model.state_dict())


def tensors_hash(model: nn.Module) -> str:
    """The same over tensors alone: to notice a change, also of a network that holds other state."""
    return state_hash(tensors_of(model))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict without what modules keep in it that is no tensor."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def state_hash(state: Mapping[str, Any]) -> str:
    """The hash that a network with this state_dict has."""
    return entries_hash(_entry(name, value) for name, value in state.items())


def _entry(name: str, value: Any) -> Entry:
    if isinstance(value, Tensor):
        return name, [str(value.dtype), list(value.shape)], raw_bytes(value.clone()).numpy().data
    if value is not None and not isinstance(value, (str, int, float, bytes)):
        raise ModelError(f"state_dict entry {name!r} is a {type(value).__name__}, whose content has no stable hash")
    return name, [repr(value)], b""
