"""Tensors and text in one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sipp.errors import DataError, ModelError


def tensors_to_bytes(tensors: Mapping[str, object], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors, tied ones under each name."""
    plain = {  # copies: safetensors refuses memory that two names share
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }
    if wrong := [name for name in tensors if name not in plain]:
        raise ModelError(
            f"state_dict entries {', '.join(wrong[:5])} are not tensors, and safetensors stores nothing else"
        )
    return save(plain, metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"is not a valid safetensors file ({error})", where=path) from error
