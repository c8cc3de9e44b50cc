"""Every study in results/ can be read, says what a reader needs, and is in the index."""

import re
from pathlib import Path

import pytest

from sipp.report.compare_runs import panels_of
from sipp.report.results import Run, read_results

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
    runs = [result for result in read_results([study]) if isinstance(result, Run)]
    assert runs and panels_of(runs)
    assert all(run.finished for run in runs) == ("**Cut off**" not in text)  # the README says what is missing
    for run in runs:
        assert run.name.rpartition("-")[2] in text, run.name
    for figure in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (study / figure).is_file()
