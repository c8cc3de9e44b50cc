"""The file of `sipp.save`: a safetensors file of two byte tensors, `index` and `data`.

`data` is one tensor of the network after another: which weights are stored, the byte planes of their values, the scales
of int8, and the mask where it is not simply the stored weights (`coding.py`, `rounding.py`). `index` is JSON in zlib:
an entry per tensor (`StoredTensor`), and the record of the network. The metadata hold one SHA-256 of both. One
safetensors entry per tensor would cost 100 bytes each, more than the norm layers of a small network.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_bytes
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sipp.errors import DataError, ModelError
from sipp.files import CHANGED, sha256_of
from sipp.results import Precision, SavedFile, StoredTensor, to_json
from sipp.storage.coding import (
    DTYPES,
    FLOATS,
    Flags,
    decode_numbers,
    decode_positions,
    encode_numbers,
    encode_positions,
    from_bits,
    raw_bits,
)
from sipp.storage.rounding import FORMATS, restore_values, round_values

KEY = "sipp file"  # in the metadata: the format, and the SHA-256 of index and data
FORMAT = 3
FOREIGN = (
    "is not a file from sipp.save, or was cut{}; for a plain safetensors file use safetensors.torch.load_file, and "
    "copy or save a damaged one again"
)
ABOUT_FILE = ("path", "sha256", "n_bytes")  # fields of SavedFile that the index leaves out

Groups = list[tuple[tuple[str, ...], Tensor]]  # tensors with all their names


# --- the file ---------------------------------------------------------------------------------------------------------


def file_content(contents: SavedFile, data: bytes) -> tuple[bytes, SavedFile]:
    """The bytes of the file with these contents and this data, and the contents with their size and SHA-256."""
    values = to_json(contents, only_fields=True)
    if contents.pruned is not None:
        values |= to_json(contents.pruned, only_fields=True)
    values = {name: value for name, value in values.items() if name not in ABOUT_FILE}
    index = zlib.compress(json.dumps(values, separators=(",", ":")).encode(), 9)
    digest = sha256_of(index, data)
    tensors = {name: np.frombuffer(held, dtype=np.uint8) for name, held in (("index", index), ("data", data))}
    content = safetensors_bytes(tensors, {KEY: json.dumps({"format": FORMAT, "sha256": digest})})
    return content, replace(contents, sha256=digest, n_bytes=len(content))


def read_contents(path: Path) -> tuple[SavedFile, memoryview]:
    """The contents of a file, still without masks, and the data from which `decode` makes the rest."""
    if not path.is_file():
        raise DataError("is not a file", where=path, fix="give the path of a file that sipp.save wrote")
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "{}"))
            if about.get("format") != FORMAT:
                raise DataError(FOREIGN.format(""), where=path)
            index, data = (memoryview(file.get_tensor(name)).cast("B") for name in ("index", "data"))
    except (OSError, SafetensorError, ValueError) as error:
        raise error if isinstance(error, DataError) else DataError(FOREIGN.format(f" ({error})"), where=path) from error
    digest = sha256_of(index, data)
    if digest != about.get("sha256"):
        raise DataError(
            f"its content does not have the SHA-256 it was saved with; {CHANGED}; copy or save it again", where=path
        )
    values = json.loads(zlib.decompress(index))
    about_file = {"kind": SavedFile.KIND, "path": str(path), "sha256": digest, "n_bytes": path.stat().st_size}
    return SavedFile.read(values | about_file, path), data


# --- the tensors ------------------------------------------------------------------------------------------------------


def named_tensors(model: nn.Module) -> Groups:
    """Every distinct tensor of the state_dict with all its (tied) names."""
    groups: dict[object, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(f"a {type(value).__name__} in the state_dict; only tensors can be saved", where=name)
        if is_lazy(value) or value.is_meta or value.layout != torch.strided:
            raise ModelError(
                "has no plain numbers (lazy, meta or sparse)", where=name, fix="run or load the model first"
            )
        if value.dtype not in DTYPES.values():
            raise ModelError(
                f"the dtype {value.dtype} cannot be stored", where=name, fix=f"convert it to one of {', '.join(DTYPES)}"
            )
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        groups.setdefault(memory if value.numel() else name, ([], value))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in groups.values()]


def encode(
    model: nn.Module, masks: Mapping[str, Tensor], precision: Precision
) -> tuple[tuple[StoredTensor, ...], list[bytes]]:
    """The entry and the bytes of every tensor of the model."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    entries, pieces = [], []
    for names, tensor in named_tensors(model):
        names = tuple(sorted(names, key=lambda name: name not in masks))  # a mask is named by the first
        rounding = _rounding_of(tensor, precision, is_parameter=not parameters.isdisjoint(names))
        entry, piece = _encode(names, tensor, masks.get(names[0]), rounding, coded=precision != "fp32")
        entries.append(entry)
        pieces.append(piece)
    return tuple(entries), pieces


def decode(contents: SavedFile, data: memoryview) -> tuple[dict[str, Tensor], SavedFile]:
    """The state_dict (tied names share a tensor), and the contents with masks."""
    state, masks = {}, {}
    for entry, piece in zip(contents.tensors, _pieces(data, [entry.n_bytes for entry in contents.tensors])):
        tensor, mask = _decode(entry, piece)
        state.update(dict.fromkeys(entry.names, tensor))
        if mask is not None:
            masks[entry.names[0]] = mask
    return state, replace(contents, masks=masks)


