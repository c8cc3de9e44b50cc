"""One safetensors file of two byte tensors, `index` and `data`, whose header leaves nothing to choose.

The header holds the SHA-256 of the two and their lengths. A reader takes these facts out, writes the header anew and
compares: whatever else differs, a flipped bit, a second key, a shifted offset, is refused before anything is parsed.
One tensor per weight would cost 100 bytes of header each: more than the norms of a small network.
"""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path

from sipp.errors import DataError

MARK = "sipp-file/1"
ALIGNMENT = 8  # safetensors pads its header with spaces
LENGTH = struct.Struct("<Q")  # the header's length, in front of it
MOST_HEADER_BYTES = 1024
_OURS = re.compile(rb'\{"__metadata__":\{"format":"(sipp-file/[0-9]{1,4})"')
_FACTS = re.compile(rb'"sha256":"([0-9a-f]{64})".*?"index":.*?"shape":\[([0-9]{1,18})\]')


def pack(index: bytes, data: bytes) -> tuple[bytes, str]:
    """The whole file with this index and data, and their SHA-256."""
    digest = _digest(index, data)
    return b"".join((_header(digest, len(index), len(data)), index, data)), digest


def unpack(path: Path) -> tuple[memoryview, memoryview, str]:
    """The index, the data and their SHA-256, after every bit of the file was compared with it."""
    content = _content(path)
    n_header = LENGTH.unpack_from(content)[0] if len(content) >= LENGTH.size else 0
    start = LENGTH.size + n_header
    if n_header > min(MOST_HEADER_BYTES, len(content)):
        raise _foreign(path)
    header = bytes(content[LENGTH.size : start])
    mark, facts = _OURS.match(header), _FACTS.search(header)
    if mark is not None and mark.group(1) != MARK.encode():
        raise DataError(f"has the format {mark.group(1).decode()}, this version reads {MARK}; update sipp", where=path)
    if mark is None or facts is None:
        raise _foreign(path)
    digest, n_index = facts.group(1).decode(), int(facts.group(2))
    if _header(digest, n_index, len(content) - start - n_index) != content[:start]:
        raise DataError(
            f"its header does not fit its {len(content):,} bytes; it was changed or cut, copy again", where=path
        )
    index, data = content[start : start + n_index], content[start + n_index :]
    if _digest(index, data) != digest:
        raise DataError(
            f"its content does not have the SHA-256 {digest[:12]} it was saved with; it was changed after "
            "it was written, copy or save it again",
            where=path,
        )
    return index, data, digest


def _content(path: Path) -> memoryview:
    """The bytes of a regular file."""
    if not path.is_file():  # a device or a pipe may never end
        raise DataError("is no file", where=path, fix="give the path of a file that sipp.save wrote")
    try:
        return memoryview(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", where=path) from error


def _foreign(path: Path) -> DataError:
    return DataError(
        "is no file of sipp.save, or its beginning was changed; for a plain safetensors file use "
        "safetensors.torch.load_file",
        where=path,
    )


def _header(digest: str, n_index: int, n_data: int) -> bytes:
    """The only header that a file with these facts may have, its length in front."""
    ends = (0, n_index, n_index + n_data)
    entries = [
        f'"{name}":{{"dtype":"U8","shape":[{end - start}],"data_offsets":[{start},{end}]}}'
        for name, start, end in (("index", ends[0], ends[1]), ("data", ends[1], ends[2]))
    ]
    text = f'{{"__metadata__":{{"format":"{MARK}","sha256":"{digest}"}},{",".join(entries)}}}'
    padded = text + " " * (-len(text) % ALIGNMENT)
    return LENGTH.pack(len(padded)) + padded.encode()


def _digest(index: bytes | memoryview, data: bytes | memoryview) -> str:
    digest = hashlib.sha256(index)
    digest.update(data)
    return digest.hexdigest()
