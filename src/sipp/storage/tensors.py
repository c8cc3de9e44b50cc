"""Converts tensors to the bytes of a safetensors file and back, as torch tensors or (without torch) as raw bytes.

torch and NumPy are imported inside the functions, because commands that only read records must start fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from safetensors import SafetensorError, deserialize

from sipp.errors import DataError, ModelError
from sipp.results.network_hash import entries_hash

MOST_HEADER = 1 << 28  # bytes; a larger header is not parsed
_DTYPES = {  # what safetensors calls an element type, and its name in torch
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True)
class RawTensor:
    """A tensor as stored in a file: dtype (named by safetensors), shape and bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def dtype(self) -> str:
        """The dtype, named by torch."""
        return f"torch.{_DTYPES[self.kind]}"

    def n_nonzero(self) -> int:
        """The number of non-zero entries; -0.0 is zero, NaN is not."""
        import numpy as np

        if not self.data:
            return 0
        bits = np.frombuffer(self.data, f"<u{len(self.data) // math.prod(self.shape)}")
        is_float = "float" in self.dtype
        return int(np.count_nonzero(bits << bits.dtype.type(1) if is_float else bits))  # of floats all but the sign


def metadata_in(file: BinaryIO) -> dict[str, Any]:
    """The metadata of a safetensors file, without reading its tensors; empty for any other file."""
    n_bytes = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(n_bytes)) if n_bytes <= MOST_HEADER else {}
    except (ValueError, RecursionError):
        return {}
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def tensors_to_bytes(tensors: Mapping[str, object], mark: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors, `mark` as metadata, and tied ones under each name."""
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
        return save(plain, mark)
    except SafetensorError as error:
        raise ModelError(
            f"the names and the record do not fit into the header of a safetensors file, which takes 100 MB ({error})"
        ) from error


def in_own_memory(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with views copied: torch.save writes the whole storage behind a view, such as a data set.

    Tied tensors stay tied; values that are no tensors are unchanged.
    """
    from torch import Tensor
    from torch.nn import Parameter

    copies: dict[tuple[object, ...], Any] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        memory = value.untyped_storage()
        if value.is_contiguous() and memory.nbytes() == value.nbytes:
            return value
        place = (memory.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        if place not in copies:
            copied = value.detach().clone()
            is_parameter = isinstance(value, Parameter)
            copies[place] = Parameter(copied, requires_grad=value.requires_grad) if is_parameter else copied
        return copies[place]

    return {name: own(value) for name, value in tensors.items()}


def tensors_from_bytes(data: bytes, where: object) -> dict[str, Any]:
    """The tensors of a safetensors file, on the CPU; a DataError names `where` the bytes came from."""
    import torch
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, torch.cuda.OutOfMemoryError) as error:
        raise DataError(f"not a safetensors file: {error}", where=where) from error


def raw_tensors(data: bytes, where: object) -> dict[str, RawTensor]:
    """The raw tensors of a safetensors file; a DataError names `where` the bytes came from."""
    try:
        tensors = {
            name: RawTensor(stored["dtype"], tuple(stored["shape"]), stored["data"])
            for name, stored in deserialize(data)
        }
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"not a safetensors file: {error}", where=where) from error
    unknown = next((name for name, stored in tensors.items() if stored.kind not in _DTYPES), None)
    if unknown is not None:
        raise DataError(
            f"{unknown!r:.60} has the element type {tensors[unknown].kind}, which is not read here", where=where
        )
    return tensors


def raw_hash(tensors: Mapping[str, RawTensor]) -> str:
    """The hash of a state_dict with these tensors (`state_hash`), without torch."""
    return entries_hash(tensors, lambda _, tensor: ([tensor.dtype, list(tensor.shape)], tensor.data))
