"""THE list of methods: one row each. `prune`, recipes, the command line and the page read it.

To add a method: write its score in a file of this folder, add a row here; the page gives it a look by itself.
Importing this file loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from sipp.errors import OptionError
from sipp.records.options import Reduce
from sipp.records.other_names import method_here

Need = Literal["data", "labels"]
CutRule = Literal["global", "layer", "row", "sampled", "hybrid"]
Score = Callable[[Any], dict[str, Any]]  # of a ScoringTask, {parameter name: tensor}; this file loads no torch

SENSITIVITY = "sensitivity"  # as a score: the empirical sensitivities themselves (T1-T3)
BLEND = "blend"  # as a score: sensitivities and magnitudes blended, how is chosen on points kept aside (T20)

NOTHING: frozenset[Need] = frozenset()
POINTS: frozenset[Need] = frozenset({"data"})
LABELS: frozenset[Need] = frozenset({"data", "labels"})


@dataclass(frozen=True)
class MethodInfo:
    """One method: what it scores by, what it needs, which weights go."""

    name: str
    about: str  # one line for tables, without |
    score: str  # "file:function" of this folder, {parameter name: tensor} of a ScoringTask; or SENSITIVITY, or BLEND
    needs: frozenset[Need] = NOTHING
    cut: CutRule = "global"  # which weights go: the smallest of all, the same share of a layer or row, or by sampling
    reduce: Reduce = "max"  # of the sensitivities, where nothing else is asked for
    floor: float | None = None  # under rows and layers, where nothing else is asked for; None: rows may die

    @property
    def is_scored(self) -> bool:
        """Whether the method ranks by sensitivities, alone or blended."""
        return self.score in (SENSITIVITY, BLEND)

    @property
    def is_blend(self) -> bool:
        return self.score == BLEND

    @property
    def is_sampled(self) -> bool:
        return self.cut in ("sampled", "hybrid")

    @property
    def needs_data(self) -> bool:
        return bool(self.needs)


METHODS: tuple[MethodInfo, ...] = (
    MethodInfo("sipp-blend", "sensitivity^p magnitude^(1-p), p chosen by the error on points kept aside",
               BLEND, POINTS, floor=0.1),
    MethodInfo("sipp-hybrid", "per row the better of keeping the most sensitive weights and sampling",
               SENSITIVITY, POINTS, "hybrid"),
    MethodInfo("sipp-det", "keeps the most sensitive weights",
               SENSITIVITY, POINTS),
    MethodInfo("sipp-rand", "samples weights by sensitivity and re-weights them",
               SENSITIVITY, POINTS, "sampled"),
    MethodInfo("sipp-simple", "keeps the most sensitive weights, with the simple bound's constants",
               SENSITIVITY, POINTS),
    MethodInfo("wt", "keeps the largest magnitudes (weight thresholding)",
               "baselines:wt"),
    MethodInfo("snip", "keeps the largest weight x gradient of the loss, in magnitude",
               "baselines:snip", LABELS),
    MethodInfo("random", "keeps weights at random",
               "baselines:random"),
    MethodInfo("lamp", "magnitudes, each relative to the larger ones of its layer",
               "lamp:lamp"),
    MethodInfo("wanda", "magnitude times the length of its input, compared within each row",
               "wanda:wanda", POINTS, "row"),
    MethodInfo("synflow", "keeps the paths of the largest products of magnitudes, found in 100 steps",
               "synflow:synflow", POINTS),
    MethodInfo("grasp", "keeps the weights that carry most of the gradient's norm",
               "grasp:grasp", LABELS),
    MethodInfo("erk", "random weights, as many of a layer as the sum of its sizes says",
               "erk:erk"),
    MethodInfo("obs", "keeps the weights that the others of their row could replace worst, layer by layer",
               "obs:obs", POINTS, "layer"),
)  # fmt: skip

NAMES: tuple[str, ...] = tuple(row.name for row in METHODS)
_ROWS = {row.name: row for row in METHODS}


def method_of(name: Any) -> MethodInfo:
    """The row of a method; an OptionError names the nearest and all of them."""
    if isinstance(name, str) and name in _ROWS:
        return _ROWS[name]
    if isinstance(name, str) and (here := method_here(name)) is not None:
        raise OptionError(f"method={name!r} is called {here!r} here", fix=f"give method={here!r}", option="method")
    near = difflib.get_close_matches(name, NAMES, n=1) if isinstance(name, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"method={name!r:.60} is not one of {', '.join(NAMES)}{hint}", option="method")


def score_of(row: MethodInfo) -> Score:
    """The function that scores for a method that has one of its own."""
    file, _, function = row.score.partition(":")
    found: Score = getattr(import_module(f"sipp.scoring.{file}"), function)
    return found
