"""The list of methods is the only one: every row can be pruned by, and says what it needs and how it cuts."""

import inspect

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles import scores as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, OptionError
from sipp.scoring.lamp import lamp
from sipp.scoring.methods import METHODS, NAMES, MethodInfo, method_of, score_of
from sipp.scoring.task import task_of
from sipp.scoring.wanda import wanda


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def points(n: int = 40) -> Tensor:
    return torch.rand(n, 12, generator=torch.Generator().manual_seed(2))


def labelled() -> list[tuple[Tensor, Tensor]]:
    return [(points(), torch.arange(40) % 3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
@pytest.mark.parametrize("keep", [0.6, 0.07])
def test_every_method_prunes_to_the_exact_budget(row: MethodInfo, keep: float) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pruned = sipp.prune(model, labelled(), keep=keep, method=row.name)
    assert pruned.method == row.name and pruned.kept == pruned.budget == round(keep * pruned.n_weights)
    assert sum(int(mask.sum()) for mask in pruned.masks.values()) == pruned.kept
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if not row.is_sampled and row.fitting is None:
        dense = model.get_parameter("0.weight")
        assert torch.equal(pruned.model.get_parameter("0.weight"), torch.where(pruned.masks["0.weight"], dense, 0.0))
    again = sipp.prune(model, labelled(), keep=keep, method=row.name)
    assert all(torch.equal(again.masks[name], mask) for name, mask in pruned.masks.items())


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.name)
def test_a_row_says_what_its_method_needs(row: MethodInfo) -> None:
    if row.needs_data:
        with pytest.raises(OptionError, match="needs data"):
            sipp.prune(net(), None, keep=0.5, method=row.name)
    else:
        assert sipp.prune(net(), None, keep=0.5, method=row.name).kept > 0
    if "labels" in row.needs:
        with pytest.raises(DataError, match="labels"):
            sipp.prune(net(), points(), keep=0.5, method=row.name)
    else:
        assert sipp.prune(net(), points(), keep=0.9, method=row.name).kept > 0


@pytest.mark.parametrize("row", [row for row in METHODS if not row.uses_sensitivities], ids=lambda row: row.name)
def test_scores_have_the_shape_of_their_weights(row: MethodInfo) -> None:
    function = score_of(row)
    assert list(inspect.signature(function).parameters) == ["task"] and function.__doc__
    model = net()
    scores = function(task_of(model, labelled(), exclude="2"))
    assert {name: score.shape for name, score in scores.items()} == {
        name: model.get_parameter(name).shape for name in ("0.weight", "4.weight")
    }
    assert all(bool((score >= 0).all()) and score.is_floating_point() for score in scores.values())


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'wanda'"):
        sipp.prune(net(), points(), keep=0.5, method="wunda")
    with pytest.raises(OptionError, match="sipp-hybrid"):
        method_of(3)
    assert len(set(NAMES)) == len(NAMES)


# --- LAMP, Wanda -----------------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3e-20, -2e18, 7.0]), min_size=6, max_size=6)


@given(WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_lamp_is_its_definition(values: list[float]) -> None:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.tensor(values).view(2, 3))
    found = lamp(task_of(nn.Sequential(layer)))["0.weight"]
    torch.testing.assert_close(found, oracle.lamp(layer.weight.detach()), rtol=1e-12, atol=0.0)


def test_lamp_leaves_no_layer_empty() -> None:
    """Its point: a layer of small weights keeps its largest one, which magnitude alone would take away."""
    model = net()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
    kept = {layer.name: layer.kept for layer in sipp.prune(model, None, keep=0.1, method="lamp").layers}
    assert all(kept.values())
    with pytest.warns(UserWarning, match="this layer lost all"):
        assert 0 in {layer.kept for layer in sipp.prune(model, None, keep=0.1, method="magnitude").layers}


def test_wanda_is_its_definition_whatever_the_batches() -> None:
    model = nn.Sequential(nn.Linear(5, 4))
    x = torch.randn(30, 7, 5, generator=torch.Generator().manual_seed(0))
    expected = oracle.wanda_linear(model[0], x)
    for data in (x, [x[:11], x[11:]]):
        torch.testing.assert_close(wanda(task_of(model, data))["0.weight"], expected, rtol=1e-10, atol=0.0)


def test_wanda_meets_the_windows_of_convolutions() -> None:
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
    x = torch.randn(9, 4, 7, 7, generator=torch.Generator().manual_seed(0))
    patches = nn.functional.unfold(x.double(), 3, stride=2, padding=1).movedim(1, 2).reshape(-1, 2, 18)
    lengths = patches.square().sum(0).sqrt()  # groups x fan-in
    expected = conv.weight.detach().double().abs() * lengths.repeat_interleave(3, 0).view(6, 2, 3, 3)
    torch.testing.assert_close(wanda(task_of(nn.Sequential(conv), x))["0.weight"], expected, rtol=1e-10, atol=0.0)


def test_wanda_keeps_the_same_share_of_every_row() -> None:
    pruned = sipp.prune(net(), points(), keep=0.5, method="wanda")
    for mask in pruned.masks.values():
        kept = mask.sum(1)
        assert bool(((kept - 0.5 * mask.shape[1]).abs() <= 1).all())
    mask, scores = pruned.masks["0.weight"], wanda(task_of(net(), points()))["0.weight"]
    for row, kept_row in zip(scores, mask):
        assert float(row[kept_row].min()) >= float(row[~kept_row].max())
