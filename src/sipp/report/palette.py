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

ARM_DASH = (2, 2)  # for an arm that names its reduction; solid if its method is dashed
SEPARATOR = " "  # between a method and its form, in the label of an arm
REPAIRED = "repaired"  # suffix of an arm; drawn hollow


def style_of(method: str, methods: tuple[str, ...]) -> Style:
    """The style of a method; methods without a row in `STYLES` get free styles in the order of `methods`.

    An arm with a reduction ("sipp-det mean") looks like its method, with another dash if both appear. A repaired one
    ("sipp-det repaired") has its method's colour and marker, hollow, and dots in the gaps of its line.
    """
    if method in STYLES:
        return STYLES[method]
    if method.endswith(SEPARATOR + REPAIRED):
        style = style_of(method.removesuffix(SEPARATOR + REPAIRED), methods)
        # a solid line becomes long dashes with dots between them
        dash = (*style.dash, 1, style.dash[-1]) if style.dash else (12, 3, 1, 3)
        return replace(style, dash=dash, hollow=True)
    name = method.partition(SEPARATOR)[0]
    if not _is_free(method):
        beside = [
            other
            for other in methods
            if other.partition(SEPARATOR)[0] == name and other.partition(SEPARATOR)[2] != REPAIRED
        ]
        style = STYLES[name]
        is_first = name not in beside and beside[:1] == [method]
        return style if is_first or len(beside) < 2 else replace(style, dash=() if style.dash else ARM_DASH)
    bare = (other.removesuffix(SEPARATOR + REPAIRED) for other in methods)
    others = [other for other in dict.fromkeys((*bare, method)) if _is_free(other)]
    return FREE_STYLES[others.index(method) % len(FREE_STYLES)]


def _is_free(method: str) -> bool:
    """Whether it has no row in `STYLES`, neither itself nor its method."""
    name, _, reduce = method.partition(SEPARATOR)
    return method not in STYLES and not (name in STYLES and reduce)
