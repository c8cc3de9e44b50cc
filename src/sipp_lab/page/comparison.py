"""The article that compares several panels: how far the best method prunes each network with almost no loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sipp.report import Article, Finding, PageCell, PageTable, Section, numbers, plots
from sipp.results import words
from sipp_lab.page import series
from sipp_lab.page.article import choices
from sipp_lab.page.panels import Panel
from sipp_lab.runs.folder import Run
from sipp_lab.studies import Form, Study

SAME_LEVEL = 0.05  # methods that draw weights keep slightly other shares at a level


def comparison(panels: Sequence[Panel], study: Study | None, form: Form) -> Article:
    """The article on all panels of a page, or on a study."""
    sections = [_main_comparison(panels)] if len(panels) > 1 else []
    tables: list[tuple[str, Mapping[str, Any]]] = []
    if study is not None:
        about = f"{study.source}. The paper: {study.claim} {study.note(form)}".rstrip()
        sections.append(Section("Study", Finding(study.description, about)))
        facts = {"study": study.name, "form": form, "source": study.source, "the paper's claim": study.claim}
        tables.append(("What this shows", facts))
    n_done, n_stages = (sum(n) for n in zip(*((len(panel.run.records), panel.run.n_stages) for panel in panels)))
    return Article(
        ident="panels",
        topic="all runs",
        title="All runs",
        state="" if n_done >= n_stages else f"unfinished, {n_done} of {n_stages}",
        sections=sections,
        tables=tables,
    )


def _main_comparison(panels: Sequence[Panel]) -> Section:
    """One line and one plot per network: how far the best method prunes it with almost no loss."""
    rows = []
    for panel in panels:
        dense, changes = series.dense_mean(panel.run, "top1"), series.metric_curves(panel.run, "delta_top1")
        near = choices(panel.run)
        last = [(curve.points[-1].keep, curve.points[-1].mean, curve.method) for curve in changes if curve.points]
        sparsest = min((keep for keep, _, _ in last), default=None)
        ends = (
            []
            if sparsest is None
            else [(change, name) for keep, change, name in last if math.isclose(keep, sparsest, rel_tol=SAME_LEVEL)]
        )
        best, worst = max(ends, default=(None, "")), min(ends, default=(None, ""))
        cells = (
            PageCell("not done" if dense is None else numbers.number(dense, "share")),
            PageCell(_kept_words(panel.run, *near[0]) if near else "none"),
            _change_cell(sparsest, *best),
            _change_cell(sparsest, *worst),
        )
        rows.append((panel.title, cells))
    limit = f"within {100 * numbers.TOLERANCE:g} points of dense"
    head = ("network", "dense", f"smallest keep {limit}", "best, sparsest level", "worst there")
    n_columns = 4 if all(cells[2] == cells[3] for _, cells in rows) else 5  # with one method each there is no worst
    n_reached = sum(cells[1].text != "none" for _, cells in rows)
    finding = Finding(
        f"{n_reached} of {words.counted(len(rows), 'comparison')} "
        f"{'has' if n_reached == 1 else 'have'} a method {limit}",
        "One row for each network and schedule; each has an article below.",
    )
    caption = "Accuracy (top-1), mean over seeds, and its change in percentage points; keep: share of weights left."
    shown = tuple((name, cells[: n_columns - 1]) for name, cells in rows)
    table = PageTable(caption, head[:n_columns], shown, wraps=True)
    drawn = [
        plot for i, panel in enumerate(panels) if (plot := series.accuracy_plot(panel.run, f"panel{i}", panel.title))
    ]
    return Section("Main comparison", finding, [drawn[i : i + 2] for i in range(0, len(drawn), 2)], table)


def _kept_words(run: Run, method: str, at: plots.Point) -> str:
    """'10 % (magnitude)', with the share of multiply-adds that are left if it is known."""
    products = {(name, left.keep): left.mean for (name, _), left in series.by_level(run, "multiply_adds").items()}
    known = (method, at.keep) in products
    left = f", multiply-adds {100 * products[method, at.keep]:.2g} %" if known else ""
    return f"{numbers.number(at.keep, 'share')} ({method}{left})"


def _change_cell(keep: float | None, change: float | None, method: str) -> PageCell:
    if keep is None or change is None:
        return PageCell("not done")
    words = f"{numbers.number(change, 'points')} against the dense network at keep {numbers.number(keep, 'share')}"
    return PageCell(f"{100 * change:+.2f} ({method})", numbers.tone_of(change), words)
