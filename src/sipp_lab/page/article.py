"""The article on one panel: which method to use, guarantees, and dead rows."""

from __future__ import annotations

import itertools
from typing import Any

from sipp.report import Article, Finding, PageCell, PageTable, Section, numbers, plots
from sipp.results import Certificate, to_json, words
from sipp_lab.page import series
from sipp_lab.page.panels import Panel
from sipp_lab.runs.folder import Run


def panel_article(panel: Panel, ident: str) -> Article:
    """The article on one network, data set and pipeline."""
    run = panel.run
    n_done, pipeline = len(run.records), series.pipeline_of(run)
    caveats = []
    if not run.finished:
        caveats.append(
            f"This run is not finished: {n_done} of {run.n_stages} networks are done. Means are over the seeds done "
            "so far, so levels may rest on different numbers of seeds."
        )
    if len(run.origins) > 1:
        caveats.append(
            f"This run was resumed with different data, code or device: its numbers have {len(run.origins)} origins."
        )
    return Article(
        ident=ident,
        topic=f"{run.config['pipeline']}: {'another pipeline' if pipeline is None else pipeline.description}",
        title=f"{panel.title}, {_seed_words(run)}",
        state="" if run.finished else f"unfinished, {n_done} of {run.n_stages}",
        caveats=caveats,
        notes=run.notes,
        tiles=_tiles(run),
        sections=_sections(run, ident),
        tables=[("Versions and hashes", _origins(panel)), ("Configuration", run.config)],
    )


def _seed_words(run: Run) -> str:
    """'seed 3', 'seeds 0 to 11', 'seeds 0, 2, 5'."""
    seeds = series.seeds_of(run)
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    dense, levels = series.dense_mean(run, "top1"), series.levels_of(run)
    n_weights = next((record.pruned.n_weights for record in run.records if record.pruned is not None), None)
    products = next((record.multiply_adds for record in run.records if record.method is None), None)
    test = next((record.after.n for record in run.records), None)
    tiles = {
        "dense top-1": "not done" if dense is None else numbers.number(dense, "share"),
        "smallest keep": numbers.number(min(levels.values()), "share") if levels else "not done",
        "prunable weights": "unknown" if n_weights is None else f"{n_weights:,}",
        "multiply-adds of an input": "unknown" if products is None else f"{products:,}",
        "methods": str(len(series.methods_of(run))),
        "seeds": str(len(series.seeds_of(run))),
        "test inputs": "unknown" if test is None else f"{test:,}",
        "total time": numbers.seconds(sum(record.seconds for record in run.records)),
    }
    return [(name, value, "") for name, value in tiles.items()]


def _sections(run: Run, ident: str) -> list[Section]:
    """The sections that have plots, in order; the first, which method to use, is always there."""
    choice = best_choice(run) or Finding("No pruned network is finished yet", "The plots fill in as the run goes on.")
    accuracies = _row(series.accuracy_plot(run, f"{ident}-accuracy"))
    sections = [Section("Which to use", choice, accuracies, method_table(run), note=spread_words(run))]
    if series.methods_of(run):
        certified = _row(series.certified_plot(run, f"{ident}-certified"))
        sections.append(Section("Certificates", certificate_finding(run), certified))
        if layers := _row(series.layers_plot(run, f"{ident}-layers")):
            sections.append(Section("Layers", layers_finding(run), layers))
    return sections


def _row(plot: series.Plot) -> list[list[series.Plot]]:
    """The rows of plots of a section with this plot, which may be empty."""
    return [[plot]] if plot else []


def _origins(panel: Panel) -> dict[str, Any]:
    run = panel.run
    values: dict[str, Any] = {"run folders": ", ".join(panel.folders)}
    for index, origin in enumerate(run.origins):
        prefix = f"origin {index + 1}: " if len(run.origins) > 1 else ""
        values |= {prefix + key: value for key, value in to_json(origin).items()}
    hashes = [record.certificate.data_hash for record in run.records if record.certificate is not None]
    return values | ({"holdout inputs (SHA-256)": hashes[-1]} if hashes else {})


# --- which method to use --------------------------------------------------------------------------------------------


def sparsest(curve: plots.Curve) -> plots.Point | None:
    """The last point before the first that loses more than `numbers.TOLERANCE` accuracy, or None."""
    within = list(itertools.takewhile(lambda point: point.mean >= -numbers.TOLERANCE, curve.points))
    return within[-1] if within else None


def choices(run: Run) -> list[tuple[str, plots.Point]]:
    """The methods that reach the smallest keep within the tolerance, and where they do, the most accurate first."""
    reached = [(curve.method, at) for curve in series.metric_curves(run, "delta_top1") if (at := sparsest(curve))]
    least = min((at.keep for _, at in reached), default=0.0)
    return sorted((one for one in reached if one[1].keep <= least * (1 + 1e-3)), key=lambda one: -one[1].mean)


def best_choice(run: Run) -> Finding | None:
    """Which method to use at which keep; None if no pruned network is finished."""
    curves, best = series.metric_curves(run, "delta_top1"), choices(run)
    limit = f"{100 * numbers.TOLERANCE:g} percentage points"
    if not curves:
        return None
    if not best:
        change, keep, method = max((p.mean, -p.keep, curve.method) for curve in curves for p in curve.points)
        return Finding(
            f"No method stays within {limit} of the dense network",
            f"The closest is {method} at keep {numbers.number(-keep, 'share')}: "
            f"{numbers.number(change, 'points')} top-1.",
        )
    (method, at), *others = best
    detail = f"The sparsest level within {limit} of the dense accuracy ({numbers.number(at.mean, 'points')})."
    if others:
        detail += f" At the same keep: {', '.join(name for name, _ in others)}."
    return Finding(f"Use {method} at keep {numbers.number(at.keep, 'share')}", detail)


