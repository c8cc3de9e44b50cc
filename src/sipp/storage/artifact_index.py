"""What a file says of itself: one record a tensor, how the network was pruned, what is claimed; nothing is trusted.

The index is JSON, compressed by zlib. Reading it checks every type and key, then every size against the bytes there
are, before anything of that size is made.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sipp.errors import DataError
from sipp.records.pattern import pattern_of
from sipp.storage.huffman import MOST_SYMBOLS_PER_BYTE
from sipp.storage.marks import Precision
from sipp.storage.planes import DTYPES, TURNED
from sipp.storage.positions import PositionKind, bitmask_bytes, least_gap_bytes
from sipp.storage.rounding import FORMATS, Rounding

MOST_INDEX_BYTES = 16 * 2**20  # enough for 50,000 tensors
MOST_WEIGHTS = 2**47
MOST_AXES = 64
SCALE_BYTES = 4


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return text


Count = Annotated[int, Field(ge=0, le=MOST_WEIGHTS)]
NamedPattern = Annotated[str, AfterValidator(lambda text: str(pattern_of(text)))]
Line = Annotated[str, AfterValidator(_printable)]  # what is shown: no line breaks, nothing that steers a terminal


class IndexRecord(BaseModel):
    """A frozen record without conversions and without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Positions(IndexRecord):
    """How it is said which weights are meant, and how many they are."""

    kind: PositionKind
    kept: Count
    n_bytes: Count


class StoredValues(IndexRecord):
    """How the stored weights are written, and how far that moved them."""

    rounding: Rounding
    planes: Annotated[tuple[Count, ...], Field(max_length=16)]  # bytes; as many as numbers: not coded
    scale_planes: Annotated[tuple[Count, ...], Field(max_length=SCALE_BYTES)]  # of int8's scales, one a row
    largest_change: Annotated[float, Field(ge=0)]
    norm_change: Annotated[float, Field(ge=0)]


class Entry(IndexRecord):
    """One tensor: positions, values and mask lie one after the other in the data."""

    names: Annotated[tuple[Line, ...], Field(min_length=1)]  # more than one: tied
    dtype: Line
    shape: Annotated[tuple[Count, ...], Field(max_length=MOST_AXES)]
    positions: Positions
    values: StoredValues
    mask: Literal["stored"] | Positions | None  # "stored": the mask is where values are; None: it has no mask

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def mask_bytes(self) -> int:
        return self.mask.n_bytes if isinstance(self.mask, Positions) else 0

    @property
    def n_bytes(self) -> int:
        return self.positions.n_bytes + sum(self.values.planes) + sum(self.values.scale_planes) + self.mask_bytes


class Statements(IndexRecord):
    """How the network was pruned, and what was said about it then, in words."""

    method: Line
    draws: Line
    budget: Count
    kept: Count
    n_weights: Count
    seed: int
    network: Line
    rows_and_layers: Line | None
    measured: Line | None
    pattern: NamedPattern | None = None  # n:m; whether the masks obey it is seen when it is shown


class Index(IndexRecord):
    """Everything in the file but the numbers."""

    model: Line  # name of its class
    sipp: Line
    torch: Line
    precision: Precision  # as asked for
    statements: Statements | None
    certificate: str | None  # as `to_json` writes it
    buffers_hash: str | None = None  # of buffers that the state_dict leaves out; None: there are none
    tensors: Annotated[tuple[Entry, ...], Field(fail_fast=True)]

    @property
    def is_moved(self) -> bool:
        """Whether a stored value differs from the one given to `save`."""
        return any(entry.values.largest_change > 0 for entry in self.tensors)


