"""Dimension 0 is the input. Where patches do not move with the inputs, they stay together, and no mean is taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import draws
import numpy as np
import pytest
import torch
from oracles import sensitivity as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.scoring import sensitivities
from sipp.scoring.task import Sensitivities, task_of

N, WIDTH = 4, 6  # points, features
randn = partial(draws.randn, dtype=torch.float64)


class Calls(nn.Module):
    """One layer, called in some way; an attention_mask is there to be read by others."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.m, self.call = layer.double(), call

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.call(self.m, x)


def time_major_fold(m: nn.Module, x: Tensor) -> Tensor:
    n, t, d = x.shape
    return m(x.transpose(0, 1).reshape(t * n, d)).view(t, n, -1).transpose(0, 1)


def transposed(m: nn.Module, x: Tensor) -> Tensor:
    return m(x.transpose(0, 1)).transpose(0, 1)


def folded(m: nn.Module, x: Tensor) -> Tensor:
    return m(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def shuffled(m: nn.Module, x: Tensor) -> Tensor:
    """All of the last steps, then the others point by point."""
    out = m(torch.cat((x[:, -1], x[:, :-1].flatten(0, 1))))
    return torch.cat((out[len(x) :].unflatten(0, (len(x), -1)), out[: len(x), None]), dim=1)


def scores_of(model: nn.Module, data: object, reduce: str = "max") -> Sensitivities:
    return sensitivities.measure_sensitivities(task_of(model, data), reduce=reduce)


def layer_of(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, 3, bias=False)


def complexity(weight: Tensor, points: list[np.ndarray]) -> float:
    """Delta_l by its definition (T11): the norms of the four quadrants added up, by the norm of the output."""
    w_FK, worst = oracle.f64(weight).reshape(len(weight), -1), 0.0
    for patches_PK in points:
        quadrants = 0.0
        for s in (1, -1):
            for t in (1, -1):
                quadrants += float(np.linalg.norm(np.maximum(t * patches_PK, 0) @ np.maximum(s * w_FK, 0).T))
        worst = max(worst, quadrants / float(np.linalg.norm(patches_PK @ w_FK.T)))
    return worst


ASSIGNED = {"as it is": (lambda m, x: m(x), 5), "as many steps": (lambda m, x: m(x), N), "fold": (folded, 5)}
UNASSIGNED = {
    "time-major fold": (time_major_fold, 5),
    "time-major fold of as many steps": (time_major_fold, N),
    "transposed, as many steps": (transposed, N),
    "transposed": (transposed, 5),
    "shuffled": (shuffled, 5),
}


@pytest.mark.parametrize("layout", ASSIGNED)
def test_where_the_inputs_come_first_the_points_get_their_own_patches(layout: str) -> None:
    call, n_steps = ASSIGNED[layout]
    for seed in range(5):
        model, x = Calls(layer_of(seed), call), randn(N, n_steps, WIDTH, seed=seed)
        x[2 + seed :] = x[0]  # equal inputs show nothing when they are exchanged: others are looked for
        points = oracle.linear_points(x)
        for reduce in ("max", "mean"):
            expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, reduce)}
            assert not oracle.disagreements(sipp.sensitivity(model, [x], reduce=reduce), expected)
        found = scores_of(model, [x]).layers[0]
        assert found.sign_complexity == pytest.approx(complexity(model.m.weight, points), rel=1e-5)


@pytest.mark.parametrize("layout", UNASSIGNED)
def test_elsewhere_there_is_a_maximum_and_no_mean(layout: str, caplog: pytest.LogCaptureFixture) -> None:
    call, n_steps = UNASSIGNED[layout]
    for seed in range(5):
        caplog.clear()
        model, x = Calls(layer_of(seed), call), randn(N, n_steps, WIDTH, seed=seed)
        found = scores_of(model, [x]).layers[0]
        expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "max")}
        assert not oracle.disagreements({"m.weight": found.sensitivity_FK}, expected)
        assert found.sign_complexity is None
        assert "m.weight" in caplog.text and "padding" not in caplog.text
        with pytest.raises(DataError, match=r"batch_first=True.*batches of one input"):
            sipp.sensitivity(model, [x], reduce="mean")


@pytest.mark.parametrize("layout", ASSIGNED)
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_padding_is_taken_out_where_it_lies(layout: str, reduce: str) -> None:
    call, n_steps = ASSIGNED[layout]
    model, x = Calls(layer_of(), call), randn(N, n_steps, WIDTH)
    mask = (torch.arange(n_steps) < torch.tensor([2, n_steps, 1, 3])[:, None]).long()
    x = torch.where(mask[..., None] == 1, x, 50 * randn(N, n_steps, WIDTH, seed=1))
    points = [oracle.f64(point[real == 1]) for point, real in zip(x, mask)]
    expected = {"m.weight": oracle.sensitivity(oracle.f64(model.m.weight), points, reduce)}
    assert not oracle.disagreements(
        sipp.sensitivity(model, [{"x": x, "attention_mask": mask}], reduce=reduce), expected
    )


