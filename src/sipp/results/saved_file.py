"""The record of a file of `sipp.save`: bytes per tensor, against the dense network and the entropy bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from sipp.results.certificate import AnyCertificate
from sipp.results.display import number, percent_up, size_words
from sipp.results.options import Precision, pattern_of
from sipp.results.sheet import Sheet, Table, shown

About = Literal["stored values", "values before rounding"]
MOST_WEIGHTS = 2**47
ROUNDED_NOTE = "about the network before its values were rounded, not about the stored one"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return text


Count = Annotated[int, Field(ge=0, le=MOST_WEIGHTS)]
Line = Annotated[str, AfterValidator(_printable)]  # one printable line: no control characters for a terminal


class StrictRecord(BaseModel):
    """A frozen record without type conversions and unknown keys, for files that are not trusted."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class StoredStatements(StrictRecord):
    """How the network was pruned, and its statements as sentences."""

    method: Line
    draws: Line
    budget: Count
    kept: Count
    n_weights: Count
    seed: int
    network: Line
    rows_and_layers: Line | None
    measured: Line | None
    pattern: Annotated[str, AfterValidator(lambda text: str(pattern_of(text)))] | None = None  # n:m


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
    value_bytes: int  # of the stored values before compression, with the scales of int8
    dense_bytes: int
    largest_change: float  # largest relative change of a weight by rounding
    norm_change: float  # relative change of the whole tensor

    ALSO_IN_JSON = ("bound_bytes",)

    @property
    def bound_bytes(self) -> float:
        """Bytes of the stored values and n H(kept / n) / 8 for their positions."""
        return self.value_bytes + entropy_bytes(self.n_weights, self.kept)


