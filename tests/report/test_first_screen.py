"""What a reader who knows nothing of the package meets first: on the page of a study, and in its tables."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from report.browser import CHROMIUM, visit
from report.synthetic import STAND_IN_HASH, big_run, certificate, evaluation
from report.test_result_folders import pruned_folder

from sipp.cli.commands.report_command import report
from sipp.files import seal
from sipp.report import read_pruned_result
from sipp.report.rendering import about_method
from sipp_lab.page import read_results, render
from sipp_lab.page.article import method_table
from sipp_lab.runs.folder import read_run

SCREEN = 900  # pixels high, of a window that is 1440 wide
RUN = {"n_inputs": 64, "dense_ms": 1234.5678, "sparse_ms": 395.69479, "off_by": 1.26e-07}
RUN |= {"faster": {"ratio": 3.1201, "low": 2.9, "high": 3.31, "runs_dense": False}}
BENCH = {
    "kind": "Bench", "sipp": "0", "machine": "a CPU", "n_threads": 1, "network": "my:net",
    "pruned_hash": STAND_IN_HASH, "line": "",
    "file_bytes": 35390000, "bound_bytes": 34460000.5, "dense_bytes": 153238700, "memory_bytes": 89770123,
    "memory_dense_bytes": 153128456,
    "runs": [RUN],
}  # fmt: skip
SURVEY = (Path(__file__).parent / "survey.js").read_text()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve runs of different schedules, in folders of folders as in results/STUDY/RUN."""
    base = tmp_path_factory.mktemp("study") / "my-study"
    for index in range(12):
        name = f"net{index}-own"
        big_run(
            base / f"part{index % 2}" / str(index),
            name=name,
            methods=("magnitude", "mine"),
            n_levels=3,
            n_seeds=1,
            n_layers=2,
        )
    return base


def test_a_folder_of_folders_of_runs_is_a_page_with_its_name(study: Path, tmp_path: Path) -> None:
    report([study], out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<title>my-study</title>" in text and text.index("Main comparison") < text.index("Use ")
    assert "Each of the 12 results by itself" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")
def test_a_study_is_at_most_five_screens_before_anything_is_opened(study: Path, tmp_path: Path) -> None:
    found = visit(render(*read_results([study])), tmp_path, width=1440, steps=SURVEY)
    assert found.problems() == [] and found.seen["open"] == 0 and found.seen["height"] <= 5 * SCREEN


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")
def test_no_number_is_on_two_lines_and_size_and_speed_come_first(tmp_path: Path) -> None:
    own = replace(certificate(0.0421), dense_hash="0" * 64)
    folder = pruned_folder(tmp_path / "a-network-with-a-rather-long-name", certificate=own)
    (folder / "eval.json").write_text(evaluation(0.9, 0.875, n_inputs=1234567))
    (folder / "bench.json").write_text(json.dumps(seal(BENCH)))
    page = render(*read_results([folder]))
    assert "4.33 x smaller" in page and "3.1 x faster (2.9 to 3.3)" in page and "within 4.21 %" in page
    for width in (390, 800):
        found = visit(page, tmp_path / str(width), width=width, steps=SURVEY)
        assert found.problems() == [] and found.seen["numbers"] == [] and found.seen["lead"], width


def test_a_file_that_grew_is_called_larger(tmp_path: Path) -> None:
    folder = pruned_folder(tmp_path / "tiny")
    grew = {**BENCH, "file_bytes": 2940, "dense_bytes": 1000}
    (folder / "bench.json").write_text(json.dumps(seal(grew)))
    page = render(*read_results([folder]))
    why = "in a network this small, names and records take more room than zeros save"
    assert "x smaller" not in page
    assert "2.94 x larger" in page and why in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")
def test_bars_keep_their_values_on_a_telephone(tmp_path: Path) -> None:
    layers = read_pruned_result(pruned_folder(tmp_path / "short")).pruned.layers
    named = tuple(replace(one, name=f"encoder.recurrent.{one.name}_hh_l0") for one in layers)  # leaves little room
    page = render(*read_results([pruned_folder(tmp_path / "net", layers=named)]))
    look = 'return [...document.querySelectorAll("figure[data-plot*=layers] svg text")].map((one) => one.textContent);'
    found = visit(page, tmp_path, width=390, steps=look)
    assert found.problems() == [] and {"25 %", "20 %", "0 %"} <= set(found.seen), found.seen  # values, and both ends


def test_the_dense_accuracy_is_in_every_table_and_words_are_explained(study: Path) -> None:
    run = read_run(study / "part0" / "0")
    table = method_table(run)
    assert table is not None and table.head[:2] == ("method / keep", "dense")
    assert all(re.fullmatch(r"\d\d\.\d", cells[0].text) for _, cells in table.rows)
    page = render([run])
    for name in ("magnitude", "mine", "dense", "smallest keep"):
        assert re.search(rf'title="[^"]+"[^>]*>{name}<', page), name
    assert about_method("magnitude") in page and "a score from the user's own code" in about_method("mine")
    assert "Words on this page" in page and "keep 10 % means 90 % zeros" in page
