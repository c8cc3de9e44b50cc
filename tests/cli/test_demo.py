"""The demo: fits a narrow terminal, two runs give the same numbers, and it ends with a page (short versions of all)."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sipp.cli.commands import demo_command as demo

SHORT = ("prune.methods=[magnitude, sipp-hybrid]", "prune.levels=1", "train.epochs=3", "train.decay.milestones=[2]")


def plotted(page: Path) -> dict[str, list[float]]:
    """{method: its retrained accuracies, level by level} among the numbers that the page embeds."""
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text()).group(1))
    plot = data["plots"]["part0-accuracy"]
    view = plot["views"][plot["choices"][0]["options"].index("top-1 accuracy")]
    return {one["name"]: [mean for _, mean, *_ in one["points"]] for one in view["series"] if one["name"] != "dense"}


def accuracies(records: demo.Records) -> dict[tuple[str | None, int], float]:
    return {(record["method"], record["level"]): record["after"]["top1"] for record in records}


def test_two_short_runs_agree_and_end_with_a_page(tmp_path: Path) -> None:
    first, again, other = (
        demo.run_demo(tmp_path / name, progress=False, settings=(*SHORT, *more))
        for name, more in (("a", ()), ("b", ()), ("c", ("seed=1",)))
    )
    assert accuracies(first[0]) == accuracies(again[0]) != accuracies(other[0])
    assert accuracies(first[0])[None, 0] > 0.8
    assert set(accuracies(first[0])) == {(None, 0), ("magnitude", 1), ("sipp-hybrid", 1)}
    assert first[1] == tmp_path / "a" / "page.html"
    assert plotted(first[1]) == {
        method: [pytest.approx(accuracies(first[0])[method, 1])] for method in ("magnitude", "sipp-hybrid")
    }
    # The run itself is made anew each time: nothing of it stays beside what it shows.
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["page.html"]


def test_the_table_fits_80_columns() -> None:
    shares = {"before": {"top1": 0.5}, "after": {"top1": 1.0}}
    records: demo.Records = [{"method": None, "level": 0, **shares}]
    records += [
        {"method": method, "level": level, "keep": 0.5**level, **shares}
        for method in demo.METHODS
        for level in range(1, 6)
    ]
    text = StringIO()
    Console(file=text, width=80).print(demo.demo_table(records))
    assert "…" not in text.getvalue() and "sipp-hybrid" in text.getvalue()
