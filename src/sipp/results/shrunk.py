"""The result of `shrink`: a smaller network with the same output, and what it saves."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from torch import nn

from sipp.results.certificate import AnyCertificate
from sipp.results.display import WIDTH, labelled, listed, plain_table, short_names, text_of
from sipp.results.html import labels_html, table_html, view
from sipp.results.network_hash import tensors_hash
from sipp.results.plots import layer_bars

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShrunkLayer:
    """One weight before and after. Multiply-adds are those of one call with the example."""

    name: str
    before: Shape
    after: Shape
    multiply_adds_before: int
    multiply_adds: int


@dataclass(frozen=True)
class Shrunk:
    """A network without its dead channels, and what that saves. `print` it.

    Example:
        >>> import sipp, torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> _ = net[0].weight.data[4:].zero_()
        >>> small = sipp.shrink(net, torch.rand(2, 8))
        >>> [(layer.name, layer.before, layer.after) for layer in small.layers]
        [('0.weight', (16, 8), (4, 8)), ('2.weight', (4, 16), (4, 4))]
    """

    model: nn.Module  # the class that was given, with smaller layers
    layers: tuple[ShrunkLayer, ...]  # every weight of a linear layer or a convolution, by one of its names
    n_parameters_before: int
    n_parameters: int
    multiply_adds_before: int  # of one call with the example, including attention and recurrent layers
    multiply_adds: int
    example: str  # the input for which multiply-adds were counted and outputs compared, in words
    off_by: float  # the largest difference of an output on the example, relative to its largest value
    left_alone: tuple[str, ...]  # operations that keep all channels they read, and the modules they are in
    hash_before: str  # of the network before shrinking
    described_hash: str  # of `model` as it was made; this record does not describe other weights
    certificate: AnyCertificate | None = None  # about the network before shrinking, which computes the same
    seen: frozenset[str] = frozenset()  # hashes of known points that chose the masks: `certify` refuses them
    seen_all: bool = False  # whether no other points chose the weights of `described_hash`

    @property
    def is_as_made(self) -> bool:
        """Whether the weights are unchanged since `shrink`."""
        return tensors_hash(self.model) == self.described_hash

    def _table(self) -> Table:
        """One line per weight."""
        table = plain_table("weight", "before", "after", "multiply-adds before", "multiply-adds after")
        names = short_names([layer.name for layer in self.layers])
        for name, layer in zip(names, self.layers):
            shapes = (" x ".join(map(str, shape)) for shape in (layer.before, layer.after))
            table.add_row(name, *shapes, f"{layer.multiply_adds_before:,}", f"{layer.multiply_adds:,}")
        return table

    def _words(self) -> list[tuple[str, str]]:
        """What it saves, and what is certified, as labels and texts."""
        lines = [
            ("parameters", _fewer(self.n_parameters_before, self.n_parameters)),
            ("multiply-adds", f"{_fewer(self.multiply_adds_before, self.multiply_adds)}, for {self.example}"),
            ("outputs", f"the same on this example, up to rounding ({self.off_by:.0e} of the largest)"),
        ]
        if self.left_alone:
            lines.append(("left alone", f"these keep all channels that they read: {listed(self.left_alone)}"))
        if self.certificate is not None and self.is_as_made:
            words = f"made for the network before, which computes the same. {self.certificate.sentence}"
            lines.append(("certificate", words))
        return lines

    def __str__(self) -> str:
        return "\n".join([text_of(self._table()), *(labelled(label, text) for label, text in self._words())])

    def _repr_html_(self) -> str:
        table = table_html(self._table(), bars=("multiply-adds before", "multiply-adds after"))
        return view(f"{type(self.model).__name__} without its dead channels", table, labels_html(self._words()))

    def plot(self, ax: Any = None) -> Any:
        """Draws the multiply-adds of each layer before and after, on `ax` or on new axes; returns the axes."""
        millions = {
            "after": [layer.multiply_adds / 1e6 for layer in self.layers],
            "before": [layer.multiply_adds_before / 1e6 for layer in self.layers],
        }
        return layer_bars(ax, [layer.name for layer in self.layers], millions, "multiply-adds (millions)")

    def __repr__(self) -> str:
        kept = _fewer(self.n_parameters_before, self.n_parameters)
        return textwrap.shorten(f"<Shrunk {type(self.model).__name__}: parameters {kept}; print() shows them>", WIDTH)


def _fewer(before: int, after: int) -> str:
    return f"{before:,} -> {after:,} ({before / max(1, after):.2f} x fewer)"
