"""Which blend was taken: in the record of a pruned network and of a run, and on their pages."""

import json
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sipp
from sipp_lab.page import read_results, render

RECIPE = (
    "train.epochs=1",
    "train.decay={factor: 0.5, milestones: []}",
    "train.batch_size=256",
    "prune.levels=1",
    "data.n_calibration=40",
)


def pruned_by(method: str) -> sipp.Pruned:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    return sipp.prune(net, torch.rand(40, 12), keep=0.5, method=method, progress=False)


def page_of(*folders: Path) -> tuple[str, dict[str, Any]]:
    page = render(*read_results(folders))
    return page, json.loads(page.split('id="data">')[1].split("</script>")[0])["plots"]


def test_the_whole_curve_is_in_the_record_and_on_the_page(tmp_path: Path) -> None:
    pruned = pruned_by("sipp-blend")
    assert pruned.choice is not None
    record = json.loads((sipp.save_folder(pruned, tmp_path / "net") / "report.json").read_text())["choice"]
    assert record["n_inputs"] == 10 and record["is_held_back"] is True
    assert [one["error"] for one in record["tried"]] == [one.error for one in pruned.choice.tried]
    taken = pruned.choice.taken
    assert record["taken"] in record["tried"] and record["taken"] == asdict(taken)
    page, plots = page_of(tmp_path / "net")
    assert pruned.choice.sentence[1:] in page
    assert "on 10 held-back inputs used to choose it" in page
    (plot,) = [plot for name, plot in plots.items() if "-blend" in name]
    assert taken.name in plot["names"] and len(plot["names"]) == 12
    drawn = dict(zip(plot["names"], plot["views"][0]["series"][0]["values"]))
    assert drawn == {one.name: pytest.approx(one.error, rel=0.01) for one in pruned.choice.tried}


def test_an_output_that_is_not_finite_has_no_bar(tmp_path: Path) -> None:
    pruned = pruned_by("sipp-blend")
    assert pruned.choice is not None
    *others, last = (one for one in pruned.choice.tried if one != pruned.choice.taken)
    tried = (pruned.choice.taken, *others, replace(last, error=inf))
    pruned = replace(pruned, choice=replace(pruned.choice, tried=tried, is_held_back=False))
    record = json.loads((sipp.save_folder(pruned, tmp_path / "net") / "report.json").read_text())["choice"]
    assert record["tried"][-1]["error"] == "inf"
    page, plots = page_of(tmp_path / "net")
    (plot,) = [plot for name, plot in plots.items() if "-blend" in name]
    assert plot["views"][0]["series"][0]["values"][-1] is None and "inputs that were also used for scoring" in page
