"""LoRA under masks: what it adds to a held weight is masked, in `hold` and in `gradual`, and merged by `release`.

The layer here is written by hand with the names that peft has for its parts; `examples/lora.py` runs with peft itself.
"""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError
from sipp.inputs.layers import find_prunable_layers
from sipp.pruning.lora import lora_merged
from sipp.pruning.masking import hold

RANK, SCALE = 2, 0.5


class Lora(nn.Module):
    """W x + scale B A dropout(x)."""

    def __init__(self, base: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.scaling, self.active_adapters = {"default": SCALE}, ["default"]
        self.merged = self.disable_adapters = False
        self.lora_variant: dict[str, Any] = {}

    def get_delta_weight(self, adapter: str) -> Tensor:
        return SCALE * self.lora_B[adapter].weight @ self.lora_A[adapter].weight

    def merge(self) -> None:
        self.base_layer.weight.data += self.get_delta_weight("default")
        self.merged = True

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.merged:
            return result
        return result + SCALE * self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5))


def adapted(net: nn.Sequential, dropout: float = 0.0) -> nn.Sequential:
    net[0] = Lora(net[0], dropout)  # type: ignore[arg-type]
    return net


def training(net: nn.Module) -> tuple[torch.optim.Optimizer, Tensor, Any]:
    points = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    wanted = torch.randn(40, 5, generator=torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        F.mse_loss(net(points), wanted).backward()
        optimizer.step()

    return optimizer, points, step


@pytest.mark.parametrize("method", ["wanda", "sipp-rand"])
def test_gradual_masks_what_is_added_and_merges_it(method: str) -> None:
    net = adapted(dense())
    optimizer, points, train = training(net)
    trained: list[Tensor] = []

    def step(number: int) -> None:
        train(number)
        trained.append(net(points).detach())

    done = sipp.gradual(net, step, points, keep=0.3, steps=20, method=method, optimizer=optimizer)
    assert torch.allclose(net(points), trained[-1], atol=1e-5)  # merging changed nothing
    assert done.masks.keys() == {"0.base_layer.weight", "2.weight"} and done.kept == round(0.3 * done.n_weights)
    layer: Any = net[0]
    assert layer.merged and not bool(layer.base_layer.weight[~done.masks["0.base_layer.weight"]].any())
    assert float(layer.get_delta_weight("default").detach().abs().max()) > 0.01  # it was trained
    assert "forward" not in vars(layer) and "get_delta_weight" not in vars(layer)
    layer.merged = False  # as if nothing had been merged: its product is added again, and to every weight
    assert not torch.allclose(net(points), nn.Sequential(layer.base_layer, *net[1:])(points), atol=1e-3)


def test_a_cut_scores_weights_with_what_is_added_to_them() -> None:
    """The weight that LoRA brings to zero goes, however large it is in the network below."""
    net = adapted(dense())
    layer: Any = net[0]
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.rand(12, 8) + 1)
        layer.base_layer.weight[3] = 9.0
        layer.lora_A["default"].weight.zero_()[0] = 9.0
        layer.lora_B["default"].weight.zero_()[3, 0] = -1 / SCALE
    done = sipp.gradual(net, lambda i: None, None, keep=0.5, steps=4, method="magnitude", include="0.*")
    assert not bool(done.masks["0.base_layer.weight"][3].any())


def test_weights_are_as_they_were_after_they_were_with_what_is_added() -> None:
    net = adapted(dense()).to(torch.bfloat16)
    weight = net[0].base_layer.weight  # type: ignore[union-attr]
    before, x = weight.clone(), torch.randn(3, 8, dtype=torch.bfloat16)
    expected = net(x)
    with lora_merged(net):
        assert not torch.equal(weight, before) and torch.allclose(net(x), expected, atol=0.02)
        with torch.no_grad():
            weight[0, 0] += 1
    same = weight == before
    assert not bool(same[0, 0]) and int(same.sum()) == same.numel() - 1 and "forward" not in vars(net[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_held_weights_stay_zero_under_an_adapter_by_the_names_that_they_had(dropout: float) -> None:
    pruned = sipp.prune(dense(), None, keep=0.4, method="magnitude")
    net = adapted(pruned.model, dropout)  # type: ignore[arg-type]
    _, points, step = training(net)
    sipp.hold(net, pruned)
    for i in range(5):
        step(i)
    net.eval()
    layer, mask = net[0], pruned.masks["0.weight"]
    expected = net(points)
    by_hand = layer.base_layer.weight + mask * Lora.get_delta_weight(layer, "default")  # type: ignore
    first = F.linear(points, by_hand, layer.base_layer.bias)  # type: ignore
    assert torch.allclose(expected, net[1:](first), atol=1e-5)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other[0].base_layer.bias += 1  # type: ignore
    assert torch.equal(net(points), expected) and not torch.allclose(other(points), expected, atol=1e-2)
    sipp.release(net)
    assert torch.allclose(net(points), expected, atol=1e-5)
    assert int(layer.base_layer.weight.count_nonzero()) == int(mask.sum())  # type: ignore


def test_dropout_of_an_adapter_is_its_own() -> None:
    """Its dropout drops everything that goes into the adapter, and nothing that goes into the layer."""
    net = adapted(dense(), 1.0 - 1e-9).train()
    points = torch.randn(4, 8)
    hold(net, {"0.base_layer.weight": torch.ones(12, 8, dtype=torch.bool)})
    assert torch.allclose(net(points), net[1:](net[0].base_layer(points)), atol=1e-5)  # type: ignore


def test_thin_matrices_are_no_weights_to_prune_and_variants_are_refused() -> None:
    net = adapted(dense())
    assert [one.module_name for one in find_prunable_layers(net, include="*")] == ["0.base_layer", "2"]
    net[0].lora_variant = {"default": object()}  # type: ignore
    with pytest.raises(ModelError, match="0: the adapter is not a plain LoRA"):
        hold(net, {"2.weight": torch.ones(5, 12, dtype=torch.bool)})
