"""What makes two points the same: a hash of each point's content, whatever batch it comes in."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from sipp.errors import DataError
from sipp.records import Batch


def keys_of(batch: Batch) -> list[bytes]:
    """One SHA-256 per point over dtype, shape and bytes of its inputs; how they are passed (names) does not matter."""
    tensors = [*batch.args, *(batch.kwargs[name] for name in sorted(batch.kwargs))]
    if not all(isinstance(t, Tensor) for t in tensors):
        raise DataError(f"{batch.where} holds a PackedSequence, which a certificate cannot take; give padded tensors")
    head = json.dumps([[str(t.dtype), list(t.shape[1:])] for t in tensors]).encode()
    parts = [raw_bytes(t).reshape(batch.n_points, t[0].nbytes).numpy() for t in tensors]
    return [
        hashlib.sha256(head + b"".join(part[index].tobytes() for part in parts)).digest()
        for index in range(batch.n_points)
    ]


def raw_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as one flat row of bytes on the CPU (every dtype, bfloat16 included)."""
    flat = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return flat.cpu().contiguous().reshape(-1).view(torch.uint8)
