"""Encodes the tensors of a network as index entries and bytes, and decodes them.

tensor -> positions (coding.py), values (rounding.py, coding.py) -> entry + bytes
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sipp.errors import DataError, ModelError
from sipp.pruning.largest_scores import breaking_pattern
from sipp.results.certificate import AnyCertificate, from_json
from sipp.results.hashing import with_buffers
from sipp.results.network_hash import state_hash
from sipp.results.options import Precision, pattern_of
from sipp.results.saved_file import About, SavedFile, StoredTensor
from sipp.storage.small_file.coding import (
    DTYPES,
    FLOATS,
    Flags,
    PositionKind,
    decode_numbers,
    decode_positions,
    encode_numbers,
    encode_positions,
    from_bits,
    pieces_of,
    raw_bits,
)
from sipp.storage.small_file.file_format import SCALE_BYTES, Entry, Index, Positions, StoredValues, read_index, unpack
from sipp.storage.small_file.parts import part_files, pieces_in_parts
from sipp.storage.small_file.rounding import FORMATS, Rounding, restore_values, round_values

Groups = list[tuple[tuple[str, ...], Tensor]]  # tensors with all their names


def named_tensors(model: nn.Module, first: Collection[str] = ()) -> Groups:
    """Every distinct tensor of the state_dict with all its (tied) names, those in `first` before the others."""
    groups: dict[object, tuple[list[str], Tensor]] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(f"a {type(value).__name__} in the state_dict; only tensors can be saved", where=name)
        if not name.isprintable():
            raise ModelError(
                "a name in the state_dict that cannot be printed", where=f"{name!r}", fix="rename that module"
            )
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
    return [(tuple(sorted(names, key=lambda name: name not in first)), tensor) for names, tensor in groups.values()]


def encode_network(
    model: nn.Module, groups: Groups, mask_of: Mapping[str, Tensor], precision: Precision
) -> tuple[tuple[Entry, ...], list[bytes]]:
    """The entry and the bytes of every tensor; masks are keyed by a tensor's first name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    entries, pieces = [], []
    for names, tensor in groups:
        rounding = _rounding_of(tensor, precision, is_parameter=not parameters.isdisjoint(names))
        entry, parts = _encode(names, tensor, mask_of.get(names[0]), rounding, coded=precision != "fp32")
        entries.append(entry)
        pieces.append(b"".join(parts))
    return tuple(entries), pieces


