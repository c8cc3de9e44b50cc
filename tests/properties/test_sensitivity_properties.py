"""What must hold for every weight and every input: hypothesis over values, signs, scales and convolution geometry."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from oracles import sensitivity as oracle
from torch import Tensor, nn

import sipp
from sipp.scoring import sensitivities

few = settings(max_examples=15, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31 - 1)
reduces = st.sampled_from(["max", "mean"])
KINDS = ("normal", "positive", "negative", "sparse", "integers")
kinds = st.sampled_from(KINDS)
kernels = st.sampled_from(["reference", "auto"])

TIGHT = 1e-6  # the same arithmetic in another order
LOOSE = 1e-5  # another scale or another kernel
SCALES = (1e-9, 1e9, 2.0**40, 2.0**-40, 1e-25)


def values(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """Float32 values of one kind: any sign, one sign, mostly zero, or small integers (many ties)."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if kind == "positive":
        return x.abs()
    if kind == "negative":
        return -x.abs()
    if kind == "sparse":
        return torch.where(x > 0.7, x, 0.0)
    if kind == "integers":
        return x.round()
    return x


@st.composite
def instances(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(weight (F, K), x (N, P, K)) of drawn sizes and kinds."""
    n_rows, fan_in, n_points, n_patches = (draw(st.integers(1, high)) for high in (6, 9, 4, 5))
    weight = values((n_rows, fan_in), draw(kinds), draw(seeds))
    return weight, values((n_points, n_patches, fan_in), draw(kinds), draw(seeds))


def scored(weight: Tensor, data: object, reduce: str = "max", kernel: str = "auto", chunk_bytes: int = 2**20) -> Tensor:
    """Scores of one Linear, as the package gives them."""
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False).to(weight.dtype)
    model.weight = nn.Parameter(weight.clone())
    with mock.patch.object(sensitivities, "AUTO_CHUNK_BYTES", chunk_bytes):
        return sipp.sensitivity(model, data, reduce=reduce, kernel=kernel)["weight"]


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@few
@given(instances(), reduces, kernels)
def test_equals_the_oracle(instance: tuple[Tensor, Tensor], reduce: str, kernel: str) -> None:
    weight, x = instance
    got = {"weight": scored(weight, [x], reduce, kernel)}
    assert not oracle.disagreements(got, {"weight": oracle.linear_sensitivity(weight, x, reduce)})


@few
@given(instances(), reduces)
def test_scores_are_shares(instance: tuple[Tensor, Tensor], reduce: str) -> None:
    """In [0, 1], 0 where the weight or its input is always 0, and mean never above max."""
    weight, x = instance
    scores = scored(weight, [x], reduce)
    assert torch.isfinite(scores).all() and (scores >= 0).all() and (scores <= 1).all()
    assert (scores[weight == 0] == 0).all()
    assert (scores[:, (x == 0).all(0).all(0)] == 0).all()
    assert (scores <= scored(weight, [x], "max") + TIGHT).all()


@few
@given(instances())
def test_a_live_sign_of_a_row_holds_a_whole_share(instance: tuple[Tensor, Tensor]) -> None:
    """The shares of one patch and quadrant sum to 1, so the scores of a row's weights of that sign sum to 1 at least.

    The largest of them is then at least one over their number: no live row can be overlooked.
    """
    weight, x = instance
    scores = scored(weight, [x])
    for sign in (1, -1):
        part = (sign * weight).clamp(min=0)
        is_live = (part @ x.abs().flatten(0, 1).T > 0).any(1)
        n_live = (part > 0).sum(1)[is_live]
        of_sign = torch.where(part > 0, scores, 0.0)[is_live]
        assert (of_sign.sum(1) >= 1 - LOOSE).all()
        assert (of_sign.amax(1) >= (1 - LOOSE) / n_live).all() if len(of_sign) else True
        assert (torch.where(part > 0, scores, 0.0)[~is_live] == 0).all()


@few
@given(instances(), reduces, seeds)
def test_permuting_rows_columns_and_points(instance: tuple[Tensor, Tensor], reduce: str, seed: int) -> None:
    weight, x = instance
    generator = torch.Generator().manual_seed(seed)
    rows, columns, points = (torch.randperm(n, generator=generator) for n in (*weight.shape, len(x)))
    scores = scored(weight, [x], reduce)
    close(scored(weight[rows], [x], reduce), scores[rows], TIGHT)
    close(scored(weight[:, columns], [x[..., columns]], reduce), scores[:, columns], TIGHT)
    close(scored(weight, [x[points]], reduce), scores, TIGHT)


@few
@given(instances(), reduces)
def test_signs_are_symmetric(instance: tuple[Tensor, Tensor], reduce: str) -> None:
    """Turning all weights or all inputs round swaps quadrants and nothing else."""
    weight, x = instance
    scores = scored(weight, [x], reduce)
    for turned in (scored(-weight, [x], reduce), scored(weight, [-x], reduce), scored(-weight, [-x], reduce)):
        close(turned, scores, TIGHT)


@few
@given(instances(), kinds, seeds, reduces)
def test_points_join_by_max(instance: tuple[Tensor, Tensor], kind: str, seed: int, reduce: str) -> None:
    """More points never lower a score of either kind: the scores of two data sets together are the larger of both."""
    weight, x = instance
    y = values((2, *x.shape[1:]), kind, seed)
    joint = torch.maximum(scored(weight, [x], reduce), scored(weight, [y], reduce))
    close(scored(weight, [torch.cat([x, y])], reduce), joint, TIGHT)
    close(scored(weight, [x, y, x], reduce), joint, TIGHT)


@few
@given(instances(), reduces, kernels, st.sampled_from([256, 4096, 2**16]))
def test_batches_chunks_and_kernels_do_not_matter(
    instance: tuple[Tensor, Tensor], reduce: str, kernel: str, chunk_bytes: int
) -> None:
    weight, x = instance
    whole = scored(weight, [x], reduce)
    close(scored(weight, list(x.split(1)), reduce), whole, TIGHT)
    close(scored(weight, list(x.split(3)), reduce), whole, TIGHT)
    close(scored(weight, x, reduce), whole, TIGHT)
    close(scored(weight, [x], reduce, chunk_bytes=chunk_bytes), whole, TIGHT)
    close(scored(weight, [x], reduce, kernel, chunk_bytes), whole, LOOSE)


# --- Scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_scale_of_a_layer_does_not_matter(reduce: str, kernel: str) -> None:
    weight, x = values((5, 8), "normal", 1), values((3, 4, 8), "normal", 2)
    plain = scored(weight, [x], reduce, kernel)
    for of_weights, of_inputs in itertools.product((1.0, *SCALES), repeat=2):
        scaled = scored(weight * of_weights, [x * of_inputs], reduce, kernel)
        torch.testing.assert_close(scaled, plain, rtol=LOOSE, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**8])
def test_dtypes(dtype: torch.dtype, scale: float) -> None:
    """Half-precision models are scored in float32 on the very values they hold."""
    weight, x = (values((5, 8), "normal", 1) * scale).to(dtype), (values((3, 4, 8), "normal", 2) * scale).to(dtype)
    for reduce in ("max", "mean"):
        expected = {"weight": oracle.linear_sensitivity(weight, x, reduce)}
        assert not oracle.disagreements({"weight": scored(weight, [x], reduce)}, expected)


@few
@given(seeds, reduces, kernels)
def test_scales_may_differ_within_a_row_and_between_patches(seed: int, reduce: str, kernel: str) -> None:
    """Powers of two from 2^-60 to 2^60 side by side: no ratio overflows, none is lost to a threshold, none is NaN."""
    generator = torch.Generator().manual_seed(seed)

    def spread(*shape: int) -> Tensor:
        exponents = torch.randint(-60, 61, shape, generator=generator).double()
        return (torch.randint(-1, 2, shape, generator=generator) * 2.0**exponents).float()

    weight, x = spread(4, 6), spread(3, 3, 6)
    got = {"weight": scored(weight, [x], reduce, kernel)}
    assert not oracle.disagreements(got, {"weight": oracle.linear_sensitivity(weight, x, reduce)})


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_a_small_quadrant_beside_a_large_one_keeps_its_whole_share(kernel: str) -> None:
    """The first weight is alone in its quadrant, though its product is 1e-40 beside a product of 1."""
    scores = scored(torch.tensor([[1e-20, -1.0]]), [torch.tensor([[1e-20, 1.0]])], kernel=kernel)
    close(scores, torch.ones(1, 2), TIGHT)


# --- Edge values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_dead_rows_and_dead_inputs_score_zero(reduce: str, kernel: str) -> None:
    weight, x = values((4, 5), "normal", 1), values((3, 2, 5), "normal", 2)
    weight[2] = 0
    assert (scored(weight, [x], reduce, kernel)[2] == 0).all()
    assert (scored(weight, [torch.zeros_like(x)], reduce, kernel) == 0).all()
    assert (scored(torch.zeros_like(weight), [x], reduce, kernel) == 0).all()


@few
@given(kinds, seeds, reduces)
def test_one_hot_patches_score_one(kind: str, seed: int, reduce: str) -> None:
    """A patch with one entry gives its weight the whole output, whatever the sizes: 1, or 0 for a zero weight."""
    weight = values((4, 6), kind, seed)
    close(scored(weight, [torch.eye(6) * 3.7], reduce), (weight != 0).float(), TIGHT)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_ties_stay_ties(sign: float, reduce: str) -> None:
    """Constant weights and inputs share equally: every score is one over the fan-in, bit for bit the same."""
    scores = scored(torch.full((3, 7), 0.3 * sign), [torch.full((2, 4, 7), -1.9)], reduce)
    close(scores, torch.full((3, 7), 1 / 7), TIGHT)
    assert len(scores.unique()) == 1


# --- Convolution geometry --------------------------------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """(a convolution, its input) of drawn dimension, sizes, stride, padding, padding mode, dilation and groups."""
    n_axes = draw(st.integers(1, 3))
    per_axis = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n_axes))  # noqa: E731
    groups, n_in, n_out = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kernel, dilation, size = per_axis(1, 3), per_axis(1, 2), per_axis(3, 6 - n_axes + 1)
    padding = draw(st.one_of(st.just("same"), st.just("valid"), st.just(per_axis(0, 2))))
    stride = (1,) * n_axes if padding == "same" else per_axis(1, 3)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    conv = getattr(nn, f"Conv{n_axes}d")(
        groups * n_in, groups * n_out, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode
    )
    pads = oracle.conv_padding(conv)
    fits = [n + sum(p) >= d * (k - 1) + 1 and max(p) < n for n, p, d, k in zip(size, pads, dilation, kernel)]
    assume(all(fits))
    with torch.no_grad():
        conv.weight.copy_(values(tuple(conv.weight.shape), draw(kinds), draw(seeds)))
    return conv, values((2, groups * n_in, *size), draw(kinds), draw(seeds))


@settings(few, max_examples=60)
@given(convolutions(), reduces)
def test_convolution_geometry(case: tuple[nn.Module, Tensor], reduce: str) -> None:
    conv, x = case
    expected = oracle.conv_sensitivity(conv, oracle.conv_points(conv, x), reduce)
    assert not oracle.disagreements(sipp.sensitivity(conv, [x], reduce=reduce), {"weight": expected})


@few
@given(convolutions())
def test_dense_matrix_of_the_convolution_is_met_by_the_same_windows(case: tuple[nn.Module, Tensor]) -> None:
    """The oracle's windows are right: dotted with the filters they give torch's own convolution."""
    conv, x = case[0].double(), case[1].double()
    groups = oracle.conv_points(conv, x)
    for n, out in enumerate(conv(x)):
        np.testing.assert_allclose(
            oracle.conv_output(conv, groups, n), oracle.f64(out).reshape(len(out), -1), atol=1e-12
        )
