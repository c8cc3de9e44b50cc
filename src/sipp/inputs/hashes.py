"""One SHA-256 a point, of its bytes as they are given.

It finds the points of one set in another, and the copies within a set. A point that was cast to another type or scaled,
such as an image divided by 255, is another point to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sipp.inputs.batches import Batch
from sipp.results import hashing

DIGITS = 32  # hexadecimal, half of a SHA-256: two of a billion points share them with a probability below 1e-20


def point_hashes(batch: Batch) -> list[str]:
    """The hash of every point of a batch, over the bytes of all its inputs.

    Padding is not content: positions where `real_BT` is False are left out, and so is the mask itself.
    """
    return [_digits(hashlib.sha256(b"".join(point))) for point in zip(*map(_rows, _inputs(batch)), strict=True)]


def hash_of_points(hashes: Iterable[str]) -> str:
    """One SHA-256 of the hashes of many points, whatever their order."""
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()


def hash_of_batch(hashes: Iterable[str]) -> str:
    """The hash of a batch that counts as one draw."""
    return _digits(hashlib.sha256("".join(hashes).encode()))


def is_padding_mask(name: str) -> bool:
    """Whether an input of this name says which positions are padding."""
    return name == "attention_mask" or name.endswith("padding_mask")


def _digits(sha256: hashlib._Hash) -> str:
    return sha256.hexdigest()[:DIGITS]


def _inputs(batch: Batch) -> list[Tensor | list[Tensor]]:
    """The content of the points: every input, without padding and without the mask that marks it."""
    names = (name for name in sorted(batch.kwargs) if batch.real_BT is None or not is_padding_mask(name))
    return [_content(value, batch.real_BT) for value in (*batch.args, *(batch.kwargs[name] for name in names))]


def _content(value: Tensor | PackedSequence, real_BT: Tensor | None) -> Tensor | list[Tensor]:
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return [sequence[:length] for sequence, length in zip(padded, lengths.tolist())]
    if real_BT is None or value.ndim < 2 or value.shape[1] != real_BT.shape[1]:
        return value
    return [point[real] for point, real in zip(value, real_BT.to(value.device))]


def _rows(part: Tensor | list[Tensor]) -> list[bytes]:
    """The bytes of each point, from a copy: a tensor that NumPy has seen can no longer be resized."""
    if isinstance(part, Tensor):
        return [row.tobytes() for row in hashing.raw_bytes(part).reshape(len(part), part[0].nbytes).clone().numpy()]
    return [hashing.raw_bytes(point).clone().numpy().tobytes() for point in part]
