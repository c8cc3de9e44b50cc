"""A real run's records hold what the page needs, and the page shows it."""

from pathlib import Path
from typing import Any

import pytest
from report.test_page import data_of, faults

from sipp.results.certificate import Certificate
from sipp.results.jsonio import from_json
from sipp_lab.page import read_results, render
from sipp_lab.page.article import method_table, panel_article
from sipp_lab.page.panels import panels_of
from sipp_lab.recipes import load_recipe
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import FinishedRun, run

SMALL = (
    "train.epochs=1",
    "train.warmup_epochs=0.0",
    "train.decay={factor: 0.5, every: 1}",
    "train.batch_size=256",
    "prune.levels=2",
    "prune.methods=[sipp-det, sipp-hybrid, magnitude]",
    "data.n_calibration=40",
    "data.n_holdout=100",
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    recipe = load_recipe("digits-iterative", settings=SMALL)
    return run(recipe, RunOptions(out=tmp_path_factory.mktemp("runs"), device="cpu"))


def levels(done: FinishedRun) -> list[dict[str, Any]]:
    return [record for record in done.records if record["method"] is not None]


def test_certificates_are_whole_and_speak_of_the_moment_before_training(done: FinishedRun) -> None:
    for record in levels(done):
        certificate = from_json(Certificate, record["certificate"], "the record")
        assert certificate.n == 100 and certificate.calibration_checked
    by_level = {(record["method"], record["level"]): record["certificate"] for record in levels(done)}
    # The first level of every method is pruned from the same dense network, the second from its own retrained one.
    assert len({one["dense_hash"] for (_, level), one in by_level.items() if level == 1}) == 1
    assert len({one["dense_hash"] for (_, level), one in by_level.items() if level == 2}) == 3


def test_no_holdout_no_certificate(tmp_path: Path) -> None:
    settings = (*SMALL, "data.n_holdout=0", "prune.methods=[magnitude]", "prune.levels=1")
    found = run(load_recipe("digits-at-init", settings=settings), RunOptions(out=tmp_path, device="cpu"))
    assert levels(found)[0]["certificate"] is None
    page = render(*read_results([found.folder]))
    assert "No certificate: the run has no holdout" in page and faults(page) == []


def test_the_page_of_a_real_run(done: FinishedRun) -> None:
    page = render(*read_results([done.folder.parent]))
    assert faults(page) == [] and "not finished: " not in page
    assert list(data_of(page)["plots"]) == ["part0-accuracy", "part0-certified", "part0-layers"]


def test_the_page_shows_multiply_adds_beside_the_share_of_weights(done: FinishedRun) -> None:
    run = read_run(done.folder)
    table = method_table(run)
    assert table is not None and "multiply-adds" in table.caption
    dense = next(record["multiply_adds"] for record in done.records if record["method"] is None)
    assert any(value == f"{dense:,}" for _, value, _ in panel_article(panels_of([run])[0], "r").tiles)
    shown = {(method, level): cells[level] for method, cells in table.rows for level in (1, 2)}
    for record in levels(done):
        share = record["multiply_adds"] / dense
        cell = shown[record["method"], record["level"]]
        assert cell.text.endswith(f" ({100 * share:.2g})") and "of the multiply-adds left" in cell.title
        assert share != pytest.approx(record["keep"], abs=1e-3)  # layers lose different shares, so it says more
