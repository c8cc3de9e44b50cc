"""A forward that is not the known map of its type, or a weight used outside of its module, is found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draws import randn
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError
from sipp.inputs.layers import Adapter, WeightUse, register, vectors
from sipp.inputs.layers.registry import _REGISTRY
from sipp.pruning.masking import hold
from sipp_lab.nets.registry import build, net_spec

SLIGHTLY = 1.01


# --- Forwards that are another map -----------------------------------------------------------------------------------


class PadsAsMuchAsItCuts(nn.Conv2d):
    """The output has the known shape; the windows do not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 0, 1, 0))[..., :-1, :-1])


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


class Rescales(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(SLIGHTLY * x)


class RescalesInPlace(nn.Linear):
    """The window that was captured shows the changed values by the time the layer is done."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(SLIGHTLY))


class ChangesOnePoint(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x[:1], x[1:2] * SLIGHTLY, x[2:]]))


class LeavesTheBiasOut(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LastToken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat((x[:, :-1], torch.ones_like(x[:, -1:])), dim=1))


class LastPixel(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return torch.cat((out[..., :-1, :], out[..., -1:, :] + 1), dim=-2)


class ScaledLSTM(nn.LSTM):
    def forward(self, x: Tensor) -> object:
        return super().forward(SLIGHTLY * x)


class ScaledAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> object:
        return super().forward(x, key, SLIGHTLY * value)


class AttendsToItself(nn.Module):
    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


def with_output_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: SLIGHTLY * output)
    return layer


def with_patched_forward(layer: nn.Linear) -> nn.Module:
    layer.forward = lambda x: F.linear(SLIGHTLY * x, layer.weight, layer.bias)
    return layer


OTHER_MAPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "pads and cuts": (lambda: PadsAsMuchAsItCuts(2, 3, 3), (2, 5, 5), "Conv2d"),
    "standardises its weight": (lambda: Standardised(2, 3, 3), (2, 5, 5), "Conv2d"),
    "rescales": (lambda: Rescales(6, 4), (6,), "Linear"),
    "rescales in place": (lambda: RescalesInPlace(6, 4), (6,), "Linear"),
    "rescales one point": (lambda: ChangesOnePoint(6, 4), (6,), "Linear"),
    "rescales, half precision": (lambda: Rescales(64, 32).bfloat16(), (64,), "Linear"),
    "leaves the bias out": (lambda: LeavesTheBiasOut(6, 4), (6,), "Linear"),
    "hook on the output": (lambda: with_output_hook(nn.Linear(6, 4)), (6,), "Linear"),
    "hook on a convolution": (lambda: with_output_hook(nn.Conv1d(2, 3, 2, groups=1)), (2, 5), "Conv1d"),
    "patched forward": (lambda: with_patched_forward(nn.Linear(6, 4)), (6,), "Linear"),
    "changes the last of many tokens": (lambda: LastToken(256, 4), (600, 256), "Linear"),
    "changes the last pixels": (lambda: LastPixel(3, 4, 3), (3, 90, 90), "Conv2d"),
    "changes the last pixels of groups": (lambda: LastPixel(4, 4, 3, groups=2), (4, 8, 8), "Conv2d"),
    "recurrent": (lambda: ScaledLSTM(6, 4, 2, batch_first=True, bidirectional=True), (5, 6), "LSTM"),
    "attention": (lambda: AttendsToItself(ScaledAttention(6, 2, batch_first=True)), (5, 6), "MultiheadAttention"),
}


@pytest.mark.parametrize("case", OTHER_MAPS)
def test_a_forward_that_is_not_the_known_map_is_refused_by_name(case: str) -> None:
    make, shape, base = OTHER_MAPS[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Unflatten(1, shape), make())
    model = model.to(next(model.parameters()).dtype)
    x = randn(8, *shape).to(next(model.parameters()).dtype)
    with pytest.raises(ModelError, match=rf"2\S* \(\w+\): sipp cannot reproduce .* as a {base} .*exclude='2"):
        sipp.sensitivity(model, x)


class SameMap(nn.Linear):
    """A subclass that adds nothing to the map."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 + super().forward(x.clone())


def test_a_subclass_of_the_same_map_and_hooks_that_only_look_are_fine() -> None:
    torch.manual_seed(0)
    model, x = SameMap(6, 4), randn(8, 6)
    model.register_forward_hook(lambda module, args, output: None)
    plain = nn.Linear(6, 4)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(sipp.sensitivity(model, x)["weight"], sipp.sensitivity(plain, x)["weight"])


def test_scores_are_of_the_input_after_the_users_own_hooks() -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 4), randn(8, 6)
    expected = sipp.sensitivity(plain, x + 1)["weight"]
    assert not torch.allclose(sipp.sensitivity(plain, x)["weight"], expected)
    plain.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(sipp.sensitivity(plain, x)["weight"], expected)


def test_a_large_layer_with_cancelling_terms_is_no_false_alarm() -> None:
    """Outputs near 0 that are sums of large terms: rounding is relative to the terms."""
    layer = nn.Linear(4096, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.sign() * 1e3)
        layer.weight[:, 2048:] = -layer.weight[:, :2048]
    half = randn(4, 2048)
    assert sipp.sensitivity(layer, torch.cat([half, half], 1))


