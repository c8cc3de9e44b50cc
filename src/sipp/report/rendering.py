"""Runs and pruned models in, one HTML file out that needs nothing else: styles, script and numbers are all inside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from sipp.display import percent_up
from sipp.extras import needed_for
from sipp.report import palette, series, words
from sipp.report.panels import panels_of
from sipp.report.plots import Plot, pruned_plots, run_plots
from sipp.report.read import Broken, PrunedModel, Result, Run
from sipp.report.size_and_speed import BENCH, bench_finding, bench_plots
from sipp.report.tables import Table, certified_cell, choice_of, method_table, networks_table
from sipp.report.words import Finding, number
from sipp.scoring.methods import Style
from sipp.storage.marks import PAGE_MARK
from sipp.storage.network_schemas import PrunedRecord
from sipp.storage.run_schemas import plain

TEMPLATE = "template.html.j2"
SHOWN_LENGTH = 500  # of a value in the table of the configuration

SHOWN = {"layers", "bound", "certificate", "kind", "measured"}  # of a pruned model's record, elsewhere on the page


@dataclass(frozen=True)
class Section:
    """A heading that says what was found, and rows of plots below it."""

    kicker: str
    finding: Finding
    rows: list[list[str]]
    table: Table | None = None
    folded: list[str] = field(default_factory=list)  # plots that are shown when asked for, and why


@dataclass(frozen=True)
class Part:
    """What the page says of one run or pruned model."""

    ident: str
    kicker: str
    title: str
    state: str
    finished: bool
    caveats: list[str]
    tiles: list[tuple[str, str]]
    sections: list[Section]
    tables: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class About:
    """What a page is about beside its results: a study's name, what it shows, and rows of what is known of it."""

    title: str
    finding: Finding
    rows: list[tuple[str, str]]


def render(
    results: Sequence[Result], *, version: str, broken: Sequence[Broken] = (), about: About | None = None
) -> str:
    """The page of these results, in their order; it says which others lay beside them and could not be read.

    Where there are several runs, or the page is `about` something, it begins with a panel for each network.
    """
    with needed_for("drawing the page"):
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

    parts: list[Part] = []
    plots: dict[str, Plot] = {}
    for index, result in enumerate(results):
        ident = f"part{index}"
        if isinstance(result, Run):
            found = run_plots(result, ident)
            parts.append(_run_part(result, ident, found))
        else:
            found = pruned_plots(result, ident) | bench_plots(result, ident)
            parts.append(_pruned_part(result, ident, found))
        plots |= {plot["id"]: plot for plot in found.values()}
    runs = [result for result in results if isinstance(result, Run)]
    if len(runs) > 1 or about is not None:
        drawn = _panel_plots(runs)
        parts.insert(0, _panels_part(runs, drawn, about))
        plots |= {plot["id"]: plot for plot in drawn}
    methods = _methods(results)
    styles = {
        name: {"cls": f"m{i}", "marker": style.marker, "dash": list(style.dash)}
        for i, (name, style) in enumerate(methods.items())
    }
    classes = {name: f"p{i}" for i, name in enumerate(palette.PARTS)}
    css = _file("page.css") + _colours(methods)
    script = _file("draw.js") + _file("page.js")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_file(TEMPLATE)).render(
        title=parts[0].title if about is not None or len(results) == 1 else f"{len(results)} pruning results",
        heading=_heading(results, about),
        lede=_lede(results),
        parts=parts,
        side_by_side=networks_table([result for result in results if isinstance(result, PrunedModel)]),
        broken=[f"Not shown: {one.folder.name} is broken. {one.reason}" for one in broken],
        version=version,
        policy=_policy(css, script),
        mark=Markup(PAGE_MARK),
        # What the package itself wrote goes in as it is; everything that came from files is escaped.
        css=Markup(css),
        script=Markup(script),
        data=Markup(embedded({"plots": plots, "styles": styles, "parts": classes})),
    )


