"""Splits a saved network into several files: parts with the data, and an index file that names them.

A part is named by the SHA-256 of its data, so that no save changes a part of an earlier one. The index is written last,
atomically: before that the old network is complete, afterwards the new one. Then parts that only the old one used are
removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sipp.errors import DataError
from sipp.storage.files import DAY_S, sha256_of, write_atomic
from sipp.storage.small_file.coding import pieces_of
from sipp.storage.small_file.file_format import MARK_OF_PARTS, Index, Part, pack, read_index, unpack

SUFFIX = ".safetensors"
HEAD = 128  # bytes that contain the mark
N_DIGITS = 16  # of a SHA-256 in a name


def planned_parts(path: Path, pieces: Sequence[bytes], shard_bytes: int) -> list[tuple[Part, Sequence[bytes]]]:
    """Groups the bytes of tensors into parts of at most `shard_bytes` (a larger tensor alone), and names them."""
    groups: list[list[bytes]] = [[]]
    for piece in pieces:
        if groups[-1] and sum(map(len, groups[-1])) + len(piece) > shard_bytes:
            groups.append([])
        groups[-1].append(piece)
    parts: list[tuple[Part, Sequence[bytes]]] = []
    for i, group in enumerate(groups, start=1):
        digest = sha256_of(*group)
        name = f"{_stem(path)}-{i:05d}-of-{len(groups):05d}-{digest[:N_DIGITS]}{SUFFIX}"
        parts.append((Part(name=name, sha256=digest, n_bytes=sum(map(len, group))), group))
    return parts


def write_network(path: Path, content: bytes, parts: Sequence[tuple[Part, Sequence[bytes]]]) -> int:
    """Writes the parts, then the index file; returns the total number of bytes."""
    before, n_bytes, begun = {part.name for part in _parts_of(path)}, len(content), time.time()
    for part, group in parts:
        n_bytes += _write_part(_folder_of(path) / part.name, group)
    write_atomic(path, content)
    for part, group in parts:  # another writer, who replaced the same network, may have removed a part as an old one
        if not (_folder_of(path) / part.name).is_file():
            _write_part(_folder_of(path) / part.name, group)
    if before or parts:
        _remove_old(path, before, begun)
    return n_bytes


def _write_part(file: Path, group: Sequence[bytes]) -> int:
    """Writes a part; returns its number of bytes."""
    packed, _ = pack(b"", *group)
    if file.is_symlink():  # no reader follows it, and it may lead anywhere
        raise DataError("is a symbolic link, and leads elsewhere", where=file, fix="remove it")
    write_atomic(file, packed)
    return len(packed)


def _remove_old(path: Path, before: set[str], begun: float) -> None:
    """Removes parts that the network no longer uses, and unused parts of killed writers, older than a day.

    Parts that another writer has written since `begun` stay.
    """
    named = {part.name for part in _parts_of(path)}
    ours = re.compile(re.escape(_stem(path)) + rf"-[0-9]{{5}}-of-[0-9]{{5}}-[0-9a-f]{{{N_DIGITS}}}" + re.escape(SUFFIX))
    with contextlib.suppress(OSError):  # others clean up too
        for file in _folder_of(path).iterdir():
            is_left = ours.fullmatch(file.name) and file.name not in named and file.is_file() and not file.is_symlink()
            written = file.stat().st_mtime
            if is_left and ((file.name in before and written < begun) or time.time() - written > DAY_S):
                file.unlink()


def part_files(path: Path, index: Index) -> list[Path]:
    """The paths of the parts; empty for a network in one file."""
    return [_folder_of(path) / part.name for part in index.parts]


def pieces_in_parts(path: Path, index: Index) -> Iterator[memoryview]:
    """The bytes of each tensor, with one part in memory at a time; DataError if a part was changed."""
    left = list(index.tensors)
    for part, file in zip(index.parts, part_files(path, index)):
        if file.is_symlink() or not file.is_file():
            raise DataError(f"its part {part.name} is not there", where=path, fix="copy all files of the network")
        _, data, digest = unpack(file)
        if digest != part.sha256 or len(data) != part.n_bytes:
            raise DataError(f"{part.name} is not the part that it was saved with", where=path, fix="copy it again")
        lengths: list[int] = []
        while left and sum(lengths) + left[0].n_bytes <= part.n_bytes:
            lengths.append(left.pop(0).n_bytes)
        if sum(lengths) != part.n_bytes:
            raise DataError(f"{part.name} ends inside a tensor; it was not written by sipp.save", where=path)
        yield from pieces_of(data, lengths)


def _parts_of(path: Path) -> tuple[Part, ...]:
    """The parts that the index file names; empty for any other file."""
    if not path.is_file():  # a pipe may never end
        return ()
    try:
        with open(path, "rb") as file:
            if MARK_OF_PARTS.encode() not in file.read(HEAD):  # before a large file is read for nothing
                return ()
        code, data, _ = unpack(path)
        return read_index(code, len(data), path).parts
    except (OSError, DataError):
        return ()


def _stem(path: Path) -> str:
    """What the names of parts begin with; `net` and `net.safetensors` in one folder do not share theirs."""
    name = Path(os.path.realpath(path)).name
    return name.removesuffix(SUFFIX) if name.endswith(SUFFIX) else f"{name}~"


def _folder_of(path: Path) -> Path:
    """The folder of the file, with symbolic links resolved."""
    return Path(os.path.realpath(path)).parent
