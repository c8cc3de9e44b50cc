"""The numbers behind the plots, against values computed by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from report.synthetic import certificate, config, dense, layer, level_record, write_run

from sipp.report import plots
from sipp.report.plots import Curve, Point
from sipp.results.jsonio import to_json
from sipp_lab.page import article, series
from sipp_lab.runs.folder import Run, read_run


def small_run(folder: Path, *, pipeline: str = "iterative", n_seeds: int = 2, without: tuple[int, ...] = ()) -> Run:
    """Two levels of sipp-det and magnitude on two seeds, with numbers that can be computed in the head."""
    tops = {  # (seed, method): top-1 at level 1 and 2; dense networks have 0.90 and 0.80
        (0, "sipp-det"): (0.91, 0.88),
        (1, "sipp-det"): (0.80, 0.70),
        (0, "magnitude"): (0.86, 0.60),
        (1, "magnitude"): (0.79, 0.40),
    }
    records = []
    for seed in range(n_seeds):
        records.append(dense(seed, 0.90 - 0.10 * seed))
        for method in ("sipp-det", "magnitude"):
            for level, keep in ((1, 0.5), (2, 0.25)):
                eps = (2.0 + seed + level) if method == "sipp-det" else None
                parts = [
                    layer("a.weight", 100, int(100 * keep) + 10, eps=eps, dead=seed),
                    layer("b.weight", 300, int(300 * keep) - 10, eps=eps and 2 * eps, dead=2 * level),
                ]
                top1 = tops[seed, method][level - 1]
                one = level_record(
                    seed=seed, method=method, level=level, keep=keep, top1=top1, layers=parts, epsilon=0.1 * level
                )
                records.append(one)
    records = [record for index, record in enumerate(records) if index not in without]
    settings = config(name="small", pipeline=pipeline, methods=("sipp-det", "magnitude"), n_levels=2, n_seeds=n_seeds)
    return read_run(write_run(folder / "small", settings, records))


def close(point: Point, keep: float, mean: float, low: float, high: float, n: int) -> bool:
    return (point.keep, point.mean, point.low, point.high, point.n) == pytest.approx((keep, mean, low, high, n))


def test_changes_are_taken_seed_by_seed(tmp_path: Path) -> None:
    det, magnitude = series.metric_curves(small_run(tmp_path), "delta_top1")
    assert (det.method, magnitude.method) == ("sipp-det", "magnitude")
    assert close(det.points[0], 0.5, 0.005, 0.0, 0.01, 2)  # +0.01 and 0.00
    assert close(det.points[1], 0.25, -0.06, -0.10, -0.02, 2)
    assert close(magnitude.points[1], 0.25, -0.35, -0.40, -0.30, 2)


def test_accuracies_and_the_dense_reference(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    det, _ = series.metric_curves(run, "top1")
    assert close(det.points[0], 0.5, 0.855, 0.80, 0.91, 2)
    before, _ = series.metric_curves(run, "before_top1")
    assert close(before.points[0], 0.5, 0.4275, 0.40, 0.455, 2)
    assert series.dense_mean(run, "top1") == pytest.approx(0.85) and series.dense_mean(run, "delta_top1") == 0.0
    assert series.dense_mean(run, "before_top1") is None


def test_the_paper_figure_comes_first(tmp_path: Path) -> None:
    assert series.metrics_of(small_run(tmp_path))[0] == "delta_top1"
    assert series.metrics_of(small_run(tmp_path, pipeline="at-init"))[0] == "top1"


def test_a_change_without_its_dense_network_is_unknown(tmp_path: Path) -> None:
    run = small_run(tmp_path, without=(5,))  # the dense network of seed 1
    assert series.metric_curves(run, "delta_top1") == ()
    assert len(series.metric_curves(run, "top1")) == 2


def test_layers_combine_seeds(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    views = plots.layer_views({name: series.layers_at(run, name, 2) for name in ("sipp-det", "magnitude")})
    by_label = {label: {one["name"]: one["values"] for one in view["series"]} for label, view in views.items()}
    assert by_label[plots.KEPT]["sipp-det"][0] == pytest.approx(0.35) and len(by_label[plots.KEPT]["sipp-det"]) == 2
    assert by_label[plots.EPSILON]["sipp-det"][0] == 5.0 and "magnitude" not in by_label[plots.EPSILON]
    assert by_label[plots.DEAD]["sipp-det"][0] == 0.5 and sum(by_label[plots.SHARE]["magnitude"]) == pytest.approx(1)


@pytest.mark.parametrize("eps", [None, math.inf])
def test_an_epsilon_that_one_seed_lacks_is_not_that_of_the_others(eps: float | None, tmp_path: Path) -> None:
    (first, *others), other_seed = series.layers_at(small_run(tmp_path), "sipp-det", 2)
    view = plots.layer_views({"sipp-det": [[replace(first, eps=eps), *others], other_seed]})[plots.EPSILON]
    assert view["series"][0]["values"] == [None, 10.0]


def test_an_infinite_epsilon_of_one_seed_takes_the_point_away(tmp_path: Path) -> None:
    part = layer("a", 10, 5, eps=1.0, dead=0)
    records = []
    for seed, epsilon in ((0, 0.1), (1, float("inf"))):
        for level in (1, 2):
            value = epsilon if level == 2 else 0.1
            one = level_record(
                seed=seed, method="magnitude", level=level, keep=0.5, top1=0.5, layers=[part], epsilon=0.1
            )
            verdict = "certified" if value == 0.1 else "not certified"
            records.append({**one, "certificate": to_json(certificate(value, verdict=verdict))})
    settings = config(name="s", pipeline="iterative", methods=("magnitude",), n_levels=2, n_seeds=2)
    (curve,) = series.certified_curves(read_run(write_run(tmp_path / "r", settings, records)))
    assert [point.n for point in curve.points] == [2]  # a mean over the finite ones would look better than it is


# --- words ----------------------------------------------------------------------------------------------------------


def test_headings_state_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    assert [(name, at.keep) for name, at in article.choices(run)] == [("sipp-det", 0.5)]
    assert article.certificate_finding(run).heading == (
        "At keep 50 %, outputs are certified within 10 % for every method"
    )
    assert "best of several does not" in article.certificate_finding(run).detail
    assert "4.5 dead rows" in article.layers_finding(run).heading


def test_reach_ends_at_the_first_level_that_loses_more() -> None:
    points = [Point(keep, mean, mean, mean, 1) for keep, mean in ((0.5, 0.0), (0.25, -0.02), (0.1, 0.0))]
    assert article.sparsest(Curve("magnitude", tuple(points))) == points[0]
    assert article.sparsest(Curve("magnitude", tuple(points[1:]))) is None


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    assert "One seed" in article.spread_words(small_run(tmp_path / "a", n_seeds=1))
    assert "means over 2 seeds" in article.spread_words(small_run(tmp_path / "b"))