# --- Layer types that a user teaches ---------------------------------------------------------------------------------


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(3, 4)), nn.Parameter(randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


def its_use(module: nn.Module, args: tuple, kwargs: dict, n_points: int) -> Iterator[WeightUse]:
    yield vectors("weight", args[0], n_points)


def returning(factor: float) -> Callable[..., Any]:
    def uses(module: nn.Module, args: tuple, kwargs: dict, n_points: int) -> Any:
        yield vectors("weight", args[0], n_points)
        return factor * F.linear(args[0], module.weight, module.bias)

    return uses


def its_rows_apart(module: nn.Module, args: tuple, kwargs: dict, n_points: int) -> Iterator[WeightUse]:
    yield replace(vectors("weight", args[0], n_points), n_rows=1)
    yield replace(vectors("weight", args[0], n_points), row_start=1)


@pytest.fixture
def taught() -> Iterator[Callable[..., None]]:
    yield lambda **fields: register(Doubled, Adapter(weights=lambda module: ("weight",), **fields))
    _REGISTRY.pop(Doubled, None)


def test_a_taught_layer_is_checked_too(taught: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(Doubled()), randn(5, 4)
    taught(uses=its_use)
    with pytest.raises(ModelError, match=r"0 .Doubled.*cannot reproduce .* as a Doubled"):
        sipp.sensitivity(model, x)
    taught(uses=returning(2.1))
    with pytest.raises(ModelError, match=r"0 .Doubled.*cannot reproduce .* as a Doubled"):
        sipp.sensitivity(model, x)
    taught(uses=returning(2))
    with caplog.at_level(logging.WARNING, "sipp"):
        scores = sipp.sensitivity(model, x)
        assert not caplog.records
        taught(uses=its_rows_apart)
        assert torch.equal(sipp.sensitivity(model, x)["0.weight"], scores["0.weight"])
        assert "0 (Doubled): its output cannot be computed" in caplog.text  # what is not checked is recorded


# --- Uses outside of modules -----------------------------------------------------------------------------------------


class Reads(nn.Module):
    """Two layers and a read of the first one's weight, by `read(x, h, layer)`."""

    def __init__(self, read: Callable[[Tensor, Tensor, nn.Linear], object]) -> None:
        super().__init__()
        self.a, self.b, self.read = nn.Linear(6, 6), nn.Linear(6, 2), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        self.read(x, h, self.a)
        return self.b(h)


OTHER_USES: list[tuple[str, Callable[[Tensor, Tensor, nn.Linear], object]]] = [
    ("mm", lambda x, h, a: F.linear(h, a.weight)),
    ("mm", lambda x, h, a: F.linear(input=h, weight=a.weight)),
    ("mm", lambda x, h, a: F.linear(h[:, :3], a.weight.data[2:, :3])),
    ("mm", lambda x, h, a: h @ a.weight.t()),
    ("mm", lambda x, h, a: torch.matmul(h, a.weight.T)),
    ("bmm", lambda x, h, a: torch.einsum("bi,oi->bo", h, a.weight)),
    ("linalg_vector_norm", lambda x, h, a: F.linear(h, F.normalize(a.weight))),
    ("to", lambda x, h, a: a.weight.to(torch.float64)),
    ("add", lambda x, h, a: h.add_(a.weight[0].detach())),
]


@pytest.mark.parametrize(("operation", "read"), OTHER_USES)
def test_a_use_outside_of_the_module_is_refused_by_name(operation: str, read: Callable) -> None:
    model, x = Reads(read), randn(8, 6)
    with pytest.raises(ModelError, match=rf"batch 0: a\.weight is read by \S*({operation}).*exclude='a\.weight'"):
        sipp.sensitivity(model, x)
    assert set(sipp.sensitivity(model, x, exclude="a.weight")) == {"b.weight"}


NO_USES: dict[str, Callable[[Tensor, Tensor, nn.Linear], object]] = {
    "attributes": lambda x, h, a: (a.weight.shape, a.weight.dtype, a.weight.device, a.weight.requires_grad, a.weight.T),
    "state of the same kind": lambda x, h, a: next(a.parameters()).data.new(2, 3).zero_() + a.weight.new_zeros(3),
    "like": lambda x, h, a: (torch.zeros_like(a.weight), x.to(a.weight), x.type_as(a.weight), x.view_as(h)),
    "grad": lambda x, h, a: a.weight.grad,
    "the bias": lambda x, h, a: h + a.bias,
    "the module itself": lambda x, h, a: a(h),
}


@pytest.mark.parametrize("read", NO_USES.values(), ids=NO_USES)
def test_what_does_not_read_the_values_is_no_use(read: Callable) -> None:
    assert set(sipp.sensitivity(Reads(read), randn(8, 6))) == {"a.weight", "b.weight"}


def test_a_held_model_can_be_scored() -> None:
    """The hooks that hold masks write into weights in place, which is no use."""
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), randn(8, 6)
    masks = sipp.prune(model, x, keep=0.5, method="magnitude").masks
    hold(model, masks)
    assert set(sipp.sensitivity(model, x)) == set(masks)


@pytest.mark.parametrize("name", ["lenet-300-100", "lenet-5", "lstm", "digits-cnn", "resnet20", "densenet22"])
def test_no_false_alarm_on_our_own_networks(name: str) -> None:
    torch.manual_seed(0)
    assert sipp.sensitivity(build(name), randn(2, *net_spec(name).input_shape))


def test_products_that_vanish_in_the_dtype_of_the_layer_are_no_other_map() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=False).half()
    with torch.no_grad():
        layer.weight.mul_(1e-4)
    points = torch.full((4, 6), 1e-4, dtype=torch.float16)
    assert not layer(points).any()
    assert sipp.sensitivity(layer, [points])["weight"].sum(1).gt(0).all()
