"""A file of `sipp.save`: the record of its network, and bytes per tensor beside dense ones and the entropy bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sipp.results import words
from sipp.results.jsonio import NOT_JSON
from sipp.results.options import Precision
from sipp.results.saved_network import SavedNetwork
from sipp.results.sheet import PERCENT, Entry, Sheet, Table, shown

WIDE_AS = {"fp16": "float16", "bf16": "bfloat16", "int8": "int8"}  # the dtype of rounded values
ROUNDED_NOTE = "about the network before its values were rounded, not about the stored one"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file."""

    names: tuple[str, ...]  # more than one: tied, stored once
    shape: tuple[int, ...]
    dtype: str
    kept: int  # values stored
    positions: str  # how those of the values are stored: "all", "bitmask", ...
    values: str  # "exact", "fp16", "bf16" or "int8"
    mask: str | None  # "stored": the mask is where values are; None: it has no mask
    lengths: tuple[int, ...]  # bytes of the positions, the planes of values, those of int8's scales, a mask of its own
    largest_change: float  # largest relative change of a weight by rounding
    norm_change: float  # relative change of the whole tensor

    ALSO_IN_JSON = ("n_weights", "n_bytes", "dense_bytes", "value_bytes", "bound_bytes")
    SCALE_BYTES = 4  # of int8's scales, one a row, as float32

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def n_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def n_bytes(self) -> int:
        """Bytes in the file."""
        return sum(self.lengths)

    @property
    def dense_bytes(self) -> int:
        width: int = getattr(torch, self.dtype).itemsize
        return self.n_weights * width

    @property
    def value_bytes(self) -> int:
        """Bytes of the stored values before compression, with the scales of int8."""
        width: int = getattr(torch, WIDE_AS.get(self.values, self.dtype)).itemsize
        return self.kept * width + (self.SCALE_BYTES * self.n_rows if self.values == "int8" else 0)

    @property
    def bound_bytes(self) -> float:
        """Bytes of the stored values and n H(kept / n) / 8 for their positions."""
        return self.value_bytes + entropy_bytes(self.n_weights, self.kept)


@dataclass(frozen=True, kw_only=True)
@shown
class SavedFile(SavedNetwork):
    """A network in a small file: its record, and how each tensor is stored. `print` it.

    The file does not name the inputs that chose the weights (`pruned.seen`): their hashes would outweigh the rest.
    """

    path: Path
    sha256: str = ""
    n_bytes: int = 0
    precision: Precision  # `values` as asked for
    tensors: tuple[StoredTensor, ...]
    masks: dict[str, Tensor] = field(default_factory=dict, metadata=NOT_JSON)  # {name: bool tensor}, True = kept

    ALSO_IN_JSON = ("certificate_about", "dense_bytes", "bound_bytes", "rounding_words")
    KIND: ClassVar = "network file"

    @property
    def certificate_about(self) -> Literal["stored values", "values before rounding"] | None:
        if self.certificate is None:
            return None
        return "stored values" if self.certificate.pruned_hash == self.pruned_hash else "values before rounding"

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors, dense, each in its own dtype."""
        return sum(tensor.dense_bytes for tensor in self.tensors)

    @property
    def bound_bytes(self) -> float:
        """Bytes of the stored values, and n H(keep) / 8 for the positions in sparse tensors."""
        sparse = [tensor for tensor in self.tensors if tensor.mask is not None or tensor.kept < tensor.n_weights]
        n_weights, kept = sum(tensor.n_weights for tensor in sparse), sum(tensor.kept for tensor in sparse)
        return sum(tensor.value_bytes for tensor in self.tensors) + entropy_bytes(n_weights, kept)

    @property
    def rounding_words(self) -> str:
        """How far rounding changed the values, in words; empty if every bit is stored."""
        rounded = [tensor for tensor in self.tensors if tensor.largest_change]
        if not rounded:
            return ""
        largest = words.percent_up(max(tensor.largest_change for tensor in rounded))
        together = words.percent_up(max(tensor.norm_change for tensor in rounded))
        return (
            f"{self.precision} changed weights in {len(rounded)} of {len(self.tensors)} tensors: a single weight by at "
            f"most {largest}, and a whole tensor by at most {together} of its norm"
        )

    @property
    def certified(self) -> str:
        note = f"{ROUNDED_NOTE}: " if self.certificate_about == "values before rounding" else ""
        return note + super().certified

    @property
    def sheet(self) -> Sheet:
        return Sheet(_headline(self), tuple(_facts(self)), (_table(self),))


def entropy_bytes(n_weights: int, kept: int) -> float:
    """The least bytes that positions of independently kept weights need on average: n H(kept / n) / 8."""
    shares = [count / n_weights for count in (kept, n_weights - kept) if 0 < count < n_weights]
    return -n_weights * sum(share * math.log2(share) for share in shares) / 8


def _facts(contents: SavedFile) -> list[tuple[str, str]]:
    """How it was pruned, and its statements, marked if they are about unrounded values."""
    facts = [("rounding", contents.rounding_words)]
    if contents.pruned is not None:
        is_marked = bool(contents.rounding_words)
        facts += [("pruned", contents.pruned.headline), ("statements", ROUNDED_NOTE if is_marked else "")]
    facts += contents.facts
    facts.append(("SHA-256", contents.sha256))
    facts.append(("written by", f"sipp {contents.sipp}, torch {contents.torch}"))
    return [(label, text) for label, text in facts if text]


COLUMN_WORDS = (
    "positions: how the positions of kept values are stored; values: their format; bytes by entropy: the values, and "
    "the least that their positions need on average; bytes dense: all values, zeros included"
)


def _table(contents: SavedFile) -> Table:
    """One line a tensor; dense and exact ones share a line."""
    rows: list[tuple[Entry, ...]] = []

    def add(name: str, group: Sequence[StoredTensor], positions: str, values: str) -> None:
        kept, n_weights = sum(tensor.kept for tensor in group), sum(tensor.n_weights for tensor in group)
        n_bytes, bound = sum(tensor.n_bytes for tensor in group), round(sum(tensor.bound_bytes for tensor in group))
        dense = sum(tensor.dense_bytes for tensor in group)
        rows.append((name, n_weights, kept / max(n_weights, 1), positions, values, n_bytes, bound, dense))

    def is_whole(tensor: StoredTensor) -> bool:
        return (tensor.mask, tensor.positions, tensor.values, len(tensor.names)) == (None, "all", "exact", 1)

    for tensor in contents.tensors:
        if not is_whole(tensor):
            values = tensor.dtype if tensor.values == "exact" else tensor.values
            add(" = ".join(tensor.names), [tensor], tensor.positions, values)
    if whole := [tensor for tensor in contents.tensors if is_whole(tensor)]:
        add(f"{len(whole)} whole tensors", whole, "all", "exact")
    add("all tensors", contents.tensors, "", contents.precision)
    columns = ("tensor", "weights", "kept", "positions", "values", "bytes", "bytes by entropy", "bytes dense")
    bars = ("bytes", "bytes dense")
    return Table(columns, tuple(rows), bars=bars, words=COLUMN_WORDS, forms={"kept": PERCENT})


def _headline(contents: SavedFile) -> str:
    size = words.size(contents.n_bytes, contents.dense_bytes)
    return f"{contents.path}: {contents.model}, {contents.n_bytes:,} bytes (dense: {contents.dense_bytes:,}), {size}"
