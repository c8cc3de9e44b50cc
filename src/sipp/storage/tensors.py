"""Tensors and text in one safetensors file, in memory and on the disk.

torch is imported inside the functions, because the files of a run are named before it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sipp.errors import DataError, ModelError

TRIES = 3  # to read a file that others replace meanwhile


def tensors_to_bytes(tensors: Mapping[str, object], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors, tied ones under each name."""
    from safetensors import SafetensorError
    from safetensors.torch import save
    from torch import Tensor

    wrong = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if wrong:
        raise ModelError(
            f"state_dict entries {', '.join(wrong[:5])} are not tensors, and safetensors holds nothing else"
        )
    # Copies: safetensors refuses memory that two names share.
    plain = {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }
    try:
        return save(plain, metadata)
    except SafetensorError as error:
        raise ModelError(
            f"the names and the record do not fit into the header of a safetensors file, which takes 100 MB ({error})"
        ) from error


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata."""
    from safetensors import SafetensorError, safe_open

    why: Exception | None = None
    for _ in range(TRIES):
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except RuntimeError as error:  # it was replaced by a smaller file after its header was read
            why = error
        except (OSError, SafetensorError, ValueError) as error:
            raise DataError(f"is not a whole safetensors file ({error})", where=path) from error
    raise DataError(f"is not a whole safetensors file ({why})", where=path) from why
