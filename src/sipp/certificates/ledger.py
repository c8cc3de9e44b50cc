"""The ledger: a JSON-lines file with one line for every use of a holdout.

Uses are also remembered while the process runs, so that a second claim on the same points gives a warning without a
file. A use counts whether or not it ended in a claim: the best of several has less confidence than each alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from sipp.errors import DataError, HoldoutReusedWarning, OptionError, warn_caller
from sipp.results.certificate import is_hash

WALK = "prune_to"  # tests many networks and certifies one; its line names no pruned network
COMPARING = "compare"  # measures many networks and certifies none; its line names the dense one
OUTPUT, ACCURACY = "output", "accuracy"  # the kinds of certificates
SECOND = (
    "these holdout inputs were already used for another certificate, walk or comparison. Each certificate holds at its "
    "own confidence, but several together, or the best of them, at less. Use new inputs for each claim, or pass "
    "ledger=FILE: it counts the uses, and the certificates mention them"
)
_uses: dict[str, set[tuple[Any, ...]]] = {}  # those of this process, by data_hash


def ledger_lines(path: str | os.PathLike[str], end: int | None = None) -> list[dict[str, Any]]:
    """The entries in the first `end` bytes of the ledger, which is created if absent; DataError if it is unusable."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OptionError(f"ledger={path!r:.60} must be the name of a file")
    try:
        with open(path, "a+b") as file:
            file.seek(0)
            content = file.read() if end is None else file.read(end)
    except OSError as error:
        raise DataError(f"ledger {os.fspath(path)!r} cannot be opened for reading and appending: {error}") from error
    lines = content.split(b"\n")
    entries = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            entries.append(json.loads(line))
        except ValueError:
            entries.append(None)
        if not _is_entry(entries[-1]):
            raise DataError(
                f"ledger {os.fspath(path)!r}, line {number} is not an entry", fix="repair it, uses must not be lost"
            )
    if lines[-1]:
        raise DataError(f"ledger {os.fspath(path)!r} ends in the middle of line {len(lines)}", fix="repair it first")
    return entries


def record_use(
    ledger: str | os.PathLike[str] | None,
    evidence: dict[str, Any],
    kind: str,
    sketch: Sequence[str] = (),
    terms: tuple[Any, ...] = (),
) -> dict[str, Any]:
    """Appends this use to the ledger; returns the fields ledger_kept and prior_uses.

    The line is appended first, then the lines before it are counted: two processes at once cannot both be the first. An
    earlier use counts if it was of exactly the same points, or if the sketches (`sketch_of`) share a point, so that
    some of these points were used. `terms` distinguish claims of one kind.
    """
    is_second = _is_second(evidence, kind, terms)
    if ledger is None:
        if is_second:
            warn_caller(SECOND, HoldoutReusedWarning)
        return {"ledger_kept": False, "prior_uses": 0}
    entry = {"claim": kind, **{name: evidence[name] for name in ("data_hash", "dense_hash", "pruned_hash", "n")}}
    line = json.dumps({**entry, "sketch": list(sketch)}).encode() + b"\n"
    try:
        with open(ledger, "ab", buffering=0) as file:
            written = file.write(line)
            start = file.tell() - written
            if written != len(line):
                if os.fstat(file.fileno()).st_size == start + written:  # nobody has appended a line since
                    file.truncate(start)
                raise OSError("the disk took only a part of the line")
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(f"ledger {os.fspath(ledger)!r} could not be written, so no claim is made: {error}") from error
    return {"ledger_kept": True, "prior_uses": n_uses(ledger_lines(ledger, start), json.loads(line))}


def _is_second(evidence: dict[str, Any], kind: str, terms: tuple[Any, ...]) -> bool:
    """Whether these points served another claim in this process; repeating the same claim does not count."""
    if kind not in (OUTPUT, ACCURACY, WALK, COMPARING):  # part of a use, or an interrupted one
        return False
    own = (kind, evidence["dense_hash"], evidence["pruned_hash"], *terms)
    uses = _uses.setdefault(evidence["data_hash"], set())
    has_others = bool(uses - {own})
    uses.add(own)
    return has_others and kind != COMPARING


def n_uses(entries: list[dict[str, Any]], own: dict[str, Any]) -> int:
    """How many of these entries share points with the entry `own`."""
    mine = set(own["sketch"])
    return sum(entry["data_hash"] == own["data_hash"] or not mine.isdisjoint(entry["sketch"]) for entry in entries)


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or not is_hash(value.get("data_hash")) or not isinstance(value.get("sketch"), list):
        return False
    return all(isinstance(s, str) and re.fullmatch("[0-9a-f]{16}", s) for s in value["sketch"])
