"""THE list of methods: one row each. `prune`, recipes, the command line and the page read it.

To add a method: write its score in a file of this folder, add a row here. Importing this file loads no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from sipp.errors import OptionError
from sipp.records.options import Reduce

Need = Literal["data", "labels"]
Cut = Literal["global", "layer", "row", "sampled", "hybrid"]
Marker = Literal["circle", "square", "diamond", "up", "down", "plus", "cross"]
Score = Callable[[Any], dict[str, Any]]  # of a Subject, {parameter name: tensor}; this file loads no torch

SENSITIVITY = "sensitivity"  # as a score: the empirical sensitivities themselves (T1-T3)
BLEND = "blend"  # as a score: sensitivities and magnitudes blended, how is chosen on points kept aside (T20)


@dataclass(frozen=True)
class Style:
    """The look of one method on the page and in figures."""

    light: str  # colour on a light background, and in print
    dark: str
    marker: Marker
    dash: tuple[int, ...] = ()  # lengths of line and gap; empty: a solid line
    hollow: bool = False  # markers are outlines, and bars are hatched: a repaired network


@dataclass(frozen=True)
class MethodInfo:
    """One method: what it scores by, what it needs, how rows are cut, what is promised, how it looks."""

    name: str
    label: str  # on plots
    about: str  # one line for tables, without |
    score: str  # "file:function" of this folder, {parameter name: tensor} of a Subject; or SENSITIVITY
    needs: frozenset[Need]
    cut: Cut  # which weights go: the smallest of all, the same share of each layer or row, or by sampling
    promise: str  # the statement about a row it keeps
    style: Style
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


NOTHING: frozenset[Need] = frozenset()
POINTS: frozenset[Need] = frozenset({"data"})
LABELS: frozenset[Need] = frozenset({"data", "labels"})

METHODS: tuple[MethodInfo, ...] = (
    MethodInfo(
        "sipp-blend", "SiPP-blend", "sensitivity^p magnitude^(1-p), p chosen by the error on points kept aside",
        BLEND, POINTS, "global", "T17", Style("#090416", "#f6ffac", "circle", (9, 3)), floor=0.1,
    ),
    MethodInfo(
        "sipp-hybrid", "SiPP-hybrid", "per row the better of keeping the most sensitive weights and sampling",
        SENSITIVITY, POINTS, "hybrid", "T9", Style("#0b5fb0", "#4eacfc", "circle"),
    ),
    MethodInfo(
        "sipp-det", "SiPP-det", "keeps the most sensitive weights",
        SENSITIVITY, POINTS, "global", "T5", Style("#bc3700", "#ff8a54", "square"),
    ),
    MethodInfo(
        "sipp-rand", "SiPP-rand", "samples weights by sensitivity and re-weights them",
        SENSITIVITY, POINTS, "sampled", "T6", Style("#00875f", "#2bd19b", "diamond"),
    ),
    MethodInfo(
        "sipp-simple", "SiPP-simple", "keeps the most sensitive weights, with the simple bound's constants",
        SENSITIVITY, POINTS, "global", "T5", Style("#7e2281", "#cb7cca", "up", (7, 3)),
    ),
    MethodInfo(
        "wt", "WT", "keeps the largest magnitudes (weight thresholding)",
        "baselines:wt", NOTHING, "global", "T17 with data", Style("#b38704", "#f2d04b", "down", (4, 3)),
    ),
    MethodInfo(
        "snip", "SNIP", "keeps the largest weight x gradient of the loss, in magnitude",
        "baselines:snip", LABELS, "global", "T17", Style("#389acf", "#b5e3ff", "cross", (2, 3)),
    ),
    MethodInfo(
        "random", "random", "keeps weights at random",
        "baselines:random", NOTHING, "global", "T17 with data", Style("#565a5c", "#989a9b", "plus", (8, 3, 2, 3)),
    ),
    MethodInfo(
        "lamp", "LAMP", "magnitudes, each relative to the larger ones of its layer",
        "lamp:lamp", NOTHING, "global", "T17 with data", Style("#700407", "#c7273e", "up", (1, 2)),
    ),
    MethodInfo(
        "wanda", "Wanda", "magnitude times the length of its input, compared within each row",
        "wanda:wanda", POINTS, "row", "T17", Style("#9621fb", "#534bff", "square", (5, 2, 1, 2)),
    ),
    MethodInfo(
        "synflow", "SynFlow", "keeps the paths of the largest products of magnitudes, found in 100 steps",
        "synflow:synflow", POINTS, "global", "T17", Style("#2c009b", "#7158b9", "diamond", (6, 2)),
    ),
    MethodInfo(
        "grasp", "GraSP", "keeps the weights that carry most of the gradient's norm",
        "grasp:grasp", LABELS, "global", "T17", Style("#7f919e", "#3a7087", "down", (1, 3)),
    ),
    MethodInfo(
        "erk", "ERK", "random weights, as many of a layer as the sum of its sizes says",
        "erk:erk", NOTHING, "global", "T17 with data", Style("#c44ef3", "#da0211", "cross", (6, 3)),
    ),
    MethodInfo(
        "obs", "OBS", "keeps the weights that the others of their row could replace worst, layer by layer",
        "obs:obs", POINTS, "layer", "T17", Style("#471647", "#bdfc04", "plus", (3, 2)),
    ),
)  # fmt: skip

NAMES: tuple[str, ...] = tuple(row.name for row in METHODS)
_ROWS = {row.name: row for row in METHODS}


def method_of(name: Any) -> MethodInfo:
    """The row of a method; an OptionError names the nearest and all of them."""
    if isinstance(name, str) and name in _ROWS:
        return _ROWS[name]
    near = difflib.get_close_matches(name, NAMES, n=1) if isinstance(name, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OptionError(f"method={name!r:.60} is not one of {', '.join(NAMES)}" + (f"; {hint}".rstrip() if hint else ""))


def score_of(row: MethodInfo) -> Score:
    """The function that scores for a method that has one of its own."""
    file, _, function = row.score.partition(":")
    found: Score = getattr(import_module(f"sipp.scoring.{file}"), function)
    return found
