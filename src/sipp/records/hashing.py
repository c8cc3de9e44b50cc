"""Which network a certificate speaks of: the entries of a state_dict in, one SHA-256 out. Needs no torch.

Buffers that a state_dict leaves out (persistent=False) are part of a network, and no file holds them. So they have a
hash of their own, which files hold: with it the hash of the network follows from the tensors of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

WRAPPERS = ("module", "_orig_mod")  # what DDP and torch.compile add to names

Entry = tuple[str, list[Any], bytes | memoryview]  # name; element type and shape, or the value in words; bytes


def entries_hash(entries: Iterable[Entry]) -> str:
    """SHA-256 over all entries, sorted by their names without the parts that wrappers add."""
    digest = hashlib.sha256()
    named = [(".".join(p for p in name.split(".") if p not in WRAPPERS), said, data) for name, said, data in entries]
    for name, said, data in sorted(named, key=lambda entry: entry[0]):
        digest.update(json.dumps([name, *said]).encode())
        digest.update(data)
    return digest.hexdigest()


def with_buffers(state: str, buffers: str | None) -> str:
    """The hash of a network from that of its state_dict and that of its other buffers; the first where it has none."""
    return state if buffers is None else hashlib.sha256(f"{state} {buffers}".encode()).hexdigest()