def decode_network(
    index: Index, pieces: Iterable[memoryview], where: object
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state_dict (tied names share a tensor) and the masks; `read_index` has checked the index.

    `pieces` are the bytes of each tensor.
    """
    state, masks = {}, {}
    for entry, piece in zip(index.tensors, pieces):
        tensor, mask = _decode(entry, piece, f"{where}, tensor {entry.name!r:.100}")
        state.update(dict.fromkeys(entry.names, tensor))
        if mask is not None:
            masks[entry.name] = mask
    return state, masks


def with_stored_values(model: nn.Module, values: Precision) -> nn.Module:
    """A copy of the network with the values that `load` would return after `save`; certify this one."""
    stored = copy.deepcopy(model)
    groups = named_tensors(stored)
    for (_, tensor), entry, piece in zip(groups, *encode_network(stored, groups, {}, values)):
        if entry.values.rounding != "exact":
            with torch.no_grad():
                tensor.copy_(_decode(entry, memoryview(piece), entry.name)[0])
    return stored


def _rounding_of(tensor: Tensor, precision: Precision, *, is_parameter: bool) -> Rounding:
    """How a tensor is rounded: only parameters with two or more axes, and only if that makes them smaller.

    Norms, biases and buffers are always exact: they take little space and matter much.
    """
    if precision in ("fp32", "lossless") or not is_parameter or tensor.dim() < 2 or tensor.dtype not in FLOATS:
        return "exact"
    width = 1 if precision == "int8" else FORMATS[precision].itemsize
    return precision if tensor.element_size() > width else "exact"  # type: ignore[return-value]


def _encode(
    names: tuple[str, ...], tensor: Tensor, mask: Tensor | None, rounding: Rounding, *, coded: bool
) -> tuple[Entry, list[bytes]]:
    """The entry of a tensor and its bytes; the mask is True where a weight is kept, even if it is 0."""
    flat_K = tensor.detach().to("cpu").reshape(-1).contiguous()
    if mask is not None and tensor.dtype not in FLOATS:
        raise ModelError(f"has a mask, but its dtype is {tensor.dtype}; only floats have masks here", where=names[0])
    kept_K = None if mask is None else mask.detach().to("cpu").reshape(-1).numpy()
    may_be_sparse = tensor.dtype in FLOATS and (mask is not None or tensor.dim() >= 2)  # zeros of norms stay numbers
    kind, code, is_stored_K = _where(flat_K, kept_K, names[0], may_be_sparse=may_be_sparse)
    value_K = flat_K if kind == "all" else from_bits(raw_bits(flat_K)[is_stored_K], flat_K.dtype)
    n_rows = tensor.shape[0] if tensor.dim() else 1
    row_K = _rows(is_stored_K, n_rows) if rounding == "int8" else None
    rounded = round_values(value_K, row_K, n_rows, rounding, names[0])
    planes = encode_numbers(rounded.stored_K, coded=coded)
    scales = [] if rounded.scale_F is None else encode_numbers(rounded.scale_F, coded=coded)
    stored_mask: Literal["stored"] | Positions | None = None if kept_K is None else "stored"
    own = b""
    if kept_K is not None and not np.array_equal(kept_K, is_stored_K):  # -0.0 among the pruned ones
        own_kind, own = encode_positions(kept_K)
        stored_mask = Positions(kind=own_kind, kept=int(np.count_nonzero(kept_K)), n_bytes=len(own))
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
        mask=stored_mask,
    )
    return entry, [code, *planes, *scales, own]


def _where(
    flat_K: Tensor, kept_K: Flags | None, name: str, *, may_be_sparse: bool
) -> tuple[PositionKind, bytes, Flags]:
    """Which weights are stored: those the mask keeps, and all whose bits are not zero (-0.0 is not +0.0)."""
    if may_be_sparse:
        is_stored_K: Flags = raw_bits(flat_K) != 0
        if kept_K is not None:
            if _has_nonzero(is_stored_K & ~kept_K, flat_K):
                raise ModelError(
                    "a weight outside its mask is not zero", where=name, fix="set it to zero, or give its own mask"
                )
            is_stored_K |= kept_K
        kind, code = encode_positions(is_stored_K)
        n_zeros = is_stored_K.size - int(np.count_nonzero(is_stored_K))
        if kept_K is not None or len(code) < n_zeros * flat_K.element_size():  # a few zeros are cheaper as numbers
            return kind, code, is_stored_K
    return "all", b"", np.ones(flat_K.numel(), dtype=np.bool_)


def _decode(entry: Entry, data: memoryview, what: str) -> tuple[Tensor, Tensor | None]:
    """The tensor and its mask (or None), on the CPU."""
    values, kept, dtype = entry.values, entry.positions.kept, DTYPES[entry.dtype]
    code, *planes, mask_code = pieces_of(data, entry.lengths)
    is_stored_K = decode_positions(entry.positions.kind, code, entry.n_weights, kept, what)
    stored_dtype = {"exact": dtype, "int8": torch.int8, **FORMATS}[values.rounding]
    flat_K = decode_numbers(planes[: len(values.planes)], kept, stored_dtype, what)
    scale_F, row_K = None, None
    if values.rounding == "int8":
        scale_F = decode_numbers(planes[len(values.planes) :], entry.n_rows, torch.float32, what)
        row_K = _rows(is_stored_K, entry.n_rows)
    flat_K = restore_values(flat_K, scale_F, row_K, dtype)
    if entry.positions.kind != "all":
        bits = np.zeros(entry.n_weights, dtype=f"u{dtype.itemsize}")
        bits[is_stored_K] = raw_bits(flat_K)
        flat_K = from_bits(bits, dtype)
    if isinstance(entry.mask, Positions):
        is_stored_K = decode_positions(entry.mask.kind, mask_code, entry.n_weights, entry.mask.kept, what)
        if _has_nonzero(~is_stored_K, flat_K):
            raise DataError(f"{what}: a weight outside its mask is not zero; it was not written by sipp.save")
    mask = None if entry.mask is None else torch.from_numpy(is_stored_K).reshape(entry.shape)
    return flat_K.reshape(entry.shape), mask


def _has_nonzero(flags_K: Flags, flat_K: Tensor) -> bool:
    """Whether one of the flagged weights is not zero (-0.0 is zero)."""
    return bool((from_bits(raw_bits(flat_K)[flags_K], flat_K.dtype) != 0).any())


def _rows(is_stored_K: Flags, n_rows: int) -> Tensor:
    """The row index of each stored weight."""
    fan_in = is_stored_K.size // max(n_rows, 1)
    return torch.from_numpy(np.flatnonzero(is_stored_K) // max(fan_in, 1))


# --- what is inside a file --------------------------------------------------------------------------------------------


def contents_of(
    index: Index,
    *,
    path: Path,
    sha256: str,
    n_bytes: int,
    masks: dict[str, Tensor],
    certificate: AnyCertificate | None,
    state: Mapping[str, Tensor],
) -> SavedFile:
    """The record of a saved file; the hash of the stored values decides what its certificate is about."""
    about: About | None = None
    if certificate is not None:
        stored = with_buffers(state_hash(state), index.buffers_hash)
        about = "stored values" if certificate.pruned_hash == stored else "values before rounding"
    pattern = None if index.statements is None else index.statements.pattern
    return SavedFile(
        path=path,
        sha256=sha256,
        n_bytes=n_bytes,
        model=index.model,
        versions={"sipp": index.sipp, "torch": index.torch},
        precision=index.precision,
        tensors=tuple(_stored(entry) for entry in index.tensors),
        masks=masks,
        statements=index.statements,
        statements_about="values before rounding" if index.is_rounded else "stored values",
        certificate=certificate,
        certificate_about=about,
        breaking_pattern=None if pattern is None else breaking_pattern(masks, pattern_of(pattern)),
        buffers_hash=index.buffers_hash,
    )


def read_network(path: Path) -> tuple[dict[str, Tensor], SavedFile]:
    """Reads and checks a file of `save`: the state_dict, and a record of all else."""
    code, data, digest = unpack(path)
    if not code:
        raise DataError("is one part of a network", where=path, fix="give the file that sipp.save was told to write")
    index = read_index(code, len(data), path)
    lengths = [entry.n_bytes for entry in index.tensors]
    pieces = pieces_in_parts(path, index) if index.parts else pieces_of(data, lengths)
    state, masks = decode_network(index, pieces, path)
    try:
        certificate = None if index.certificate is None else from_json(index.certificate)
    except DataError as error:
        raise DataError(f"{error}", where=path) from error
    n_bytes = path.stat().st_size + sum(file.stat().st_size for file in part_files(path, index))
    contents = contents_of(
        index, path=path, sha256=digest, n_bytes=n_bytes, masks=masks, certificate=certificate, state=state
    )
    if contents.certificate_about == "values before rounding" and not index.is_rounded:
        raise DataError("its certificate is about another network; do not rely on it, certify this one", where=path)
    return state, contents


def _stored(entry: Entry) -> StoredTensor:
    kept, width = entry.positions.kept, DTYPES[entry.dtype].itemsize
    value_bytes = kept * (FORMATS[entry.values.rounding].itemsize if entry.values.rounding in FORMATS else width)
    if entry.values.rounding == "int8":
        value_bytes = kept + SCALE_BYTES * entry.n_rows
    return StoredTensor(
        names=entry.names,
        shape=entry.shape,
        dtype=entry.dtype,
        kept=kept,
        n_weights=entry.n_weights,
        positions=entry.positions.kind,
        values=entry.values.rounding,
        has_mask=entry.mask is not None,
        n_bytes=entry.n_bytes,
        value_bytes=value_bytes,
        dense_bytes=entry.n_weights * width,
        largest_change=entry.values.largest_change,
        norm_change=entry.values.norm_change,
    )


# --- tensors that share memory ----------------------------------------------------------------------------------------


def cannot_share(groups: Groups, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of tensors that share memory (as a transpose or a slice) and cannot all have these values."""
    by_memory: dict[object, Groups] = {}
    for names, tensor in groups:
        if tensor.numel() and 0 not in tensor.stride():  # an expanded tensor takes no values
            by_memory.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append((names, tensor))
    for shared in by_memory.values():
        if len(shared) == 1:
            continue
        memory = shared[0][1].untyped_storage().cpu().clone()
        views = [
            torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                memory, tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            for _, tensor in shared
        ]
        values = [state[names[0]] for names, _ in shared]
        for view, value in zip(views, values):
            view.copy_(value)
        if any(bits_differ(view, value) for view, value in zip(views, values)):
            return tuple(names[0] for names, _ in shared)
    return ()


def bits_differ(one: Tensor, other: Tensor) -> bool:
    return one is not other and not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))
