"""The article that compares several runs; runs that differ only in seeds or methods share a panel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sipp.report import Article, Cell, Finding, Section, Table, flatten, numbers
from sipp.results import to_json, words
from sipp_lab.page import series
from sipp_lab.page.plots import accuracy_plot
from sipp_lab.page.run_article import best_choice, choice_of, method_table, network_and_data
from sipp_lab.runs.folder import Run, without_times
from sipp_lab.studies import Study

# Differences that titles do not mention: details of the schedule, and how (not to what) networks are trained, also in
# the published runs (train.together).
QUIET = {"name", "train.eval_every", "train.warmup_epochs", "train.decay.milestones", "train.together", "train.step"}
LISTS = ("seed", "repetitions")  # keys that say which networks there are, not what they are
N_OPEN = 2  # panels open at first: about three screens with the main comparison


@dataclass(frozen=True)
class StudySummary:
    """The study that a page is about: its title, what it shows, and rows for a table."""

    title: str
    finding: Finding
    facts: dict[str, str]

    @classmethod
    def of(cls, study: Study) -> StudySummary:
        """What a page says of this study."""
        facts = {"study": study.name, "form": study.form, "source": study.source, "the paper's claim": study.claim}
        finding = Finding(study.description, f"{study.source}. The paper: {study.claim} {study.note}".rstrip())
        return cls(f"Study {study.name} ({study.form})", finding, facts)


@dataclass(frozen=True)
class Panel:
    """One network, data set and pipeline, with its runs merged into one."""

    title: str
    run: Run
    folders: tuple[str, ...]


def runs_article(runs: Sequence[Run], study: StudySummary | None) -> Article:
    """The article on all runs: a panel for each network with a table and curves."""
    panels = panels_of(runs)
    sections = [_main_comparison(panels)] if len(panels) > 1 else []
    for index, panel in enumerate(panels):
        plot = accuracy_plot(panel.run, f"panel{index}-accuracy", panel.title)
        topic = f"{panel.title}, {words.counted(len(series.seeds_of(panel.run)), 'seed')}"
        finding = best_choice(panel.run) or Finding("No pruned network is finished yet", "")
        has_curve = any(len(curve.points) > 1 for curve in series.metric_curves(panel.run, "top1"))
        rows, is_closed = [[plot]] if plot and has_curve else [], index >= N_OPEN
        sections.append(Section(topic, finding, rows, method_table(panel.run), is_closed=is_closed))
    sections += [] if study is None else [Section("Study", study.finding)]
    n_stages, n_done = sum(run.n_stages for run in runs), sum(len(run.records) for run in runs)
    folders = {panel.title: ", ".join(panel.folders) for panel in panels}
    return Article(
        ident="panels",
        topic="all runs",
        title="All runs",
        state="" if n_done >= n_stages else f"unfinished, {n_done} of {n_stages}",
        sections=sections,
        tables=[*([] if study is None else [("What this shows", study.facts)]), ("Runs of each panel", folders)],
    )


def _main_comparison(panels: Sequence[Panel]) -> Section:
    """One line per network: its dense accuracy, and how far the best method prunes it with almost no loss."""
    rows = []
    for panel in panels:
        dense, changes = series.dense_mean(panel.run, "top1"), series.metric_curves(panel.run, "delta_top1")
        choice = choice_of(panel.run)
        kept, method = (None, "none") if choice is None else (choice.keep, choice.method)
        products = {(name, at.keep): at.mean for (name, _), at in series.by_level(panel.run, "multiply_adds").items()}
        left = products.get((method, kept)) if kept is not None else None
        last = [(curve.points[-1].keep, curve.points[-1].mean, curve.method) for curve in changes if curve.points]
        sparsest = min((keep for keep, _, _ in last), default=None)
        ends = [(change, name) for keep, change, name in last if keep == sparsest]
        best, worst = max(ends, default=(None, "")), min(ends, default=(None, ""))
        cells = (
            Cell("not done" if dense is None else numbers.number(dense, "share")),
            Cell("none" if kept is None else _kept_words(kept, method, left)),
            _change_cell(sparsest, *best),
            _change_cell(sparsest, *worst),
        )
        rows.append((panel.title, cells))
    near = f"within {100 * numbers.TOLERANCE:g} points of dense"
    head = ("network", "dense", f"smallest keep {near}", "best, sparsest level", "worst there")
    n_columns = 4 if all(cells[2] == cells[3] for _, cells in rows) else 5  # with one method each there is no worst
    n_reached = sum(cells[1].text != "none" for _, cells in rows)
    finding = Finding(
        f"{n_reached} of {words.counted(len(rows), 'comparison')} "
        f"{'has' if n_reached == 1 else 'have'} a method {near}",
        "One row for each network and schedule; open the panels and single runs below.",
    )
    caption = "Accuracy (top-1), mean over seeds, and its change in percentage points; keep: share of weights left."
    shown = tuple((name, cells[: n_columns - 1]) for name, cells in rows)
    table = Table(caption, head[:n_columns], shown, wraps=True)
    return Section("Main comparison", finding, [], table)


def _kept_words(kept: float, method: str, products: float | None) -> str:
    """'10 % (magnitude)', with the share of multiply-adds that are left if it is known."""
    left = "" if products is None else f", multiply-adds {100 * products:.2g} %"
    return f"{numbers.number(kept, 'share')} ({method}{left})"


def _change_cell(keep: float | None, change: float | None, method: str) -> Cell:
    if keep is None or change is None:
        return Cell("not done")
    words = f"{numbers.number(change, 'points')} against the dense network at keep {numbers.number(keep, 'share')}"
    return Cell(f"{100 * change:+.2f} ({method})", numbers.tone_of(change), words)


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Groups the runs into panels, in the order of their first runs."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if _same_setting(group[0], run) and all(_agree(other, run) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    joined = [_merge(group) for group in groups]
    titles = _titles(joined)
    return [Panel(title, run, tuple(o.name for o in group)) for title, run, group in zip(titles, joined, groups)]


def _comparable_config(run: Run) -> dict[str, Any]:
    """The configuration without seeds and methods."""
    config = {key: value for key, value in run.config.items() if key not in LISTS}
    if config.get("code"):  # the user's own scores are methods too
        config["code"] = {key: value for key, value in config["code"].items() if key != "methods"}
    return {**config, "prune": {key: value for key, value in config["prune"].items() if key != "methods"}}


def _same_setting(run: Run, other: Run) -> bool:
    same_data = {origin.data for origin in run.origins} == {origin.data for origin in other.origins}
    return same_data and _comparable_config(run) == _comparable_config(other)


def _agree(run: Run, other: Run) -> bool:
    """Whether the networks that both runs contain are identical; otherwise they cannot share a panel."""
    first, second = _records_by_key(run), _records_by_key(other)
    return all(
        _comparable_record(first[key]) == _comparable_record(second[key]) for key in first.keys() & second.keys()
    )


def _records_by_key(run: Run) -> dict[tuple[int, str | None, int], Any]:
    return {(record.seed, record.method, record.level): record for record in run.records}


def _comparable_record(record: Any) -> dict[str, Any]:
    return without_times(to_json(record))


def _merge(group: Sequence[Run]) -> Run:
    if len(group) == 1:
        return group[0]
    records: dict[Any, Any] = {}
    methods: dict[str, None] = {}
    for run in group:
        records = {**_records_by_key(run), **records}
        methods |= dict.fromkeys(run.config["prune"]["methods"])
    config = {**group[0].config, "prune": {**group[0].config["prune"], "methods": list(methods)}}
    n_stages = len(records) + sum(run.n_stages - len(run.records) for run in group)
    return replace(group[0], config=config, records=tuple(records.values()), n_stages=n_stages)


def _titles(runs: Sequence[Run]) -> list[str]:
    """The titles: network, data and pipeline, plus the settings that differ if that is ambiguous."""
    short = [f"{network_and_data(run)}, {run.config['pipeline']}" for run in runs]
    titles = []
    for index, run in enumerate(runs):
        namesakes = [
            dict(flatten(_comparable_config(other))) for other, title in zip(runs, short) if title == short[index]
        ]
        differ = {
            key
            for config in namesakes
            for key in config
            if any(config.get(key) != other.get(key) for other in namesakes)
        }
        own = dict(flatten(_comparable_config(run)))
        shown = [key for key in sorted(differ - QUIET) if own.get(key) is not None]
        ends = [key.rpartition(".")[2] for key in shown]
        names = [end if ends.count(end) == 1 else key for key, end in zip(shown, ends)]  # train.epochs, retrain.epochs
        words = [f"{name} {own[key]}" for name, key in zip(names, shown)]
        titles.append(short[index] + (f" ({', '.join(words)})" if words else ""))
    ends = [f"run {run.name.rpartition('-')[2]}" for run in runs]  # the hash in its name
    return [title if titles.count(title) == 1 else f"{title}, {end}" for title, end in zip(titles, ends)]
