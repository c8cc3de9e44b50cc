"""Every study in results/ can be read, says what a reader needs, and is in the index."""

import re
import runpy
from pathlib import Path

import pytest

from sipp_lab.page import read_results
from sipp_lab.page.panels import panels_of
from sipp_lab.runs.folder import Run

RESULTS = Path(__file__).parents[1] / "results"
STUDIES = sorted(path.parent for path in RESULTS.glob("*/README.md"))
SAID = ("Schedule", "Seeds", "The paper's claim", "What we see", "Where we differ")


def test_every_folder_is_a_study() -> None:
    assert sorted(path for path in RESULTS.iterdir() if path.is_dir()) == STUDIES and len(STUDIES) >= 3
    index = (RESULTS / "README.md").read_text()
    assert all(f"]({study.name}/README.md)" in index for study in STUDIES)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_study_is_whole(study: Path) -> None:
    text = (study / "README.md").read_text()
    assert all(re.search(rf"\*\*{words}\*\*", text) for words in SAID) and "sipp " in text
    results, broken = read_results([study])
    runs = [result for result in results if isinstance(result, Run)]
    assert runs and not broken and panels_of(runs)
    assert all(run.finished for run in runs) == ("**Cut off**" not in text)  # the README says what is missing
    for run in runs:
        assert run.name.rpartition("-")[2] in text, run.name
    figures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert figures and all((study / figure).is_file() for figure in figures)


def test_one_figure_compares_pipelines_with_the_numbers_of_the_readme() -> None:
    study = RESULTS / "digits-gradual"
    results, _ = read_results([study])
    pipeline_curves = runpy.run_path(str(RESULTS.parent / "benchmarks" / "draw_results.py"))["pipeline_curves"]
    gradual, iterative = pipeline_curves(results)
    assert (gradual.method, iterative.method) == ("gradual", "iterative")
    text = (study / "README.md").read_text()
    for theirs, ours in zip(iterative.points[1:], gradual.points, strict=True):
        row = re.search(rf"^\| {100 * ours.keep:.3g} % \|(.*)$", text, re.M)
        assert row is not None and (ours.keep, ours.n) == (theirs.keep, 12)
        assert re.findall(r"([\d.]+) ±", row[1]) == [f"{100 * theirs.mean:.2f}", f"{100 * ours.mean:.2f}"]
    assert pipeline_curves([*results, results[0]]) == ()  # the same keep twice: which one would be drawn?
