"""The CPU kernel against the float64 definition; skipping, threads, chunks and batches change no bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fresh_process import run_python
from hypothesis import example, given, settings, strategies as st
from oracles.sensitivity import row_sensitivity
from torch import Tensor, nn
from torch.nn import functional as F

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.patches import WeightUse
from sipp.scoring import kernels, sensitivities
from sipp.scoring.kernels import cpu, plain_loops, reference
from sipp.scoring.kernels.cpu import Ratios
from sipp.scoring.kernels.protocol import Chunk

AGREEMENT = 1e-5


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def agree(got: Tensor, expected: Tensor) -> bool:
    return bool(torch.isfinite(got).all()) and torch.allclose(got.double(), expected, rtol=AGREEMENT, atol=0)


@pytest.fixture(params=["every product", "skipping"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test twice: computing every product, and only those that can matter."""
    monkeypatch.setattr(cpu, "MOST_WEIGHTS", 2**30 if request.param == "every product" else 0)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


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
    (4, 1, 70, 3, 2, 1, 43),
    (2, 1, 37, 9, 1, 1, 10),
    (3, 1, 112, 2, 1, 1, 9),  # a point is one block
    (4, 2, 5, 2, 1, 1, 17),  # a point is two blocks
]
Operands = tuple[WeightUse, Tensor, Tensor, Tensor, Chunk]


def layer(geometry: tuple[int, ...], sign: str, n_points: int) -> Operands:
    """(the use, weights, factors of rows, factors of points, the same as a chunk in float64)."""
    channels, groups, rows, kernel, stride, dilation, width = geometry
    x = rand(n_points, channels, 9, width) - 0.5
    if sign == "mixed points":
        x[0], x[1] = x[0].abs(), -x[1].abs()
    elif sign != "both":
        x = x.clamp(min=0) if sign == "positive" else -x.clamp(min=0)
    windows = windows_of(x, groups, kernel, stride, dilation)
    weight = rand(groups, rows, windows.shape[4:].numel(), seed=4) - 0.5
    weight[..., ::3, 1] = 0.0
    row_factors = torch.arange(1.0, groups * rows + 1).view(groups, rows).double()
    occurs = torch.stack(((x > 0).flatten(1).any(1), (x < 0).flatten(1).any(1)))
    scale = SCALES.repeat(n_points)[:n_points]
    factors_TB = torch.stack((scale, -scale)) * occurs
    signs = bool(occurs[0].any()), bool(occurs[1].any())
    patches = windows.permute(1, 4, 5, 6, 0, 2, 3).reshape(len(weight), weight.shape[2], -1)
    chunk = Chunk(patches.double(), n_points, weight.double(), row_factors, signs)
    return WeightUse("", windows, 2), weight, row_factors, factors_TB, chunk


def points_of(use: WeightUse, points: slice) -> WeightUse:
    return replace(use, windows=use.windows[points])


