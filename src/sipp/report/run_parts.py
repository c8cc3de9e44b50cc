"""Runs in, parts of the page out: a run with its sections, and all runs together as panels."""

from __future__ import annotations

from collections.abc import Sequence

from sipp.records.schemas import given_values
from sipp.report import series, words
from sipp.report.panels import Panel, panels_of
from sipp.report.parts import About, Part, Section, as_text, flat
from sipp.report.plots import Plot, run_plots
from sipp.report.read import Run
from sipp.report.tables import choice_of, method_table
from sipp.report.words import Finding, number

FOLDED_THEORY = "The theory's epsilon, which no network meets: a number, not a promise"


# --- panels ---------------------------------------------------------------------------------------------------------


def panels_part(runs: Sequence[Run], about: About | None) -> tuple[Part, list[Plot]]:
    """All runs together, a panel for each network with its table and its curves, and their plots."""
    panels = panels_of(runs)
    sections, plots = [], []
    if about is not None:
        sections.append(Section("Study", about.finding, []))
    for index, panel in enumerate(panels):
        plot = run_plots(panel.run, f"panel{index}").get("accuracy")  # one without a pruned network has none
        if plot is not None:
            plots.append({**plot, "title": panel.title})
        sections.append(_panel_section(panel, plot))
    n_stages, n_done = sum(run.n_stages for run in runs), sum(len(run.records) for run in runs)
    part = Part(
        ident="panels",
        kicker="all runs",
        title="All runs",
        state="" if n_done >= n_stages else f"unfinished, {n_done} of {n_stages}",
        caveats=[],
        remarks=[],
        tiles=[],
        sections=sections,
        tables=[
            *([] if about is None else [("What this shows", about.rows)]),
            ("Runs of each panel", [(panel.title, ", ".join(panel.folders)) for panel in panels]),
        ],
    )
    return part, plots


def _panel_section(panel: Panel, plot: Plot | None) -> Section:
    seeds = len(series.seeds_of(panel.run))
    kicker = f"{panel.title}, {seeds} seed{'' if seeds == 1 else 's'}"
    finding = choice_of(panel.run) or Finding("No pruned network is finished yet", "")
    return Section(kicker, finding, [] if plot is None else [[plot["id"]]], method_table(panel.run))


# --- runs -----------------------------------------------------------------------------------------------------------


def run_part(run: Run, ident: str, plots: dict[str, Plot], title: str) -> Part:
    """What the page says of one run."""
    config = run.config
    n_done = len(run.records)
    caveats = []
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
        title=title,
        state="" if run.finished else f"unfinished, {n_done} of {run.n_stages}",
        caveats=caveats,
        remarks=list(run.marks),
        tiles=_run_tiles(run),
        sections=_run_sections(run, plots),
        tables=[
            ("Versions and hashes", _origin_rows(run)),
            ("Configuration", list(flat(config))),
        ],
    )


def run_titles(runs: Sequence[Run]) -> list[str]:
    """The title of each run; runs of one recipe are told apart by their seeds, or else by their folders."""
    short = [f"{run.config['name']}: {run.config['net']} on {run.config['data']['name']}" for run in runs]
    seeds = [", ".join(str(seed) for seed in series.seeds_of(run)) for run in runs]
    named = [f"{title}, seed {own}" for title, own in zip(short, seeds)]
    titles = []
    for index, run in enumerate(runs):
        options = (short, named, [f"{title}, {run.name[-12:][:6]}" for title, run in zip(named, runs)])
        titles.append(next((one[index] for one in options if one.count(one[index]) == 1), options[-1][index]))
    return titles


def _run_tiles(run: Run) -> list[tuple[str, str]]:
    dense, levels = series.dense_point(run, "top1"), series.levels_of(run)
    n_weights = next((record.n_weights for record in run.records if record.n_weights is not None), None)
    test = next((record.after.n for record in run.records), None)
    return [
        ("dense top-1", "not done" if dense is None else number(dense.mean, "share")),
        ("least keep", number(min(levels.values()), "share") if levels else "not done"),
        ("prunable weights", "unknown" if n_weights is None else f"{n_weights:,}"),
        ("methods", str(len(series.methods_of(run)))),
        ("seeds", str(len(series.seeds_of(run)))),
        ("test points", "unknown" if test is None else f"{test:,}"),
        ("time in all", words.seconds(series.seconds_of(run))),
    ]


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
    is_met = any(record.bound is not None and record.bound.holds for record in run.records)
    promised = ["certified", "theory"] if is_met else ["certified"]
    # The sections in their order: a new one is a row here, with its plots in `run_plots`
    wanted = [
        ("Promises", words.certificate_finding(run), [promised, ["statements"]]),
        ("Layers", words.layers_finding(run), [["layers"]]),
        ("Budget", allocation, [["allocation"]]),
        ("Scores", scores, [["scores"]]),
        ("Time", words.time_finding(run), [["times"]]),
    ]
    choice = choice_of(run) or Finding("No pruned network is finished yet", "The plots fill as the run goes on.")
    rows = _idents(plots, [["pruned", "retrained"], ["accuracy"]])
    sections = [Section("Which to use", choice, rows, method_table(run), note=words.spread_words(run))]
    for kicker, finding, rows in wanted:
        shown = _idents(plots, rows)
        is_folded = kicker == "Promises" and "theory" in plots and not is_met
        if shown:
            folded = (FOLDED_THEORY, [plots["theory"]["id"]]) if is_folded else None
            sections.append(Section(kicker, finding, shown, folded=folded))
    return sections


def _idents(plots: dict[str, Plot], rows: list[list[str]]) -> list[list[str]]:
    """The plots of these rows that there are."""
    shown = [[plots[key]["id"] for key in row if key in plots] for row in rows]
    return [row for row in shown if row]


def _origin_rows(run: Run) -> list[tuple[str, str]]:
    rows = [("run folder", run.name)]
    for index, origin in enumerate(run.origins):
        prefix = f"origin {index + 1}: " if len(run.origins) > 1 else ""
        rows += [(prefix + str(key), as_text(value)) for key, value in given_values(origin).items()]
    hashes = {}
    for record in run.records:
        if record.certificate is not None and not record.certificate.is_refusal:
            hashes["holdout points (SHA-256)"] = str(given_values(record.certificate)["data_hash"])
    return rows + list(hashes.items())
