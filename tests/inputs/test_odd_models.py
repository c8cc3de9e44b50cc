"""Models that are odd: layers without weights are left alone, and what cannot be pruned is refused by name."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.results.options import Method

POINTS = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(20, dtype=torch.int64)


class PartlyEmpty(nn.Module):
    """One layer with weights, and two that have none: no rows, no fan-in."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.no_rows, self.no_inputs = nn.Linear(5, 3), nn.Linear(5, 0), nn.Linear(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.full(x), self.no_inputs(self.no_rows(x))], 1)


@pytest.mark.filterwarnings("ignore::sipp.errors.DeadRowsWarning")
@pytest.mark.parametrize(
    "method", ["sipp-det", "sipp-rand", "sipp-hybrid", "sipp-simple", "magnitude", "snip", "random"]
)
def test_layers_without_weights_are_left_alone(method: Method) -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = PartlyEmpty()
    pruned = sipp.prune(model, [(POINTS, LABELS)], keep=0.4, method=method)
    assert set(pruned.masks) == {"full.weight"} and int(pruned.masks["full.weight"].sum()) == 6
    assert list(pruned.model.state_dict()) == list(model.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_no_network_that_can_be_seen_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(5, 3))
    with torch.device("meta"):
        shapes_only = nn.Sequential(nn.Linear(5, 3))
    for model, words in (
        (torch.jit.script(plain), "TorchScript"),
        (torch.jit.trace(plain, POINTS), "TorchScript"),
        (shapes_only, r"0 \(Linear\): its weight is on the meta device"),
        (PartlyEmpty, "must be an nn.Module"),
        (5, "must be an nn.Module"),
    ):
        for prune in (sipp.sensitivity, lambda m, d: sipp.prune(m, d, keep=0.5)):
            with pytest.raises(ModelError, match=words):
                prune(model, [POINTS])


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_compiled_part_is_scored_like_a_plain_one(by_itself: bool) -> None:
    part = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
    plain = nn.Sequential(part, nn.Linear(5, 3))
    expected = sipp.sensitivity(plain, POINTS)
    if by_itself:
        part.compile(backend="eager")
    model = plain if by_itself else nn.Sequential(torch.compile(part, backend="eager"), plain[1])
    found = sipp.sensitivity(model, POINTS)
    assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))


# --- The given model is left as it was --------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Counts its calls in a buffer, another that it replaces, one that it makes, and in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("sums", torch.zeros(0))
        self.register_buffer("last", torch.zeros(3))
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        self.calls += 1
        self.sums.resize_(5).copy_(x.sum(0))
        self.last = x[0, :3] + self.last
        self.register_buffer("made", x[0])
        out = self.fc(x)
        if bool((x > 100).any()):
            raise RuntimeError("too large")
        return out


def state_of(model: nn.Module) -> dict[str, object]:
    tensors = {name: (id(tensor), tensor.tolist()) for name, tensor in model.state_dict(keep_vars=True).items()}
    plain = {name: {k: v for k, v in vars(m).items() if isinstance(v, int)} for name, m in model.named_modules()}
    return {"tensors": tensors, "order": list(tensors), "plain": plain}


PASSES = {
    "sensitivity": lambda m, x: sipp.sensitivity(m, [x], include="fc"),
    "mean": lambda m, x: sipp.sensitivity(m, [x], include="fc", reduce="mean"),
    "snip": lambda m, x: sipp.prune(m, [(x, LABELS[: len(x)])], keep=0.5, include="fc", method="snip"),
    "sample_size": lambda m, x: sipp.sample_size(m, x, include="fc"),
    "certify": lambda m, x: sipp.certify(m, m, x, output=None),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_forward_changes_in_a_model_does_not_stay(name: str) -> None:
    model = Keeps()
    before = state_of(model)
    PASSES[name](model, POINTS)
    assert state_of(model) == before
    with pytest.raises(DataError, match="too large"):
        PASSES[name](model, 200 + POINTS)
    assert state_of(model) == before


# --- Frozen weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sipp-hybrid", "magnitude"])
def test_frozen_weights_beside_others_are_named_once(method: Method) -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].weight.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sipp.prune(model, POINTS, keep=0.8, method=method)
        said = [str(one.message) for one in caught if "frozen" in str(one.message)]
        assert len(said) == 1 and "0.weight; " in said[0] and "exclude='0.weight'" in said[0]
        caught.clear()
        sipp.prune(model, POINTS, keep=0.8, method=method, exclude="0.weight")
        sipp.prune(model.requires_grad_(False), POINTS, keep=0.8, method=method)
        assert not [one for one in caught if "frozen" in str(one.message)]


# --- Copies -----------------------------------------------------------------------------------------------------------


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)
        self.lock = threading.Lock()


class Itself(nn.Linear):
    def __deepcopy__(self, memo: object) -> Itself:
        return self


@pytest.mark.parametrize(("layer", "words"), [(Locked(), "Lock"), (Itself(5, 3), "shares")])
def test_a_model_that_cannot_be_copied_is_named_and_left_alone(layer: nn.Module, words: str) -> None:
    before = layer.weight.detach().clone()
    for call in (
        lambda: sipp.prune(layer, POINTS, keep=0.5),
        lambda: sipp.prune_to(layer, POINTS, torch.randn(200, 5), epsilon=0.5, method="magnitude"),
    ):
        with pytest.raises(ModelError, match=words):
            call()
    assert torch.equal(layer.weight, before)


class Cropped(nn.Module):
    """A convolution that is given a part of a larger tensor, or that part alone."""

    def __init__(self, dim: int, outside: float, *, is_alone: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dim, self.outside, self.is_alone = dim, outside, is_alone
        self.conv, self.last = nn.Conv2d(3, 8, 3, bias=False), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        more = torch.cat((torch.full_like(x.narrow(self.dim, 0, 1), self.outside), x), self.dim)
        part = more.narrow(self.dim, 1, x.shape[self.dim])
        return self.last(self.conv(part.contiguous() if self.is_alone else part).mean((2, 3)))


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("outside", [float("nan"), 1e35])
def test_values_that_a_convolution_never_sees_change_nothing(dim: int, outside: float) -> None:
    """NaN there is no reason to refuse an input, and a large number none for another scale."""
    points = torch.rand(8, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    found, expected = (sipp.sensitivity(Cropped(dim, outside, is_alone=alone), points) for alone in (False, True))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