def test_frames_of_a_convolution_folded_input_by_input() -> None:
    def frames(m: nn.Module, x: Tensor) -> Tensor:
        return m(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    torch.manual_seed(0)
    model, x = Calls(nn.Conv2d(2, 3, 2, bias=False), frames), randn(N, 3, 2, 4, 3)
    windows = [[oracle.conv_windows(model.m, oracle.f64(frame)) for frame in point] for point in x]
    points = [np.concatenate(of_one).reshape(-1, 8) for of_one in windows]
    for reduce in ("max", "mean"):
        scores = scores_of(model, [x], reduce).layers[0]
        expected = oracle.sensitivity(oracle.f64(model.m.weight).reshape(3, 8), points, reduce)
        assert np.allclose(oracle.f64(scores.sensitivity_FK), expected, rtol=1e-5, atol=1e-7)
        assert scores.sign_complexity == pytest.approx(complexity(model.m.weight, points), rel=1e-5)


def test_inputs_that_are_all_alike_show_nothing_of_a_fold() -> None:
    copies = randn(1, 2, WIDTH).repeat(5, 1, 1)
    with pytest.raises(DataError, match="which values belong to which input"):
        sipp.sensitivity(Calls(layer_of(), folded), [copies], reduce="mean")
    expected = oracle.linear_sensitivity((model := Calls(layer_of(), lambda m, x: m(x))).m.weight, copies, "mean")
    assert not oracle.disagreements(sipp.sensitivity(model, [copies], reduce="mean"), {"m.weight": expected})


def test_padding_that_cannot_be_found_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x, mask = randn(N, 5, WIDTH), torch.ones(N, 5, dtype=torch.long)
    scores_of(Calls(layer_of(), shuffled), [{"x": x, "attention_mask": mask}])
    assert "padding is not left out" in caplog.text


def test_what_was_found_holds_for_later_batches_of_the_form() -> None:
    model, x = Calls(layer_of(), folded), randn(3 * N + 1, N, WIDTH)
    expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "mean")}
    batches = list(x.split(N))  # the last one is of another form: one point
    assert not oracle.disagreements(sipp.sensitivity(model, batches, reduce="mean"), expected)


def test_tokens_of_an_expert_are_no_blocks_of_points() -> None:
    """As many tokens as points reach the expert, those of point 0 all of them and of the others none."""

    def routed(m: nn.Module, x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:2], 3, dtype=x.dtype).index_put(
            tuple((x[..., 0] > 0).nonzero().T), m(x[x[..., 0] > 0])
        )

    x = randn(2 * N, N, WIDTH)
    x[..., 0] = -x[..., 0].abs()
    x[0, :, 0] *= -1  # the first batch sends a multiple of its points, all from one
    x[N, :3, 0] *= -1  # the second one 3 + 1
    x[N + 2, 1, 0] *= -1
    model = Calls(layer_of(), routed)
    assert scores_of(model, list(x.split(N))).layers[0].sign_complexity is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_hide_points(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12))).to(dtype)
    scores = scores_of(model, [randn(64, 16, 32).to(dtype)])
    assert all(layer.sign_complexity is not None for layer in scores.layers)


def test_random_layers_have_no_mean() -> None:
    """A run that gives other values for the same inputs does not show whose they are."""

    def noisy(m: nn.Module, x: Tensor) -> Tensor:
        return m(x + torch.rand_like(x))

    with pytest.raises(DataError, match="which values belong to which input"):
        sipp.sensitivity(Calls(layer_of(), noisy), [randn(N, 5, WIDTH)], reduce="mean")


# --- A few points are looked at and all are scored: what the few do not show ------------------------------------------


def has_a_mean(model: nn.Module, x: Tensor) -> bool:
    with suppress(DataError):
        return bool(sipp.sensitivity(model, [x], reduce="mean"))
    with pytest.raises(DataError, match=r"which values belong to which input.*reduce='max'"):
        sipp.sensitivity(model, [x], reduce="mean")
    return False


@pytest.mark.parametrize(("n_points", "n_steps"), [(2, 3), (2, 5), (3, 7), (4, 9), (6, 7), (8, 2), (8, 3), (8, 9)])
def test_features_repeated_step_by_step_are_not_taken_for_blocks(n_points: int, n_steps: int) -> None:
    """With two points and an odd number of repeated steps, blocks seem to move with the points."""

    def repeated(m: nn.Module, x: Tensor) -> Tensor:
        return m(x.repeat(n_steps, 1)).unflatten(0, (n_steps, len(x))).sum(0)

    model, x = Calls(layer_of(), repeated), randn(n_points, WIDTH)
    expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "max")}
    assert not oracle.disagreements(sipp.sensitivity(model, [x]), expected)
    assert not has_a_mean(model, x)


def test_a_layer_that_some_points_call_for_is_scored_for_all() -> None:
    def asked_for(m: nn.Module, x: Tensor) -> Tensor:
        return m(x) if bool((x[:, 0] > 9).any()) else x.clone()

    model, x = Calls(layer_of(), asked_for), randn(2 * N, WIDTH)
    x[3, 0] = 10
    expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "max")}
    assert not oracle.disagreements(sipp.sensitivity(model, [x]), expected)


def test_a_weight_that_is_used_again_by_more_points_has_no_mean() -> None:
    """Another branch for more than the points that are looked at, which no operation on values reveals."""
    model = Calls(nn.Linear(WIDTH, WIDTH), lambda m, x: m(m(x)) if len(x) > 3 else m(x))
    x = randn(8, WIDTH)
    assert sensitivities.measure_sensitivities(task_of(model, [x]), with_means=True).layers[0].mean_FK is None
    assert not has_a_mean(model, x)
