"""The CPU kernels against the float64 definitions; skipping, threads, chunks and batches change no bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from scoring.kernels.block_products import counted, max_ratios, max_times, mean_ratios
from torch import Tensor, nn

import sipp
from sipp.native.compiling import calling, compiled
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.cpu import kernel as cpu, maxima

AGREEMENT = 1e-5
SHAPES = [
    (1, 1, 1, 1),
    (1, 5, 7, 33),
    (3, 2, 9, 100),
    (8, 1, 9, 257),
    (1, 17, 40, 1000),
    (2, 6, 33, 64),
    (1, 4, 600, 130),
    (1, 70, 30, 200),
    (1, 112, 12, 200),
]


@pytest.fixture(params=["every product", "skipping"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs every test twice: computing every product, and only those that can matter."""
    monkeypatch.setattr(cpu, "MOST_WEIGHTS", 2**30 if request.param == "every product" else 0)
    return str(request.param)


only_once = pytest.mark.parametrize("way", ["skipping"], indirect=True)  # of tests that go both ways themselves


def test_small_layers_compute_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cpu._computes_every_product(torch.empty(64, 1, 9)) and cpu._computes_every_product(
        torch.empty(1, 16, 27)
    )  # depthwise; a first layer
    assert not cpu._computes_every_product(torch.empty(1, 16, 144))


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def operands(shape: tuple[int, int, int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(patches with zeros, reciprocals, signs, weights)."""
    groups, rows, fan_in, patches = shape
    a = (rand(groups, fan_in, patches, seed=seed) - 0.3).clamp(min=0)
    weight = rand(groups, rows, fan_in, seed=seed + 1) - 0.5
    sums = reference.quadrant_sums(weight, a)
    return a, torch.where(sums > 0, 1 / sums, 0).float(), weight > 0, weight


def agree(got: Tensor, expected: Tensor) -> bool:
    return bool(torch.isfinite(got).all()) and torch.allclose(got.double(), expected, rtol=AGREEMENT, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_products_agree_with_the_reference(shape: tuple[int, int, int, int], way: str) -> None:
    a, inverse, positive, weight = operands(shape)
    assert agree(cpu.quadrant_sums(weight, a), reference.quadrant_sums(weight, a))
    best = max_times(a, inverse, positive, skip=way == "skipping")
    assert agree(best, reference.max_times(a, inverse, positive))
    by_point = a.unflatten(-1, (1, -1)), inverse.unflatten(-1, (1, -1))
    assert agree(cpu.sum_times(*by_point, positive), reference.sum_times(*by_point, positive))
    assert not agree(best, reference.max_times(a, inverse, ~positive)) or shape == (1, 1, 1, 1)  # the sign matters


def test_long_sums_stay_accurate() -> None:
    a, weight = rand(1, 9000, 65), rand(1, 2, 9000, seed=1) - 0.5
    assert agree(cpu.quadrant_sums(weight, a), reference.quadrant_sums(weight, a))


def test_columns_without_a_weight_cost_nothing() -> None:
    weight = rand(1, 4, 600) - 0.5
    weight[..., ::3] = 0.0
    ends = cpu.pack_weights(weight).ends_GNCQ
    assert ends[0].amax(-1).sum(-1).tolist() == [400, 400]  # two panels of two rows, each over all columns


# --- Skipping ---------------------------------------------------------------------------------------------------------


def smooth(rows: int, fan_in: int, patches: int) -> tuple[Tensor, Tensor, Tensor]:
    """Operands like those of a convolution behind a ReLU: neighbours alike, so that most blocks are skipped."""
    a = F.avg_pool1d(rand(1, fan_in, patches + 31, seed=2) - 0.45, 32, 1).clamp(min=0)
    weight = rand(1, rows, fan_in, seed=3) - 0.5
    sums = reference.quadrant_sums(weight, a)
    return a, torch.where(sums > 0, 1 / sums, 0).float(), weight > 0


def hard_cases() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    a, inverse, positive, _ = operands((1, 13, 50, 700))
    signs = positive
    return {
        "random": (a, inverse, signs),
        "smooth": smooth(13, 50, 4000),
        "ties": (torch.ones(1, 20, 300), torch.ones(2, 1, 5, 300), torch.rand(1, 5, 20) > 0.5),
        "growing": (a.sort(dim=-1).values, inverse.sort(dim=-1).values, signs),
        "falling": (a.sort(dim=-1, descending=True).values, inverse, signs),
        "zeros": (a * (rand(1, 50, 700, seed=9) > 0.95), inverse, signs),
        "tiny and huge": (a * 1e-30, inverse * 1e30, signs),
        "subnormal": (a * 1e-38, inverse, signs),
        "products that vanish in the test": vanishing(a_late=1e-30, inverse_late=1e10, inverse_other=1e30),
        "reciprocals that vanish in the test": vanishing(a_late=1e30, inverse_late=1e-37, inverse_other=1e10),
    }


def vanishing(a_late: float, inverse_late: float, inverse_other: float) -> tuple[Tensor, Tensor, Tensor]:
    """Two blocks of one line: in the second one patch counts, and the others' reciprocals are far larger than its own.

    Scaled by the mean of the line its reciprocal, or the product with its activation, is no float32 above 0 any more.
    """
    a, inverse = torch.zeros(1, 1, 128), torch.full((2, 1, 1, 128), inverse_other)
    a[..., 0], inverse[..., :64] = 1e-12 if a_late > 1 else 0.0, 1.0
    a[..., 100], inverse[..., 100] = a_late, inverse_late
    return a.repeat(1, 1, 4), inverse.repeat(1, 1, 1, 4), torch.ones(1, 1, 1, dtype=torch.bool)  # for each thread


@pytest.mark.parametrize("case", hard_cases())
@only_once
def test_skipping_changes_no_bit(case: str) -> None:
    a, inverse, positive = hard_cases()[case]
    skipped, brute = (max_times(a, inverse, positive, skip=skip) for skip in (True, False))
    assert torch.equal(skipped, brute)
    assert agree(brute, reference.max_times(a, inverse, positive)) or case == "subnormal"


@only_once
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 150), st.integers(1, 40), st.integers(1, 400)),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([1.0, 1e-20, 1e20]),
    st.floats(0.0, 8.0),
)
def test_any_shape_and_scale(
    shape: tuple[int, int, int, int], seed: int, share_of_zeros: float, scale: float, spread: float
) -> None:
    """Random sizes of everything; lines and patches whose scales differ by up to e^(+-16) or so."""
    groups, rows, fan_in, patches = shape
    a, inverse, positive, _ = operands((groups, rows, fan_in, patches), seed)
    generator = torch.Generator().manual_seed(seed)
    a = a * (torch.rand(a.shape, generator=generator) >= share_of_zeros) * scale
    a = a * (spread * torch.randn(1, 1, patches, generator=generator)).clamp(-16, 16).exp()
    inverse = inverse / scale * (spread * torch.randn(2, groups, rows, 1, generator=generator)).clamp(-16, 16).exp()
    skipped, brute = (max_times(a, inverse, positive, skip=skip) for skip in (True, False))
    assert torch.equal(skipped, brute)
    assert agree(brute, reference.max_times(a, inverse, positive))


@only_once
def test_skipping_too_much_is_caught() -> None:
    operands = smooth(32, 32, 64 * 40)
    brute, (exact, n_computed) = max_times(*operands, skip=False), counted(*operands)
    assert torch.equal(exact, brute)
    n_all = 32 * 32 * 64
    assert 0 < n_computed < 0.5 * n_all * 40  # it does skip
    assert not torch.equal(counted(*operands, understate=0.9)[0], brute)
    assert counted(*smooth(32, 32, 64))[1] < 0.7 * n_all  # even where nothing is known yet


def test_functions_for_one_address_are_declared_alike() -> None:
    with pytest.raises(ValueError, match="take different arguments"):
        calling(maxima.raise_best, maxima.transpose_lines)


# --- Repeatable -------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def ratios(weight: Tensor, a: Tensor) -> Tensor:
    """The largest ratios of the patches as positions of one point."""
    factors = {"factors_TB": torch.tensor([[1.0], [0.0]]), "row_factors_GR": torch.ones(weight.shape[:2]).double()}
    return max_ratios(a.transpose(1, 2)[None], 1, weight, **factors)[0]


def test_threads_change_no_bit_and_torchs_number_is_kept(threads: Callable[[int], None]) -> None:
    a, _, _, weight = operands((2, 9, 37, 1500))
    results = []
    for n in (1, 2, 3, 2):
        threads(n)
        results.append((cpu.quadrant_sums(weight, a), ratios(weight, a)))
        assert torch.get_num_threads() == n
    for sums, best in results[1:]:
        assert torch.equal(sums, results[0][0]) and torch.equal(best, results[0][1])


def test_several_callers_at_once() -> None:
    a, _, _, weight = operands((1, 9, 37, 1500))
    expected = ratios(weight, a)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(r, expected) for r in pool.map(lambda _: ratios(weight, a), range(8)))


def test_other_geometries_meanwhile_take_no_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread may do before the loops of this one start: more geometries than are kept, and new memory."""
    windows, weight, factors, _ = layer(GEOMETRIES[0], "both", 3)
    expected, expected_squares = max_ratios(windows, 2, weight, **factors)
    real, meanwhile, ready = cpu._calls, [], [cpu.new_ratios(rand(1, 4, k), torch.ones(1, 4).double()) for k in (6, 45)]

    def interrupted(way: cpu.Way, in_runs: bool) -> np.ndarray:
        factors_TB = torch.tensor([[1.0], [0.0]])
        for i in range(cpu.KEPT_GEOMETRIES):
            for some in ready:
                other = rand(1, 1, 120 + i, some.shape[2] + i)[..., : some.shape[2]]
                cpu._layer("another thread", some, other, 1, factors_TB)
        # as long as what this layer reads: memory that was freed is written anew
        meanwhile.extend(torch.zeros(n, dtype=torch.int64) for n in (7 * 18, 45) * 40)
        return real(way, in_runs)

    monkeypatch.setattr(cpu, "_calls", interrupted)
    best, squares = max_ratios(windows, 2, weight, **factors)
    assert meanwhile and torch.equal(best, expected) and torch.equal(squares, expected_squares)


class Net(nn.Module):
    """Convolutions of several geometries and a Linear, with signed and with non-negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.c, self.d = nn.Conv2d(8, 6, 3, padding=2, dilation=2, groups=2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(F.relu(self.b(F.relu(self.a(x)))))).mean((2, 3)))


def scores(reduce: str, batches: list[Tensor], chunk_bytes: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return sipp.sensitivity(Net(), batches, reduce=reduce, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_chunks_and_threads_change_no_score(reduce: str, threads: Callable[[int], None]) -> None:
    x = rand(5, 3, 13, 11) - 0.5
    expected = scores(reduce, [x], 32 << 20)
    for chunk_bytes in (1, 5_000, 60_000):
        got = scores(reduce, [x], chunk_bytes)
        assert all(torch.equal(got[name], score) for name, score in expected.items())
    threads(1)
    got = scores(reduce, [x], 32 << 20)
    assert all(torch.equal(got[name], score) for name, score in expected.items())


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_a_point_is_scored_the_same_in_any_batch(reduce: str) -> None:
    """The layer's own input is given, so that the forward pass of the model cannot differ."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(4, 7, 3, padding=1), rand(6, 4, 9, 8) - 0.5
    x *= torch.tensor([60.0, 60, -70, 60, 60, 60]).exp2().view(-1, 1, 1, 1)  # by the scale of its batch, x[2] vanishes
    whole, *others = (
        sipp.sensitivity(model, batches, reduce=reduce)["weight"] for batches in ([x], list(x.split(1)), [x[:4], x[4:]])
    )
    assert all(torch.equal(whole, other) for other in others)


# --- Windows ----------------------------------------------------------------------------------------------------------


def windows_of(x: Tensor, groups: int, kernel: int, stride: int, dilation: int) -> Tensor:
    """(B, G, oh, ow, C / G, kh, kw) by unfold alone."""
    reach = dilation * (kernel - 1) + 1
    view = x.unfold(2, reach, stride).unfold(3, reach, stride)[..., ::dilation, ::dilation]
    return view.unflatten(1, (groups, -1)).permute(0, 1, 3, 4, 2, 5, 6)


SCALES = torch.tensor([1.0, 0.5, 4.0])  # of points
SIGNS = ["both", "positive", "negative", "mixed points"]
GEOMETRIES = [  # channels, groups, rows, kernel, stride, dilation, width
    (5, 1, 7, 3, 1, 1, 20),
    (8, 8, 1, 3, 1, 1, 9),
    (6, 2, 3, 3, 2, 1, 9),
    (3, 1, 4, 2, 1, 3, 12),
    (70, 1, 3, 1, 1, 1, 5),
    (4, 1, 3, 3, 2, 1, 43),
    (2, 1, 37, 9, 1, 1, 10),
    (3, 1, 5, 2, 1, 1, 9),  # a point is one block
    (4, 2, 5, 2, 1, 1, 17),  # a point is two blocks
]
Operands = tuple[Tensor, Tensor, dict[str, Tensor], tuple[bool, bool]]


def layer(geometry: tuple[int, ...], sign: str, n_points: int) -> Operands:
    """(windows, weights, factors of points and rows, the signs that occur)."""
    channels, groups, rows, kernel, stride, dilation, width = geometry
    x = rand(n_points, channels, 9, width) - 0.5
    if sign == "mixed points":
        x[0], x[1] = x[0].abs(), -x[1].abs()
    elif sign != "both":
        x = x.clamp(min=0) if sign == "positive" else -x.clamp(min=0)
    windows = windows_of(x, groups, kernel, stride, dilation)
    weight = rand(groups, rows, windows.shape[4:].numel(), seed=4) - 0.5
    row_factors = torch.arange(1.0, groups * rows + 1).view(groups, rows).double()
    occurs = torch.stack(((x > 0).flatten(1).any(1), (x < 0).flatten(1).any(1)))
    scale = SCALES.repeat(n_points)[:n_points]
    factors = {"factors_TB": torch.stack((scale, -scale)) * occurs, "row_factors_GR": row_factors}
    return windows, weight, factors, (bool(occurs[0].any()), bool(occurs[1].any()))


def in_float64(windows: Tensor, weight: Tensor) -> tuple[Tensor, int, Tensor]:
    """The patches, the number of points and the weights, as functions of a chunk take them."""
    patches = windows.permute(1, 4, 5, 6, 0, 2, 3).reshape(len(weight), weight.shape[2], -1)
    return patches.double(), len(windows), weight.double()


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_max_ratios_against_the_definition(geometry: tuple[int, ...], sign: str) -> None:
    windows, weight, factors, occurs = layer(geometry, sign, 3)
    best, squares = max_ratios(windows, 2, weight, **factors)
    given = *in_float64(windows, weight), factors["row_factors_GR"], occurs
    expected, expected_squares = reference.KERNEL.max_chunk(*given, torch.zeros_like(weight))
    assert agree(best, expected)
    torch.testing.assert_close(squares / SCALES.square(), expected_squares, rtol=1e-5, atol=1e-12)
    ratios = cpu.new_ratios(weight, factors["row_factors_GR"])
    for i in (2, 0, 1):  # what was found before stays
        cpu.max_ratios(ratios, windows[i : i + 1], 2, factors_TB=factors["factors_TB"][:, i : i + 1])
    assert torch.equal(cpu.largest_ratios(ratios), best)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_mean_ratios_against_the_definition(geometry: tuple[int, ...], sign: str) -> None:
    windows, weight, factors, occurs = layer(geometry, sign, 11)
    counts = torch.arange(windows[0, 0, ..., 0, 0, 0].numel(), 0, -1)[:11]  # no two points are averaged alike
    counts = torch.cat((counts, counts[-1:].repeat(11 - len(counts))))
    mean, squares = mean_ratios(windows, 2, weight, **factors, counts_B=counts)
    given = *in_float64(windows, weight), factors["row_factors_GR"], occurs
    sums, expected_squares = reference.KERNEL.sum_chunk(*given)
    assert agree(mean, (sums / counts.view(1, -1, 1, 1, 1)).amax((0, 1)))
    scale = SCALES.repeat(4)[:11]
    torch.testing.assert_close(squares / scale.square(), expected_squares, rtol=1e-5, atol=1e-12)
    alone = []
    for i in range(11):
        own = factors | {"factors_TB": factors["factors_TB"][:, i : i + 1], "counts_B": counts[i : i + 1]}
        alone.append(mean_ratios(windows[i : i + 1], 2, weight, **own)[0])
    assert torch.equal(torch.stack(alone).amax(0), mean)  # bit for bit: what stands beside a point does not matter


@pytest.mark.parametrize("fan_in", [1, 15, 16, 17, 47])
@pytest.mark.parametrize("n_points", [3, 16, 53, 130])
@pytest.mark.parametrize("gap", [0, 3])
def test_linear_inputs_with_gaps_match_the_reference(fan_in: int, n_points: int, gap: int) -> None:
    """A Linear: columns side by side, points apart."""
    x = (rand(n_points, gap + fan_in + gap, seed=6) - 0.5)[:, gap : gap + fan_in]
    windows, weight = x[:, None, None], rand(1, 5, fan_in, seed=7) - 0.5
    scale = rand(n_points, seed=8) + 0.5
    factors = {"factors_TB": torch.stack((scale, -scale)), "row_factors_GR": torch.ones(1, 5).double()}
    best, squares = max_ratios(windows, 1, weight, **factors)
    given = x.T[None].double(), n_points, weight.double(), factors["row_factors_GR"], (True, True)
    expected, expected_squares = reference.KERNEL.max_chunk(*given, torch.zeros_like(weight))
    assert agree(best, expected)
    torch.testing.assert_close(squares / scale.square(), expected_squares, rtol=1e-5, atol=1e-12)


def test_extremes() -> None:
    x = rand(6, 1000) - 0.5
    x[1], x[2], x[3], x[0, :5] = x[1].abs(), -x[2].abs(), 0.0, -0.0
    lowest, highest, smallest = cpu.extremes(x)
    expected = reference.extremes(x)
    assert torch.equal(lowest, expected[0].clamp(max=0)) and torch.equal(highest, expected[1].clamp(min=0))
    assert torch.equal(smallest, expected[2])
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        x[5, 77] = bad
        lowest, highest, _ = cpu.extremes(x)
        assert not torch.isfinite(torch.maximum(highest, -lowest))[5]
        assert torch.isfinite(torch.maximum(highest, -lowest))[:5].all()
    assert torch.equal(cpu.extremes(x[:5].double())[2], expected[2][:5].double())


# --- Compiling --------------------------------------------------------------------------------------------------------


def test_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = numba.njit

    def no_folder(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(*args, **options)

    def double(x: np.ndarray) -> float:
        return x.sum() * 2

    monkeypatch.setattr(numba, "njit", no_folder)
    with caplog.at_level(logging.INFO, "sipp"):
        function = compiled(double)
    assert function(np.ones(3)) == 6
    # and no more of it; that compiling takes a while may be said too, on a slow machine
    assert [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()] == [
        "Numba's cache could not be written (no folder can be written): each process compiles again"
    ]


@pytest.mark.parametrize("stride", [1, 2, 3, 16, 17])
def test_runs_of_patches_of_every_length(stride: int) -> None:
    torch.manual_seed(stride)
    layer = nn.Conv1d(2, 3, 3, stride=stride)
    for n_patches in (*range(1, 20), 23, 24, 25, 31, 32, 33, 63, 64, 65):
        x = torch.randn(2, 2, (n_patches - 1) * stride + 3)
        fast = sipp.sensitivity(layer, [x], kernel="cpu")["weight"]
        slow = sipp.sensitivity(layer, [x], kernel="reference")["weight"]
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("kernel", [(1, 4), (4, 1), (2, 3), (1, 1)])
def test_columns_that_lie_in_another_order(kernel: tuple[int, int], reduce: str) -> None:
    """Channels last, as an embedding before a Conv1d has them: a window is one piece of memory, its columns mixed."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(6, 5, kernel), torch.randn(4, 6, 5, 21)
    fast, slow = (
        sipp.sensitivity(layer, given, reduce=reduce, kernel=way)["weight"]  # type: ignore[arg-type]
        for given, way in ((x.contiguous(memory_format=torch.channels_last), "cpu"), (x, "reference"))
    )
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=0)
