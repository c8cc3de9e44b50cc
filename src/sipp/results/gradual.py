"""The schedule of gradual pruning (steps and shares), and the result of `gradual`.

The share of weights left falls along a cubic curve, fast at first, while many weights are redundant, then slowly:

    keep(t) = keep + (1 - keep) (1 - t)^3,    t from 0 after BEGIN of all steps to 1 after END of them

in equal steps of t. Before BEGIN the network is dense; after END the masks stay fixed and training recovers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from sipp.results.jsonio import NOT_JSON
from sipp.results.sheet import PERCENT, Sheet, Table, shown

BEGIN = 0.1  # share of the steps before the schedule begins
END = 0.6  # share of the steps after which nothing is pruned any more
CUTS = 10  # how often the masks shrink in between


def cut_times(n_steps: int) -> dict[int, float]:
    """{number of steps done: t} for every pruning; if two fall on one step, the later t counts. The last t is 1."""
    times = [k / CUTS for k in range(1, CUTS + 1)]
    return {max(1, round((BEGIN + t * (END - BEGIN)) * n_steps)): t for t in times}


def budget_at(t: float, n_weights: int, last: int) -> int:
    """How many of `n_weights` are left at time t of the schedule, which ends with `last`."""
    return last + round((n_weights - last) * (1 - t) ** 3)


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
        table = Table(("after step", "keep"), self.path, bars=("keep",), forms={"keep": PERCENT})
        return Sheet(title, tables=(table,))
