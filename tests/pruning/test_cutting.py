"""What `prune` does with a budget, a floor and a pattern for every method, and `moved`: what that did to the output."""

import math
from dataclasses import replace

import pytest
import torch
from draws import scored_and_held_back
from oracles import patterns as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp.pruning.cutting import N_SAMPLE
from sipp.results import OutputChange
from sipp.scoring.methods import METHODS, NAMES

pytestmark = pytest.mark.filterwarnings("ignore")


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 4))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)  # magnitude alone would take all of it
    return model


X = torch.rand(200, 30, generator=torch.Generator().manual_seed(0))
LABELLED = [(X, torch.arange(200) % 4)]

# --- Floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NAMES)
def test_no_row_dies_with_a_floor_whatever_the_method(method: str) -> None:
    pruned = sipp.prune(net(), LABELLED, keep=0.033, method=method, floor=0.001)  # 69 weights for 64 rows
    assert pruned.kept == round(0.033 * pruned.n_weights) and not any(layer.dead_rows for layer in pruned.layers)
    assert any(layer.dead_rows for layer in sipp.prune(net(), None, keep=0.02, method="magnitude", floor=0).layers)


@pytest.mark.parametrize("draws", ["until", "fixed"])
@pytest.mark.parametrize("method", ["sipp-rand", "sipp-hybrid"])
def test_no_sampled_row_dies_at_any_budget_that_reaches_for_all(method: str, draws: str) -> None:
    x, model = X.clone(), net()
    x[:, 3] = 0.0
    with torch.no_grad():
        model[0].weight[7] = 0.0
        model[0].weight[7, 3] = 2.0  # meets nothing but zeros: no sensitivity, and yet a weight
    for seed, budget in enumerate((64, 65, 70, 200)):
        pruned = sipp.prune(model, x, budget=budget, method=method, draws=draws, floor=0.1, seed=seed)
        assert not any(layer.dead_rows for layer in pruned.layers), (budget, seed)
        assert pruned.kept == budget or draws == "fixed"
        assert bool(pruned.masks["0.weight"][7, 3])


def test_the_default_method_has_a_floor_of_its_own_and_others_mean_something() -> None:
    own, given, off = (sipp.prune(net(), X, keep=0.05, floor=floor) for floor in (None, 0.1, 0))
    assert all(torch.equal(own.masks[name], mask) for name, mask in given.masks.items())
    assert not any(layer.dead_rows for layer in own.layers) and any(layer.dead_rows for layer in off.layers)
    for floor in (-0.1, 1.0, float("nan"), "off"):
        with pytest.raises(OptionError, match="floor"):
            sipp.prune(net(), None, keep=0.5, method="magnitude", floor=floor)


# --- Within the masks of an earlier pruning ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", [row.name for row in METHODS if not row.fitting])
def test_no_weight_that_an_earlier_pruning_removed_comes_back(method: str) -> None:
    """Also where a row has fewer weights left than an even share, and one whose weights left have no sensitivity."""
    x, model, generator = X.clone(), net(), torch.Generator().manual_seed(0)
    x[:, :2] = 0.0
    shapes = {name: p.shape for name, p in model.named_parameters() if p.ndim == 2}
    masks = {name: torch.rand(shape, generator=generator) < 0.6 for name, shape in shapes.items()}
    masks["0.weight"][0] = torch.arange(30) < 2
    pruned = sipp.prune(model, [(x, torch.arange(200) % 4)], keep=0.4, method=method, within=masks, floor=0.1)
    for name, mask in pruned.masks.items():
        assert not bool((mask & ~masks[name]).any())
        assert not bool(pruned.model.get_parameter(name)[~mask].any())
    assert bool(pruned.masks["0.weight"][0].any())


def test_a_repair_within_masks_needs_the_network_that_they_pruned() -> None:
    first = sipp.prune(net(), X, keep=0.5, method="wanda")
    with pytest.raises(OptionError, match="a repair would use them"):
        sipp.prune(net(), X, keep=0.2, method="wanda", within=first.masks, repair=True)
    again = sipp.prune(first.model, X, keep=0.2, method="wanda", within=first.masks, repair=True)
    assert all(not bool(again.model.get_parameter(name)[~mask].any()) for name, mask in first.masks.items())


# --- Patterns ---------------------------------------------------------------------------------------------------------


