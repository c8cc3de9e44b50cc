"""Masks that shrink in the middle of training, and a pipeline of one file that does so: killed, resumed, recorded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.hyperparameters import hyperparameters
from lab.more_pipelines.halving import PIPELINE, halved
from lab.small_runs import contents, final, killed_at_every, small
from lab.training.test_loop import bits, equal, make_feed, make_net

from sipp.errors import OptionError
from sipp_lab.page import render
from sipp_lab.pipelines import PIPELINES
from sipp_lab.recipes import Recipe
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.running import run
from sipp_lab.training.loop import MaskChanges, TrainState, new_state, train

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


def changes(*after: int) -> MaskChanges:
    return MaskChanges(frozenset(after), halved)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_optimizer_forgets_what_is_gone(optimizer: Any) -> None:
    hyper = hyperparameters(2, 8, 0.05, optimizer=optimizer, weight_decay=1e-3)
    seen: list[dict[str, int]] = []

    def check(state: TrainState) -> None:
        seen.append({name: int(mask.sum()) for name, mask in state.masks.items()})
        for name, mask in state.masks.items():
            parameter = state.model.get_parameter(name)
            assert not bool(parameter.detach()[~mask].any())
            for value in state.optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor) and value.shape == mask.shape:
                    assert not bool(value[~mask].any()) and bool(value[mask].any())

    train(new_state(make_net(), hyper), make_feed(), hyper, seed=0, on_step=check, changes=changes(3, 4))
    half, quarter = {"0.weight": 27, "5.weight": 432}, {"0.weight": 13, "5.weight": 216}
    assert seen == [{}, {}, half, quarter, quarter, quarter, quarter, quarter]


def test_an_epoch_is_evaluated_with_the_masks_of_its_last_step() -> None:
    hyper = hyperparameters(1, 8, 0.05)
    plain, cut = (
        train(new_state(make_net(), hyper), make_feed(), hyper, seed=0, changes=one) for one in (None, changes(4))
    )
    assert plain.rows[0].train_loss == cut.rows[0].train_loss and plain.rows[0].test != cut.rows[0].test


def test_a_state_copied_after_any_epoch_goes_on_to_the_same_bits() -> None:
    hyper, kept = hyperparameters(3, 8, 0.05), list[TrainState]()
    whole = train(
        new_state(make_net(), hyper),
        make_feed(),
        hyper,
        seed=0,
        on_epoch=lambda state: kept.append(copy.deepcopy(state)),
        changes=changes(3, 5),
    )
    for state in kept[:-1]:
        again = train(state, make_feed(), hyper, seed=0, changes=changes(3, 5))
        assert equal(bits(again), bits(whole)) and again.rows == whole.rows and again.facts == whole.facts


def test_a_weight_is_not_brought_back() -> None:
    hyper = hyperparameters(1, 8, 0.05)
    masks = {"5.weight": torch.rand(4, 216, generator=torch.Generator().manual_seed(0)) < 0.3}
    revive = MaskChanges(frozenset({2}), lambda step, state: ({"5.weight": ~state.masks["5.weight"]}, {}))
    with pytest.raises(OptionError, match="would bring back"):
        train(new_state(make_net(), hyper, masks=masks), make_feed(), hyper, seed=0, changes=revive)
