"""Norms of maps against the matrix of the map."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracles.dense_map import dense_norm
from torch import Tensor, nn

from sipp.bounds import operator_norms as norms
from sipp.bounds.operator_norms import average_pool_norm, conv_norm, linear_norm, max_pool_gain
from sipp.bounds.rules import SLOPES

N_CONVOLUTIONS = 300


@dataclass(frozen=True)
class Case:
    conv: nn.Module
    input_size: tuple[int, ...]
    true_norm: float


def _pick(generator: torch.Generator, choices: list[int]) -> int:
    return choices[int(torch.randint(len(choices), (1,), generator=generator))]


def _weight(conv: nn.Module, generator: torch.Generator) -> None:
    weight = torch.randn(conv.weight.shape, dtype=torch.float64, generator=generator)
    kind = _pick(generator, [0, 0, 1, 2])
    if kind == 1:  # all of one sign: windows add up, which is where a forgotten sqrt(m) shows
        weight = weight.abs()
    if kind == 2:
        weight = weight * (torch.rand(weight.shape, generator=generator) < 0.3)
    conv.weight.data = weight


def _cases(seed: int) -> Iterator[Case]:
    """Random convolutions of rank 1 to 3: kernel, stride, dilation, padding and groups."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rank, groups = _pick(generator, [1, 2, 2, 3]), _pick(generator, [1, 1, 2, 3])
        channels = (groups * _pick(generator, [1, 2]), groups * _pick(generator, [1, 2, 3]))
        kernel = [_pick(generator, [1, 2, 3, 4, 5] if rank < 3 else [1, 2, 3]) for _ in range(rank)]
        stride = [_pick(generator, [1, 1, 2, 3]) for _ in range(rank)]
        dilation = [_pick(generator, [1, 1, 2, 3]) for _ in range(rank)]
        size = [_pick(generator, list(range(3, 9)) if rank < 3 else [3, 4]) for _ in range(rank)]
        padding = [_pick(generator, [0, k // 2, k // 2, 3]) for k in kernel]
        axes = zip(size, kernel, stride, dilation, padding)
        if min((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in axes) < 1:
            continue
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
        conv = kind(*channels, kernel, stride, padding, dilation, groups, bias=False, dtype=torch.float64)
        _weight(conv, generator)
        with torch.no_grad():
            yield Case(conv, tuple(size), dense_norm(conv, (channels[0], *size)))


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [case for case, _ in zip(_cases(seed=0), range(N_CONVOLUTIONS))]


def _bound(conv: nn.Module, input_size: tuple[int, ...]) -> float:
    return conv_norm(
        conv.weight,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        input_size=input_size,
    )


def plain_norm(weight: Tensor, stride: int = 1, padding: int = 0, groups: int = 1, **size: tuple[int, ...]) -> float:
    """The bound of a convolution without dilation, the same along each axis."""
    rank = weight.dim() - 2
    windows = {"stride": (stride,) * rank, "padding": (padding,) * rank, "dilation": (1,) * rank}
    return conv_norm(weight, **windows, groups=groups, **size)


def _exceeded(bound: Callable[[Case], float], cases: list[Case]) -> list[Case]:
    """The cases whose map stretches more than the bound says."""
    return [case for case in cases if not bound(case) >= case.true_norm]


def test_a_bound_holds_for_every_convolution(cases: list[Case]) -> None:
    assert _exceeded(lambda case: _bound(case.conv, case.input_size), cases) == []
    assert len({(case.conv.stride, case.conv.padding, case.conv.dilation) for case in cases}) > 100


def test_a_bound_holds_where_the_largest_response_lies_near_one_of_the_frequencies_that_padding_adds() -> None:
    convs = []
    for seed in (137, 165, 185, 221):
        generator = torch.Generator().manual_seed(seed)
        n = int(torch.randint(3, 7, (1,), generator=generator))
        conv = nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=torch.float64)
        conv.weight.data = torch.randn(1, 1, 3, 3, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            convs.append(Case(conv, (n, n), dense_norm(conv, (1, n, n))))
    assert _exceeded(lambda case: _bound(case.conv, case.input_size), convs) == []


@pytest.mark.parametrize("stride", [1, 2])
def test_a_bound_is_within_one_percent_on_larger_images(stride: int) -> None:
    weight = torch.randn(2, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(stride))
    bound = plain_norm(weight, stride=stride, padding=1, input_size=(28, 28))
    true = dense_norm(lambda x: F.conv2d(x, weight, padding=1, stride=stride), (1, 28, 28))
    assert true <= bound <= 1.01 * true


def test_blocks_change_nothing_and_too_many_frequencies_leave_the_count_of_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = plain_norm(weight, padding=1, input_size=(8, 9))
    monkeypatch.setattr(norms, "BLOCK_ENTRIES", 1)
    assert plain_norm(weight, padding=1, input_size=(8, 9)) == pytest.approx(whole, rel=1e-12)
    counted = 3 * float(torch.linalg.matrix_norm(weight.flatten(1), ord=2))
    monkeypatch.setattr(norms, "MAX_TRANSFER_WORK", 1.0)
    assert whole < 0.9 * counted
    assert plain_norm(weight, padding=1, input_size=(8, 9)) == pytest.approx(counted, rel=1e-8)


@pytest.mark.parametrize("scale", [1e-300, 1e200])
def test_norms_scale_with_the_weights(scale: float) -> None:
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = plain_norm(weight, padding=1, input_size=(5, 5))
    assert plain_norm(weight * scale, padding=1, input_size=(5, 5)) == pytest.approx(plain * scale, rel=1e-9)
    assert linear_norm(weight.flatten(1) * scale) == pytest.approx(linear_norm(weight.flatten(1)) * scale, rel=1e-9)


def test_weights_that_are_no_numbers_have_no_finite_norm() -> None:
    for value in (math.nan, math.inf):
        assert linear_norm(torch.tensor([[value, 1.0]])) == math.inf
        assert plain_norm(torch.full((1, 1, 3, 3), value), input_size=(5, 5)) == math.inf


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("count_include_pad", [False, True])
def test_average_pool_norm_is_that_of_its_matrix(ceil_mode: bool, count_include_pad: bool) -> None:
    kernel, stride, padding = (2, 3), (3, 2), (0, 1)
    flags = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    true = dense_norm(lambda x: F.avg_pool2d(x, kernel, stride, padding, **flags), (1, 6, 7))
    found = average_pool_norm((6, 7), kernel=kernel, stride=stride, padding=padding, **flags)
    assert true <= found <= true * (1 + 1e-8)


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "windows"), [(2, 2, 1, 1), (3, 2, 1, 2), (3, 2, 2, 3), (3, 4, 1, 1)]
)
def test_max_pool_gain_is_reached_by_the_busiest_pixel(kernel: int, stride: int, dilation: int, windows: int) -> None:
    pixels = torch.eye(24, dtype=torch.float64).unsqueeze(1)
    pooled = F.max_pool1d(pixels, kernel, stride, 0, dilation)
    reached = float(torch.linalg.vector_norm(pooled.flatten(1), dim=1).max())
    gain = max_pool_gain(kernel=(kernel,), stride=(stride,), dilation=(dilation,), n_out=pooled.shape[2:])
    assert gain == pytest.approx(math.sqrt(windows)) and reached == pytest.approx(gain)


@pytest.mark.parametrize("name", sorted(SLOPES))
def test_activation_slopes_bound_the_steepest_secant_and_are_not_loose(name: str) -> None:
    x = torch.linspace(-12, 12, 1_000_001, dtype=torch.float64)
    limits = {"clamp": (-1, 1), "clamp_min": (-1,)}.get(name, ())
    y = getattr(torch.ops.aten, name)(x, *limits)
    steepest = float((y.diff() / x.diff()).abs().max())
    assert SLOPES[name] * (1 - 2e-4) <= steepest <= SLOPES[name] * (1 + 1e-9)
