"""Scoring leaves data, flags and other threads alone, and notices layers that compute something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draws import randn
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.inputs.outputs import output_norms


def in_place() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))


LABELS = torch.arange(8) % 3
CALLS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "sensitivity": sipp.sensitivity,
    "mean": lambda m, x: sipp.sensitivity(m, [x], reduce="mean"),
    "sample_size": sipp.sample_size,
    "prune": lambda m, x: sipp.prune(m, x, keep=0.5),
    "snip": lambda m, x: sipp.prune(m, [(x, LABELS)], keep=0.5, method="snip"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_model_that_works_in_place_does_not_change_the_data(call: Callable[[nn.Module, Tensor], object]) -> None:
    x = randn(8, 6)
    before = x.clone()
    call(in_place(), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("is_training", [True, False])
def test_flags_of_scripted_parts_come_back(is_training: bool) -> None:
    inner = torch.jit.script(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)))
    model = nn.Sequential(nn.Linear(6, 4), inner, nn.Linear(4, 2)).train(is_training)
    inner[0].train(not is_training)
    before = [module.training for module in model.modules()]
    sipp.sensitivity(model, randn(8, 6), include=nn.Linear)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("call", [sipp.sensitivity, lambda m, x: sipp.prune(m, x, keep=0.5).model.state_dict()])
@pytest.mark.filterwarnings("ignore")
def test_threads_that_share_a_model(call: Callable[[nn.Module, Tensor], dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2)).train()
    batches = [randn(4, 6, seed=i) for i in range(12)]
    expected = call(model, batches)
    found: list[dict[str, Tensor]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.extend(call(model, batches) for _ in range(3))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 9
    assert all(torch.equal(one[name], expected[name]) for one in found for name in expected)
    assert all(module.training for module in model.modules()) and torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Reads(nn.Module):
    """A layer that is called, and whose weight is read elsewhere too."""

    def __init__(self, read: Callable[[nn.Linear, Tensor], Tensor], weight: nn.Parameter | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.read = nn.Linear(4, 4, bias=False), read
        if weight is not None:
            self.fc.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.read(self.fc, x)


class Marked(nn.Parameter):
    """A parameter of a class of its own."""


READS: dict[str, Callable[[], Reads]] = {
    "parameter class": lambda: Reads(lambda fc, x: F.linear(x, fc.weight), Marked(randn(4, 4))),
    "item": lambda: Reads(lambda fc, x: x * fc.weight[0, 0].item()),
}


@pytest.mark.parametrize("kind", READS)
def test_a_weight_read_outside_its_layer_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=r"fc\.weight is read by"):
        sipp.sensitivity(READS[kind](), randn(8, 4))


def test_a_parameter_class_of_its_own_is_fine() -> None:
    model = Reads(lambda fc, x: torch.zeros(len(x), fc.weight.shape[0]), Marked(randn(4, 4)))
    assert set(sipp.sensitivity(model, randn(8, 4))) == {"fc.weight"}


class LastToken(nn.Linear):
    """Not the known map: what comes last is changed."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, -1] = 1.0
        return super().forward(x)


class LastPixel(nn.Conv2d):
    """Not the known map: the last row of the output is changed."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return torch.cat((out[..., :-1, :], out[..., -1:, :] + 1), dim=-2)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: LastToken(256, 4), (20, 600, 256)),
        (lambda: LastToken(256, 4), (2, 4, 256)),
        (lambda: LastPixel(3, 4, 3), (9, 3, 90, 90)),
        (lambda: LastPixel(4, 4, 3, groups=2), (2, 4, 8, 8)),
    ],
)
def test_another_map_is_seen_wherever_it_differs(layer: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="cannot reproduce"):
        sipp.sensitivity(nn.Sequential(layer()), [randn(*shape)])


class OwnLinear(nn.Linear):
    """The known map, in a class of its own, so that its output is compared."""


class OwnConv(nn.Conv2d):
    """The same for a convolution."""


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: OwnLinear(256, 4), (20, 600, 256)),
        (lambda: OwnLinear(6, 100), (5, 6)),
        (lambda: OwnConv(3, 4, 3, stride=2), (9, 3, 90, 90)),
        (lambda: OwnConv(4, 4, 3, groups=2, padding=1), (40, 4, 30, 31)),
        (lambda: OwnConv(6, 12, 3, groups=6, bias=False), (4, 6, 7, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_known_map_is_taken_for_what_it_is(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert sipp.sensitivity(nn.Sequential(layer()).to(dtype), [randn(*shape).to(dtype)])


class Steps(nn.Module):
    """A cell that takes two steps; of a class of its own, so that its output is compared."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.cell = type("Own", (kind,), {})(4, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 1], self.cell(x[:, 0]))
        return state[0] if isinstance(state, tuple) else state


CELLS = [(nn.LSTMCell, {}), (nn.GRUCell, {}), (nn.RNNCell, {}), (nn.RNNCell, {"nonlinearity": "relu", "bias": False})]


@pytest.mark.parametrize(("kind", "options"), CELLS)
def test_the_steps_of_a_cell_are_taken_for_what_they_are(kind: type[nn.RNNCellBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert len(sipp.sensitivity(Steps(kind, **options), randn(6, 2, 4))) == 2


class Scaled(nn.MultiheadAttention):
    """Takes one more argument than attention does."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Any:  # type: ignore[override]
        return super().forward(query * scale, key, value)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "one number a point": lambda out: out[:, 0],
    "sparse": lambda out: out.to_sparse(),
    "plain": lambda out: (out, [{"a": out}]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_may_have_any_structure(kind: str) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return OUTPUTS[kind](self.fc(x))

    assert set(sipp.sensitivity(Gives(), randn(8, 4))) == {"fc.weight"}


def test_the_norm_of_one_number_is_its_magnitude() -> None:
    norms = output_norms(torch.tensor([3.0, -4.0]), 2)
    assert norms is not None and norms.tolist() == [3.0, 4.0]


@pytest.mark.filterwarnings("ignore")
def test_snip_under_inference_mode_gives_the_same() -> None:
    model, x = in_place(), randn(8, 6)
    expected = sipp.prune(model, [(x, LABELS)], keep=0.5, method="snip").model.state_dict()
    with torch.inference_mode():
        found = sipp.prune(model, [(x.clone(), LABELS.clone())], keep=0.5, method="snip").model.state_dict()
        made_here = in_place()
        with pytest.raises(ModelError, match="inference_mode"):
            sipp.prune(made_here, [(x, LABELS)], keep=0.5, method="snip")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_data_that_cannot_be_begun_is_an_error_of_the_data() -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise RuntimeError("worker died")

    with pytest.raises(DataError, match="worker died"):
        sipp.sensitivity(in_place(), Broken())
