"""Every number that a page quotes is the one that a benchmark wrote."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def _quotes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quotes", ROOT / "benchmarks" / "quotes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quotes"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


quotes = _quotes()
PAGES = {str(path.relative_to(ROOT)): path for path in quotes.pages()}


@pytest.mark.parametrize("page", PAGES)
def test_quoted_figures_are_those_of_their_files(page: str) -> None:
    assert quotes.problems_in(PAGES[page].read_text(encoding="utf-8"), page) == []


@pytest.mark.parametrize("path", sorted(quotes.FIGURES.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_of_figures_says_where_it_comes_from(path: Path) -> None:
    assert quotes.figures(path.stem)["values"]


def test_results_in_readme_are_quoted() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    results = text.split("## Results")[1].split("\n## ")[0]
    assert len(list(quotes.quotes_in(results, "README.md"))) >= 8


def test_a_wrong_a_missing_and_a_lost_figure_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"resnet20": {"0.2": {"accuracy": 89.99}}, "bytes": 1094288}
    whole = {"command": "c", "commit": "abc", "machine": "m", "work": "w", "values": values}
    (tmp_path / "some.json").write_text(json.dumps(whole))
    monkeypatch.setattr(quotes, "FIGURES", tmp_path)
    for right in ("**90.0 %**<!-- some: resnet20.0.2.accuracy -->", "1,094,288 bytes<!-- some: bytes -->"):
        assert quotes.problems_in(right, "page") == []
    wrong = "it keeps 90.1 %<!-- some: resnet20.0.2.accuracy -->"
    assert "the file has 90.0" in quotes.problems_in(wrong, "page")[0]
    assert quotes.filled(wrong, "page") == wrong.replace("90.1", "90.0")
    for broken, why in (
        ("90.0 %<!-- some: resnet56.0.2 -->", "no 'resnet56.0.2'"),
        ("90.0 %<!-- some: resnet20.0.2 -->", "not a number"),
        ("90.0 %<!-- other: x -->", "has no other.json"),
        ("many<!-- some: bytes -->", "no number stands before it"),
    ):
        assert why in quotes.problems_in(broken, "page")[0]
    (tmp_path / "some.json").write_text(json.dumps(whole | {"commit": ""}))
    assert "does not say its commit" in quotes.problems_in("1,094,288<!-- some: bytes -->", "page")[0]
