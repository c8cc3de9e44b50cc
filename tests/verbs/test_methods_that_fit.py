"""`sparsegpt` and `alps` as methods: masks and values by their definitions; refused where only masks are wanted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sipp
from sipp.errors import OptionError
from sipp.inputs.data import data_of
from sipp.repairing import repair_network, split_data
from sipp.scoring.methods import METHODS
from sipp_lab.recipes.arms import arm_of
from tests.oracles.sparsegpt import sparsegpt

FITTED = ("sparsegpt", "alps")


def points(n: int = 200) -> torch.Tensor:
    mixing = torch.randn(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.randn(n, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) @ mixing


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double()


def even_masks(net: nn.Module) -> dict[str, torch.Tensor]:
    """The largest 40 % of each layer's weights."""
    masks = {}
    for name, n_kept in (("0.weight", 115), ("2.weight", 58)):
        size_FK = net.get_parameter(name).detach().abs()
        masks[name] = size_FK >= size_FK.flatten().topk(n_kept).values[-1]
    return masks


def test_one_layer_has_the_mask_and_the_values_of_the_definition() -> None:
    net = nn.Sequential(nn.Linear(12, 6)).double()
    pruned = sipp.prune(net, points(), keep=0.5, method="sparsegpt", progress=False)
    fit_points = torch.cat([batch.args[0] for batch in split_data(data_of(points())).fit])
    mask_FK, values_FK = sparsegpt(fit_points.numpy(), net[0].weight.detach().numpy(), 36, None)
    assert np.array_equal(pruned.masks["0.weight"].numpy(), mask_FK)
    assert np.allclose(pruned.model[0].weight.detach().numpy(), values_FK, rtol=1e-6, atol=1e-8)  # type: ignore[index]


@pytest.mark.parametrize("method", FITTED)
def test_a_network_is_the_one_of_the_search_from_an_even_cut(method: str) -> None:
    net = network()
    first = sipp.prune(net, points(), keep=0.4, method=method, progress=False)
    assert [layer.kept for layer in first.layers] == [115, 58] and first.kept == 173
    parts = split_data(data_of(points()))
    wanted = repair_network(net, even_masks(net), parts, method)  # type: ignore[arg-type]
    assert all(torch.equal(first.model.state_dict()[name], value) for name, value in wanted.model.state_dict().items())
    assert first.repair is not None and first.repair.method == method and f"by {method}" in first.repair.sentence


@pytest.mark.parametrize("method", FITTED)
def test_where_only_masks_are_wanted_they_are_refused(method: str, tmp_path: Path) -> None:
    net, data = network(), points()
    with pytest.raises(OptionError, match=f"method='{method}' finds new values"):
        sipp.prune_to(net, data[:100], data[100:], epsilon=0.1, method=method)
    with pytest.raises(OptionError, match="training finds the values"):
        sipp.gradual(net, lambda step: None, data, keep=0.5, steps=4, method=method)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(OptionError, match="only with repair=True"):
        sipp.prune_on_disk(net, tmp_path, data, tmp_path / "out", keep=0.5, method=method)
    with pytest.raises(OptionError, match="a run trains them"):
        arm_of(method)
    with pytest.raises(OptionError, match="reads the data twice, but it is an iterator"):
        sipp.prune(net, iter([data]), keep=0.5, method=method)
    assert {row.name for row in METHODS if row.fitting is not None} == set(FITTED)
