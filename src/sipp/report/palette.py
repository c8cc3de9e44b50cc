"""The colour, marker and dash of each method.

The colours remain distinct with protanopia, deuteranopia and tritanopia, and contrast with the background;
`tests/report/test_palette.py` measures both. Markers and dashes distinguish methods without colour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Literal

Marker = Literal["circle", "square", "diamond", "up", "down", "plus", "cross"]


@dataclass(frozen=True)
class Style:
    """The style of one method on the page."""

    light: str  # colour on a light background, and in print
    dark: str
    marker: Marker
    dash: tuple[int, ...] = ()  # lengths of line and gap; empty: solid
    hollow: bool = False  # outlined markers and hatched bars: a repaired network


STYLES: dict[str, Style] = {
    "sipp-blend": Style("#090416", "#f6ffac", "circle", (9, 3)),
    "sipp-hybrid": Style("#0b5fb0", "#4eacfc", "circle"),
    "sipp-det": Style("#bc3700", "#ff8a54", "square"),
    "sipp-rand": Style("#00875f", "#2bd19b", "diamond"),
    "sipp-simple": Style("#7e2281", "#cb7cca", "up", (7, 3)),
    "magnitude": Style("#b38704", "#f2d04b", "down", (4, 3)),
    "snip": Style("#389acf", "#b5e3ff", "cross", (2, 3)),
    "random": Style("#565a5c", "#989a9b", "plus", (8, 3, 2, 3)),
    "lamp": Style("#700407", "#c7273e", "up", (1, 2)),
    "wanda": Style("#9621fb", "#534bff", "square", (5, 2, 1, 2)),
    "synflow": Style("#2c009b", "#7158b9", "diamond", (6, 2)),
    "grasp": Style("#7f919e", "#3a7087", "down", (1, 3)),
    "erk": Style("#c44ef3", "#da0211", "cross", (6, 3)),
    "obs": Style("#471647", "#bdfc04", "plus", (3, 2)),
}

# For methods without a row above: each as far as possible from all previous colours. The ninth such method on a page
# reuses the colours of the first, with another marker and dash.
FREE_COLOURS = (
    ("#19342d", "#99ffd9"),
    ("#330066", "#b4646e"),
    ("#0f572a", "#ff6666"),
    ("#330600", "#9f66ff"),
    ("#6600cc", "#ff99cc"),
    ("#ff1a8c", "#4dff79"),
    ("#42783a", "#b2bcff"),
    ("#9b914b", "#cc9900"),  # last: the colour of magnitude is near
)
FREE_MARKERS: tuple[Marker, ...] = ("up", "diamond", "square", "down", "circle", "cross", "plus")
FREE_DASHES = tuple((line, gap) for gap in (4, 5, 6, 7) for line in (10, 7, 4, 2))  # gaps that no row above has
FREE_STYLES = tuple(
    Style(*colours, marker, dash)
    for (dash, marker), colours in zip(product(FREE_DASHES, FREE_MARKERS), cycle(FREE_COLOURS))
)

# Colours of the parts of the time, and of single series.
QUIET, LOUD = ("#c3cad4", "#4a5361"), ("#0b5fb0", "#4eacfc")
THIS = "this network"  # the only series on a page about one network
PARTS: dict[str, tuple[str, str]] = {
    THIS: LOUD,
    "just pruned": QUIET,
    "repaired": LOUD,
    "train": QUIET,
    "prune": LOUD,
    "certify": ("#00875f", "#2bd19b"),
    "other": ("#7e2281", "#cb7cca"),
    "total": ("#4a5361", "#c3cad4"),
}

SEPARATOR = " "  # between a method and its form, in the label of an arm
REPAIRED = "repaired"  # suffix of an arm; drawn hollow


def style_of(arm: str, arms: tuple[str, ...]) -> Style:
    """The style of a method; those without a row in `STYLES` get free styles in the order of `arms`.

    A repaired one ("sipp-det repaired") has its method's colour and marker, hollow, and dots in the gaps of its line.
    """
    plain = arm.removesuffix(SEPARATOR + REPAIRED)
    if plain != arm:
        style = style_of(plain, arms)
        # a solid line becomes long dashes with dots between them
        dash = (*style.dash, 1, style.dash[-1]) if style.dash else (12, 3, 1, 3)
        return replace(style, dash=dash, hollow=True)
    if arm in STYLES:
        return STYLES[arm]
    bare = (other.removesuffix(SEPARATOR + REPAIRED) for other in (*arms, arm))
    others = [other for other in dict.fromkeys(bare) if other not in STYLES]
    return FREE_STYLES[others.index(arm) % len(FREE_STYLES)]
