"""The pipeline gradual: budgets and masks along the schedule, one parent."""

from pathlib import Path

import pytest
import torch
from lab.small_runs import STILL, final, small

from sipp.results.gradual import budget_at, cut_times
from sipp_lab.page import render
from sipp_lab.recipes import Recipe
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

pytestmark = pytest.mark.usefixtures("narrow")

N_WEIGHTS, N_STEPS = 980, 2 * 8


def gradual(*settings: str) -> Recipe:
    return small("digits-gradual", "train.batch_size=128", *settings)


def test_every_level_follows_the_schedule_from_the_dense_network(tmp_path: Path) -> None:
    done = run(gradual(STILL, "prune.methods=[sipp-det]"), RunOptions(out=tmp_path, device="cpu"))
    dense = final(done.folder, "seed0.dense")
    times = cut_times(N_STEPS)
    for record in done.records[1:]:
        last = {1: 490, 2: 245}[record["level"]]
        assert record["pruned"]["kept"] == record["pruned"]["budget"] == last
        path = [(at, budget_at(t, N_WEIGHTS, last) / N_WEIGHTS) for at, t in times.items()]
        assert [(cut["after_step"], cut["keep"]) for cut in record["path"]] == path and max(times) < N_STEPS
        tensors = final(done.folder, f"seed0.{record['method']}.{record['level']:02d}")
        for layer in record["pruned"]["layers"]:
            weight, mask = tensors[f"model.{layer['name']}"], tensors[f"mask.{layer['name']}"]
            assert int(mask.sum()) == layer["kept"]
            assert torch.equal(weight, torch.where(mask, dense[f"model.{layer['name']}"], 0.0))
    page = render([read_run(done.folder)])
    assert "prune little by little" in page


def test_weights_that_sampling_changed_are_those_that_are_trained(tmp_path: Path) -> None:
    """T8 changes the values of what it keeps."""
    done = run(gradual(STILL, "prune.methods=[sipp-rand]", "prune.levels=1"), RunOptions(out=tmp_path, device="cpu"))
    dense, sampled = final(done.folder, "seed0.dense"), final(done.folder, "seed0.sipp-rand.01")
    masks = {key.removeprefix("mask."): mask for key, mask in sampled.items() if key.startswith("mask.")}
    assert any(not torch.equal(sampled[f"model.{name}"], dense[f"model.{name}"] * mask) for name, mask in masks.items())
