"""Renders articles as one self-contained HTML file, with styles, script and data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from sipp import __version__
from sipp.extras import needed_for
from sipp.files import check_file, make_folder, write_atomic
from sipp.report import palette
from sipp.report.compare_networks import networks_article
from sipp.report.contents import Article
from sipp.report.glossary import WORDS, about_method
from sipp.report.one_network import pruned_article
from sipp.report.palette import Style
from sipp.report.results import PrunedModel

TEMPLATE = "template.html.j2"
HOW_TO_READ = "Point at a plot, or focus it and use the arrow keys, to see exact values; every plot also has a table."


def write_page(path: Path, text: str, *, force: bool) -> None:
    """Writes a rendered page; an existing file is replaced only with `force`."""
    make_folder(path.parent)
    check_file(path, force=force)
    write_atomic(path, text.encode(errors="replace"))  # a folder name may not be valid text


def network_articles(models: Sequence[PrunedModel]) -> list[Article]:
    """The articles about pruned networks: the comparison of several first."""
    compared = [networks_article(models)] if len(models) > 1 else []
    single = [pruned_article(model, f"part{index}") for index, model in enumerate(models)]
    return compared + [replace(article, is_closed=bool(compared)) for article in single]


def render(
    articles: Sequence[Article],
    methods: Iterable[str],
    *,
    heading: str = "",
    broken: Sequence[str] = (),
    words: Mapping[str, str] = WORDS,
) -> str:
    """Renders these articles in order; `methods` are all arms that they show, each with a style of its own.

    Without a `heading` it is the title of the first article. `broken` are sentences about what cannot be shown, `words`
    are explained where they occur and at the end.
    """
    with needed_for("drawing the page"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    plots = {plot["id"]: plot for article in articles for section in article.sections for plot in section.plots}
    arms = tuple(dict.fromkeys(methods))
    drawn = {name: palette.style_of(name, arms) for name in arms}
    styles = {
        name: {
            "cls": f"m{i}",
            "marker": style.marker,
            "dash": list(style.dash),
            "hollow": style.hollow,
            "about": about_method(name),
        }
        for i, (name, style) in enumerate(drawn.items())
    }
    classes = {name: f"p{i}" for i, name in enumerate(palette.PARTS)}
    css = _asset("page.css") + _colours(drawn)
    script = _asset("draw.js") + _asset("names.js") + _asset("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset(TEMPLATE)).render(
        heading=heading or articles[0].title,
        explained={**{name: about_method(name) for name in arms}, **words},
        how_to_read=HOW_TO_READ,
        articles=list(articles),
        broken=broken,
        version=f"sipp {__version__}",
        policy=_policy(css, script),
        # Only text from this package is inserted unescaped; everything from files is escaped.
        css=Markup(css),
        script=Markup(script),
        data=Markup(embedded({"plots": plots, "styles": styles, "parts": classes})),
    )


def embedded(values: Any) -> str:
    """JSON that is safe inside a script element: it cannot end the element or start a comment."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files("sipp.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(css: str, script: str) -> str:
    """A content security policy that allows only this style and this script."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src 'sha256-{digest(css)}'; script-src 'sha256-{digest(script)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _colours(methods: dict[str, Style]) -> str:
    """CSS colour classes of methods and parts, for light and dark mode."""
    pairs = {f"m{i}": (style.light, style.dark) for i, style in enumerate(methods.values())}
    pairs |= {f"p{i}": colours for i, colours in enumerate(palette.PARTS.values())}
    light = "".join(f".{name}{{color:{pair[0]}}}" for name, pair in pairs.items())
    dark = "".join(f".{name}{{color:{pair[1]}}}" for name, pair in pairs.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"