def obeyed(tensors: dict[str, Tensor], n: int, m: int) -> bool:
    return all(oracle.obeys(tensor.flatten(1).tolist(), n, m) for tensor in tensors.values())


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=2)  # fan-in 27, 36
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)).eval()


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(120, 3, 4, 4, generator=generator), torch.arange(120) % 5) for _ in range(3)]


@pytest.mark.parametrize("method", [row.name for row in METHODS if not row.is_sampled and not row.fitting])
def test_every_score_that_ranks_has_patterns(method: str) -> None:
    model = convnet()
    pruned = sipp.prune(model, images(), pattern="2:4", method=method)
    assert obeyed(pruned.masks, 2, 4) and pruned.pattern == "2:4"
    assert {layer.name: layer.kept for layer in pruned.layers} == {
        "0.weight": 8 * 14, "2.weight": 8 * 18, "5.weight": 5 * 64
    }  # fmt: skip
    for name, mask in pruned.masks.items():
        assert torch.equal(pruned.model.get_parameter(name), torch.where(mask, model.get_parameter(name), 0.0))
    assert all(layer.eps is not None for layer in pruned.layers)  # T5, T17: of any mask


def test_repair_keeps_the_pattern() -> None:
    model, data = convnet(), [x for x, _ in images()]
    plain = sipp.prune(model, data, pattern="2:4", method="sipp-det")
    fixed = sipp.repair(model, plain, data)
    searched = sipp.prune(model, data, pattern="2:4", method="sipp-det", repair=True)
    assert all(torch.equal(mask, plain.masks[name]) for name, mask in fixed.masks.items())
    for found in (fixed, searched):
        assert found.pattern == "2:4"
        assert obeyed({name: found.model.get_parameter(name) for name in found.masks}, 2, 4)
    x = torch.cat(data)
    errors = [float((found.model(x) - model(x)).norm().detach()) for found in (plain, fixed, searched)]
    assert errors[2] < errors[1] < errors[0]


def test_patterns_of_rows_that_lie_in_columns_and_what_does_not_go_together() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes))
    pruned = sipp.prune(gpt2, None, pattern="2:4", method="magnitude")
    assert obeyed({name: mask.t() for name, mask in pruned.masks.items()}, 2, 4)  # inputs x outputs
    for more in ({"keep": 0.5}, {"budget": 10}, {"keep": 0.5, "budget": 10}):
        with pytest.raises(OptionError, match="give exactly one of keep"):
            sipp.prune(convnet(), None, pattern="2:4", method="magnitude", **more)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="draws weights"):
        sipp.prune(convnet(), images(), pattern="2:4", method="sipp-rand")


# --- How far the output moved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sipp-blend", "sipp-hybrid", "wanda"])
@pytest.mark.parametrize("keep", [0.05, 0.9])
def test_output_change_is_measured_on_calibration_points(method: str, keep: float) -> None:
    model = net()
    pruned = sipp.prune(model, X, keep=keep, method=method)
    used = scored_and_held_back(X)[1][0] if method == "sipp-blend" else X[:N_SAMPLE]
    assert pruned.moved.is_held_back == (method == "sipp-blend") and pruned.moved.n_inputs == len(used)
    with torch.no_grad():
        f, g = model(used).double(), pruned.model(used).double()
    assert pruned.moved.error == pytest.approx(float((g - f).norm() / f.norm()), rel=1e-6)
    assert ("warning:         output error" in str(pruned)) == (pruned.moved.error > 0.5)


def test_a_repair_updates_the_output_change() -> None:
    """The old number would describe weights that have been replaced."""
    pruned = sipp.prune(net(), X, keep=0.05, method="magnitude")
    fixed = sipp.repair(net(), pruned, X)
    assert fixed.moved == OutputChange(fixed.repair.output_after, fixed.repair.n_test, is_held_back=True)
    assert fixed.moved.error < pruned.moved.error
    few = sipp.repair(net(), pruned, X[:40])
    assert few.repair.output_after is None
    assert few.moved == OutputChange(few.repair.output_validation, 4, is_held_back=False)


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.51])
def test_an_output_change_that_is_not_finite_is_warned_of(error: float) -> None:
    pruned = sipp.prune(net(), None, keep=0.5, method="magnitude")
    assert not replace(pruned, moved=OutputChange(0.5, 3, is_held_back=False)).warning
    warning = replace(pruned, moved=OutputChange(error, 1, is_held_back=False)).warning
    assert warning and "on 1 calibration input:" in warning
    # a dense output that is no number is not the pruning's fault
    assert ("measure the accuracy" in warning) == math.isfinite(error)