def class_name(model: object) -> str:
    """The class of a network as files name it."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def write_index(index: Index) -> bytes:
    """The index as it stands in the file."""
    text = index.model_dump_json(exclude={"buffers_hash"} if index.buffers_hash is None else None).encode()
    if len(text) > MOST_INDEX_BYTES:
        raise DataError(f"the network has too many tensors for one file ({len(index.tensors):,}); save it in parts")
    return zlib.compress(text, 9)


def read_index(code: memoryview, n_data: int, where: str) -> Index:
    """The index, if every entry fits the `n_data` bytes of data that there are."""
    try:
        coder = zlib.decompressobj()
        text = coder.decompress(code, MOST_INDEX_BYTES)
        if not coder.eof or coder.unused_data:
            raise ValueError("it is longer than an index can be, or does not end")
        json.loads(text, object_pairs_hook=_refuse_twins)
        index = Index.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"its index is not valid at {place or 'its top'}: {first['msg']}", where=where) from error
    except (zlib.error, ValueError, RecursionError) as error:
        raise DataError(f"its index cannot be read ({error}); it was not written by sipp.save", where=where) from error
    names = [name for entry in index.tensors for name in entry.names]
    if len(set(names)) != len(names):
        raise DataError("two tensors have the same name; it was not written by sipp.save", where=where)
    for entry in index.tensors:
        if fault := next(_faults(entry), ""):
            raise DataError(f"{where}, tensor {entry.name!r:.100}: {fault}; it was not written by sipp.save")
    if sum(entry.n_bytes for entry in index.tensors) != n_data:
        raise DataError(f"its tensors need other bytes than the {n_data:,} there are; save it again", where=where)
    return index


def _refuse_twins(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice in it")


def _faults(entry: Entry) -> Iterator[str]:
    """What is impossible about an entry, sizes above all: nothing of its shape has been made yet."""
    if entry.dtype not in DTYPES:
        yield f"unknown dtype {entry.dtype!r:.40}"
        return
    dtype, values = DTYPES[entry.dtype], entry.values
    if math.prod(max(size, 1) for size in entry.shape) > MOST_WEIGHTS:
        yield "its shape is larger than any tensor"
    yield from _position_faults(entry.positions, entry.n_weights)
    if isinstance(entry.mask, Positions):
        yield from _position_faults(entry.mask, entry.n_weights)
    if dtype not in TURNED and (entry.positions.kind != "all" or values.rounding != "exact"):
        yield "only floats can be sparse or rounded"
    width = {"exact": dtype.itemsize, "int8": 1, **{name: to.itemsize for name, to in FORMATS.items()}}[values.rounding]
    yield from _plane_faults(values.planes, width, entry.positions.kept)
    if values.rounding == "int8":
        yield from _plane_faults(values.scale_planes, SCALE_BYTES, entry.n_rows)
    elif values.scale_planes or (values.rounding != "exact" and width >= dtype.itemsize):
        yield "its values are not of a form that is written"
    if values.rounding == "exact" and (values.largest_change or values.norm_change):
        yield "exact values that moved"


def _position_faults(positions: Positions, n_weights: int) -> Iterator[str]:
    kept, n_bytes = positions.kept, positions.n_bytes
    fits = {
        "all": kept == n_weights and n_bytes == 0,
        "bitmask": n_bytes == bitmask_bytes(n_weights),
        "kept gaps": n_bytes >= least_gap_bytes(n_weights),
        "zero gaps": n_bytes >= least_gap_bytes(n_weights),
    }[positions.kind]
    if not fits or kept > n_weights:
        yield f"{kept:,} of {n_weights:,} weights in {n_bytes:,} bytes of positions ({positions.kind}) is impossible"


def _plane_faults(planes: tuple[int, ...], width: int, n_numbers: int) -> Iterator[str]:
    if len(planes) != width:
        yield f"{len(planes)} planes of bytes for numbers of {width} bytes"
    if any(n_bytes > n_numbers or n_numbers > MOST_SYMBOLS_PER_BYTE * n_bytes for n_bytes in planes):
        yield f"{n_numbers:,} numbers in {sum(planes):,} bytes is impossible"
