"""What is inside a file of `sipp.save`: bytes by tensor against the dense network and the entropy bound, as a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from sipp.allocation.patterns import breaking
from sipp.errors import DataError
from sipp.records.certificate import AnyCertificate, from_json
from sipp.records.display import WIDTH, labelled, number, percent_up, text_of
from sipp.records.identity import with_buffers
from sipp.records.network_hash import state_hash
from sipp.records.pattern import pattern_of
from sipp.storage.coding import DTYPES
from sipp.storage.network_file import Entry, Index, Statements, read_index, unpack
from sipp.storage.outputs import Precision
from sipp.storage.rounding import FORMATS
from sipp.storage.tensor_entries import decode_network

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
    buffers_hash: str | None  # of buffers that no state_dict holds; None: there are none

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
    state: Mapping[str, Tensor],
) -> Contents:
    """The record of a file with this index and these stored values; a certificate is about them by their hash alone."""
    about: About | None = None
    if certificate is not None:
        stored = with_buffers(state_hash(state), index.buffers_hash)
        about = "stored values" if certificate.pruned_hash == stored else "values before rounding"
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
        certificate_about=about,
        buffers_hash=index.buffers_hash,
    )


def read_network(path: Path) -> tuple[dict[str, Tensor], Contents]:
    """The state_dict in a file of `save`, and what else is inside, after every check."""
    code, data, digest = unpack(path)
    index = read_index(code, len(data), path)
    state, masks = decode_network(index, data, path)
    try:
        certificate = None if index.certificate is None else from_json(index.certificate)
    except DataError as error:
        raise DataError(f"{error}", where=path) from error
    n_bytes = path.stat().st_size
    found = contents_of(
        index, path=path, sha256=digest, n_bytes=n_bytes, masks=masks, certificate=certificate, state=state
    )
    if found.certificate_about == "values before rounding" and not index.is_moved:
        raise DataError("its certificate is about another network; do not rely on it, certify this one", where=path)
    return state, found


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


# --- as a table -----------------------------------------------------------------------------------------------------

COLUMNS = {  # and their words, where they do not speak for themselves
    "weights": "",
    "kept": "",
    "positions": "how the places of kept values are stored",
    "values": "the format they are stored in",
    "largest change": "of a weight by rounding, in parts of itself",
    "norm change": "of all weights of a tensor together, in parts of their length",
    "bytes": "",
    "bytes by entropy": "of the values, and of their places at least, on average",
    "bytes dense": "of all values, zeros too",
}


def contents_text(contents: Contents) -> str:
    """The table of tensors; those that are stored whole and exact share a line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("tensor", overflow="fold")
    columns = [one for one in COLUMNS if contents.moved or not one.endswith("change")]
    for column in columns:
        table.add_column(column.replace("bytes ", "bytes\n"), justify="right")

    def add(name: str, group: Sequence[StoredTensor], positions: str, values: str) -> None:
        cells = _cells(group) | {"positions": positions, "values": values}
        table.add_row(name, *(cells[column] for column in columns))

    whole = []
    for one in contents.tensors:
        if one.has_mask or one.positions != "all" or one.values != "exact" or len(one.names) > 1:
            add(escape(" = ".join(one.names)), [one], one.positions, one.dtype if one.values == "exact" else one.values)
        else:
            whole.append(one)
    if whole:
        add(f"{len(whole)} whole tensors", whole, "all", "exact")
    table.add_section()
    add("all tensors", contents.tensors, "", contents.precision)
    ratio = contents.dense_bytes / contents.n_bytes
    words = "; ".join(f"{column}: {COLUMNS[column]}" for column in columns if COLUMNS[column])
    lines = [
        f"{contents.path}: {contents.model}, {contents.n_bytes:,} bytes, {ratio:.2f} x smaller than dense "
        f"({contents.dense_bytes:,}); values and entropy of positions: {contents.bound_bytes:,.0f}",
        text_of(table),
        textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent="  "),
        *_words(contents),
        labelled("SHA-256", contents.sha256),
        labelled("written by", ", ".join(f"{name} {version}" for name, version in contents.versions.items())),
    ]
    return "\n".join(lines)


def _cells(group: Sequence[StoredTensor]) -> dict[str, str]:
    kept, n_weights = sum(one.kept for one in group), sum(one.n_weights for one in group)
    largest = max((one.largest_change for one in group), default=0.0)
    norm = max((one.norm_change for one in group), default=0.0)
    return {
        "weights": f"{n_weights:,}",
        "kept": f"{kept / max(n_weights, 1):.2%}",
        "largest change": number(largest) if largest else "",
        "norm change": number(norm) if norm else "",
        "bytes": f"{sum(one.n_bytes for one in group):,}",
        "bytes by entropy": f"{sum(one.bound_bytes for one in group):,.0f}",
        "bytes dense": f"{sum(one.dense_bytes for one in group):,}",
    }


def _words(contents: Contents) -> list[str]:
    """How it was pruned and what was said of it, marked where it is about other values than the stored ones."""
    lines = [labelled("rounding", contents.moved)] if contents.moved else []
    said = contents.statements
    if said is not None:
        lines.append(labelled("pruned", f"{said.method}, {said.kept:,} of {said.n_weights:,} weights kept"))
        if said.pattern is not None:
            lines.append(labelled("pattern", _pattern_words(contents, said.pattern)))
        if contents.statements_about != "stored values":
            lines.append(labelled("statements", ROUNDED_NOTE))
        for label, text in (("measured", said.measured), ("network", said.network), ("rows", said.rows_and_layers)):
            if text:
                lines.append(labelled(label, text))
    if contents.certificate is not None:
        note = "" if contents.certificate_about == "stored values" else f"{ROUNDED_NOTE}: "
        lines.append(labelled("certificate", note + contents.certificate.sentence))
    return lines


def _pattern_words(contents: Contents, text: str) -> str:
    """The pattern that the file names, and whether its masks obey it: what it says is not believed."""
    wrong = breaking(contents.masks, pattern_of(text))
    if not wrong:
        return f"{text} along every row, checked"
    return f"{text} is what the file says, and {', '.join(wrong[:3])} ({len(wrong)} of {len(contents.masks)}) break it"