@dataclass(frozen=True)
@shown
class SavedFile:
    """The contents of a saved file. `print` it."""

    path: Path
    sha256: str  # of index and data
    n_bytes: int
    model: str  # name of its class
    versions: dict[str, str]
    precision: Precision  # `values` as asked for
    tensors: tuple[StoredTensor, ...]
    masks: dict[str, Tensor]  # {parameter name: bool tensor}, True = kept
    statements: StoredStatements | None
    statements_about: About
    certificate: AnyCertificate | None
    certificate_about: About | None
    breaking_pattern: list[str] | None  # weights whose masks break the pattern that the file names; None: it names none
    buffers_hash: str | None  # of buffers that no state_dict holds; None: there are none

    def __repr__(self) -> str:
        held = f"{self.model}, {self.n_bytes:,} bytes, {self.precision}"
        return f"<SavedFile of {self.path.name}: {held}; print() shows them>"

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors, dense, each in its own dtype."""
        return sum(tensor.dense_bytes for tensor in self.tensors)

    @property
    def bound_bytes(self) -> float:
        """Bytes of the stored values, and n H(keep) / 8 for the positions in sparse tensors."""
        sparse = [tensor for tensor in self.tensors if tensor.has_mask or tensor.kept < tensor.n_weights]
        n_weights, kept = sum(tensor.n_weights for tensor in sparse), sum(tensor.kept for tensor in sparse)
        return sum(tensor.value_bytes for tensor in self.tensors) + entropy_bytes(n_weights, kept)

    @property
    def rounding_words(self) -> str:
        """How far rounding changed the values, in words; empty if every bit is stored."""
        rounded = [tensor for tensor in self.tensors if tensor.largest_change]
        if not rounded:
            return ""
        largest = percent_up(max(tensor.largest_change for tensor in rounded))
        together = percent_up(max(tensor.norm_change for tensor in rounded))
        return (
            f"{self.precision} changed weights in {len(rounded)} of {len(self.tensors)} tensors: a single weight by at "
            f"most {largest}, and a whole tensor by at most {together} of its norm"
        )

    @property
    def sheet(self) -> Sheet:
        return Sheet(_headline(self), tuple(_words(self)), (_contents_table(self),))


def entropy_bytes(n_weights: int, kept: int) -> float:
    """n H(kept / n) / 8: the least that positions of independently kept weights cost on average."""
    shares = [count / n_weights for count in (kept, n_weights - kept) if 0 < count < n_weights]
    return -n_weights * sum(share * math.log2(share) for share in shares) / 8


# --- as a table -----------------------------------------------------------------------------------------------------

COLUMNS = {  # each with an explanation, if it needs one
    "weights": "",
    "kept": "",
    "positions": "how the positions of kept values are stored",
    "values": "their format",
    "largest change": "of a single weight by rounding, as a share of it",
    "norm change": "of the whole tensor, as a share of its norm",
    "bytes": "",
    "bytes by entropy": "the values, and the least that their positions need on average",
    "bytes dense": "all values, zeros included",
}


def _contents_table(contents: SavedFile) -> Table:
    """The table of tensors; dense and exact ones share a line."""
    columns = [column for column in COLUMNS if contents.rounding_words or not column.endswith("change")]
    rows: list[tuple[str, ...]] = []

    def add(name: str, group: Sequence[StoredTensor], positions: str, values: str) -> None:
        cells = _cells(group) | {"positions": positions, "values": values}
        rows.append((name, *(cells[column] for column in columns)))

    whole = []
    for tensor in contents.tensors:
        if tensor.has_mask or tensor.positions != "all" or tensor.values != "exact" or len(tensor.names) > 1:
            values = tensor.dtype if tensor.values == "exact" else tensor.values
            add(" = ".join(tensor.names), [tensor], tensor.positions, values)
        else:
            whole.append(tensor)
    if whole:
        add(f"{len(whole)} whole tensors", whole, "all", "exact")
    add("all tensors", contents.tensors, "", contents.precision)
    words = "; ".join(f"{column}: {COLUMNS[column]}" for column in columns if COLUMNS[column])
    return Table(("tensor", *columns), tuple(rows), bars=("bytes", "bytes dense"), words=words)


def _headline(contents: SavedFile) -> str:
    size = size_words(contents.n_bytes, contents.dense_bytes)
    return (
        f"{contents.path}: {contents.model}, {contents.n_bytes:,} bytes (dense: {contents.dense_bytes:,}), {size}; "
        f"the kept values and the entropy of their positions come to {contents.bound_bytes:,.0f}"
    )


def _cells(group: Sequence[StoredTensor]) -> dict[str, str]:
    kept, n_weights = sum(tensor.kept for tensor in group), sum(tensor.n_weights for tensor in group)
    largest = max((tensor.largest_change for tensor in group), default=0.0)
    norm = max((tensor.norm_change for tensor in group), default=0.0)
    return {
        "weights": f"{n_weights:,}",
        "kept": f"{kept / max(n_weights, 1):.2%}",
        "largest change": number(largest) if largest else "",
        "norm change": number(norm) if norm else "",
        "bytes": f"{sum(tensor.n_bytes for tensor in group):,}",
        "bytes by entropy": f"{sum(tensor.bound_bytes for tensor in group):,.0f}",
        "bytes dense": f"{sum(tensor.dense_bytes for tensor in group):,}",
    }


def _words(contents: SavedFile) -> list[tuple[str, str]]:
    """Labels and texts: how it was pruned, and its statements, marked if they are about unrounded values."""
    statements = contents.statements
    lines: list[tuple[str, str | None]] = [("rounding", contents.rounding_words)]
    if statements is not None:
        lines.append(("pruned", f"{statements.method}, {statements.kept:,} of {statements.n_weights:,} weights kept"))
        wrong = contents.breaking_pattern
        if wrong is not None:
            broken = f"{', '.join(wrong[:3])} ({len(wrong)} of {len(contents.masks)}) break it"
            checked = f"is what the file says, but {broken}" if wrong else "along every row, checked"
            lines.append(("pattern", f"{statements.pattern} {checked}"))
        lines.append(("statements", "" if contents.statements_about == "stored values" else ROUNDED_NOTE))
        lines.append(("measured", statements.measured))
        lines += [("network", statements.network), ("rows", statements.rows_and_layers)]
    if contents.certificate is not None:
        note = "" if contents.certificate_about == "stored values" else f"{ROUNDED_NOTE}: "
        lines.append(("certificate", note + contents.certificate.sentence))
    lines.append(("SHA-256", contents.sha256))
    lines.append(("written by", ", ".join(f"{name} {version}" for name, version in contents.versions.items())))
    return [(label, text) for label, text in lines if text]
