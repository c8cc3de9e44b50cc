"""The notebook of examples/paths, run by Jupyter and looked at in a browser: text whole, views with tables and bars."""

import re
from pathlib import Path
from typing import Any

import pytest
from report.browser import CHROMIUM, visit

pytest.importorskip("ipykernel", reason="needs ipykernel")
nbformat: Any = pytest.importorskip("nbformat", reason="needs nbformat")
nbclient: Any = pytest.importorskip("nbclient", reason="needs nbclient")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "paths" / "notebook.ipynb"
LIMIT_S = 300
# of every table of ours in an output: its place and colours, the bars in it
LOOK = r"""
const seen = (node) => { const box = node.getBoundingClientRect(); return [box.width, box.height]; };
const colour = (node) => getComputedStyle(node).color.match(/[\d.]+/g).slice(0, 3).map(Number);
const ground = getComputedStyle(document.body).backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);
const outputs = [...document.querySelectorAll(".jp-RenderedHTMLCommon")].filter((one) => one.querySelector("td"));
const fixed = [...document.querySelectorAll(".jp-RenderedText pre")];
return {
  ground,
  tables: outputs.flatMap((one) => [...one.querySelectorAll("table")]).map((one) => seen(one)),
  texts: outputs.map((one) => colour(one.querySelector("td"))),
  bars: outputs.flatMap((one) => [...one.querySelectorAll("[aria-hidden] > span")])
    .map((one) => [...seen(one), parseFloat(one.style.width), one.parentElement.getBoundingClientRect().width]),
  fonts: fixed.map((one) => getComputedStyle(one).fontFamily),
  images: [...document.querySelectorAll(".jp-RenderedImage img")].map((one) => one.naturalWidth),
};
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after it ran, in a folder of its own."""
    book, folder = nbformat.read(NOTEBOOK, as_version=4), tmp_path_factory.mktemp("notebook")
    nbclient.NotebookClient(book, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}}).execute()
    assert {path.name for path in folder.iterdir()} == {"digits.sipp.safetensors", "page.html"}
    return book


def outputs(book: Any) -> dict[str, list[Any]]:
    """What each cell of code shows, by its last line."""
    return {cell.source.splitlines()[-1]: cell.outputs for cell in book.cells if cell.cell_type == "code"}


def test_printed_text_is_one_piece(run: Any) -> None:
    (shown,) = outputs(run)["print(pruned)  # the same as text"]  # a table torn out would be an output of its own
    assert shown.output_type == "stream"
    assert re.search(r"prunable weights kept.*error:.*\n weight +rows.*\n 2\.weight .*\nprint\(", shown.text, re.S)


def test_every_record_is_a_view_and_every_plot_a_picture(run: Any) -> None:
    kinds = {line: {kind for one in shown for kind in one.get("data", {})} for line, shown in outputs(run).items()}
    views = [line for line, found in kinds.items() if "text/html" in found]
    pictures = [line for line, found in kinds.items() if "image/png" in found]
    assert len(views) == 7 and {"pruned", "found", "best", "fast"} < set(views)
    assert [line.partition("(")[0] for line in pictures] == ["plt.barh", "plt.legend"]
    assert not [one for shown in outputs(run).values() for one in shown if one.output_type == "error"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_shows_it(run: Any, theme: str, tmp_path: Path) -> None:
    nbconvert = pytest.importorskip("nbconvert", reason="needs nbconvert")
    page, _ = nbconvert.HTMLExporter(theme=theme).from_notebook_node(run)
    seen = visit(page, tmp_path, width=1000, steps=LOOK).seen
    assert len(seen["tables"]) >= 9 and all(width > 100 and height > 20 for width, height in seen["tables"])
    assert len(seen["bars"]) >= 20
    for width, height, share, whole in seen["bars"]:
        assert height > 5 and width == pytest.approx(whole * share / 100, abs=0.5)
    assert sum(seen["ground"]) > 600 if theme == "light" else sum(seen["ground"]) < 150
    for text in seen["texts"]:  # can be read: light on dark, dark on light
        assert abs(sum(text) - sum(seen["ground"])) > 400
    assert all("mono" in one.lower() for one in seen["fonts"]) and len(seen["fonts"]) >= 2
    assert len(seen["images"]) == 2 and min(seen["images"]) > 300
