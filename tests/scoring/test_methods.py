"""The list of methods is the only one: every row can be pruned by, and says what it needs and how it cuts."""

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, OptionError
from sipp.scoring.methods import METHODS, NAMES, MethodInfo, method_of, scores_of
from sipp.scoring.task import task_of


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


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="did you mean 'wanda'"):
        sipp.prune(net(), points(), keep=0.5, method="wunda")
    with pytest.raises(OptionError, match="sipp-hybrid"):
        method_of(3)
    assert len(set(NAMES)) == len(NAMES)


def test_lamp_leaves_no_layer_empty() -> None:
    """Its point: a layer of small weights keeps its largest one, which magnitude alone would take away."""
    model = net()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)
    kept = {layer.name: layer.kept for layer in sipp.prune(model, None, keep=0.1, method="lamp").layers}
    assert all(kept.values())
    with pytest.warns(UserWarning, match="lost all their weights"):
        assert 0 in {layer.kept for layer in sipp.prune(model, None, keep=0.1, method="magnitude").layers}


@pytest.mark.parametrize(("method", "rows"), [("wanda", True), ("obs", False)])
def test_every_row_or_layer_keeps_the_same_share_of_its_largest_scores(method: str, rows: bool) -> None:
    pruned = sipp.prune(net(), points(), keep=0.5, method=method, floor=0)
    scores = scores_of(task_of(net(), points()), method_of(method))
    for name, mask in pruned.masks.items():
        for score, kept in zip(scores[name], mask) if rows else [(scores[name], mask)]:
            assert abs(int(kept.sum()) - 0.5 * kept.numel()) <= 1
            assert float(score[kept].min()) >= float(score[~kept].max())
