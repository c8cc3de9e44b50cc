"""Renders results as one self-contained HTML file, with styles, script and data inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from sipp import __version__
from sipp.extras import needed_for
from sipp.files import check_file, make_folder, write_atomic
from sipp.report import palette, series
from sipp.report.compare_networks import networks_article
from sipp.report.compare_runs import runs_article
from sipp.report.contents import Article, StudySummary
from sipp.report.glossary import OF_RUNS, WORDS, about_method
from sipp.report.palette import Style
from sipp.report.pruned_article import pruned_article
from sipp.report.results import PrunedModel, Result
from sipp.report.run_article import run_article, run_titles
from sipp_lab.runs.reading import Run, UnreadableFolder

TEMPLATE = "template.html.j2"
HOW_TO_READ = "Point at a plot, or focus it and use the arrow keys, to see exact values; every plot also has a table."


def write_page(
    path: Path,
    results: Sequence[Result],
    *,
    force: bool,
    broken: Sequence[UnreadableFolder] = (),
    study: StudySummary | None = None,
    title: str = "",
) -> None:
    """Writes the page of these results; an existing file is replaced only with `force`."""
    text = render(results, broken=broken, study=study, title=title)
    make_folder(path.parent)
    check_file(path, force=force)
    write_atomic(path, text.encode(errors="replace"))  # a folder name may not be valid text


def render(
    results: Sequence[Result],
    *,
    broken: Sequence[UnreadableFolder] = (),
    study: StudySummary | None = None,
    title: str = "",
) -> str:
    """Renders these results in order, and lists those that could not be read.

    With several runs, or for a study (`study`), the page starts with a panel for each network; the single results are
    collapsed below. `title` is used for a page with several results.
    """
    with needed_for("drawing the page"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    articles = _articles(results, study)
    plots = {plot["id"]: plot for article in articles for section in article.sections for plot in section.plots}
    methods = _methods(results)
    heading = articles[0].title if len(articles) == 1 else title or f"{len(results)} pruning results"
    styles = {
        name: {
            "cls": f"m{i}",
            "marker": style.marker,
            "dash": list(style.dash),
            "hollow": style.hollow,
            "about": about_method(name),
        }
        for i, (name, style) in enumerate(methods.items())
    }
    classes = {name: f"p{i}" for i, name in enumerate(palette.PARTS)}
    css = _asset("page.css") + _colours(methods)
    script = _asset("draw.js") + _asset("names.js") + _asset("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset(TEMPLATE)).render(
        heading=heading if study is None else study.title,
        explained=_glossary(results, methods),
        how_to_read=HOW_TO_READ,
        articles=articles,
        broken=[f"Not shown: {result.folder.name} is broken. {result.what}" for result in broken],
        version=f"sipp {__version__}",
        policy=_policy(css, script),
        # Only text from this package is inserted unescaped; everything from files is escaped.
        css=Markup(css),
        script=Markup(script),
        data=Markup(embedded({"plots": plots, "styles": styles, "parts": classes})),
    )


def _articles(results: Sequence[Result], study: StudySummary | None) -> list[Article]:
    """The articles of the page: comparisons first, then single results."""
    runs = [result for result in results if isinstance(result, Run)]
    models = [result for result in results if isinstance(result, PrunedModel)]
    articles = [runs_article(runs, study)] if len(runs) > 1 or study is not None else []
    articles += [networks_article(models)] if len(models) > 1 else []
    titles = iter(run_titles(runs))
    together = bool(articles)
    for index, result in enumerate(results):
        ident = f"part{index}"
        if isinstance(result, Run):
            article = run_article(result, ident, next(titles))
        else:
            article = pruned_article(result, ident)
        articles.append(replace(article, is_closed=together))
    return articles


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


def _methods(results: Sequence[Result]) -> dict[str, Style]:
    """The style of every method on the page."""
    names: dict[str, None] = {}
    for result in results:
        names |= dict.fromkeys(series.methods_of(result) if isinstance(result, Run) else (result.arm,))
    return {name: palette.style_of(name, tuple(names)) for name in names}


def _colours(methods: dict[str, Style]) -> str:
    """CSS colour classes of methods and parts, for light and dark mode."""
    pairs = {f"m{i}": (style.light, style.dark) for i, style in enumerate(methods.values())}
    pairs |= {f"p{i}": colours for i, colours in enumerate(palette.PARTS.values())}
    light = "".join(f".{name}{{color:{pair[0]}}}" for name, pair in pairs.items())
    dark = "".join(f".{name}{{color:{pair[1]}}}" for name, pair in pairs.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def _glossary(results: Sequence[Result], methods: dict[str, Style]) -> dict[str, str]:
    """The glossary of the page: shown as tooltips, and as a list at the end."""
    explained = {name: about_method(name) for name in methods}
    only_runs = all(isinstance(result, Run) for result in results)
    return {**explained, **{name: words for name, words in WORDS.items() if only_runs or name not in OF_RUNS}}
