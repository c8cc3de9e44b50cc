"""Records in a notebook: whole HTML with the numbers of the text, bars as long as their numbers, pictures on demand."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.table import Table
from torch import nn

import sipp
from sipp.results.html import table_html
from sipp.results.text_scores import TextScores
from sipp.runtime.exporting import export


def points(seed: int, n: int = 120) -> torch.Tensor:
    return torch.rand(n, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("records")
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    labelled = [(points(3), torch.arange(120) % 4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruned = sipp.prune(net, points(1), keep=0.5, repair=True)
        certificate = sipp.certify(net, pruned, points(2))
        found = {
            "Pruned": pruned,
            "PrunedTo": sipp.prune_to(net, points(1), points(4), epsilon=0.9, method="wt"),
            "Comparison": sipp.compare(net, labelled, keeps=(0.8, 0.5), methods=("wt", "random"), repair=True),
            "Certificate": certificate,
            "AccuracyCertificate": sipp.certify_accuracy(net, pruned, points(5)),
            "with labels": sipp.certify_accuracy(net, pruned, labelled),
            "SavedFile": sipp.save(pruned, folder / "net.safetensors", values="int8"),
            "Repair": pruned.repair,
            "BlendChoice": pruned.choice,
            "Assumption": sipp.check_assumption(net, points(1)),
            "NetworkBound": pruned.bound,
            "Guarantee": pruned.guarantee,
            "Measured": pruned.measured,
            "Exported": export(pruned, folder / "net.pt", to="pt"),
            "Gradual": sipp.gradual(net, lambda step: None, points(1), keep=0.3, steps=10),
            "Sparse": sipp.sparse(pruned, points(6, 4)),
            "Shrunk": sipp.shrink(pruned, points(6, 4)),
            "TextScores": TextScores(
                n_windows=3, window=8, n_tokens=21, loss=2.0, dense_loss=1.5, kl=0.25, same_token=0.75
            ),
        }
    return found


NAMES = (
    "Pruned", "PrunedTo", "Comparison", "Certificate", "AccuracyCertificate", "with labels",
    "SavedFile", "Repair", "BlendChoice", "Assumption", "NetworkBound", "Guarantee", "Measured", "Exported", "Gradual",
    "Sparse", "Shrunk", "TextScores",
)  # fmt: skip
WITH_BARS = {
    "Pruned", "PrunedTo", "Comparison", "Certificate", "AccuracyCertificate", "with labels", "SavedFile", "Repair",
    "BlendChoice", "Assumption", "Gradual", "Sparse", "Shrunk",
}  # fmt: skip


class Page(HTMLParser):
    """The text of HTML whose tags fit together, and the lengths of its bars."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.bars: list[float] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        style = dict(attrs).get("style") or ""
        if found := re.search(r"width:([\d.e+-]+)%", style):
            self.bars.append(float(found[1]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


@pytest.mark.parametrize("name", NAMES)
def test_every_record_has_a_view_with_the_numbers_of_its_text(name: str, records: dict[str, Any]) -> None:
    page = Page(records[name]._repr_html_())
    shown = " ".join(page.texts)
    assert numbers(str(records[name])) <= numbers(shown), name
    assert bool(page.bars) == (name in WITH_BARS) and all(0 <= one <= 100 for one in page.bars)
    assert len(repr(records[name])) < 150 or name not in WITH_BARS - {"BlendChoice"}  # in a shell: one short line


def test_all_records_that_print_are_tried(records: dict[str, Any]) -> None:
    assert set(records) == set(NAMES) and {type(one).__name__ for one in records.values()} == {*NAMES} - {"with labels"}


def test_bars_are_as_long_as_their_numbers() -> None:
    table = Table()
    for column in ("name", "keep", "bytes", "also\nbytes"):
        table.add_column(column)
    table.add_row("a <b>", "25.00%*", "1,000", "500")
    table.add_row(r"\[x]", "", "inf", "none")
    assert Page(table_html(table, bars=("keep",))).bars == [25]
    page = Page(table_html(table, bars=("bytes", "also bytes")))
    assert page.bars == [100, 50, 100] and page.texts == [
        *("name", "keep", "bytes", "also bytes"),
        *("a <b>", "25.00%*", "1,000", "500"),
        *("[x]", "inf", "none"),
    ]
    assert Page(table_html(table)).bars == []


def test_layers_of_a_pruned_network(records: dict[str, Any]) -> None:
    pruned = records["Pruned"]
    assert Page(pruned._repr_html_()).bars == pytest.approx([100 * layer.keep for layer in pruned.layers], rel=0.01)
    many = replace(pruned, layers=pruned.layers * 10)
    assert "... 12 more" in many._repr_html_() and len(Page(many._repr_html_()).bars) == 8


def test_a_walk_that_certified_nothing(records: dict[str, Any]) -> None:
    none = sipp.prune_to(records["Pruned"].model, points(1), points(4, 10), epsilon=0.5, method="wt")
    assert none.verdict in " ".join(Page(none._repr_html_()).texts)


PLOTS = {
    "Shrunk": lambda one: [
        *(x.multiply_adds / 1e6 for x in one.layers),
        *(x.multiply_adds_before / 1e6 for x in one.layers),
    ],
    "Pruned": lambda one: [100 * layer.keep for layer in one.layers],
    "Repair": lambda one: [*(x.error_after for x in one.layers), *(x.error_before for x in one.layers)],
    "SavedFile": lambda one: [*(x.n_bytes / 1e3 for x in one.tensors), *(x.dense_bytes / 1e3 for x in one.tensors)],
}


@pytest.mark.parametrize("name", PLOTS)
def test_bars_of_a_picture(name: str, records: dict[str, Any]) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="needs the extra report")
    ax = figure.Figure().subplots()
    assert records[name].plot(ax) is ax
    assert [bar.get_width() for bar in ax.patches] == pytest.approx(PLOTS[name](records[name]))
    assert (ax.get_legend() is not None) == (name != "Pruned")


def test_plotted_curves_have_the_numbers_of_their_records(records: dict[str, Any]) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="needs the extra report")
    axes = figure.Figure().subplots(3)
    compared, best, slowly = records["Comparison"], records["PrunedTo"], records["Gradual"]
    lines = {line.get_label(): line for line in compared.plot(axes[0]).lines}
    assert set(lines) == {row.name for row in compared.rows}
    for row in compared.rows:
        line = lines[row.name]
        assert dict(zip(line.get_xdata(), line.get_ydata()))[100 * row.keep] == row.error
    assert lines["wt"].get_color() == lines["wt + repair"].get_color() != lines["random"].get_color()
    assert lines["wt + repair"].get_linestyle() == "--" and axes[0].xaxis_inverted()
    passed, failed = best.plot(axes[1]).lines
    assert len(passed.get_xdata()) == sum(level.passed for level in best.path)
    assert len(passed.get_xdata()) + len(failed.get_xdata()) == len(best.path)
    (line,) = slowly.plot(axes[2]).lines
    assert list(line.get_ydata()) == [100 * keep for _, keep in slowly.path]


def test_new_axes_where_none_are_given(records: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra report")
    monkeypatch.setattr(pyplot, "subplots", lambda **options: (None, "new axes"))
    with pytest.raises(AttributeError, match="'str' object"):
        records["Pruned"].plot()


def test_nothing_is_drawn_without_matplotlib_and_the_error_names_the_extra(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(sipp.errors.OptionError, match=r"sipp\[report\]"):
        records["Pruned"].plot()


def test_names_from_a_file_are_escaped_in_html(tmp_path: Path) -> None:
    """A name from a file that nobody trusts is text, not HTML."""
    net = nn.Sequential()
    net.add_module("<script>alert(1)</script>", nn.Linear(4, 4))
    assert "<script>" not in sipp.save(net, tmp_path / "net.safetensors")._repr_html_()


def test_printed_text_is_whole_where_rich_sees_a_notebook(
    records: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich would show the table at once, above the text that it belongs to."""
    before = {name: str(one) for name, one in records.items()}
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert {name: str(one) for name, one in records.items()} == before
