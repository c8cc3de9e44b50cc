"""Masks that shrink in the middle of training, and a pipeline of one file that does so: killed, resumed, recorded."""

from pathlib import Path
from typing import Any

import pytest
from lab.more_pipelines.halving import PIPELINE
from lab.small_runs import contents, final, killed_at_every, small

from sipp.errors import OptionError
from sipp_lab.page import render
from sipp_lab.pipelines import PIPELINES
from sipp_lab.recipes import Recipe
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.one_run import run

pytestmark = pytest.mark.usefixtures("narrow")

HALVING = ("pipeline=halving", "prune.methods=[magnitude]")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe of a pipeline that is one file and one row."""
    with pytest.raises(OptionError, match="pipeline='halving' is not one of iterative, at-init, gradual"):
        small("digits-iterative", *HALVING)
    monkeypatch.setitem(PIPELINES, "halving", PIPELINE)
    return small("digits-iterative", *HALVING)


def test_a_pipeline_in_one_file_prunes_and_records(recipe: Recipe, tmp_path: Path) -> None:
    done = run(recipe, out=tmp_path, device="cpu")
    dense, *levels = done.records
    assert dense["pruned"] is None and dense["keep"] == 1
    for level, record in enumerate(levels, start=1):
        tensors = final(done.folder, f"seed0.magnitude.{level:02d}")
        assert record["keep"] == pytest.approx(0.5**level, rel=1e-3)
        for layer in record["pruned"]["layers"]:
            weight, mask = tensors[f"model.{layer['name']}"], tensors[f"mask.{layer['name']}"]
            assert (
                int(mask.sum()) == layer["kept"] >= record["nonzero"][layer["name"]] == int(weight.count_nonzero()) > 0
            )
            assert not bool(weight[~mask].any())
        assert [cut["after_step"] for cut in record["path"]] == [4 if level == 1 else 6]
    page = render([read_run(done.folder)])
    assert "halving: train, and lose half of the weights on the way" in page


def test_killed_before_at_and_after_each_change_it_goes_on_to_the_same_bits(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, n_killed = run(recipe, out=tmp_path / "whole", device="cpu"), 0

    def look(tensors: dict[str, Any], values: dict[str, Any]) -> None:
        nonlocal n_killed
        n_killed += 1
        is_cut = any(key.startswith("mask.") for key in tensors)
        known = values["facts"] if "facts" in values else values["record"]
        assert is_cut == (known.get("pruned") is not None)  # masks and what is known of them travel together

    done = killed_at_every(1, recipe, tmp_path / "parts", monkeypatch, look)
    assert n_killed == 6 and contents(done.folder) == contents(whole.folder)  # three networks: an epoch, and the end
