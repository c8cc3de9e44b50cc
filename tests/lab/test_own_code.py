"""A run of a user's own network and data, named by the caller and never by a file."""

import sys
from pathlib import Path

import pytest
import torch

from sipp.errors import OptionError
from sipp_lab.own_code import import_named, own_images, own_network
from sipp_lab.recipes import Code, load_recipe
from sipp_lab.runs.folder import load_state
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

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
    code = Code(net="mine_for_runs:make", data="mine_for_runs:load")
    recipe = load_recipe("digits-iterative", settings=SETTINGS, code=code)
    done = run(recipe, RunOptions(out=mine / "runs", device="cpu"))
    assert [r["net"] for r in done.records] == ["own"] * 3 and done.records[1]["pruned"]["kept"] == 60
    torch.manual_seed(0)
    start = own_network("mine_for_runs:make").state_dict()
    still = load_recipe("digits-at-init", settings=(*SETTINGS, "train.rate=1.0e-30"), code=code)
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
    for text in ("code: {net: 'os:abort'}", "net: own", "data: {name: own}", "net: 'os:abort'"):
        path.write_text(f"base: digits-iterative\n{text}\n")
        with pytest.raises(OptionError):
            load_recipe(str(path))
    with pytest.raises(OptionError, match="command line only"):
        load_recipe("digits-iterative", settings=("code.net=os:abort",))
    with pytest.raises(OptionError, match="init"):
        load_recipe("digits-iterative", settings=("init=pytorch",), code=Code(net="a:b"))


@pytest.mark.parametrize("name", ["shouts", "ends", "net", "absent", "MISSING.x", "load", ""])
def test_wrong_networks(name: str, mine: Path) -> None:
    spec = f"mine_for_runs:{name}" if name != "MISSING.x" else "no_such_module:x"
    with pytest.raises(OptionError):
        own_network(spec)
    recipe = load_recipe("digits-iterative", settings=SETTINGS, code=Code(net=spec))
    with pytest.raises(OptionError):
        run(recipe, RunOptions(out=mine / "runs", device="cpu"))
    assert not (mine / "runs").exists()


@pytest.mark.parametrize("name", ["shouts", "make", "bytes_", "floats"])
def test_wrong_data(name: str, mine: Path) -> None:
    with pytest.raises(OptionError):
        own_images(f"mine_for_runs:{name}")
    assert own_images("mine_for_runs:load").n_classes == 3 and import_named("mine_for_runs:load")
