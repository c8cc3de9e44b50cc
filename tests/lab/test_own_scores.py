"""Scores of a user's own in runs: named on the command line, and recorded."""

import sys
from pathlib import Path

import pytest
from test_own_code import MINE, SETTINGS

from sipp.cli.commands.report_command import report
from sipp.errors import OptionError
from sipp.scoring import methods
from sipp_lab.own_code import load_scores
from sipp_lab.recipes import Code, load_recipe
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import FinishedRun, run

SCORES = """
import torch, sipp
POWER = 2
def raised(weight): return weight.abs() ** POWER
def squares(task):
    return {name: raised(weight) for name, weight in task.parameters().items()}
sipp.register_method("squares", squares)
"""
MORE = """
def cubes(task): return {name: weight.abs() ** 3 for name, weight in task.parameters().items()}
sipp.register_method("cubes", cubes)
"""


@pytest.fixture(autouse=True)
def own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_ROWS", dict(methods._ROWS))
    monkeypatch.setattr(sys, "path", [*sys.path])


def loaded(folder: Path, text: str) -> None:
    (folder / "scores.py").write_text(text)
    load_scores(folder / "scores.py")


def made(folder: Path, names: str) -> FinishedRun:
    """A run of these methods on a network and data of the user's own."""
    (folder / "mine_for_scores.py").write_text(MINE)
    code = Code(net="mine_for_scores:make", data="mine_for_scores:load")
    sys.path.insert(0, str(folder))
    recipe = load_recipe("digits-iterative", settings=(*SETTINGS, f"prune.methods=[{names}]"), code=code)
    return run(recipe, RunOptions(out=folder / "runs", device="cpu"))


def test_own_scores_are_part_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(tmp_path, SCORES)
    first = made(tmp_path, "magnitude, squares")
    assert first.n_made == 3 and made(tmp_path, "magnitude, squares").n_made == 0
    (tmp_path / "more.py").write_text("import sipp\n" + MORE)
    load_scores(tmp_path / "more.py")
    assert made(tmp_path, "magnitude, squares").folder == first.folder  # a score that the recipe does not name
    loaded(tmp_path, SCORES.replace("POWER = 2", "POWER = 4"))
    with pytest.raises(OptionError, match="squares source"):  # its file changed
        made(tmp_path, "magnitude, squares")

    monkeypatch.setattr(methods, "_ROWS", {row.name: row for row in methods.METHODS})  # without the code
    with pytest.raises(OptionError, match="squares"):
        load_recipe("digits-iterative", settings=("prune.methods=[squares]",))
    assert read_run(first.folder).notes == ()  # a fresh run of own code: no false alarm
    page = tmp_path / "page.html"
    report([first.folder], out=page)
    text = page.read_text()
    assert "squares" in text and "different version" not in text


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(3)", "x = 1", None])
def test_files_that_register_nothing(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match="--code"):
        load_scores(path)
