"""The format of `sipp.save`: a safetensors file of two byte tensors, `index` and `data`, read without trusting it.

The header holds the SHA-256 and the lengths of the two. A reader extracts these, rebuilds the header and compares: any
other difference (a flipped bit, a second key, a shifted offset) is refused before anything is parsed. One safetensors
entry per weight would cost 100 bytes each, more than the norm layers of a small network.

The index holds everything but the numbers: one entry per tensor, how the network was pruned, and what is claimed. It is
JSON, compressed by zlib. Reading it checks every type and key, and then every size against the actual bytes, before
anything of that size is allocated: the SHA-256 detects damage, but an attacker can compute a new one.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from sipp.errors import DataError
from sipp.results.options import Precision
from sipp.results.saved_file import MOST_WEIGHTS, Count, Line, StoredStatements, StrictRecord
from sipp.storage.files import read_file, sha256_of
from sipp.storage.small_file.coding import (
    DTYPES,
    FLOATS,
    MOST_SYMBOLS_PER_BYTE,
    PositionKind,
    bitmask_bytes,
    least_gap_bytes,
)
from sipp.storage.small_file.rounding import FORMATS, Rounding

MARK = "sipp-file/1"
MARK_OF_PARTS = "sipp-file/2"  # the data are in parts beside it
ALIGNMENT = 8  # safetensors pads its header with spaces
LENGTH = struct.Struct("<Q")  # the header's length, in front of it
MOST_HEADER_BYTES = 1024
MOST_INDEX_BYTES = 16 * 2**20  # enough for 50,000 tensors
MOST_AXES = 64
SCALE_BYTES = 4
FOREIGN = (
    "is not a file from sipp.save, or its beginning was changed; for a plain safetensors file use "
    "safetensors.torch.load_file"
)
_OURS = re.compile(rb'\{"__metadata__":\{"format":"(sipp-file/[0-9]{1,4})"')
_DIGEST = r"[0-9a-f]{64}"
_FACTS = re.compile(rb'"sha256":"([0-9a-f]{64})".*?"index":.*?"shape":\[([0-9]{1,18})\]')


# --- header ---------------------------------------------------------------------------------------------------------


def pack(index: bytes, *data: bytes, mark: str = MARK) -> tuple[bytes, str]:
    """The whole file with this index and data, and their SHA-256."""
    digest = sha256_of(index, *data)
    return b"".join((_header(mark, digest, len(index), sum(map(len, data))), index, *data)), digest


def unpack(path: Path) -> tuple[memoryview, memoryview, str]:
    """The index (empty in a part), the data and their SHA-256, which is checked."""
    if not path.is_file():  # a device or a pipe may never end
        raise DataError("is not a file", where=path, fix="give the path of a file that sipp.save wrote")
    content = memoryview(read_file(path))
    n_header = LENGTH.unpack_from(content)[0] if len(content) >= LENGTH.size else 0
    start = LENGTH.size + min(n_header, MOST_HEADER_BYTES)
    header = bytes(content[LENGTH.size : start])
    mark, facts = _OURS.match(header), _FACTS.search(header)
    kind = "" if mark is None else mark.group(1).decode()
    if kind and kind not in (MARK, MARK_OF_PARTS):
        raise DataError(f"has the format {kind}, this version reads {MARK_OF_PARTS}; update sipp", where=path)
    if mark is None or facts is None:
        raise DataError(FOREIGN, where=path)
    digest, n_index = facts.group(1).decode(), int(facts.group(2))
    n_data = len(content) - start - n_index
    if _header(kind, digest, n_index, n_data) != content[:start] or (kind == MARK_OF_PARTS and n_data):
        raise DataError(
            f"its header does not fit its {len(content):,} bytes; it was changed or cut; copy it again", where=path
        )
    index, data = content[start : start + n_index], content[start + n_index :]
    if sha256_of(index, data) != digest:
        raise DataError(
            f"its content does not have the SHA-256 {digest[:12]} it was saved with; it was changed after "
            "it was written; copy or save it again",
            where=path,
        )
    return index, data, digest


def _header(mark: str, digest: str, n_index: int, n_data: int) -> bytes:
    """The header that a file with this content must have, preceded by its length."""
    entries = [
        f'"{name}":{{"dtype":"U8","shape":[{end - start}],"data_offsets":[{start},{end}]}}'
        for name, start, end in (("index", 0, n_index), ("data", n_index, n_index + n_data))
    ]
    text = f'{{"__metadata__":{{"format":"{mark}","sha256":"{digest}"}},{",".join(entries)}}}'
    padded = text + " " * (-len(text) % ALIGNMENT)
    return LENGTH.pack(len(padded)) + padded.encode()


# --- index ----------------------------------------------------------------------------------------------------------


class Positions(StrictRecord):
    """How the positions of weights are encoded, and how many there are."""

    kind: PositionKind
    kept: Count
    n_bytes: Count


class StoredValues(StrictRecord):
    """How the stored weights are encoded, and how far rounding changed them."""

    rounding: Rounding
    planes: Annotated[tuple[Count, ...], Field(max_length=16)]  # bytes; as many as numbers: not coded
    scale_planes: Annotated[tuple[Count, ...], Field(max_length=SCALE_BYTES)]  # of int8's scales, one a row
    largest_change: Annotated[float, Field(ge=0)]
    norm_change: Annotated[float, Field(ge=0)]


class Entry(StrictRecord):
    """One tensor: its positions, values and mask follow each other in the data."""

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
    def lengths(self) -> tuple[int, ...]:
        """Bytes of the positions, of each plane, and of a separate mask."""
        mask = self.mask.n_bytes if isinstance(self.mask, Positions) else 0
        return self.positions.n_bytes, *self.values.planes, *self.values.scale_planes, mask

    @property
    def n_bytes(self) -> int:
        return sum(self.lengths)


class Part(StrictRecord):
    """A file beside the index, with the data of some tensors."""

    name: Annotated[str, Field(pattern=r"^[^/\\\x00]{1,255}$")]
    sha256: Annotated[str, Field(pattern=rf"^{_DIGEST}$")]
    n_bytes: Count  # of its data


class Index(StrictRecord):
    """Everything in the file but the numbers."""

    model: Line  # name of its class
    sipp: Line
    torch: Line
    precision: Precision  # as asked for
    statements: StoredStatements | None
    certificate: str | None  # as `to_json` writes it
    buffers_hash: str | None = None  # of buffers that the state_dict leaves out; None: there are none
    parts: tuple[Part, ...] = ()  # in the order of the tensors; (): the data lie in the same file
    tensors: Annotated[tuple[Entry, ...], Field(fail_fast=True)]

    @property
    def is_rounded(self) -> bool:
        """Whether a stored value differs from the one given to `save`."""
        return any(entry.values.largest_change > 0 for entry in self.tensors)


def write_index(index: Index) -> bytes:
    """The index as bytes for the file."""
    unsaid = {name for name, value in (("buffers_hash", index.buffers_hash), ("parts", index.parts)) if not value}
    text = index.model_dump_json(exclude=unsaid).encode()
    if len(text) > MOST_INDEX_BYTES:
        raise DataError(f"the network has too many tensors for one file ({len(index.tensors):,}); save it in parts")
    return zlib.compress(text, 9)


def read_index(code: memoryview, n_data: int, where: Path) -> Index:
    """Parses and checks the index; every entry must fit the `n_data` bytes of data."""
    try:
        coder = zlib.decompressobj()
        text = coder.decompress(code, MOST_INDEX_BYTES)
        if not coder.eof or coder.unused_data:
            raise ValueError("it is longer than an index can be, or does not end")
        index = Index.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"its index is not valid at {place or 'its top'}: {first['msg']}", where=where) from error
    except (zlib.error, ValueError) as error:
        raise DataError(f"its index cannot be read ({error}); it was not written by sipp.save", where=where) from error
    names = [name for entry in index.tensors for name in entry.names]
    if len(set(names)) != len(names):
        raise DataError("two tensors have the same name; it was not written by sipp.save", where=where)
    for entry in index.tensors:
        if fault := next(_faults(entry), ""):
            raise DataError(f"{where}, tensor {entry.name!r:.100}: {fault}; it was not written by sipp.save")
    if index.parts and n_data == 0:
        n_data = sum(part.n_bytes for part in index.parts)
    if sum(entry.n_bytes for entry in index.tensors) != n_data:
        raise DataError(f"its tensors need other bytes than the {n_data:,} there are; save it again", where=where)
    return index


def _faults(entry: Entry) -> Iterator[str]:
    """Yields what is impossible about an entry, such as its sizes, before anything of that size is allocated."""
    if entry.dtype not in DTYPES:
        yield f"unknown dtype {entry.dtype!r:.40}"
        return
    dtype, values = DTYPES[entry.dtype], entry.values
    if math.prod(max(size, 1) for size in entry.shape) > MOST_WEIGHTS:
        yield "its shape is larger than any tensor"
    for positions in (entry.positions, entry.mask):
        if isinstance(positions, Positions) and not _is_possible(positions, entry.n_weights):
            yield f"{positions.kept:,} of {entry.n_weights:,} weights in {positions.n_bytes:,} bytes is impossible"
    if dtype not in FLOATS and (entry.positions.kind != "all" or values.rounding != "exact"):
        yield "only floats can be sparse or rounded"
    width = {"exact": dtype.itemsize, "int8": 1, **{name: to.itemsize for name, to in FORMATS.items()}}[values.rounding]
    scale_width = SCALE_BYTES if values.rounding == "int8" else 0
    if len(values.scale_planes) != scale_width or (values.rounding != "exact" and width >= dtype.itemsize):
        yield "its values are not of a form that is written"
    if len(values.planes) != width:
        yield f"{len(values.planes)} planes of bytes for numbers of {width} bytes"
    for planes, n_numbers in ((values.planes, entry.positions.kept), (values.scale_planes, entry.n_rows)):
        if any(n_bytes > n_numbers or n_numbers > MOST_SYMBOLS_PER_BYTE * n_bytes for n_bytes in planes):
            yield f"{n_numbers:,} numbers in {sum(planes):,} bytes is impossible"
    if values.rounding == "exact" and (values.largest_change or values.norm_change):
        yield "exact values that moved"


def _is_possible(positions: Positions, n_weights: int) -> bool:
    if positions.kind == "all":
        return positions.kept == n_weights and positions.n_bytes == 0
    fits = positions.n_bytes >= least_gap_bytes(n_weights)
    if positions.kind == "bitmask":
        fits = positions.n_bytes == bitmask_bytes(n_weights)
    return fits and positions.kept <= n_weights
