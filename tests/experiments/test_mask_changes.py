"""Masks that shrink in the middle of training, and a pipeline of one file that does so: killed, resumed, recorded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.hyperparameters import hyperparameters
from experiments.more_pipelines.halving import halved
from experiments.training.test_loop import bits, equal, make_feed, make_net

from sipp.errors import OptionError
from sipp.experiments import pipelines
from sipp.experiments.recipes import Recipe, load_recipe
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.reading import read_run
from sipp.experiments.runs.run_recipe import run
from sipp.experiments.runs.store import without_times
from sipp.experiments.training.loop import MaskChanges, TrainState, new_state, train
from sipp.report.rendering import render
from sipp.storage.state_files import load_state

pytestmark = pytest.mark.usefixtures("narrow")

SMALL = (
    "pipeline=halving",
    "train.epochs=2",
    "train.decay={factor: 0.5, milestones: [1]}",
    "train.batch_size=256",
    "prune.methods=[wt]",
    "prune.levels=2",
    "data.n_calibration=40",
)
N_STEPS = 8  # of a network: two epochs of four


class Killed(BaseException):
    """Stands for a process that is killed."""


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe of a pipeline that is one file in one more folder, and known nowhere else."""
    with pytest.raises(OptionError, match="pipeline='halving' is not one of at-init, gradual, iterative"):
        load_recipe("digits-iterative", settings=SMALL)
    more = str(Path(__file__).parent / "more_pipelines")
    monkeypatch.setattr(pipelines, "__path__", [*pipelines.__path__, more])
    return load_recipe("digits-iterative", settings=SMALL)


def test_a_pipeline_in_one_file_prunes_and_records(recipe: Recipe, tmp_path: Path) -> None:
    done = run(recipe, out=tmp_path, device="cpu")
    dense, *levels = done.records
    assert dense["kind"] == "dense" and "keep" not in dense
    for level, record in enumerate(levels, start=1):
        tensors = load_state(done.folder / f"seed0.wt.{level:02d}", "final")[0]
        assert record["keep"] == pytest.approx(0.5**level, rel=1e-3)
        for layer in record["layers"]:
            weight, mask = tensors[f"model.{layer['name']}"], tensors[f"mask.{layer['name']}"]
            assert int(mask.sum()) == layer["kept"] >= layer["nnz"] == int(weight.count_nonzero()) > 0
            assert not bool(weight[~mask].any()) and layer["cut_after"] == (4 if level == 1 else 6)
    page = render([read_run(done.folder)])
    assert "halving: train, and lose half of the weights on the way" in page


def contents(folder: Path) -> list[Any]:
    tensors: list[Any] = [path.read_bytes() for path in sorted(folder.glob("*/final.safetensors"))]
    return tensors + [without_times(record) for record in runs.read_records(folder)]


def test_killed_before_at_and_after_each_change_it_goes_on_to_the_same_bits(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(recipe, out=tmp_path / "whole", device="cpu")
    save, n_saved = runs.save_checkpoint, 0

    def dying(folder: Path, name: str, tensors: Any, values: Any) -> None:
        nonlocal n_saved
        save(folder, name, tensors, values)
        n_saved += 1
        if n_saved % 3 == 0:  # of seven checkpoints a network: each network is killed several times
            raise Killed

    monkeypatch.setattr(runs, "save_checkpoint", dying)
    n_killed = 0
    while True:
        try:
            done = run(recipe, out=tmp_path / "parts", device="cpu", checkpoint_seconds=0.0, accept_changes=True)
            break
        except Killed:
            n_killed += 1
            checkpoint = max((tmp_path / "parts").glob("*/*/step-*.json"))
            tensors, values = load_state(checkpoint.parent, checkpoint.stem)
            is_cut = any(key.startswith("mask.") for key in tensors)
            assert is_cut == ("keep" in values["facts"])  # masks and what is known of them travel together
    assert n_killed == 3 * (N_STEPS - 1) // 3 and contents(done.folder) == contents(whole.folder)


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


def test_a_state_copied_after_any_step_goes_on_to_the_same_bits() -> None:
    hyper = hyperparameters(2, 8, 0.05, weight_decay=1e-3)
    whole = train(new_state(make_net(), hyper), make_feed(), hyper, seed=0, changes=changes(3, 4))
    kept: list[TrainState] = []
    train(
        new_state(make_net(), hyper),
        make_feed(),
        hyper,
        seed=0,
        on_step=lambda state: kept.append(copy.deepcopy(state)),
        changes=changes(3, 4),
    )
    for state in kept[:-1]:
        again = train(state, make_feed(), hyper, seed=0, changes=changes(3, 4))
        assert equal(bits(again), bits(whole)) and again.rows == whole.rows and again.facts == whole.facts


def test_a_weight_is_not_brought_back() -> None:
    hyper = hyperparameters(1, 8, 0.05)
    masks = {"5.weight": torch.rand(4, 216, generator=torch.Generator().manual_seed(0)) < 0.3}
    revive = MaskChanges(frozenset({2}), lambda step, state: ({"5.weight": ~state.masks["5.weight"]}, {}))
    with pytest.raises(OptionError, match="revives"):
        train(new_state(make_net(), hyper, masks=masks), make_feed(), hyper, seed=0, changes=revive)
