"""How a method looks everywhere: one colour (on light and on dark), one marker, one dash, on the page and in figures.

The colours can be told apart with protanopia, deuteranopia and tritanopia, and stand out from their background;
`tests/report/test_palette.py` measures both. The marker and the dash say the same without colour.
"""

from __future__ import annotations

from dataclasses import replace

from sipp.experiments.arms import BETWEEN
from sipp.scoring.methods import METHODS, Style

STYLES: dict[str, Style] = {row.name: row.style for row in METHODS}
# For methods that are not listed: told apart by marker and dash.
OTHERS = (
    Style("#7a4a2b", "#c99a7a", "up", (1, 2)),
    Style("#b0126e", "#ff7ab8", "diamond", (5, 2, 1, 2)),
    Style("#3f6b00", "#a3d15c", "square", (9, 4)),
)

# Parts of a stack (time, histograms), from quiet to loud.
PARTS: dict[str, tuple[str, str]] = {
    "kept": ("#0b5fb0", "#4eacfc"),
    "pruned": ("#c3cad4", "#4a5361"),
    "just pruned": ("#c3cad4", "#4a5361"),
    "repaired": ("#0b5fb0", "#4eacfc"),
    "train": ("#c3cad4", "#4a5361"),
    "score": ("#0b5fb0", "#4eacfc"),
    "prune": ("#bc3700", "#ff8a54"),
    "certify": ("#00875f", "#2bd19b"),
    "other": ("#7e2281", "#cb7cca"),
}

# A diverging scale for the heat map: less than average, average, more than average.
LESS = ("#b35806", "#ff9d4d")
MORE = ("#0b5fb0", "#4eacfc")


ARM_DASH = (2, 2)  # of an arm that names its reduction; () where its method has a dash of its own
REPAIRED = "repaired"  # of an arm, and of a part: drawn hollow


def style_of(method: str, methods: tuple[str, ...]) -> Style:
    """The look of a method; one that is not listed gets the look of its place among the others of the run.

    An arm that names a reduction ("sipp-det mean") looks like its method, and has another dash beside the other form.
    A repaired one ("sipp-det repaired") has its method's colour and marker, hollow, and a dot in each gap of its line.
    """
    if method in STYLES:
        return STYLES[method]
    if method.endswith(BETWEEN + REPAIRED):
        plain = method.removesuffix(BETWEEN + REPAIRED)
        style = style_of(plain, (*methods, plain))
        return replace(style, dash=_dotted(style.dash), hollow=True)
    name, _, reduce = method.partition(BETWEEN)
    if name in STYLES and reduce:
        beside = [one for one in methods if one.partition(BETWEEN)[0] == name and one.partition(BETWEEN)[2] != REPAIRED]
        style = STYLES[name]
        is_first = name not in beside and beside[:1] == [method]
        return style if is_first or len(beside) < 2 else replace(style, dash=_other_dash(style))
    others = [name for name in methods if name not in STYLES and not name.endswith(BETWEEN + REPAIRED)]
    return OTHERS[others.index(method) % len(OTHERS)]


def _other_dash(style: Style) -> tuple[int, ...]:
    return () if style.dash else ARM_DASH


def _dotted(dash: tuple[int, ...]) -> tuple[int, ...]:
    """The dash with a dot in its last gap; a solid line becomes long strokes with a dot between them."""
    return (*dash, 1, dash[-1]) if dash else (12, 3, 1, 3)