def test_windows_of_another_dtype_are_an_error() -> None:
    """Compiled code would read other numbers, or beyond them."""
    use, weight, row_factors, factors_TB, _ = layer(GEOMETRIES[0], SIGNS[0], 3)
    with pytest.raises(DataError, match="float64"):
        Ratios(weight, row_factors).take_in(replace(use, windows=use.windows.double()), factors_TB)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_maxima_against_the_definition(geometry: tuple[int, ...], sign: str, way: str) -> None:
    use, weight, row_factors, factors_TB, chunk = layer(geometry, sign, 3)
    given = chunk, torch.zeros_like(weight)
    expected, expected_squares = reference.max_chunk(*given)
    ratios = Ratios(weight, row_factors)
    squares = ratios.take_in(use, factors_TB)
    assert agree(ratios.largest(), expected)
    torch.testing.assert_close(squares / SCALES.square(), expected_squares, rtol=1e-5, atol=1e-12)
    one_by_one = Ratios(weight, row_factors)
    for i in (2, 0, 1):  # what was found before stays
        one_by_one.take_in(points_of(use, slice(i, i + 1)), factors_TB[:, i : i + 1])
    assert torch.equal(one_by_one.largest(), ratios.largest())
    plain, plain_squares = plain_loops.max_chunk(*given)
    torch.testing.assert_close(plain, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(plain_squares, expected_squares, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_means_against_the_definition(geometry: tuple[int, ...], sign: str) -> None:
    use, weight, row_factors, factors_TB, chunk = layer(geometry, sign, 11)
    counts = torch.arange(use.n_positions, 0, -1)[:11]  # no two points are averaged alike
    counts = torch.cat((counts, counts[-1:].repeat(11 - len(counts))))
    sums, expected_squares = reference.sum_chunk(chunk)
    ratios = Ratios(weight, row_factors)
    squares = ratios.take_in(use, factors_TB, counts)
    assert agree(ratios.largest(), (sums / counts.view(1, -1, 1, 1, 1)).amax((0, 1)))
    torch.testing.assert_close(squares / SCALES.repeat(4)[:11].square(), expected_squares, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(plain_loops.sum_chunk(chunk)[0], sums, rtol=1e-12, atol=0)
    few = Ratios(weight, row_factors)
    few.take_in(points_of(use, slice(5)), factors_TB[:, :5], counts[:5])
    few.take_in(points_of(use, slice(5, None)), factors_TB[:, 5:], counts[5:])
    assert torch.equal(few.largest(), ratios.largest())


@pytest.mark.parametrize("stride", [1, 2, 3, 16, 17])
def test_runs_of_patches_of_every_length(stride: int) -> None:
    torch.manual_seed(stride)
    layer = nn.Conv1d(2, 3, 3, stride=stride)
    for n_patches in (*range(1, 20), 23, 24, 25, 31, 32, 33, 63, 64, 65):
        x = torch.randn(2, 2, (n_patches - 1) * stride + 3)
        fast, slow = (sipp.sensitivity(layer, [x], kernel=one)["weight"] for one in ("auto", "reference"))
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("kernel", [(1, 4), (2, 3), (1, 1)])
def test_columns_that_lie_in_another_order(kernel: tuple[int, int], reduce: str) -> None:
    """Channels last, as an embedding before a Conv1d has them: a window is one piece of memory, its columns mixed."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(6, 5, kernel), torch.randn(4, 6, 5, 21)
    fast, slow = (
        sipp.sensitivity(layer, given, reduce=reduce, kernel=way)["weight"]  # type: ignore[arg-type]
        for given, way in ((x.contiguous(memory_format=torch.channels_last), "auto"), (x, "reference"))
    )
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=0)


def test_long_sums_stay_accurate() -> None:
    windows, weight = rand(65, 1, 9000), rand(1, 2, 9000, seed=1) - 0.5
    ones = torch.ones(1, 2).double()
    ratios = Ratios(weight, ones)
    ratios.take_in(WeightUse("", windows, 0), torch.ones(2, 65) * torch.tensor([[1.0], [0.0]]))
    chunk = Chunk(windows[:, 0].T[None].double(), 65, weight.double(), ones, (True, False))
    assert agree(ratios.largest(), reference.max_chunk(chunk, torch.zeros_like(weight))[0])


# --- Skipping ---------------------------------------------------------------------------------------------------------


def both_ways(a_KP: Tensor, weight_RK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest ratios of patches of one point: with skipping, without, and by the definition."""
    weight, ones = weight_RK[None], torch.ones(1, len(weight_RK)).double()
    use, factors_TB = WeightUse("", a_KP.T[None, None]), torch.tensor([[1.0], [0.0]])
    found = []
    for most in (-1, 2**30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "MOST_WEIGHTS", most)
            ratios = Ratios(weight, ones)
        ratios.take_in(use, factors_TB)
        found.append(ratios.largest()[0])
    chunk = Chunk(a_KP[None].double(), 1, weight.double(), ones, (True, False))
    expected, _ = reference.max_chunk(chunk, torch.zeros_like(weight).double())
    return found[0], found[1], expected[0]


def hard_cases() -> dict[str, tuple[Tensor, Tensor]]:
    a, weight = (rand(50, 700) - 0.3).clamp(min=0), rand(13, 50, seed=1) - 0.5
    smooth = F.avg_pool1d(rand(1, 50, 4031, seed=2) - 0.45, 32, 1).clamp(min=0)[0]
    alone = torch.zeros(50, 300)
    alone[:, 299] = rand(50)
    late = torch.zeros(50, 700)  # the patch that counts comes last, and its reach is far below that of the others
    late[0], late[:, 699] = 1e-12, 1e12 * rand(50)
    late[1:, :699] = 1e-25
    return {
        "random": (a, weight),
        "smooth": (smooth, weight),
        "ties": (torch.ones(50, 300), weight),
        "growing": (a.sort(dim=-1).values, weight),
        "falling": (a.sort(dim=-1, descending=True).values, weight),
        "zeros": (a * (rand(50, 700, seed=9) > 0.95), weight),
        "one patch": (alone, weight),
        "late": (late, weight),
        "patches of any scale": (a * torch.logspace(-18, 18, 700), weight),
        "columns of any scale": (a * torch.logspace(-9, 9, 50)[:, None], weight),
        "rows without one sign": (a, torch.cat((weight.abs(), -weight.abs(), weight))),
    }


@pytest.mark.parametrize("case", hard_cases())
def test_skipping_changes_no_bit(case: str) -> None:
    skipped, brute, expected = both_ways(*hard_cases()[case])
    assert torch.equal(skipped, brute) and agree(brute, expected)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 150), st.integers(1, 40), st.integers(1, 400)),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.floats(0.0, 8.0),
)
def test_skipping_changes_no_bit_of_any_shape_and_scale(
    shape: tuple[int, int, int], seed: int, share_of_zeros: float, spread: float
) -> None:
    """Lines and patches whose scales differ by up to e^(+-16) or so."""
    rows, fan_in, patches = shape
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(fan_in, patches, generator=generator)
    a *= torch.rand(a.shape, generator=generator) >= share_of_zeros
    a *= (spread * torch.randn(1, patches, generator=generator)).clamp(-16, 16).exp()
    weight = torch.randn(rows, fan_in, generator=generator)
    weight *= (spread * torch.randn(1, fan_in, generator=generator)).clamp(-8, 8).exp()
    skipped, brute, expected = both_ways(a, weight)
    assert torch.equal(skipped, brute) and agree(brute, expected)


