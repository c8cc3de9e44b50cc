"""Multiply-adds of networks: by hand, and in the records and tables of a run."""

from pathlib import Path

import pytest
import torch
from lab.small_runs import final, small
from torch import nn

from sipp_lab.nets import NETS, build
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run
from sipp_lab.runs.stages import multiply_adds


def zeroed(weight: nn.Parameter, n_left: int) -> None:
    with torch.no_grad():
        weight.view(-1)[n_left:] = 0


def test_by_hand() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )  # fmt: skip
    x = torch.randn(1, 3, 12, 12)
    assert multiply_adds(net, x) == 36 * 8 * 27 + 16 * 8 * 18 + 5 * 128
    zeroed(net[0].weight, 100)
    zeroed(net[5].weight, 7)
    assert multiply_adds(net, x) == 36 * 100 + 16 * 8 * 18 + 7
    assert net.training and net[1].num_batches_tracked == 0  # as it was
    linear = nn.Linear(4, 3)
    assert multiply_adds(linear, torch.randn(1, 4)) == 12


def test_a_recurrent_layer_counts_every_step() -> None:
    net = build("lstm")
    steps, weights = 8, 4 * 64 * (8 + 64)
    x = torch.randn(1, 1, 8, 8)
    assert multiply_adds(net, x) == steps * weights + 640
    zeroed(net.lstm.weight_hh_l0, 50)  # type: ignore[union-attr, arg-type]
    assert multiply_adds(net, x) == steps * (4 * 64 * 8 + 50) + 640


@pytest.mark.parametrize(("name", "millions"), [("resnet20", 40.55), ("resnet56", 125.49), ("vgg16", 313.2)])
def test_published_counts(name: str, millions: float) -> None:
    count = multiply_adds(build(name), torch.zeros(1, *NETS[name].input_shape))
    assert count is not None and round(count / 1e6, 2) == millions


def test_a_run_records_and_shows_them(tmp_path: Path) -> None:
    done = run(small("digits-iterative", "prune.methods=[magnitude]"), RunOptions(out=tmp_path, device="cpu"))
    sides = {"0.weight": 64, "3.weight": 64, "7.weight": 16, "12.weight": 1}  # uses of each weight
    for record in done.records:
        stage = "seed0.dense" if record["method"] is None else f"seed0.magnitude.{record['level']:02}"
        tensors = final(done.folder, stage)
        by_hand = sum(n * int(torch.count_nonzero(tensors[f"model.{name}"])) for name, n in sides.items())
        assert record["multiply_adds"] == by_hand
    dense, *pruned = (record["multiply_adds"] for record in done.records)
    assert dense > pruned[0] > pruned[-1] > 0
    shown = str(done)
    assert "multiply-adds" in shown and f"{dense:,}" in shown and f"{pruned[-1]:,}" in shown