def embedded(values: Any) -> str:
    """JSON that can stand inside a script element: no character of it can end the element or start a comment."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return resources.files("sipp.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(css: str, script: str) -> str:
    """A content security policy: this style and this script and nothing else, from nowhere else."""

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src 'sha256-{digest(css)}'; script-src 'sha256-{digest(script)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _methods(results: Sequence[Result]) -> dict[str, Style]:
    """The look of every method on the page."""
    names: dict[str, None] = {}
    for result in results:
        names |= dict.fromkeys(series.methods_of(result) if isinstance(result, Run) else (result.record.method,))
    return {name: palette.style_of(name, tuple(names)) for name in names}


def _colours(methods: dict[str, Style]) -> str:
    """CSS classes of methods and parts, on light and on dark."""
    pairs = {f"m{i}": (style.light, style.dark) for i, style in enumerate(methods.values())}
    pairs |= {f"p{i}": colours for i, colours in enumerate(palette.PARTS.values())}
    pairs |= {"less": palette.LESS, "more": palette.MORE}
    light = "".join(f".{name}{{color:{one[0]}}}" for name, one in pairs.items())
    dark = "".join(f".{name}{{color:{one[1]}}}" for name, one in pairs.items())
    return f"{light}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def _heading(results: Sequence[Result], about: About | None) -> str:
    if about is not None:
        return about.title
    return "Pruning report" if len(results) == 1 else f"{len(results)} pruning results"


def _lede(results: Sequence[Result]) -> str:
    n_networks = sum(len(result.records) if isinstance(result, Run) else 1 for result in results)
    text = f"What was pruned, what that costs and what is promised about it: {n_networks:,} networks. "
    return text + "Point at a plot, or focus it and use the arrow keys, for exact values; every plot has its table."


# --- panels ---------------------------------------------------------------------------------------------------------


def _panel_plots(runs: Sequence[Run]) -> list[Plot]:
    """The plot of accuracies of each panel; one without a pruned network has none."""
    found = []
    for index, panel in enumerate(panels_of(runs)):
        plot = run_plots(panel.run, f"panel{index}").get("accuracy")
        if plot is not None:
            seeds = len(series.seeds_of(panel.run))
            found.append({**plot, "title": f"{panel.title}, {seeds} seed{'' if seeds == 1 else 's'}"})
    return found


def _panels_part(runs: Sequence[Run], plots: list[Plot], about: About | None) -> Part:
    panels = panels_of(runs)
    n_stages, n_done = sum(run.n_stages for run in runs), sum(len(run.records) for run in runs)
    idents = [plot["id"] for plot in plots]
    finding = Finding(
        "A panel for each network", "Runs that differ only in seeds and methods are one panel; means over seeds."
    )
    return Part(
        ident="panels",
        kicker="all runs",
        title="All runs" if about is None else about.title,
        state="finished" if n_done >= n_stages else f"unfinished, {n_done} of {n_stages}",
        finished=n_done >= n_stages,
        caveats=[],
        tiles=[("panels", str(len(panels))), ("runs", str(len(runs))), ("networks", f"{n_done:,}")],
        sections=[
            Section(
                "Panels",
                finding if about is None else about.finding,
                [idents[start : start + 2] for start in range(0, len(idents), 2)],
            )
        ],
        tables=[
            *([] if about is None else [("What this shows", about.rows)]),
            ("Runs of each panel", [(panel.title, ", ".join(panel.folders)) for panel in panels]),
        ],
    )


# --- runs -----------------------------------------------------------------------------------------------------------


def _run_part(run: Run, ident: str, plots: dict[str, Plot]) -> Part:
    config = run.config
    n_done = len(run.records)
    caveats = list(run.marks)
    if not run.finished:
        caveats.append(
            f"This run is not finished: {n_done} of {run.n_stages} networks are done. Means are over the seeds "
            "that are there, so levels may rest on different numbers of seeds."
        )
    if len(run.origins) > 1:
        caveats.append(
            f"This run was resumed with other data, code or device: its numbers have {len(run.origins)} origins."
        )
    return Part(
        ident=ident,
        kicker=f"{config['pipeline']}: {'another pipeline' if run.pipeline is None else run.pipeline.description}",
        title=f"{config['name']}: {config['net']} on {config['data']['name']}",
        state="finished" if run.finished else f"unfinished, {n_done} of {run.n_stages}",
        finished=run.finished,
        caveats=caveats,
        tiles=_run_tiles(run),
        sections=_run_sections(run, plots),
        tables=[
            ("Versions and hashes", _origin_rows(run)),
            ("Configuration", list(flat(config))),
        ],
    )


def _run_tiles(run: Run) -> list[tuple[str, str]]:
    dense, levels = series.dense_point(run, "top1"), series.levels_of(run)
    n_weights = next((record.n_weights for record in run.records if record.n_weights is not None), None)
    test = next((record.after.n for record in run.records), None)
    tiles = [
        ("dense top-1", "not done" if dense is None else number(dense.mean, "share")),
        ("least keep", number(min(levels.values()), "share") if levels else "not done"),
        ("prunable weights", "unknown" if n_weights is None else f"{n_weights:,}"),
        ("methods", str(len(series.methods_of(run)))),
        ("seeds", str(len(series.seeds_of(run)))),
        ("test points", "unknown" if test is None else f"{test:,}"),
        ("time in all", words.seconds(series.seconds_of(run))),
    ]
    return tiles


def _run_sections(run: Run, plots: dict[str, Plot]) -> list[Section]:
    scores = Finding(
        "Which scores were kept",
        "The scores by which a method ranks weights (for sipp methods the sensitivity), counted just before a level "
        "was pruned, first seed. Scores of different methods have different scales. Methods that sample may keep small "
        "scores, and so do rows that are kept whole.",
    )
    allocation = Finding(
        "Where each method spends its budget",
        "Kept share of each layer (number of weights in brackets) against that of the whole network; mean over seeds.",
    )
    promised = ["certified", "theory"] if _is_met(run) else ["certified"]
    # The sections in their order: a new one is a row here, with its plots in `run_plots`
    wanted = [
        ("Accuracy", words.accuracy_finding(run), [["pruned", "retrained"], ["accuracy"]]),
        (
            "Promises",
            words.certificate_finding(run),
            [promised, ["statements"]],
        ),
        ("Layers", words.layers_finding(run), [["layers"]]),
        ("Budget", allocation, [["allocation"]]),
        ("Scores", scores, [["scores"]]),
        ("Time", words.time_finding(run), [["times"]]),
    ]
    sections = []
    if (choice := choice_of(run)) is not None:
        sections.append(Section("Which to use", choice, [], method_table(run)))
    for kicker, finding, rows in wanted:
        shown = [[plots[key]["id"] for key in row if key in plots] for row in rows]
        folded = [plots["theory"]["id"]] if kicker == "Promises" and "theory" in plots and not _is_met(run) else []
        if any(shown) or kicker == "Accuracy":
            sections.append(Section(kicker, finding, [row for row in shown if row], None, folded))
    return sections


def _is_met(run: Run) -> bool:
    """Whether the theory's statement is a promise for any network of the run."""
    return any(record.bound is not None and record.bound.holds for record in run.records)


