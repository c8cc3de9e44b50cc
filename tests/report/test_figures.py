"""Figures for print: written in both formats, not empty, in the colours of the page."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from report.synthetic import big_run, config, layer, level_record, write_run
from sipp.report.figures import _draw_column, _layer_figures, _rounded, draw_lines, figure_names, write_figures

from sipp.report import figures, series
from sipp.report.palette import STYLES, style_of
from sipp.report.plots import curve_view
from sipp.report.series import Curve, Point
from sipp_lab.page import read_results
from sipp_lab.runs.folder import Run

NAMES = {
    "delta-top1", "delta-top5", "top1", "top5", "before-top1", "certified-epsilon", "theory-epsilon",
    "layers-keep", "layers-epsilon",
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("figures")
    run = big_run(base / "a run", methods=("sipp-det", "magnitude"), n_levels=6, n_seeds=2, n_layers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(figures.PRINT_STYLE, "pdf.fonttype", 3)  # cutting fonts to size takes as long as all the drawing
        return write_figures(read_results([run]), base / "out")


def n_colours(path: Path) -> int:
    return len(Image.open(path).convert("RGB").getcolors(maxcolors=1 << 20) or ())


def test_every_figure_in_both_formats(written: list[Path]) -> None:
    assert {(path.stem.removeprefix("a_run-"), path.suffix) for path in written} == {
        (name, suffix) for name in NAMES for suffix in (".pdf", ".png")
    }


def test_figures_are_not_empty(written: list[Path], tmp_path: Path) -> None:
    for path in written:
        if path.suffix == ".pdf":
            data = path.read_bytes()
            assert data.startswith(b"%PDF") and len(data) > 5000 and b"%%EOF" in data[-20:]
        else:
            assert n_colours(path) > 50 and min(Image.open(path).size) >= 700
    blank = tmp_path / "blank.png"
    Image.new("RGB", (900, 900), "white").save(blank)
    assert n_colours(blank) == 1  # what the check above would see of an empty figure


def has_colour(path: Path, colour: str) -> bool:
    wanted = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return wanted in {one for _, one in Image.open(path).convert("RGB").getcolors(maxcolors=1 << 20) or ()}


def test_methods_are_drawn_in_their_colours(written: list[Path]) -> None:
    curves = ("top1", "top5", "delta-top1", "delta-top5", "before-top1", "certified-epsilon", "layers-keep")
    for path in written:
        if path.suffix == ".png" and path.stem.removeprefix("a_run-") in curves:
            assert has_colour(path, STYLES["sipp-det"].light) and has_colour(path, STYLES["magnitude"].light), path
            assert not has_colour(path, STYLES["snip"].light)  # not in this run


def test_layers_are_bars_with_their_names_as_on_the_page(tmp_path: Path) -> None:
    """Eight methods are two rows of columns; every layer is named in each row, and has a bar of its length."""
    run = big_run(tmp_path / "run", methods=tuple(STYLES)[:8], n_levels=1, n_seeds=1, n_layers=4)
    (shown,) = read_results([run])
    assert isinstance(shown, Run)
    figure = Figure()
    _layer_figures(shown)["keep"](figure)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [*STYLES][:8]
    for place, (method, axes) in enumerate(zip(STYLES, figure.axes)):
        rows = series.layer_rows(shown, method, 1)
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([100 * row.keep for row in rows], rel=1e-4)
        assert {axes.get_xscale() for axes in figure.axes} == {"linear"} and axes.get_xlim()[0] == 0
        names = [text.get_text() for text in axes.get_yticklabels() if text.get_visible()]
        assert names == ["layers.0.conv1", "layers.0.conv2", "layers.1.conv1", "layers.1.conv2"] or place % 4


def test_steep_values_are_dots_on_a_logarithmic_axis(tmp_path: Path) -> None:
    """No bar starts at zero there."""
    (shown,) = read_results([big_run(tmp_path / "run", methods=("sipp-det",), n_levels=1, n_seeds=1, n_layers=20)])
    assert isinstance(shown, Run)
    figure = Figure()
    _layer_figures(shown)["epsilon"](figure)
    assert figure.axes[0].get_xscale() == "log" and not figure.axes[0].patches and figure.axes[0].lines


def test_repaired_networks_are_hollow_and_hatched(tmp_path: Path) -> None:
    axes = Figure().subplots()
    points = (Point(0.5, 0.8, 0.8, 0.8, 1), Point(0.2, 0.7, 0.7, 0.7, 1))
    draw_lines(axes, curve_view((Curve("magnitude", points), Curve("magnitude repaired", points)), "accuracy", "share"))
    plain, repaired = axes.lines
    assert plain.get_color() == repaired.get_color() and repaired.get_label() == "magnitude repaired"
    assert (plain.get_markerfacecolor(), repaired.get_markerfacecolor()) == (STYLES["magnitude"].light, "white")
    assert plain.get_linestyle() == repaired.get_linestyle() == "--" and plain._dash_pattern != repaired._dash_pattern
    _draw_column(axes, [1.0], style_of("magnitude repaired", ("magnitude",)), is_steep=False)
    assert axes.patches[-1].get_hatch()


def test_an_unfinished_run_has_the_figures_it_can_have(tmp_path: Path) -> None:
    run = big_run(tmp_path / "run", methods=("magnitude",), n_levels=1, n_seeds=1, n_layers=1)
    records = (run / "records.jsonl").read_text().splitlines(keepends=True)
    (run / "records.jsonl").write_text(records[0])
    assert figure_names(read_results([run])) == []
    (run / "records.jsonl").write_text("".join(records[:2]))
    assert "run-top1.pdf" in figure_names(read_results([run]))


def test_hostile_names_and_equal_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "FORMATS", ("png",))
    name = r"$\frac{a$ <b> \\ _"
    layers = [layer(name, 10, 5, eps=None, dead=0)]
    runs = [
        write_run(
            tmp_path / folder / "run",
            config(name=name, pipeline="at-init", methods=(name,), n_levels=1, n_seeds=1),
            [level_record(seed=0, method=name, level=1, keep=0.5, top1=0.5, layers=layers, epsilon=0.1)],
        )
        for folder in ("a", "b")
    ]
    made = write_figures(read_results(runs), tmp_path / "out")
    assert {path.stem for path in made} >= {"run-top1", "run-2-top1", "run-layers-keep"}
    assert len({path.name for path in made}) == len(made) and all(path.parent == tmp_path / "out" for path in made)


@pytest.mark.parametrize(("n_lines", "is_below"), [(figures.MOST_NAMES, False), (figures.MOST_NAMES + 1, True)])
def test_many_names_stand_below_the_axes_and_hide_no_line(n_lines: int, is_below: bool) -> None:
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    for i in range(n_lines):
        axes.plot([0, 1], [i, i], label=f"method {i}")
    figures._legend(axes)
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert len(legend.get_texts()) == n_lines
    assert (legend.get_window_extent().y1 < axes.get_window_extent().y0) == is_below


def test_numbers_beside_bars() -> None:
    known = {100.0: "100", 9.96: "10", 9.94: "9.9", 0.0123: "0.012", 51.4: "51"}
    assert {value: _rounded(value) for value in known} == known
