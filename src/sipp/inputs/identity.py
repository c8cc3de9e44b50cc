"""Which network a certificate speaks of: the entries of a state_dict in, one SHA-256 out. Needs no torch."""

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
