"""One tensor of a network as an entry of the index and its bytes, and back."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sipp.errors import DataError, ModelError
from sipp.storage.artifact_index import Entry, Positions, StoredValues
from sipp.storage.marks import Precision
from sipp.storage.planes import DTYPES, TURNED, cut, decode_planes, encode_planes, raw_bits
from sipp.storage.positions import Flags, PositionKind, decode_positions, encode_positions
from sipp.storage.rounding import FORMATS, Rounding, restore_values, round_values


def rounding_of(tensor: Tensor, precision: Precision, *, is_parameter: bool) -> Rounding:
    """What becomes of a tensor's values: only parameters of two axes or more, and wider than asked for, are rounded.

    Norms, biases and buffers weigh little and decide much: they are always exact.
    """
    if precision in ("fp32", "lossless") or not is_parameter or tensor.dim() < 2 or tensor.dtype not in TURNED:
        return "exact"
    width = 1 if precision == "int8" else FORMATS[precision].itemsize
    return precision if tensor.element_size() > width else "exact"  # type: ignore[return-value]


def encode_tensor(
    names: tuple[str, ...], tensor: Tensor, mask: Tensor | None, rounding: Rounding, *, coded: bool
) -> tuple[Entry, list[bytes]]:
    """The entry of a tensor and its bytes; a mask is True where a weight is kept, whatever its value is."""
    flat_K = tensor.detach().to("cpu").reshape(-1).contiguous()
    if mask is not None and tensor.dtype not in TURNED:
        raise ModelError(f"has a mask, but its dtype is {tensor.dtype}; only floats have masks here", where=names[0])
    kept_K = None if mask is None else mask.detach().to("cpu").reshape(-1).numpy()
    may_be_sparse = tensor.dtype in TURNED and (mask is not None or tensor.dim() >= 2)  # zeros of norms are no matter
    kind, code, is_stored_K = _where(flat_K, kept_K, names[0], may_be_sparse=may_be_sparse)
    value_K = flat_K if kind == "all" else _from_bits(raw_bits(flat_K)[is_stored_K], flat_K.dtype)
    n_rows = tensor.shape[0] if tensor.dim() else 1
    row_K = _rows(is_stored_K, n_rows) if rounding == "int8" else None
    rounded = round_values(value_K, row_K, n_rows, rounding, names[0])
    planes = encode_planes(rounded.stored_K, coded=coded)
    scales = [] if rounded.scale_F is None else encode_planes(rounded.scale_F, coded=coded)
    own: tuple[PositionKind, bytes] | None = None
    if kept_K is not None and not np.array_equal(kept_K, is_stored_K):  # -0.0 among the pruned ones
        own = encode_positions(kept_K)
    entry = Entry(
        names=names,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        positions=Positions(kind=kind, kept=int(value_K.numel()), n_bytes=len(code)),
        values=StoredValues(
            rounding=rounding,
            planes=tuple(map(len, planes)),
            scale_planes=tuple(map(len, scales)),
            largest_change=rounded.largest_change,
            norm_change=rounded.norm_change,
        ),
        mask=_mask_record(kept_K, own),
    )
    pieces = [code, *planes, *scales, own[1] if own else b""]
    _check_back(entry, pieces, flat_K, kept_K)
    return entry, pieces


def decode_tensor(entry: Entry, data: memoryview, where: str) -> tuple[Tensor, Tensor | None]:
    """The tensor and its mask (or None), on the CPU; the entry's sizes were checked before (`read_index`)."""
    values, what = entry.values, f"{where}, tensor {entry.name!r:.100}"
    n_planes = len(values.planes)
    code, *planes, mask_code = cut(
        data, (entry.positions.n_bytes, *values.planes, *values.scale_planes, entry.mask_bytes)
    )
    kept, dtype = entry.positions.kept, DTYPES[entry.dtype]
    is_stored_K = decode_positions(entry.positions.kind, code, entry.n_weights, kept, what)
    stored_dtype = {"exact": dtype, "int8": torch.int8, **FORMATS}[values.rounding]
    value_K = decode_planes(planes[:n_planes], kept, stored_dtype, what)
    if values.rounding == "int8":
        scale_F = decode_planes(planes[n_planes:], entry.n_rows, torch.float32, what)
        value_K = restore_values(value_K, scale_F, _rows(is_stored_K, entry.n_rows), dtype)
    else:
        value_K = restore_values(value_K, None, None, dtype)
    if entry.positions.kind == "all":
        flat_K = value_K
    else:
        bits = np.zeros(entry.n_weights, dtype=f"u{dtype.itemsize}")
        bits[is_stored_K] = raw_bits(value_K)
        flat_K = _from_bits(bits, dtype)
    mask = None
    if entry.mask == "stored":
        mask = torch.from_numpy(is_stored_K).reshape(entry.shape)
    elif isinstance(entry.mask, Positions):
        flags = decode_positions(entry.mask.kind, mask_code, entry.n_weights, entry.mask.kept, what)
        if _has_nonzero(~flags, flat_K):
            raise DataError(f"{what}: a weight outside of its mask is not zero; it was not written by sipp.save")
        mask = torch.from_numpy(flags).reshape(entry.shape)
    return flat_K.reshape(entry.shape), mask


