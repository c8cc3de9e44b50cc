"""The result of `gradual`: the network, its masks, and the share of weights left after each cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sipp.results.display import plain_table
from sipp.results.html import table_html, view
from sipp.results.plots import curves


@dataclass(frozen=True)
class Gradual:
    """A network that was pruned while it was trained. `print` it."""

    model: nn.Module  # the one that was given, released
    masks: dict[str, Tensor]
    path: tuple[tuple[int, float], ...]  # (steps done, share of weights left), one pair a cut
    method: str
    n_weights: int
    kept: int
    seed: int

    @property
    def keep(self) -> float:
        """The share of prunable weights that was kept."""
        return self.kept / self.n_weights

    @property
    def _headline(self) -> str:
        return f"{self.method}: kept {self.kept:,} of {self.n_weights:,} weights ({self.keep:.2%})"

    def __str__(self) -> str:
        steps = ", ".join(f"{keep:.2%} after step {step}" for step, keep in self.path)
        return f"{self._headline}; {steps}"

    def __repr__(self) -> str:
        return (
            f"<Gradual {type(self.model).__name__} by {self.method}: {self.kept:,} of {self.n_weights:,} weights kept>"
        )

    def _repr_html_(self) -> str:
        table = plain_table("after step", "keep")
        for step, keep in self.path:
            table.add_row(f"{step:,}", f"{keep:.2%}")
        return view(self._headline, table_html(table, bars=("keep",)))

    def plot(self, ax: Any = None) -> Any:
        """Draws the share of weights left over the steps, on `ax` or on new axes; returns the axes."""
        steps, keeps = [step for step, _ in self.path], [100 * keep for _, keep in self.path]
        return curves(ax, {self.method: (steps, keeps)}, "step", "weights kept (%)")
