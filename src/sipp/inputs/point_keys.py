"""Keys of points by content, whatever batch, layout or padding they come in.

`keys_of` includes dtype and shape: it identifies exactly the points that were used. `draw_keys_of` goes by the numbers
as float32: it counts distinct draws (T18), and finds the points of one set in another. It does not recognise a point
that was cast to half precision, divided by 255, or given with one more input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sipp.results.batches import Batch
from sipp.results.network_hash import raw_bytes

SKETCH_SIZE = 256  # a ledger keeps only this many of the smallest hashes of a set of points
PREFIX_BYTES = 8  # kept of each hash

_Input = Tensor | list[Tensor]  # n x ..., or n tensors of unequal length


def keys_of(batch: Batch) -> list[bytes]:
    """One SHA-256 per point over dtype, shape and bytes of its inputs; how they are passed (names) does not matter.

    Padding is not content: positions where `real_BT` is False are left out, and so is the mask itself.
    """
    inputs = _inputs(batch)
    all_alike = all(isinstance(part, Tensor) for part in inputs)
    points = [[part[i] for part in inputs] for i in range(1 if all_alike else batch.n_points)]
    heads = [json.dumps([[str(t.dtype), list(t.shape)] for t in point]).encode() for point in points]
    rows = zip(heads * batch.n_points if all_alike else heads, *map(_rows, inputs), strict=True)
    return [hashlib.sha256(b"".join(row)).digest() for row in rows]


def draw_keys_of(batch: Batch) -> list[bytes]:
    """One key per point from its numbers as float32, whatever their dtype and names, computed on their device."""
    return _by_point([content_keys(part) for part in _inputs(batch)])


def ledger_keys_of(batch: Batch) -> list[bytes]:
    """One SHA-256 per point of its numbers as float32: the keys of a ledger's sketches, the same in every version."""
    by_part = []
    for part in _inputs(batch):
        numbers = [t.to(torch.float32) + 0.0 for t in ([part] if isinstance(part, Tensor) else part)]  # -0 is 0
        rows = _rows(numbers[0] if isinstance(part, Tensor) else numbers)
        by_part.append([hashlib.sha256(b"[%d]" % (len(row) // 4) + row).digest() for row in rows])
    return _by_point(by_part)


def sketch_of(ledger_keys: Iterable[bytes]) -> list[str]:
    """The smallest hashes of a set of points: two sets that share many points share some of these."""
    return [key[:PREFIX_BYTES].hex() for key in sorted(set(ledger_keys))[:SKETCH_SIZE]]


def set_hash(keys: Iterable[bytes]) -> str:
    """One hash of all points (of `keys_of`), whatever their order."""
    return hashlib.sha256(b"".join(sorted(keys))).hexdigest()


def batch_key(keys: Sequence[bytes]) -> bytes:
    """The key of a draw that is a whole batch."""
    return hashlib.sha256(b"".join(keys)).digest()


def labels_of(batch: Batch) -> list[str]:
    """The label of each point as a string; "" without labels."""
    labels = batch.labels
    if labels is None:
        return [""] * batch.n_points
    rows = labels.detach().cpu().tolist() if isinstance(labels, Tensor) else labels
    if not isinstance(rows, Sequence) or len(rows) != batch.n_points:
        return [repr(rows)] * batch.n_points
    return [repr(row) for row in rows]


def is_padding_mask(name: str) -> bool:
    """Whether an input of this name says which positions are padding."""
    return name == "attention_mask" or name.endswith("padding_mask")


def _inputs(batch: Batch) -> list[_Input]:
    """The content of the points: every input, without padding and without the mask that marks it."""
    names = sorted(batch.kwargs)
    if batch.real_BT is not None:
        names = [name for name in names if not is_padding_mask(name)]
    return [_content(value, batch.real_BT) for value in (*batch.args, *(batch.kwargs[name] for name in names))]


def _content(value: Tensor | PackedSequence, real_BT: Tensor | None) -> _Input:
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return [sequence[:length] for sequence, length in zip(padded, lengths.tolist())]
    if real_BT is None or value.ndim < 2 or value.shape[1] != real_BT.shape[1]:
        return value
    return [point[real] for point, real in zip(value, real_BT.to(value.device))]


def _rows(part: _Input) -> list[bytes]:
    """The bytes of each point."""
    if isinstance(part, Tensor):
        return [row.tobytes() for row in raw_bytes(part).reshape(len(part), part[0].nbytes).numpy()]
    return [raw_bytes(point).numpy().tobytes() for point in part]


def _by_point(by_part: list[list[bytes]]) -> list[bytes]:
    """One key per point from those of its inputs, whatever their order."""
    if len(by_part) == 1:
        return by_part[0]
    points = [sorted(set(keys)) for keys in zip(*by_part, strict=True)]
    return [keys[0] if len(keys) == 1 else hashlib.sha256(b"".join(keys)).digest() for keys in points]


# --- A short key of the numbers of a point ----------------------------------------------------------------------------

# It is computed on their device, in one pass. With r a row of random 64-bit numbers, two different rows of 32-bit words
# x, y have sum_k r_k x_k = sum_k r_k y_k modulo 2^64 with a probability of at most 2^-33: words differ by an odd number
# times a power of two below 2^32. A key is two such sums: one pair collides with a probability of 2^-66, any two of
# 10,000 points with 2^-40. Sums of integers are exact in every order, so a key depends on nothing but the numbers. The
# random rows are public, so this does not protect against points made up to collide: files and certificates use
# SHA-256.

N_SUMS = 2
COMPILED_FROM = 1 << 17  # values; for fewer, torch is done before the compiled code is loaded
CHUNK_VALUES, GPU_CHUNK_VALUES = 1 << 20, 1 << 24  # per chunk
NEGATIVE_ZERO = -(2**31)  # the bits of -0.0


def content_keys(part: Tensor | list[Tensor]) -> list[bytes]:
    """One key per point, from the number of its values and the values as float32; -0 and 0 are the same."""
    if not isinstance(part, Tensor):  # of unequal lengths
        return [key for point in part for key in content_keys(point[None])]
    rows_BN = part.detach().reshape(len(part), -1)
    n_values = rows_BN.shape[1]
    most = CHUNK_VALUES if part.device.type == "cpu" else GPU_CHUNK_VALUES
    sums_B2 = torch.cat([_sums(rows_CN) for rows_CN in rows_BN.split(max(1, most // max(1, n_values)))]).cpu()
    head, raw, width = n_values.to_bytes(8, "little"), sums_B2.numpy().tobytes(), N_SUMS * 8
    return [head + raw[start : start + width] for start in range(0, len(raw), width)]


def _sums(rows_CN: Tensor) -> Tensor:
    rows_CN, factors = rows_CN.to(torch.float32).resolve_neg(), _factors(rows_CN.shape[1], rows_CN.device)
    if rows_CN.device.type == "cpu" and rows_CN.numel() >= COMPILED_FROM:
        from sipp.native.processor import IS_COMPILED  # Numba is slow to import

        if IS_COMPILED:
            from sipp.inputs.point_sums import sums_of_words

            return sums_of_words(rows_CN, factors)
    bits = rows_CN.contiguous().view(torch.int32)  # not `+ 0.0` for -0: torch may flush denormals to 0
    words = bits.masked_fill(bits == NEGATIVE_ZERO, 0).to(torch.int64)
    return (words[:, None] * factors).sum(2)


@lru_cache(maxsize=8)
def _factors(n_values: int, device: torch.device) -> Tensor:
    """The random rows, N_SUMS x N; those for fewer values are a prefix."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = (n_values, N_SUMS)
    limits = torch.iinfo(torch.int64)
    drawn = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64, device="cpu")
    return drawn.t().contiguous().to(device)
