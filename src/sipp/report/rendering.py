"""Renders articles as one self-contained HTML file, with styles, script and data inside."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import sipp
from sipp.extras import needed_for
from sipp.report import palette
from sipp.report.contents import Article, flatten

TEMPLATE = "template.html.j2"
HOW_TO_READ = "Point at a plot, or focus it and use the arrow keys, to see exact values; every plot also has a table."
SHOWN_LENGTH = 500  # characters of a value in a table of values
DIGITS = 10  # significant digits of numbers on the page, more than any measurement has
MOVED = "distance between the outputs of the pruned and the dense network, as a share of the dense output's norm"
WORDS = {  # explained where they occur, and at the end
    "keep": "share of the prunable weights that are kept: keep 10 % means 90 % zeros",
    "dense": "the network before pruning",
    "dead rows": "rows (outputs of a layer) that lost all their weights and output only a bias",
    "output error": MOVED,
    "guarantee": "measured on inputs that neither network has seen; holds for new inputs from the same source",
    "certified within": "guaranteed for new inputs from the source of the holdout, with the certificate's confidence",
    "prunable weights": "weights of linear, convolutional, recurrent and attention layers; biases and norms stay",
}
OWN_SCORE = "a score from the user's own code"


def about_method(arm: str) -> str:
    """What a method does, in a line; one that the package does not know is the user's own."""
    name, _, form = arm.partition(palette.SEPARATOR)
    known = sipp.methods()
    about = known[name].about if name in known else OWN_SCORE
    if form == palette.REPAIRED:
        return f"{about}; then mask and weights were fitted to the dense network without labels"
    return f"{about}; with the {form} over patches" if form else about


def render(
    articles: Sequence[Article],
    methods: Iterable[str],
    *,
    heading: str = "",
    broken: Sequence[str] = (),
    words: Mapping[str, str] = {},
) -> str:
    """Renders these articles in order; `methods` are all methods that they show, each with a style of its own.

    Without a `heading` it is the title of the first article. `broken` are sentences about what cannot be shown, `words`
    are explained beside those of every page.
    """
    with needed_for("drawing the page"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    plots = {plot["id"]: plot for article in articles for section in article.sections for plot in section.plots}
    arms = tuple(dict.fromkeys(methods))
    drawn = {name: palette.style_of(name, arms) for name in arms}
    styles = {
        name: {
            "cls": f"m{i}", "marker": style.marker, "dash": list(style.dash), "hollow": style.hollow,
            "about": about_method(name),
        }
        for i, (name, style) in enumerate(drawn.items())
    }  # fmt: skip
    classes = {name: f"p{i}" for i, name in enumerate(palette.PARTS)}
    css = _asset("page.css") + _colours(drawn)
    script = _asset("draw.js") + _asset("names.js") + _asset("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset(TEMPLATE)).render(
        heading=heading or articles[0].title,
        explained={**{name: about_method(name) for name in arms}, **WORDS, **words},
        how_to_read=HOW_TO_READ,
        articles=list(articles),
        flatten=flatten,
        as_text=_as_text,
        broken=broken,
        version=f"sipp {sipp.__version__}",
        # Only text from this package is inserted unescaped; everything from files is escaped.
        css=Markup(css),
        script=Markup(script),
        data=Markup(embedded({"plots": plots, "styles": styles, "parts": classes})),
    )


def embedded(values: Any) -> str:
    """JSON that is safe inside a script element: it cannot end the element or start a comment."""
    text = json.dumps(_rounded(values), allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _rounded(values: Any) -> Any:
    """The values, with as many digits as the page needs."""
    if isinstance(values, float):
        return float(f"{values:.{DIGITS}g}")
    if isinstance(values, Mapping):
        return {key: _rounded(value) for key, value in values.items()}
    return list(map(_rounded, values)) if isinstance(values, list | tuple) else values


def _as_text(value: Any) -> str:
    """A value in a table of values; a long one is cut."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]} ..."


def _asset(name: str) -> str:
    return resources.files("sipp.report").joinpath("assets", name).read_text(encoding="utf-8")


def _colours(methods: dict[str, palette.Style]) -> str:
    """CSS colour classes of methods and parts, for light and dark mode."""
    pairs = {f"m{i}": (style.light, style.dark) for i, style in enumerate(methods.values())}
    pairs |= {f"p{i}": colours for i, colours in enumerate(palette.PARTS.values())}
    light = "".join(f".{name}{{color:{pair[0]}}}" for name, pair in pairs.items())
    dark = "".join(f".{name}{{color:{pair[1]}}}" for name, pair in pairs.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"