def _where(
    flat_K: Tensor, kept_K: Flags | None, name: str, *, may_be_sparse: bool
) -> tuple[PositionKind, bytes, Flags]:
    """Which weights are stored: those that are kept, and all whose bits are not zero (-0.0 is not +0.0)."""
    if not may_be_sparse:
        return "all", b"", np.ones(flat_K.numel(), dtype=np.bool_)
    is_stored_K: Flags = raw_bits(flat_K) != 0
    if kept_K is not None:
        if _has_nonzero(is_stored_K & ~kept_K, flat_K):
            raise ModelError(
                "a weight outside of its mask is not zero", where=name, fix="set it to zero, or give its own mask"
            )
        is_stored_K |= kept_K
    kind, code = encode_positions(is_stored_K)
    width = flat_K.element_size()
    n_zeros = is_stored_K.size - int(np.count_nonzero(is_stored_K))
    if kept_K is None and len(code) >= n_zeros * width:  # a few zeros are cheaper as numbers
        return "all", b"", np.ones(flat_K.numel(), dtype=np.bool_)
    return kind, code, is_stored_K


def _has_nonzero(flags_K: Flags, flat_K: Tensor) -> bool:
    """Whether one of these weights is another number than 0.0 or -0.0."""
    return bool((_from_bits(raw_bits(flat_K)[flags_K], flat_K.dtype) != 0).any())


def _from_bits(bits: NDArray[np.unsignedinteger], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(bits.view(np.uint8)).view(dtype)


def _rows(is_stored_K: Flags, n_rows: int) -> Tensor:
    """The row of each stored weight."""
    fan_in = is_stored_K.size // max(n_rows, 1)
    return torch.from_numpy(np.flatnonzero(is_stored_K) // max(fan_in, 1))


def _mask_record(kept_K: Flags | None, own: tuple[PositionKind, bytes] | None) -> Positions | Literal["stored"] | None:
    if kept_K is None or own is None:
        return None if kept_K is None else "stored"
    return Positions(kind=own[0], kept=int(np.count_nonzero(kept_K)), n_bytes=len(own[1]))


def _check_back(entry: Entry, pieces: list[bytes], flat_K: Tensor, kept_K: Flags | None) -> None:
    """Raises where the bytes do not give the tensor back: a file that cannot be read is never written."""
    back, mask = decode_tensor(entry, memoryview(b"".join(pieces)), "a tensor that was just encoded")
    same_mask = mask is None if kept_K is None else mask is not None and np.array_equal(mask.reshape(-1), kept_K)
    is_exact = entry.values.rounding == "exact"
    if not same_mask or (is_exact and not torch.equal(_bytes_of(back), _bytes_of(flat_K))):
        raise RuntimeError(f"{entry.name}: the bytes made of it do not give it back; please report this")


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