def method_table(run: Run) -> PageTable | None:
    """Top-1 accuracy of every method at every keep, coloured by the loss."""
    levels, methods = series.levels_of(run), series.methods_of(run)
    if not levels or not methods:
        return None
    after, before, changes = (series.by_level(run, metric) for metric in ("top1", "before_top1", "delta_top1"))
    dense, products = series.dense_mean(run, "top1"), series.by_level(run, "multiply_adds")
    rows = []
    for method in methods:
        cells = [PageCell("" if dense is None else f"{100 * dense:.1f}", title="the network before pruning")]
        for place in ((method, level) for level in levels):
            if place not in after:
                cells.append(PageCell("", title="not done"))
                continue
            titles, tone = [], ""
            if place in changes:
                titles.append(f"{numbers.number(changes[place].mean, 'points')} against the dense network")
                tone = numbers.tone_of(changes[place].mean)
            if place in before:
                titles.append(f"just pruned: {numbers.number(before[place].mean, 'share')}")
            text = f"{100 * after[place].mean:.1f}"
            if place in products:
                text += f" ({100 * products[place].mean:.2g})"
                titles.append(f"{numbers.number(products[place].mean, 'share')} of the multiply-adds left")
            cells.append(PageCell(text, tone, "; ".join(titles)))
        rows.append((method, tuple(cells)))
    head = ("method / keep", "dense", *(numbers.number(keep, "share") for keep in levels.values()))
    near = f"green: within {100 * numbers.TOLERANCE:g} points of dense; pale: within 1; orange and red: below."
    mean = ", mean over seeds" if len(series.seeds_of(run)) > 1 else ""
    words = f"Accuracy (top-1) after training in %{mean}, by share of weights kept"
    words += " (in brackets: multiply-adds left, in % of the dense network's)" if products else ""
    return PageTable(f"{words}; {near}", head, tuple(rows))


def spread_words(run: Run) -> str:
    """What lines and bands mean; empty if nothing is pruned yet."""
    if not series.methods_of(run):
        return ""
    n_seeds = len(series.seeds_of(run))
    if n_seeds == 1:
        return "One seed: there is no band, and small differences may be chance."
    return f"Lines are means over {n_seeds} seeds, bands reach from the smallest to the largest value."


# --- findings -------------------------------------------------------------------------------------------------------


def certificate_finding(run: Run) -> Finding:
    """What the holdout certifies at the first level, from the best to the worst method."""
    curves = series.certified_curves(run)
    n_tried = sum(record.certificate is not None or bool(record.why_no_certificate) for record in run.records)
    if not curves:
        if reasons := sorted({record.why_no_certificate for record in run.records} - {""}):
            return Finding("No network got a certificate", "; ".join(reasons))
        return Finding(
            "No certificate: the run has no holdout",
            "Set data.n_holdout in the recipe to have every pruned network certified before it is retrained.",
        )
    # All methods: the confidence of a certificate does not hold for the best of several.
    first = {curve.method: curve.points[0] for curve in curves}
    best, worst = min(first, key=lambda m: first[m].high), max(first, key=lambda m: first[m].high)
    within = words.percent_up(first[best].high)
    heading = f"At keep {numbers.number(first[best].keep, 'share')}, outputs are certified within {within}"
    if first[best].high >= Certificate.USELESS:
        heading = f"No certificate is useful: all allow an error of {words.percent_up(first[best].high)} or more"
    elif first[best].high < first[worst].high:
        heading += f" ({best}) to {words.percent_up(first[worst].high)} ({worst})"
        heading += "; a guarantee of 100 % or more is useless" if first[worst].high >= Certificate.USELESS else ""
    elif len(first) > 1:
        heading += " for every method"
    pipeline = series.pipeline_of(run)
    of = "the network it was pruned from" if pipeline is None else pipeline.compared_with
    detail = (
        f"Epsilon is the relative change of the outputs compared with {of}, before retraining; it does not cover the "
        f"retrained network. {n_tried} networks were certified on the same inputs: each claim holds on its own, but "
        "the best of several does not. The heading shows the largest value over seeds."
    )
    return Finding(heading, detail)


def layers_finding(run: Run) -> Finding:
    """How many rows lost all their weights."""
    n_layers = len(series.layers_of(run))
    dead = {curve.method: curve.points[-1] for curve in series.metric_curves(run, "dead_rows")}
    with_dead = {method: point for method, point in dead.items() if point.mean > 0}
    if not dead:
        return Finding("Layers", "No pruned network is finished yet.")
    if not with_dead:
        return Finding(
            f"No row lost all its weights in any of {n_layers} layers",
            "Every row kept at least one weight at every level.",
        )
    most, least = max(dead, key=lambda m: dead[m].mean), min(dead, key=lambda m: dead[m].mean)
    heading = f"At its sparsest level {most} leaves {numbers.number(dead[most].mean, 'count')} dead rows"
    heading += f", {least} {numbers.number(dead[least].mean, 'count')}" if most != least else ""
    return Finding(
        heading,
        "A dead row has lost all its weights: its output is only a bias. Means over seeds; a layer's "
        "epsilon is the largest over its rows and over seeds.",
    )