def _origin_rows(run: Run) -> list[tuple[str, str]]:
    rows = [("run folder", run.name)]
    for index, origin in enumerate(run.origins):
        prefix = f"origin {index + 1}: " if len(run.origins) > 1 else ""
        rows += [(prefix + str(key), _shown(value)) for key, value in plain(origin).items()]
    hashes = {}
    for record in run.records:
        if record.certificate is not None and not record.certificate.is_refusal:
            hashes["holdout points (SHA-256)"] = str(plain(record.certificate)["data_hash"])
    return rows + list(hashes.items())


# --- pruned models --------------------------------------------------------------------------------------------------


def _pruned_part(pruned: PrunedModel, ident: str, plots: dict[str, Plot]) -> Part:
    record = pruned.record
    n_weights = sum(layer.n_weights for layer in record.layers)
    kept = sum(layer.kept for layer in record.layers)
    dead = [layer for layer in record.layers if layer.dead_rows]
    least = min(record.layers, key=lambda layer: layer.kept / max(1, layer.n_weights), default=None)
    heading = (
        "No row died" if not dead else f"{sum(layer.dead_rows for layer in dead):,} rows died in {len(dead)} layers"
    )
    detail = ""
    if least is not None:
        detail = f"{least.name} keeps least: {least.kept:,} of {least.n_weights:,} weights."
    told = "All statements speak of the pruned network as it was saved, against the one it was pruned from."
    promise = Finding(_promise(record), told)
    sections = [Section("Promises", promise, [[plots["statements"]["id"]]])]
    if "layers" in plots:
        sections.append(Section("Layers", Finding(heading, detail), [[plots["layers"]["id"]]]))
    if pruned.bench is not None:
        sections.append(Section("Size and speed", bench_finding(pruned.bench), [[plots[name]["id"]] for name in BENCH]))
    return Part(
        ident=ident,
        kicker="pruned model",
        title=f"{pruned.name}: {record.method} at {number(record.keep, 'share')} keep",
        state="pruned",
        finished=True,
        caveats=list(pruned.marks),
        tiles=[
            ("keep", number(record.keep, "share")),
            ("kept weights", f"{kept:,}"),
            ("prunable weights", f"{n_weights:,}"),
            ("layers", f"{len(record.layers):,}"),
            ("dead rows", f"{sum(layer.dead_rows for layer in record.layers):,}"),
        ],
        sections=sections,
        tables=[
            (
                "Everything else in its report",
                list(flat({key: value for key, value in plain(record).items() if key not in SHOWN})),
            )
        ],
    )


def _promise(record: PrunedRecord) -> str:
    certificate = record.certificate
    if certificate is not None and certificate.verdict == "certified" and certificate.limit is not None:
        limit = percent_up(certificate.limit)
        if certified_cell(certificate.limit).tone:
            return f"The certificate says nothing: it allows an error of {limit}, the output's own length or more"
        return f"The holdout certifies outputs within {limit} of the dense network's, for all but a share of inputs"
    if certificate is not None:
        return f"Certificate: {certificate.verdict or certificate.mode}"
    if record.bound is not None and record.bound.holds:
        return "The theory's bound is met, for all but a share of inputs; no holdout was used"
    if record.measured is not None and record.measured.c_constant is not None:
        return "Rows and layers have a measured bound; what the network costs is not known: sipp certify measures it"
    return "Nothing is promised: no certificate, no bound"


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of nested values, for a table."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _shown(value)


def _shown(value: Any) -> str:
    text = ", ".join(str(one) for one in value) if isinstance(value, list) else "none" if value is None else str(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]} ..."