def _rounding_of(tensor: Tensor, precision: Precision, *, is_parameter: bool) -> str:
    """How a tensor is rounded: only parameters with two or more axes, and only if that makes them smaller.

    Norms, biases and buffers are always exact: they take little space and matter much.
    """
    if precision in ("fp32", "lossless") or not is_parameter or tensor.dim() < 2 or tensor.dtype not in FLOATS:
        return "exact"
    return precision if tensor.element_size() > _dtype_of(precision, tensor.dtype).itemsize else "exact"


def _dtype_of(values: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that is stored for a tensor of this one."""
    return {"exact": dtype, "int8": torch.int8, **FORMATS}[values]


def _encode(
    names: tuple[str, ...], tensor: Tensor, mask: Tensor | None, rounding: str, *, coded: bool
) -> tuple[StoredTensor, bytes]:
    """The entry of a tensor and its bytes; the mask is True where a weight is kept, even if it is 0."""
    flat_K = tensor.detach().to("cpu").reshape(-1).contiguous()
    kept_K = None if mask is None else mask.detach().to("cpu").reshape(-1).numpy()
    may_be_sparse = tensor.dtype in FLOATS and (mask is not None or tensor.dim() >= 2)  # zeros of norms stay numbers
    kind, code, is_stored_K = _stored_positions(flat_K, kept_K, names[0], may_be_sparse=may_be_sparse)
    value_K = flat_K if kind == "all" else from_bits(raw_bits(flat_K)[is_stored_K], flat_K.dtype)
    n_rows = tensor.shape[0] if tensor.dim() else 1
    row_K = _rows(is_stored_K, n_rows) if rounding == "int8" else None
    rounded = round_values(value_K, row_K, n_rows, rounding, names[0])
    planes = encode_numbers(rounded.stored_K, coded=coded)
    scales = [] if rounded.scale_F is None else encode_numbers(rounded.scale_F, coded=coded)
    mask_kind = None if kept_K is None else "stored"
    mask_code = b""
    if kept_K is not None and not np.array_equal(kept_K, is_stored_K):  # -0.0 among the pruned ones
        mask_kind, mask_code = encode_positions(kept_K)
    parts = [code, *planes, *scales, mask_code]
    entry = StoredTensor(
        names=names,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        kept=value_K.numel(),
        positions=kind,
        values=rounding,
        mask=mask_kind,
        lengths=tuple(map(len, parts)),
        largest_change=rounded.largest_change,
        norm_change=rounded.norm_change,
    )
    return entry, b"".join(parts)


def _stored_positions(
    flat_K: Tensor, kept_K: Flags | None, name: str, *, may_be_sparse: bool
) -> tuple[str, bytes, Flags]:
    """Which weights are stored: those the mask keeps, and all whose bits are not zero (-0.0 is not +0.0)."""
    if may_be_sparse:
        is_stored_K: Flags = raw_bits(flat_K) != 0
        if kept_K is not None:
            if bool((flat_K[torch.from_numpy(~kept_K)] != 0).any()):
                raise ModelError("a pruned weight is not zero", where=name, fix="set it to zero, or prune it again")
            is_stored_K |= kept_K
        kind, code = encode_positions(is_stored_K)
        n_zeros = is_stored_K.size - int(np.count_nonzero(is_stored_K))
        if kept_K is not None or len(code) < n_zeros * flat_K.element_size():  # a few zeros are cheaper as numbers
            return kind, code, is_stored_K
    return "all", b"", np.ones(flat_K.numel(), dtype=np.bool_)


def _decode(entry: StoredTensor, data: memoryview) -> tuple[Tensor, Tensor | None]:
    """The tensor and its mask (or None), on the CPU."""
    dtype, n_rows = DTYPES[entry.dtype], entry.n_rows
    stored_dtype = _dtype_of(entry.values, dtype)
    code, *planes, mask_code = _pieces(data, entry.lengths)
    is_stored_K = decode_positions(entry.positions, code, entry.n_weights)
    flat_K = decode_numbers(planes[: stored_dtype.itemsize], entry.kept, stored_dtype)
    scale_F, row_K = None, None
    if entry.values == "int8":
        scale_F, row_K = (
            decode_numbers(planes[-StoredTensor.SCALE_BYTES :], n_rows, torch.float32),
            _rows(is_stored_K, n_rows),
        )
    flat_K = restore_values(flat_K, scale_F, row_K, dtype)
    if entry.positions != "all":
        bits = np.zeros(entry.n_weights, dtype=f"u{dtype.itemsize}")
        bits[is_stored_K] = raw_bits(flat_K)
        flat_K = from_bits(bits, dtype)
    if entry.mask is None:
        return flat_K.reshape(entry.shape), None
    if entry.mask != "stored":
        is_stored_K = decode_positions(entry.mask, mask_code, entry.n_weights)
    return flat_K.reshape(entry.shape), torch.from_numpy(is_stored_K).reshape(entry.shape)


def _rows(is_stored_K: Flags, n_rows: int) -> Tensor:
    """The row index of each stored weight."""
    fan_in = is_stored_K.size // max(n_rows, 1)
    return torch.from_numpy(np.flatnonzero(is_stored_K) // max(fan_in, 1))


def _pieces(data: memoryview, lengths: Iterable[int]) -> Iterator[memoryview]:
    """Consecutive slices of the data with these lengths."""
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length
