"""What people get wrong in their first hour: each is told by name, with what to type instead, before any work."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import Done, run, three_lines
from safetensors.torch import save_file
from torch import nn

import sipp
from sipp.errors import DataError, OptionError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    for name in ("data", "holdout"):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(300, 6)).astype(np.float32))
    save_file(mlp().state_dict(), tmp_path / "w.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """The points of every forward pass of a whole network."""
    seen: list[int] = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        if isinstance(module, nn.Sequential):
            seen.append(len(inputs[0]))

    handle = nn.modules.module.register_module_forward_hook(count)
    yield seen
    handle.remove()


def prune(*more: object, weights: str = "w.safetensors", model: str = "cli_zoo:mlp") -> Done:
    return run("prune", "--model", model, "--weights", weights, "--data", "data.npy", "--out", "net", *more)


def told(done: Done) -> tuple[str, str]:
    """What was wrong, and what to do."""
    assert done.returncode == 2, done.stdout
    what, _, fix = three_lines(done.stderr)
    return what, fix


def test_calibration_points_as_holdout_are_refused_before_the_work(folder: Path, passes: list[int]) -> None:
    what, _ = told(prune("--keep", 0.5, "--repair", "--holdout", "data.npy"))
    assert "it is --data too" in what
    assert sum(passes) < 300, passes  # a few points show that the network takes them; no pass over the data
    assert not (folder / "net").exists()


@pytest.mark.parametrize("out", [(), ("--out", "other.html")])
def test_a_report_of_a_folder_that_is_not_there_names_it(folder: Path, out: tuple[str, ...]) -> None:
    done = run("report", "nothing", *out)
    what, where, fix = three_lines(done.stderr)
    assert done.returncode == 2 and what == "nothing: there is no such folder", what
    assert where == "sipp report nothing" and "check the name" in fix


def test_prune_to_refuses_shared_points_before_the_work(passes: list[int]) -> None:
    net, data = mlp(), torch.rand(300, 6)
    with pytest.raises(DataError, match="300 of 300"):
        sipp.prune_to(net, data, data, epsilon=0.5, progress=False)
    assert passes == []


def test_weights_that_do_not_exist(folder: Path) -> None:
    what, fix = told(prune("--keep", 0.5, weights="raeder.pt"))
    assert what == "raeder.pt does not exist" and "check the name" in fix


def test_a_file_of_code_in_place_of_its_function(folder: Path) -> None:
    (folder / "rows.py").write_text("")
    what, fix = told(prune("--keep", 0.5, model="rows.py"))
    assert what == "rows.py is a file of code" and "rows.py:FUNCTION" in fix


def test_a_module_that_is_not_there(folder: Path) -> None:
    what, fix = told(prune("--keep", 0.5, model="row:reader"))
    assert f"no module 'row' in {folder}" in what and "row.py" in fix
    (folder / "reads.py").write_text("import absent_package\n")
    what, _ = told(prune("--keep", 0.5, model="reads:net"))
    assert "No module named 'absent_package'" in what  # the module is there, what it imports is not


def test_points_of_accuracy_are_shares(folder: Path) -> None:
    _, fix = told(prune("--max-accuracy-drop", 2, "--holdout", "holdout.npy"))
    assert fix == "--max-accuracy-drop 0.02 is two percentage points"
    with pytest.raises(OptionError, match=r"max_accuracy_drop=0.02 is two percentage points"):
        sipp.prune_to(mlp(), torch.rand(9, 6), torch.rand(9, 6), max_accuracy_drop=2)


def test_a_share_left_out_does_not_go_with_an_accuracy_drop(folder: Path) -> None:
    what, fix = told(prune("--max-accuracy-drop", 0.9, "--holdout", "holdout.npy", "--share", 0.05))
    assert "--share is for --epsilon" in what and "--epsilon instead of --max-accuracy-drop" in fix


def test_a_tolerance_without_repair_says_what_reaches_further(folder: Path) -> None:
    words = ("--epsilon", 0.9, "--holdout", "holdout.npy")
    assert "--repair fits the kept weights" in prune(*words).stdout
    assert "--repair fits the kept weights" not in prune(*words, "--repair", "--force").stdout


@pytest.mark.parametrize("keep", [0.9, 0.1])
def test_without_a_holdout_the_next_step_names_it(folder: Path, keep: float) -> None:
    found = " ".join(prune("--keep", keep).stdout.split())
    assert "--holdout" in found[found.index("next:") :] and "little use" not in found
    found = " ".join(prune("--keep", keep, "--holdout", "holdout.npy", "--force").stdout.split())
    assert "--holdout" not in found[found.index("next:") :]
