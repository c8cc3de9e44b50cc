"""From torch.nn.utils.prune to sipp: masks become plain zeros, and nothing is stored twice."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import sipp
from sipp.errors import DeadRowsWarning, ModelError, OptionError
from sipp.pruning.masking import hold


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def masked_by_torch(model: nn.Module) -> nn.Module:
    layers = [(module, "weight") for module in model.modules() if isinstance(module, nn.Linear)]
    torch_prune.global_unstructured(layers, pruning_method=torch_prune.L1Unstructured, amount=0.9)
    return model


X = torch.rand(200, 64, generator=torch.Generator().manual_seed(1))


def n_negative_zeros(model: nn.Module) -> int:
    return sum(int(((p == 0) & torch.signbit(p)).sum()) for p in model.parameters())


def test_release_makes_masks_permanent_with_plain_zeros() -> None:
    model = masked_by_torch(net())
    before, weight = model(X), model[0].weight_orig  # type: ignore[index]
    sipp.release(model)
    assert list(model.state_dict()) == list(net().state_dict())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(X), before)
    assert model[0].weight is weight and weight.requires_grad  # type: ignore[index]  # an optimizer goes on with it
    assert n_negative_zeros(model) == 0
    with pytest.warns(DeadRowsWarning):
        masks = sipp.prune(net(), None, keep=0.1, method="magnitude").masks
    assert all(torch.equal(model.get_parameter(name) != 0, mask) for name, mask in masks.items())


def test_a_recurrent_network_runs_with_its_zeros() -> None:
    model, x = nn.LSTM(4, 8, batch_first=True), torch.rand(2, 5, 4)
    torch_prune.l1_unstructured(model, "weight_hh_l0", 0.9)
    torch_prune.l1_unstructured(model, "weight_ih_l0", 0.1)
    sipp.release(model)
    assert list(model.state_dict()) == list(nn.LSTM(4, 8).state_dict())
    assert int((model.weight_hh_l0 == 0).sum()) >= 0.85 * 256
    fresh = nn.LSTM(4, 8, batch_first=True)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(x)[0], fresh(x)[0])


class Tied(nn.Module):
    """Four layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tied_with(*numbers: int | None) -> tuple[Tied, list[Tensor]]:
    """The network with masks drawn by these numbers, and the masks; None: a layer without one."""
    torch.manual_seed(0)
    model = Tied()
    drawn = {i: (torch.rand(8, 8, generator=torch.Generator().manual_seed(i)) < 0.5).float() for i in (1, 2)}
    for layer, i in zip(model.layers, numbers, strict=True):
        if i is not None:
            torch_prune.custom_from_mask(layer, "weight", drawn[i])
    return model, [torch.ones(8, 8) if i is None else drawn[i] for i in numbers]


def test_a_tie_stays_where_all_masks_are_the_same_and_is_refused_elsewhere() -> None:
    model, masks = tied_with(1, 1, 1, 1)
    x, shared = torch.rand(5, 8), model.layers[0].weight_orig
    before, dense = model(x), shared.detach().clone()
    sipp.release(model)
    assert torch.equal(model(x), before) and n_negative_zeros(model) == 0
    assert all(layer.weight is shared for layer in model.layers)  # an optimizer goes on with it
    assert torch.equal(shared, dense * masks[0])
    for numbers in ((1, 2, 1, 2), (1, None, 1, 1)):
        model, _ = tied_with(*numbers)
        with pytest.raises(ModelError, match="between modules with different masks"):
            sipp.release(model)


def test_what_needs_plain_weights_names_the_way_out(tmp_path: Path) -> None:
    dense, model = net(), masked_by_torch(net())
    for call in (
        lambda: sipp.prune(model, X, keep=0.1),
        lambda: sipp.assess(dense, model, X),
        lambda: sipp.save(model, tmp_path / "net.safetensors"),
    ):
        with pytest.raises(ModelError, match=r"torch\.nn\.utils\.prune") as caught:
            call()
        assert "sipp.release" in caught.value.fix
    with pytest.raises(OptionError, match=r"call sipp\.release\(model\) first"):
        hold(model, {"0.weight": torch.ones(128, 64, dtype=torch.bool)})
    assert not list(tmp_path.iterdir())


def test_a_network_with_negative_zeros_is_stored_as_it_is_with_a_warning(tmp_path: Path) -> None:
    model = masked_by_torch(net())
    for module in (model[0], model[2]):  # type: ignore[index]
        torch_prune.remove(module, "weight")
    assert n_negative_zeros(model) > 0.3 * 9472
    with pytest.warns(UserWarning, match=r"weights are -0\.0") as caught:
        large = sipp.save(model, tmp_path / "large.safetensors")
    assert caught[0].filename == __file__
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.data.add_(0.0)  # what the warning tells one to do
    assert sipp.save(plain, tmp_path / "small.safetensors").n_bytes < 0.4 * large.n_bytes
    back = sipp.load(tmp_path / "large.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(torch.signbit(back[name]), torch.signbit(value))
