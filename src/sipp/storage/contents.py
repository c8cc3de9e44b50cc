"""What is inside a file of `sipp.save`: bytes by tensor against the dense network and the entropy bound, as a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from sipp.allocation.patterns import breaking
from sipp.records.certificate import AnyCertificate
from sipp.records.display import LABEL, WIDTH, number, percent_up, text_of
from sipp.records.pattern import pattern_of
from sipp.storage.artifact_index import Entry, Index, Statements
from sipp.storage.marks import Precision
from sipp.storage.planes import DTYPES
from sipp.storage.rounding import FORMATS

CHANGES = ("largest change", "norm change")  # columns, where values were rounded
BYTES = ("bytes", "bytes\nby entropy", "bytes\ndense")  # columns; the second says nothing of errors
About = Literal["stored values", "values before rounding"]
ROUNDED_NOTE = "about the network before its values were rounded, not about the stored one"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file."""

    names: tuple[str, ...]  # more than one: tied, stored once
    shape: tuple[int, ...]
    dtype: str
    kept: int  # values stored
    n_weights: int
    positions: str  # "all", "bitmask", "kept gaps" or "zero gaps"
    values: str  # "exact", "fp16", "bf16" or "int8"
    has_mask: bool
    n_bytes: int  # in the file
    dense_bytes: int
    largest_change: float  # of a weight by rounding, in parts of itself
    norm_change: float  # of all its weights together

    @property
    def value_bytes(self) -> int:
        """Bytes of the stored values in their format, before any coding; int8 with its scales."""
        if self.values == "int8":
            return self.kept + 4 * (self.shape[0] if self.shape else 1)
        return self.kept * (FORMATS.get(self.values) or DTYPES[self.dtype]).itemsize

    @property
    def bound_bytes(self) -> float:
        """Bytes of the stored values and n H(kept / n) / 8 for their positions."""
        return self.value_bytes + entropy_bytes(self.n_weights, self.kept)


@dataclass(frozen=True)
class Contents:
    """What a file holds. `print` it."""

    path: Path
    sha256: str  # of index and data
    n_bytes: int
    model: str  # name of its class
    versions: dict[str, str]
    precision: Precision  # `values` as asked for
    tensors: tuple[StoredTensor, ...]
    masks: dict[str, Tensor]  # {parameter name: bool tensor}, True = kept
    statements: Statements | None
    statements_about: About
    certificate: AnyCertificate | None
    certificate_about: About | None

    def __repr__(self) -> str:
        held = f"{self.model}, {self.n_bytes:,} bytes, {self.precision}"
        return f"<Contents of {self.path.name}: {held}; print() shows them>"

    @property
    def dense_bytes(self) -> int:
        """Bytes of all numbers, each tensor in its own dtype."""
        return sum(one.dense_bytes for one in self.tensors)

    @property
    def bound_bytes(self) -> float:
        """Bytes of the stored values and n H(keep) / 8 for their positions, over all tensors that are not whole."""
        sparse = [one for one in self.tensors if one.has_mask or one.kept < one.n_weights]
        n_weights, kept = sum(one.n_weights for one in sparse), sum(one.kept for one in sparse)
        return sum(one.value_bytes for one in self.tensors) + entropy_bytes(n_weights, kept)

    @property
    def moved(self) -> str:
        """How far rounding moved the values, in words; empty where every bit is stored."""
        rounded = [one for one in self.tensors if one.largest_change]
        if not rounded:
            return ""
        largest = percent_up(max(one.largest_change for one in rounded))
        together = percent_up(max(one.norm_change for one in rounded))
        return (
            f"{self.precision} moved weights in {len(rounded)} of {len(self.tensors)} tensors: one by at most "
            f"{largest} of itself, those of a tensor together by at most {together} of their length"
        )

    def __str__(self) -> str:
        return contents_text(self)


def entropy_bytes(n_weights: int, kept: int) -> float:
    """n H(kept / n) / 8: what the positions of independently kept weights cost at least, on average."""
    shares = [count / n_weights for count in (kept, n_weights - kept) if 0 < count < n_weights]
    return -n_weights * sum(share * math.log2(share) for share in shares) / 8


def contents_of(
    index: Index,
    *,
    path: Path,
    sha256: str,
    n_bytes: int,
    masks: dict[str, Tensor],
    certificate: AnyCertificate | None,
    certificate_about: About | None,
) -> Contents:
    """The record of a file with this index."""
    return Contents(
        path=path,
        sha256=sha256,
        n_bytes=n_bytes,
        model=index.model,
        versions={"sipp": index.sipp, "torch": index.torch},
        precision=index.precision,
        tensors=tuple(_stored(entry) for entry in index.tensors),
        masks=masks,
        statements=index.statements,
        statements_about="values before rounding" if index.is_moved else "stored values",
        certificate=certificate,
        certificate_about=certificate_about,
    )


