"""The result of `gradual`: the network, its masks, and the share of weights left after each cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sipp.results.jsonio import NOT_JSON
from sipp.results.sheet import Sheet, Table, shown


@dataclass(frozen=True)
@shown
class Gradual:
    """A network that was pruned while it was trained. `print` it."""

    model: nn.Module = field(metadata=NOT_JSON)  # the one that was given, released
    masks: dict[str, Tensor] = field(metadata=NOT_JSON)
    path: tuple[tuple[int, float], ...]  # (steps done, share of weights left), one pair a cut
    method: str
    n_weights: int
    kept: int
    seed: int

    ALSO_IN_JSON = ("keep",)

    @property
    def keep(self) -> float:
        """The share of prunable weights that was kept."""
        return self.kept / self.n_weights

    @property
    def sheet(self) -> Sheet:
        title = f"{self.method}: kept {self.kept:,} of {self.n_weights:,} weights ({self.keep:.2%})"
        rows = tuple((f"{step:,}", f"{keep:.2%}") for step, keep in self.path)
        return Sheet(title, tables=(Table(("after step", "keep"), rows, bars=("keep",)),))