# --- Repeatable -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions of several geometries and a Linear, with signed and with non-negative inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=8)
        self.c, self.d = nn.Conv2d(8, 6, 3, padding=2, dilation=2, groups=2), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(F.relu(self.b(F.relu(self.a(x)))))).mean((2, 3)))


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_chunks_threads_and_callers_change_no_score(reduce: str, threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    model, x = Net(), rand(5, 3, 13, 11) - 0.5

    def scores(chunk_bytes: int) -> dict[str, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sensitivities, "AUTO_CHUNK_BYTES", chunk_bytes)
            return sipp.sensitivity(model, [x], reduce=reduce, progress=False)  # type: ignore[arg-type]

    expected, found = scores(32 << 20), [scores(5_000)]
    for n_threads in (1, 2, 3):
        threads(n_threads)
        found.append(scores(32 << 20))
    for got in found:
        assert all(torch.equal(got[name], score) for name, score in expected.items())
    use, weight, row_factors, factors_TB, _ = layer(GEOMETRIES[0], "both", 3)
    with ThreadPoolExecutor(4) as pool:
        several = [Ratios(weight, row_factors) for _ in range(8)]
        list(pool.map(lambda ratios: ratios.take_in(use, factors_TB), several))
    assert all(torch.equal(one.largest(), several[0].largest()) for one in several)


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


# --- The whole range of float32 ---------------------------------------------------------------------------------------

EXPONENTS = st.integers(-148, 127)  # of float32, subnormal numbers too


def values(exponents: Tensor, seed: int, share_of_zeros: float) -> Tensor:
    """Random numbers of these magnitudes and both signs, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = exponents.shape
    numbers = (1 + torch.rand(shape, generator=generator, dtype=torch.float64)) * torch.exp2(exponents.double())
    signs = torch.where(torch.rand(shape, generator=generator) < 0.4, -1.0, 1.0)
    kept = torch.rand(shape, generator=generator) >= share_of_zeros
    return (numbers.clamp(max=3e38) * signs * kept).float()


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
@settings(max_examples=60, deadline=None)
@given(
    patches=st.lists(EXPONENTS, min_size=1, max_size=5),
    spread=st.sampled_from([0, 3, 40, 120]),
    weights=st.lists(st.integers(-60, 0), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    zeros=st.sampled_from([0.0, 0.5, 0.9]),
)
@example(patches=[100, -60], spread=0, weights=[0] * 4, seed=0, zeros=0.0)  # the second patch is 2^-160 of the first
@example(patches=[-140], spread=0, weights=[0] * 4, seed=0, zeros=0.0)  # its scale, 2^140, is no float32
@example(patches=[127], spread=0, weights=[0] * 4, seed=0, zeros=0.0)
def test_patches_of_any_scale(
    kernel: str, reduce: str, patches: list[int], spread: int, weights: list[int], seed: int, zeros: float
) -> None:
    """Two points; each patch has a scale of its own, each value strays from it: no patch is lost."""
    generator = torch.Generator().manual_seed(seed)
    strays = torch.randint(-spread, spread + 1, (2, len(patches), 4), generator=generator)
    exponents = (torch.tensor(patches)[None, :, None] + strays).clamp(-148, 127)
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data = values(torch.tensor(weights).expand(3, 4), seed + 1, 0.2)
    x = values(exponents, seed, zeros)
    if not bool(torch.isfinite(layer(x)).all()):  # the model overflows: another matter
        return
    got = sipp.sensitivity(layer, [x], reduce=reduce, kernel=kernel)["weight"]  # type: ignore[arg-type]
    points = [point.double().numpy() for point in x]
    rows = [row_sensitivity(w, points, reduce) for w in layer.weight.detach().double().numpy()]
    expected = torch.stack([torch.from_numpy(row) for row in rows])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-30)


def test_ranges_of_lines() -> None:
    """What decides on scales and on float64: the lowest, the highest, the smallest magnitude above 0."""
    x = rand(7, 100, seed=3) - 0.5
    x[0], x[1], x[2, 5], x[3, 7] = x[0].abs(), -x[1].abs(), 0.0, 1e-45
    x[4, 3], x[5, 9], x[6] = math.nan, -math.inf, 0.0
    found, expected = cpu.extremes(x), reference.extremes(x)
    nan = expected.isnan().any(0)
    assert torch.equal(found[:2].isnan().any(0), nan)
    assert torch.equal(found[0][~nan], expected[0][~nan].clamp(max=0))
    assert torch.equal(found[1][~nan], expected[1][~nan].clamp(min=0))
    assert torch.equal(found[2][~nan], expected[2][~nan])


def test_ordinary_points_need_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> Tensor:
        raise AssertionError("float64 for an ordinary point")

    monkeypatch.setattr(plain_loops, "_filled", never)
    layer = nn.Linear(4, 3, bias=False)
    sipp.sensitivity(layer, [torch.randn(50, 4).exp() * torch.tensor([1.0, 1e-8, 1e8, 0.0])])
    with pytest.raises(AssertionError, match="ordinary"):
        sipp.sensitivity(layer, [torch.tensor([[1e38, 1.0, 1e-30, 1e-8]])])


# --- Which kernel runs ------------------------------------------------------------------------------------------------

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_choice_of_a_kernel() -> None:
    assert kernels.pick("auto", CPU) is cpu.KERNEL
    assert kernels.pick("reference", CPU) is kernels.pick("reference", CUDA) is reference.KERNEL
    with pytest.raises(OptionError, match="fast"):
        kernels.pick("fast", CPU)  # type: ignore[arg-type]


def test_inputs_of_another_size_than_the_layer_takes_are_refused() -> None:
    """Compiled code does not check bounds: it must not be reached."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for x in (torch.rand(20, 9), torch.rand(20, 3, 7)):
        with pytest.raises((DataError, ModelError)):
            sipp.sensitivity(model, x)


ELSEWHERE = """
import logging, platform, sys
if sys.argv[2] == "riscv64":
    platform.machine = lambda: "riscv64"
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
sys.path.insert(0, sys.argv[1])
from scoring.kernels.test_cpu import found
import torch
torch.save(found(), sys.argv[3])
"""


def found() -> dict[str, Tensor]:
    """Scores and a pruning of a small network, with a point that float32 does not hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 40))
    x = torch.randn(5, 2, 6, 6)
    x[3] *= torch.logspace(-30, 30, 36).view(6, 6)
    scores = {f"{r} {k}": v for r in ("max", "mean") for k, v in sipp.sensitivity(model, x, reduce=r).items()}
    pruned = sipp.prune(model, x, keep=0.4, method="sipp-hybrid", seed=1)
    return scores | {f"kept {k}": mask for k, mask in pruned.masks.items()}


@pytest.mark.parametrize(
    ("where", "settings", "said"),
    [
        ("riscv64", {}, "no vector code is written for riscv64 processors"),
        ("here", {"NUMBA_DISABLE_JIT": "1"}, "NUMBA_DISABLE_JIT is set"),
    ],
)
def test_without_vector_code_or_a_compiler(where: str, settings: dict[str, str], said: str, tmp_path: Path) -> None:
    """Plain loops, or the definition, with one warning: the same scores up to rounding, the same number of weights."""
    saved = tmp_path / "found.pt"
    done = run_python(ELSEWHERE, Path(__file__).parents[2], where, saved, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(said) == 1
    here, there = found(), torch.load(saved)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        if name.startswith("kept"):
            assert int(tensor.sum()) == int(there[name].sum())
        else:
            torch.testing.assert_close(there[name], tensor, rtol=1e-5, atol=1e-30)
