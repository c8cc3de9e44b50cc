"""A user's own network, data and scores in runs: named on the command line, never by a file, and recorded."""

import sys
from pathlib import Path

import pytest
import torch

from sipp.cli.commands.report_command import report
from sipp.errors import OptionError
from sipp.scoring import methods
from sipp_lab.own_code import import_named, load_scores, own_images, own_network
from sipp_lab.recipes import load_recipe
from sipp_lab.runs.folder import load_state, read_run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import FinishedRun, run

MINE = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))

def load():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(300, 3, 2, 2, generator=generator)
    labels = images.flatten(1)[:, :3].argmax(1)
    return images[:200], labels[:200], images[200:], labels[200:]

def shouts(): raise RuntimeError("no")
def ends(): raise SystemExit(3)
def bytes_(): return load()[0].byte(), load()[1], load()[2].byte(), load()[3]
def floats(): return load()[0], load()[1].float(), load()[2], load()[3].float()
net = make()
"""
SETTINGS = (
    "train.epochs=1", "train.decay={factor: 0.5, every: 1}", "train.batch_size=50", "data.n_calibration=20",
    "data.n_holdout=0", "prune.keeps=[0.5]", "prune.methods=[sipp-det, snip]",
)  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_for_runs.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_for_runs", raising=False)
    return tmp_path


def test_a_run_uses_the_users_network_and_data(mine: Path) -> None:
    own = {"net": "mine_for_runs:make", "data": "mine_for_runs:load"}
    recipe = load_recipe("digits-iterative", settings=SETTINGS, **own)
    done = run(recipe, RunOptions(out=mine / "runs", device="cpu"))
    assert [r["net"] for r in done.records] == ["mine_for_runs:make"] * 3 and done.records[1]["pruned"]["kept"] == 60
    torch.manual_seed(0)
    start = own_network("mine_for_runs:make").state_dict()
    still = load_recipe("digits-at-init", settings=(*SETTINGS, "train.rate=1.0e-30"), **own)
    kept = run(still, RunOptions(out=mine / "runs", device="cpu"))
    assert torch.equal(
        load_state(kept.folder / "seed0.dense" / "final.safetensors")[0]["model.1.weight"], start["1.weight"]
    )
    assert run(recipe, RunOptions(out=mine / "runs", device="cpu")).n_made == 0
    with open(mine / "mine_for_runs.py", "a") as file:
        file.write("# changed")
    with pytest.raises(OptionError, match="mine_for_runs:make source"):
        run(recipe, RunOptions(out=mine / "runs", device="cpu"))


def test_no_file_names_code(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    for text in ("code: {net: 'os:abort'}", "net: own", "data: {name: 'os:abort'}", "net: 'os:abort'"):
        path.write_text(f"base: digits-iterative\n{text}\n")
        with pytest.raises(OptionError):
            load_recipe(str(path))
    with pytest.raises(OptionError, match="command line only"):
        load_recipe("digits-iterative", settings=("net=os:abort",))
    with pytest.raises(OptionError, match="init"):
        load_recipe("digits-iterative", settings=("init=pytorch",), net="a:b")


@pytest.mark.parametrize("name", ["shouts", "ends", "net", "absent", "MISSING.x", "load", ""])
def test_wrong_networks(name: str, mine: Path) -> None:
    spec = f"mine_for_runs:{name}" if name != "MISSING.x" else "no_such_module:x"
    with pytest.raises(OptionError):
        own_network(spec)
    recipe = load_recipe("digits-iterative", settings=SETTINGS, net=spec)
    with pytest.raises(OptionError):
        run(recipe, RunOptions(out=mine / "runs", device="cpu"))
    assert not (mine / "runs").exists()


@pytest.mark.parametrize("name", ["shouts", "make", "bytes_", "floats"])
def test_wrong_data(name: str, mine: Path) -> None:
    with pytest.raises(OptionError):
        own_images(f"mine_for_runs:{name}")
    assert own_images("mine_for_runs:load").n_classes == 3 and import_named("mine_for_runs:load")


# --- scores ---------------------------------------------------------------------------------------------------------

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


@pytest.fixture
def own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_ROWS", dict(methods._ROWS))
    monkeypatch.setattr(sys, "path", [*sys.path])


def loaded(folder: Path, text: str) -> None:
    (folder / "scores.py").write_text(text)
    load_scores(folder / "scores.py")


def made(folder: Path, names: str) -> FinishedRun:
    """A run of these methods on a network and data of the user's own."""
    own = {"net": "mine_for_runs:make", "data": "mine_for_runs:load"}
    recipe = load_recipe("digits-iterative", settings=(*SETTINGS, f"prune.methods=[{names}]"), **own)
    return run(recipe, RunOptions(out=folder / "runs", device="cpu"))


@pytest.mark.usefixtures("mine", "own_list")
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


@pytest.mark.usefixtures("own_list")
@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(3)", "x = 1", None])
def test_files_that_register_nothing(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "scores.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OptionError, match="--code"):
        load_scores(path)