def _stored(entry: Entry) -> StoredTensor:
    return StoredTensor(
        names=entry.names,
        shape=entry.shape,
        dtype=entry.dtype,
        kept=entry.positions.kept,
        n_weights=entry.n_weights,
        positions=entry.positions.kind,
        values=entry.values.rounding,
        has_mask=entry.mask is not None,
        n_bytes=entry.n_bytes,
        dense_bytes=entry.n_weights * DTYPES[entry.dtype].itemsize,
        largest_change=entry.values.largest_change,
        norm_change=entry.values.norm_change,
    )


COLUMN_WORDS = {  # of columns that do not speak for themselves
    "positions": "how the places of kept values are stored",
    "values": "the format they are stored in",
    "largest change": "of a weight by rounding, in parts of itself",
    "norm change": "of all weights of a tensor together, in parts of their length",
    "bytes by entropy": "of the values, and of their places at least, on average",
    "bytes dense": "of all values, zeros too",
}


def _columns(moved: bool) -> tuple[str, ...]:
    """The columns after the name of a tensor; `moved`: some were rounded."""
    return ("weights", "kept", "positions", "values", *(CHANGES if moved else ()), *BYTES)


def _column_words(moved: bool) -> str:
    shown = [column.replace("\n", " ") for column in _columns(moved)]
    text = "; ".join(f"{column}: {COLUMN_WORDS[column]}" for column in shown if column in COLUMN_WORDS)
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")


def contents_text(contents: Contents) -> str:
    """The table of tensors; those that are stored whole and exact share a line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("tensor", overflow="fold")
    moved = any(one.largest_change for one in contents.tensors)
    for column in _columns(moved):
        table.add_column(column, justify="right")
    plain = [one for one in contents.tensors if not _is_shown(one)]
    for one in contents.tensors:
        if _is_shown(one):
            table.add_row(*_cells(escape(" = ".join(one.names)), [one], one.positions, _format(one), moved))
    if plain:
        table.add_row(*_cells(f"{len(plain)} whole tensors", plain, "all", "exact", moved))
    table.add_section()
    table.add_row(*_cells("all tensors", contents.tensors, "", contents.precision, moved))
    ratio = contents.dense_bytes / contents.n_bytes
    lines = [
        f"{contents.path}: {contents.model}, {contents.n_bytes:,} bytes, {ratio:.2f} x smaller than dense "
        f"({contents.dense_bytes:,}); values and entropy of positions: {contents.bound_bytes:,.0f}",
        text_of(table),
        _column_words(moved),
        *_words(contents),
        _line("SHA-256", contents.sha256),
        _line("written by", ", ".join(f"{name} {version}" for name, version in contents.versions.items())),
    ]
    return "\n".join(lines)


def _is_shown(one: StoredTensor) -> bool:
    return one.has_mask or one.positions != "all" or one.values != "exact" or len(one.names) > 1


def _format(one: StoredTensor) -> str:
    return one.dtype if one.values == "exact" else one.values


def _cells(name: str, group: Sequence[StoredTensor], positions: str, values: str, moved: bool) -> tuple[str, ...]:
    kept, n_weights = sum(one.kept for one in group), sum(one.n_weights for one in group)
    largest = max((one.largest_change for one in group), default=0.0)
    norm = max((one.norm_change for one in group), default=0.0)
    return (
        name,
        f"{n_weights:,}",
        f"{kept / max(n_weights, 1):.2%}",
        positions,
        values,
        *((number(largest) if largest else "", number(norm) if norm else "") if moved else ()),
        f"{sum(one.n_bytes for one in group):,}",
        f"{sum(one.bound_bytes for one in group):,.0f}",
        f"{sum(one.dense_bytes for one in group):,}",
    )


def _words(contents: Contents) -> list[str]:
    """How it was pruned and what was said of it, marked where it is about other values than the stored ones."""
    lines = [_line("rounding", contents.moved)] if contents.moved else []
    said = contents.statements
    if said is not None:
        lines.append(_line("pruned", f"{said.method}, {said.kept:,} of {said.n_weights:,} weights kept"))
        if said.pattern is not None:
            lines.append(_line("pattern", _pattern_words(contents, said.pattern)))
        if contents.statements_about != "stored values":
            lines.append(_line("statements", ROUNDED_NOTE))
        for label, text in (("measured", said.measured), ("network", said.network), ("rows", said.rows_and_layers)):
            if text:
                lines.append(_line(label, text))
    if contents.certificate is not None:
        note = "" if contents.certificate_about == "stored values" else f"{ROUNDED_NOTE}: "
        lines.append(_line("certificate", note + contents.certificate.sentence))
    return lines


def _pattern_words(contents: Contents, text: str) -> str:
    """The pattern that the file names, and whether its masks obey it: what it says is not believed."""
    wrong = breaking(contents.masks, pattern_of(text))
    if not wrong:
        return f"{text} along every row, checked"
    return f"{text} is what the file says, and {', '.join(wrong[:3])} ({len(wrong)} of {len(contents.masks)}) break it"


def _line(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{label + ':':<{LABEL}}", subsequent_indent=" " * LABEL)
