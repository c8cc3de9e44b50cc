"""`prune(within=...)`: what an earlier pruning removed stays removed."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sipp
from sipp.errors import OptionError


def pruned_net() -> tuple[nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    """A network with pruned weights, points, and its masks; half of the first layer's weights never meet anything."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    points = torch.rand(60, 6)
    points[:, 3:] = 0  # no sensitivity
    alive = {name: torch.rand(p.shape) < 0.7 for name, p in net.named_parameters() if p.dim() == 2}
    with torch.no_grad():
        for name, mask in alive.items():
            net.get_parameter(name).mul_(mask)
    return net, points, alive


def prune(budget_below: int, within: bool, **options: Any) -> tuple[sipp.Pruned, dict[str, torch.Tensor]]:
    net, points, alive = pruned_net()
    budget = sum(int(mask.sum()) for mask in alive.values()) - budget_below
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sipp.prune(net, points, budget=budget, within=alive if within else None, **options), alive


@pytest.mark.parametrize("method", ["sipp-det", "sipp-blend", "sipp-hybrid", "magnitude", "random"])
def test_a_pruned_weight_is_never_chosen_again(method: str) -> None:
    pruned, alive = prune(2, True, method=method)
    assert not any(bool((mask & ~alive[name]).any()) for name, mask in pruned.masks.items())
    assert pruned.kept == sum(int(mask.sum()) for mask in pruned.masks.values()) <= pruned.budget
    if method != "sipp-hybrid":  # which keeps weights with a sensitivity only
        assert pruned.kept == pruned.budget
    assert pruned.dead_rows == sum(int((~mask.any(1)).sum()) for mask in pruned.masks.values())


def test_a_repair_stays_within_too() -> None:
    pruned, alive = prune(10, True, method="magnitude", repair=True)
    for name, mask in pruned.masks.items():
        assert not bool((mask & ~alive[name]).any()) and not bool(pruned.model.get_parameter(name)[~mask].any())


def test_masks_that_do_not_fit_are_refused() -> None:
    net, points, alive = pruned_net()
    for wrong in (
        {},
        {**alive, "0.weight": alive["0.weight"][:2]},
        {**alive, "2.weight": alive["2.weight"].float()},
        3,
    ):
        with pytest.raises(OptionError, match="within"):
            sipp.prune(net, points, keep=0.1, within=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="leaves"):
        sipp.prune(net, points, keep=1.0, within=alive)


@pytest.mark.parametrize("method", ["magnitude", "sipp-det", "sipp-rand"])
def test_the_floor_of_a_layer_asks_for_no_more_than_is_left_of_it(method: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    with torch.no_grad():
        net[2].weight.mul_(100)
    first = sipp.prune(net, None, keep=0.6, method="magnitude")
    assert min(layer.kept for layer in first.layers) < 0.9 * 200
    again = sipp.prune(net, torch.rand(100, 20), keep=0.5, method=method, within=first.masks, floor=0.9)
    assert again.kept == again.budget == 400
