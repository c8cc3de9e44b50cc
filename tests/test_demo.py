"""The demo: fits a narrow terminal, and two runs give the same numbers (short versions of both)."""

from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from sipp import demo
from sipp.pruned import Method


def test_two_short_runs_agree_and_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TRAIN_EPOCHS", 6)
    monkeypatch.setattr(demo, "RETRAIN_EPOCHS", 1)
    monkeypatch.setattr(demo, "KEEPS", (0.5, 0.1))
    first, again = (demo.run_demo(tmp_path / name, progress=False) for name in ("a", "b"))
    assert first == again
    assert first.dense > 0.8
    assert set(first.after) == {(method, keep) for method in get_args(Method) for keep in (0.5, 0.1)}
    assert (tmp_path / "a" / "accuracy.png").read_bytes()[:4] == b"\x89PNG"


def test_the_table_fits_80_columns() -> None:
    before, after = (
        {(method, keep): share for method in get_args(Method) for keep in demo.KEEPS} for share in (0.5, 1.0)
    )
    text = StringIO()
    Console(file=text, width=80).print(demo.demo_table(demo.DemoResult(0.99, before, after)))
    assert "…" not in text.getvalue() and "sipp-hybrid" in text.getvalue()
