"""How many draws a maximum was taken over, where equal ones count once (T18): keys that tell which draws are equal.

A key (`draw_keys_of`) knows a point's numbers only: blind to dtype, shape, layout, the sign of 0 and how inputs are
passed. It is three hashes, of the numbers as float32, float16 and bfloat16, and then the kind of the floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

import torch

HASH_BYTES = 16
WIDTHS = (torch.float32, torch.float16, torch.bfloat16)  # of the three hashes
LETTERS = {torch.float16: b"h", torch.bfloat16: b"b"}  # of a kind; everything else is compared as float32, "f"


def draw_key(hashes: Sequence[bytes], dtypes: Collection[torch.dtype]) -> bytes:
    """The key of a draw from the hashes of its numbers in the three widths, and the dtypes of its floats."""
    kind = b"".join(sorted({LETTERS.get(dtype, b"f") for dtype in dtypes}))
    return b"".join(one[:HASH_BYTES] for one in hashes) + (kind or b"f")


def key_of_batch(keys: Sequence[bytes]) -> bytes:
    """The key of a draw that is a whole batch."""
    hashes = [hashlib.sha256(b"".join(_hash(key, at) for key in keys)).digest()[:HASH_BYTES] for at in range(3)]
    return b"".join(hashes) + b"".join(sorted({_kind(key) for key in keys}))


def n_new(keys: Collection[bytes], seen: Collection[bytes] = ()) -> int:
    """How many different draws there are that were not seen: never too many.

    Within one kind draws are equal if their numbers as float32 are. Of several kinds only the one with the most draws
    counts. A draw of another kind was seen if both agree as float16 or as bfloat16; what was rounded to float16 and to
    bfloat16 has no common number left, so either counts as seen where the other was.
    """
    theirs = {kind: [key for key in seen if _kind(key) == kind] for kind in set(map(_kind, seen))}
    most = 0
    for kind in set(map(_kind, keys)):
        new = [key for key in keys if _kind(key) == kind]
        for other, known in theirs.items():
            if kind != other and {*b"hb"} <= {*kind, *other}:
                new = []
            for at in (0,) if kind == other else (1, 2):
                there = {_hash(key, at) for key in known}
                new = [key for key in new if _hash(key, at) not in there]
        most = max(most, len({_hash(key, 0) for key in new}))
    return most


def was_seen(seen: Collection[bytes]) -> Callable[[bytes], bool]:
    """Whether a draw is one of these: by its numbers as float32, or of another kind as float16 or bfloat16."""
    kinds = set(map(_kind, seen))
    there = {(kind, at): {_hash(key, at) for key in seen if _kind(key) == kind} for kind in kinds for at in range(3)}

    def is_one(key: bytes) -> bool:
        places = ((kind, at) for kind in kinds for at in ((0,) if kind == _kind(key) else (1, 2)))
        return any(_hash(key, at) in there[kind, at] for kind, at in places)

    return is_one


def _hash(key: bytes, at: int) -> bytes:
    return key[at * HASH_BYTES : (at + 1) * HASH_BYTES]


def _kind(key: bytes) -> bytes:
    return key[len(WIDTHS) * HASH_BYTES :]
