"""Panels: runs that differ only in seeds and methods are one; others are told apart by what differs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from report.synthetic import big_run

from sipp_lab.page import render
from sipp_lab.page.comparison import comparison
from sipp_lab.page.panels import panels_of
from sipp_lab.runs.folder import Run, read_run


def made(folder: Path, **options: Any) -> Run:
    return read_run(
        big_run(folder, **{"methods": ("magnitude",), "n_levels": 2, "n_seeds": 1, "n_layers": 1, **options})
    )


def moved(run: Run, seed: int) -> Run:
    """The same run as one of another seed."""
    records = tuple(replace(record, seed=seed) for record in run.records)
    return replace(run, name=f"seed{seed}", config={**run.config, "seed": seed}, records=records)


def test_seeds_and_methods_are_joined(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    (panel,) = panels_of([first, moved(first, 1), moved(first, 2), first])
    assert len(panel.run.records) == 3 * len(first.records) and panel.run.finished
    assert panel.folders == (first.name, "seed1", "seed2", first.name)
    other = replace(first, config={**first.config, "prune": {**first.config["prune"], "methods": ["lamp"]}})
    dense, *levels = first.records
    other = replace(other, records=(dense, *(replace(one, method="lamp") for one in levels)))
    (panel,) = panels_of([first, other])
    assert panel.run.config["prune"]["methods"] == ["magnitude", "lamp"]
    worse = replace(dense, after=replace(dense.after, n_top1=100))
    assert len(panels_of([first, replace(other, records=(worse, *other.records[1:]))])) == 2  # another dense network


def test_what_differs_is_in_the_title(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    he, torch_ = (replace(first, config={**first.config, "init": init}) for init in ("he", "pytorch"))
    titles = [panel.title for panel in panels_of([he, torch_])]
    assert titles[0].endswith("(init he)") and titles[1].endswith("(init pytorch)")
    train = first.config["train"]
    taught = {**first.config, "retrain": {**(first.config.get("retrain") or {}), "distill": {"weight": 0.5}}}
    plain, other = (
        replace(first, config={**one, "train": {**train, "together": n}}) for one, n in ((first.config, 1), (taught, 8))
    )
    titles = [panel.title for panel in panels_of([plain, other])]
    assert titles[0].endswith("iterative") and titles[1].endswith(
        "iterative (weight 0.5)"
    )  # no word of what is not set
    alike = [
        replace(first, name=f"runs-{name}", config={**first.config, "train": {**train, "together": n}})
        for n, name in enumerate("ab")
    ]
    assert [panel.title[-7:] for panel in panels_of(alike)] == [", run a", ", run b"]
    other = replace(first, origins=(*first.origins[:-1], replace(first.origins[-1], data="x")))
    assert "Main comparison" in render([first, other]) and "Main comparison" not in render([first])


def test_two_values_of_one_title_have_their_own_names(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    runs = [
        replace(
            first, config={**first.config, "train": {**first.config["train"], "epochs": n}, "retrain": {"epochs": m}}
        )
        for n, m in ((7, 70), (8, 80))
    ]
    titles = [panel.title for panel in panels_of(runs)]
    assert "(retrain.epochs 70, train.epochs 7)" in titles[0] and "(retrain.epochs 80, train.epochs 8)" in titles[1]


def test_methods_that_keep_nearly_the_same_share_are_compared_at_one_level(tmp_path: Path) -> None:
    """A method that draws weights keeps a few fewer; that alone makes it neither the best nor the worst."""
    run = made(tmp_path / "a", methods=("magnitude", "sipp-rand"))
    n_right, last = {"magnitude": 900, "sipp-rand": 500}, max(record.level for record in run.records)

    def drawn(record: Any) -> Any:
        if record.level < last:
            return record
        pruned = replace(record.pruned, kept=record.pruned.kept - (record.method == "sipp-rand"))
        return replace(record, pruned=pruned, after=replace(record.after, n_top1=n_right[record.method]))

    changed = replace(run, records=tuple(drawn(record) for record in run.records))
    panels = panels_of([changed, replace(changed, name="b", config={**run.config, "init": "pytorch"})])
    (first, *_), *_ = (section.table.rows for section in comparison(panels, None, "short").sections if section.table)
    _, _, best, worst = (cell.text for cell in first[1])
    assert "magnitude" in best and "sipp-rand" in worst
