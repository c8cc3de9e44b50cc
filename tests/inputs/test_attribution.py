"""Which patches belong to which point is found by an experiment, not guessed from shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import draws
import numpy as np
import pytest
import torch
from oracles import sensitivity as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.inputs import probing
from sipp.inputs.probing import Recorder
from sipp.results.batches import WeightUse
from sipp.results.ranking import Sensitivities, Weight
from sipp.scoring import sensitivities
from sipp.scoring.task import task_of

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
    """An order that is neither of the two: all of the last steps, then the others point by point."""
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


LAYOUTS = {
    "time-major fold": (time_major_fold, 5),
    "time-major fold of as many steps": (time_major_fold, N),
    "transposed, as many steps": (transposed, N),
    "transposed": (transposed, 5),
    "fold": (folded, 5),
    "as it is, as many steps": (lambda m, x: m(x), N),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_points_their_own_patches(layout: str) -> None:
    call, n_steps = LAYOUTS[layout]
    for seed in range(5):
        model, x = Calls(layer_of(seed), call), randn(N, n_steps, WIDTH, seed=seed)
        points = oracle.linear_points(x)
        for reduce in ("max", "mean"):
            expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, reduce)}
            assert not oracle.disagreements(sipp.sensitivity(model, [x], reduce=reduce), expected)
        found = scores_of(model, [x]).layers[0]
        assert found.sign_complexity == pytest.approx(complexity(model.m.weight, points), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_padding_is_taken_out_where_it_lies(layout: str, reduce: str) -> None:
    call, n_steps = LAYOUTS[layout]
    model, x = Calls(layer_of(), call), randn(N, n_steps, WIDTH)
    mask = (torch.arange(n_steps) < torch.tensor([2, n_steps, 1, 3])[:, None]).long()
    x = torch.where(mask[..., None] == 1, x, 50 * randn(N, n_steps, WIDTH, seed=1))
    points = [oracle.f64(point[real == 1]) for point, real in zip(x, mask)]
    expected = {"m.weight": oracle.sensitivity(oracle.f64(model.m.weight), points, reduce)}
    assert not oracle.disagreements(
        sipp.sensitivity(model, [{"x": x, "attention_mask": mask}], reduce=reduce), expected
    )


def test_frames_of_a_convolution_folded_step_by_step() -> None:
    def frames(m: nn.Module, x: Tensor) -> Tensor:
        n, t = x.shape[:2]
        out = m(x.transpose(0, 1).flatten(0, 1))
        return out.unflatten(0, (t, n)).transpose(0, 1)

    torch.manual_seed(0)
    model, x = Calls(nn.Conv2d(2, 3, 2, bias=False), frames), randn(N, 3, 2, 4, 3)
    windows = [[oracle.conv_windows(model.m, oracle.f64(frame)) for frame in point] for point in x]
    points = [np.concatenate(of_one).reshape(-1, 8) for of_one in windows]
    for reduce in ("max", "mean"):
        scores = scores_of(model, [x], reduce).layers[0]
        expected = oracle.sensitivity(oracle.f64(model.m.weight).reshape(3, 8), points, reduce)
        assert np.allclose(oracle.f64(scores.sensitivity_FK), expected, rtol=1e-5, atol=1e-7)
        assert scores.sign_complexity == pytest.approx(complexity(model.m.weight, points), rel=1e-5)


@pytest.mark.parametrize("call", [folded, transposed, time_major_fold])
@pytest.mark.parametrize("n_points", [3, 5])
def test_a_batch_that_reads_the_same_backwards_is_told_apart(
    call: Callable[[nn.Module, Tensor], Tensor], n_points: int
) -> None:
    """Reversing it changes nothing, so two orders fit; only another permutation tells them apart."""
    square = randn(3, 3, WIDTH)
    symmetric = square + square.flip(0)
    copies = randn(1, 2, WIDTH).repeat(n_points, 1, 1)
    for x in (copies, symmetric + symmetric.flip(1)):
        model = Calls(layer_of(), call)
        expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "mean")}
        assert not oracle.disagreements(sipp.sensitivity(model, [x], reduce="mean"), expected)


def test_an_order_that_nothing_explains_leaves_the_patches_together(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Calls(layer_of(), shuffled), randn(N, 5, WIDTH)
    scores = scores_of(model, [x])
    expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "max")}
    assert not oracle.disagreements({"m.weight": scores.layers[0].sensitivity_FK}, expected)
    assert scores.layers[0].sign_complexity is None
    assert "m.weight" in caplog.text and "padding" not in caplog.text
    with pytest.raises(DataError, match="batches of one input"):
        sipp.sensitivity(model, [x], reduce="mean")
    singly = sipp.sensitivity(model, [point[None] for point in x], reduce="mean")  # the way out that it names
    expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "mean")}
    assert not oracle.disagreements(singly, expected)


def test_padding_that_cannot_be_found_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x, mask = randn(N, 5, WIDTH), torch.ones(N, 5, dtype=torch.long)
    scores_of(Calls(layer_of(), shuffled), [{"x": x, "attention_mask": mask}])
    assert "padding is not left out" in caplog.text


def test_what_was_found_holds_for_later_batches_of_the_form() -> None:
    model, x = Calls(layer_of(), transposed), randn(3 * N + 1, N, WIDTH)
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


@pytest.mark.parametrize("scale", [1e-200, 1e150])
def test_values_far_from_one_are_told_apart_too(scale: float) -> None:
    def scaled(m: nn.Module, x: Tensor) -> Tensor:
        return transposed(m, x * scale) / scale

    model, x = Calls(layer_of(), scaled), randn(N, N, WIDTH)
    assert scores_of(model, [x]).layers[0].sign_complexity is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_does_not_hide_points(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12))).to(dtype)
    scores = scores_of(model, [randn(64, 16, 32).to(dtype)])
    assert all(layer.sign_complexity is not None for layer in scores.layers)


def test_a_broken_comparison_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Calls(layer_of(), time_major_fold), randn(N, 5, WIDTH)
    monkeypatch.setattr(probing, "_distances", lambda pairs, placed_B: [0.0 for a, _ in pairs for _ in a.orders])
    with pytest.raises(DataError, match="which values belong to which input"):  # every order fits
        sipp.sensitivity(model, [x], reduce="mean")


def test_a_recorder_keeps_no_inputs_alive() -> None:
    recorder = Recorder()
    recorder(Weight("w", (), "Linear", 4, 8, False), WeightUse("w", torch.randn(3, 1, 500, 8)))
    held = [sample.values_BN.untyped_storage().nbytes() for sample in recorder.samples.values()]
    assert 0 < sum(held) < 3 * 500 * 8 * 4


@pytest.mark.parametrize("order", ["reported", "interleaved", "crossed"])
@pytest.mark.parametrize("positions", [(6,), (12,), (6, 5), (3, 4, 2)])
def test_what_is_sampled_in_an_order_is_what_it_groups(order: probing.Order, positions: tuple[int, ...]) -> None:
    """The places in memory, against the windows turned."""
    use = WeightUse(
        "w", randn(3, 2, *positions, 4, seed=1).transpose(0, 1).contiguous().transpose(0, 1), len(positions)
    )
    turned = probing.group_by_point(use, order).windows
    for axis, size in enumerate(positions, 2):
        turned = turned.index_select(axis, torch.tensor(probing._few_indices(size)))
    found = probing._sampled(use, ("reported", order))
    assert found.shape[0] == 3 and found.shape[1] % probing._PADDED == 0
    for sampled, expected in zip(found.unflatten(1, (2, -1))[:, 1], turned.flatten(1)):  # some of them several times
        assert set(sampled.tolist()) == set(expected.tolist())
