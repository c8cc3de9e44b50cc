"""The page in a real browser: it draws, answers to mouse and keyboard, fits phones and desks, and asks for nothing."""

import csv
import io
import json
from pathlib import Path

import pytest
from report.browser import CHROMIUM, Visit, visit
from report.synthetic import big_run

from sipp_lab.page import read_results, render

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")

PHONE, DESK = 390, 1440
N_LAYERS = 24


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of 5 methods x 20 levels x 3 seeds."""
    return render(*read_results([big_run(tmp_path_factory.mktemp("run") / "big", n_layers=N_LAYERS)]))


LOOK = (Path(__file__).parent / "look.js").read_text()
PLAY = LOOK + (Path(__file__).parent / "play.js").read_text()


@pytest.fixture(scope="module")
def played(page: str, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit(page, tmp_path_factory.mktemp("desk"), width=DESK, steps=PLAY)


def test_nothing_goes_wrong_and_nothing_is_asked_for(played: Visit) -> None:
    assert played.problems() == []
    assert played.width == DESK


def test_a_broken_page_fails_the_same_check(tmp_path: Path) -> None:
    body = "<div style='width:3000px'>wide</div><script>console.error('on purpose')</script>"
    text = f"<html><head><title>x</title></head><body>{body}<img src='http://127.0.0.1:9/x.png'></body></html>"
    problems = visit(text, tmp_path, width=DESK).problems()
    for part in ("on purpose", "127.0.0.1:9", "px of content"):
        assert any(part in problem for problem in problems), problems


def test_all_plots_are_drawn(played: Visit) -> None:
    assert played.seen["figures"] == played.seen["drawn"] == 3


def test_legend_hides_and_shows(played: Visit) -> None:
    seen = played.seen
    assert (seen["before"], seen["hidden"], seen["back"]) == (5, 4, 5)
    assert seen["pressed"] == "false" and seen["focusKept"]


def test_hover_and_keys_read_exact_values(played: Visit, page: str) -> None:
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    points = {one["name"]: one["points"] for one in data["plots"]["part0-accuracy"]["views"][0]["series"]}
    first, last = points["magnitude"][0], points["magnitude"][-1]
    assert all(f"{100 * value:.2f}".rstrip("0") in played.seen["tip"] for value in last[1:4]), played.seen["tip"]
    assert f"magnitude {100 * first[1]:.2f}".rstrip("0") in played.seen["spoken"]
    assert played.seen["spoken"].startswith("keep 85 %, 3 seeds")
    assert played.seen["tipTop"] > 0  # beside the values, not below the plot
    assert played.seen["tipGone"] and played.seen["focused"] and played.seen["unreachable"] == 0


def test_every_plot_has_a_table_with_all_its_numbers(played: Visit) -> None:
    tables = {key.removeprefix("part0-"): rows for key, rows in played.seen["tables"].items()}
    expected = {
        "accuracy": 5 * 20,
        "certified": 5 * 20,
        "layers": N_LAYERS,
    }
    assert {key: len(tables[key]) for key in expected} == expected
    assert all(len(rows) > 3 for rows in tables.values())
    assert tables["accuracy"][0][0] == "sipp-hybrid" and tables["accuracy"][0][1] == "85"


def test_choices_change_the_plot(played: Visit) -> None:
    assert "top-1 accuracy" in played.seen["label"] and "change" not in played.seen["label"]


SAVED = "resnet56-on-cifar10-iterative-seeds-0-to-2-accuracy-against-keep-top-1-accuracy"


def test_downloads_say_what_they_are(played: Visit) -> None:
    assert played.seen["saved"] == [f"{SAVED}.csv", f"{SAVED}.png"]
    lines = played.seen["csv"].strip("\ufeff\r\n").split("\r\n")
    assert len(lines) == 101 and lines[1].startswith('"sipp-hybrid",84.9999')
    assert played.seen["png"] == "PNG" and played.seen["pngSize"] > 10_000


def test_the_table_and_the_csv_have_one_unit(played: Visit) -> None:
    rows = list(csv.reader(io.StringIO(played.seen["csv"].strip("\ufeff"))))
    shown = played.seen["shown"]
    assert (
        shown[0] == rows[0] == ["method", "keep (%)", "top-1 accuracy, mean (%)", "least (%)", "largest (%)", "seeds"]
    )
    assert [float(cell) for cell in shown[1][1:]] == pytest.approx([float(cell) for cell in rows[1][1:]], abs=0.005)


def test_readable_on_a_phone(page: str, tmp_path: Path) -> None:
    found = visit(page, tmp_path, width=PHONE, steps=LOOK + "return seen;")
    assert found.problems() == [] and found.width == PHONE
    assert found.seen["figures"] == found.seen["drawn"] == 3
    assert found.seen["scale"] > 0.95  # plots are drawn for this width, not shrunk to it: text keeps its size
