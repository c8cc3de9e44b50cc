"""The pipeline gradual: budgets and masks along the schedule, one parent, killed and resumed to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.test_mask_changes import Killed, contents

from sipp.experiments.recipes import Recipe, load_recipe
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.reading import read_run
from sipp.experiments.runs.run_recipe import run
from sipp.report.rendering import render
from sipp.storage.state_files import load_state
from sipp.verbs.gradual import CUTS, budget_at, cut_times

pytestmark = pytest.mark.usefixtures("narrow")

N_WEIGHTS, N_STEPS = 980, 2 * 8


def small(*settings: str) -> Recipe:
    given = ("train.epochs=2", "train.decay={factor: 0.5, milestones: [1]}", "train.batch_size=128", "prune.levels=2")
    return load_recipe("digits-gradual", settings=(*given, "data.n_calibration=40", *settings))


def test_every_level_follows_the_schedule_from_the_dense_network(tmp_path: Path) -> None:
    still = ("train.rate=1.0e-30", "prune.methods=[sipp-det]")  # no weight moves
    done = run(small(*still), out=tmp_path, device="cpu")
    dense = load_state(done.folder / "seed0.dense", "final")[0]
    times = cut_times(N_STEPS, CUTS)
    for record in done.records[1:]:
        last = {1: 490, 2: 245}[record["level"]]
        assert record["kept"] == record["budget"] == last and "last of its cuts" in record["bound"]["speaks_of"]
        path = [{"after_step": at, "keep": budget_at(t, N_WEIGHTS, last) / N_WEIGHTS} for at, t in times.items()]
        assert record["path"] == path and max(times) < N_STEPS
        assert {"score", "prune", "train"} <= record["part_seconds"].keys()
        tensors = load_state(done.folder / f"seed0.{record['method']}.{record['level']:02d}", "final")[0]
        for layer in record["layers"]:
            weight, mask = tensors[f"model.{layer['name']}"], tensors[f"mask.{layer['name']}"]
            assert int(mask.sum()) == layer["kept"]
            assert torch.equal(weight, torch.where(mask, dense[f"model.{layer['name']}"], 0.0))
    page = render([read_run(done.folder)])
    assert "prune gradually" in page


def test_killed_between_its_cuts_it_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = small("prune.methods=[sipp-hybrid]", "prune.levels=1")  # which changes values as well
    whole = run(recipe, out=tmp_path / "whole", device="cpu")
    save, n_saved, n_cut = runs.save_checkpoint, 0, set()

    def dying(folder: Path, name: str, tensors: Any, values: Any) -> None:
        nonlocal n_saved
        save(folder, name, tensors, values)
        n_saved += 1
        if n_saved % 4 == 0:
            n_cut.add(len(values["facts"].get("path", [])))
            raise Killed

    monkeypatch.setattr(runs, "save_checkpoint", dying)
    for _ in range(20):
        try:
            done = run(recipe, out=tmp_path / "parts", device="cpu", checkpoint_seconds=0.0, accept_changes=True)
            break
        except Killed:
            pass
    assert len(n_cut) >= 3 and contents(done.folder) == contents(whole.folder)
