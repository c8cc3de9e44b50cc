"""Bytes coded by their frequencies, and back: the Huffman code of the standard library's zlib, without its matching.

zlib is on every machine and reads its own files for thirty years. On the bytes stored here (gaps between kept weights,
exponents) its Huffman code is within a few per cent of the entropy, and adapts to every 32,000 symbols.
"""

from __future__ import annotations

import zlib

from sipp.errors import DataError

LEVEL = 9
WINDOW = -15  # raw deflate: the file has its own checksum
MEMORY = 9  # the longest blocks between two tables
MOST_SYMBOLS_PER_BYTE = 8  # a Huffman code gives every symbol at least a bit


def encode(symbols: bytes) -> bytes:
    """The code of these bytes."""
    coder = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW, MEMORY, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(symbols) + coder.flush()


def decode(code: bytes | memoryview, most_symbols: int, what: str) -> bytes:
    """The bytes that `encode` was given, at most so many; zeros may follow the code."""
    coder = zlib.decompressobj(WINDOW)
    try:
        symbols = coder.decompress(code, most_symbols + 1)
    except zlib.error as error:
        raise DataError(f"{what}: its code cannot be read ({error}); save it again") from error
    if not coder.eof or len(symbols) > most_symbols or coder.unused_data.strip(b"\0"):
        raise DataError(f"{what}: its code gives more bytes than it may, or does not end; save it again")
    return symbols
