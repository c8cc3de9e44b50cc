"""The norm of a zero-padded map from its own Gram matrix: against the matrix of the map, and what is refused."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from oracles.dense_map import dense_norm
from torch import Tensor

from sipp.bounds.sound import norms, padded_norms
from sipp.bounds.sound.norms import conv_geometry, conv_norm

N_MAPS = 150
N_INPUTS = 200  # the largest map of the random ones: its matrix is decomposed
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


@dataclass(frozen=True)
class Map:
    weight: Tensor
    options: dict
    input_size: tuple[int, ...]
    true_norm: float


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """No answer of another test, where a line may have been broken on purpose, is remembered."""
    padded_norms._remembered.cache_clear()
    yield
    padded_norms._remembered.cache_clear()


def _map(weight: Tensor, input_size: tuple[int, ...], **options: object) -> Map:
    channels = weight.shape[1] * int(options.get("groups", 1))
    convolution = CONVOLUTIONS[weight.dim() - 3]
    true = dense_norm(lambda x: convolution(x, weight, **options), (channels, *input_size))
    return Map(weight, options, input_size, true)


def _random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _random_maps(seed: int) -> Iterator[Map]:
    """Zero-padded convolutions of rank 1 to 3 on 1 to 12 positions: strides, dilations, groups, any padding."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    while True:
        rank, groups = pick(1, 2, 2, 3), pick(1, 1, 2, 3)
        kernel = [pick(1, 2, 3, 3, 4, 5) for _ in range(rank)]
        stride, dilation = [pick(1, 1, 2, 3) for _ in range(rank)], [pick(1, 1, 2, 3) for _ in range(rank)]
        size = tuple(pick(*range(1, 13)) for _ in range(rank))
        padding: str | list[int] = [pick(0, k // 2, k // 2, 4) for k in kernel]
        channels, rows = pick(1, 2, 3, 8), pick(1, 2, 3, 8)
        spans = [n + 2 * p - d * (k - 1) for n, p, k, d in zip(size, padding, kernel, dilation)]
        if min(spans) < 1 or math.prod(size) * channels * groups > N_INPUTS:
            continue
        if set(stride) == {1} and pick(0, 1):
            padding = "same"
        weight = torch.randn(groups * rows, channels, *kernel, dtype=torch.float64, generator=generator)
        weight = (weight, weight.abs(), torch.ones_like(weight))[pick(0, 0, 1, 2)]
        yield _map(weight, size, stride=stride, dilation=dilation, padding=padding, groups=groups)


@pytest.fixture(scope="module")
def maps() -> list[Map]:
    return [one for one, _ in zip(_random_maps(seed=0), range(N_MAPS))]


def _value(one: Map) -> float:
    return conv_norm(one.weight, input_size=one.input_size, **one.options).value


def _low(bound: Callable[[Map], float], maps: list[Map]) -> list[Map]:
    """The maps that stretch more than the bound says."""
    return [one for one in maps if not bound(one) >= one.true_norm * (1 - 1e-12)]


def _loose(bound: Callable[[Map], float], maps: list[Map]) -> list[Map]:
    """The maps whose bound is more than 1 % above their norm."""
    return [one for one in maps if not bound(one) <= 1.01 * one.true_norm]


def test_every_bound_holds_and_is_within_one_percent(maps: list[Map]) -> None:
    assert _low(_value, maps) == []
    assert _loose(_value, maps) == []


def test_the_same_check_finds_the_other_forms_too_loose(maps: list[Map], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_norms, "MAX_SECTION_WORK", 0.0)
    assert _low(_value, maps) == []
    assert len(_loose(_value, maps)) > N_MAPS // 4


def test_the_same_check_catches_an_estimate_in_place_of_the_certificate(
    maps: list[Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_norms, "LANCZOS_STEPS", 3)
    monkeypatch.setattr(padded_norms, "_certified", lambda coupling, plan, level: level)
    assert _low(_value, maps)


def test_poor_estimates_are_refused_and_the_other_forms_stand(maps: list[Map], monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = padded_norms._largest_from_below
    monkeypatch.setattr(padded_norms, "_largest_from_below", lambda *given: 0.97 * estimate(*given))
    assert _low(_value, maps) == []
    forms = {conv_norm(one.weight, input_size=one.input_size, **one.options).form for one in maps}
    assert forms <= {"taps", "transfer", "section"} and "transfer" in forms
    bound = conv_norm(torch.ones(1, 1, 3, 3), padding=1, input_size=(8, 8))
    assert bound.form == "taps" and bound.value == pytest.approx(9.0)


@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (2, 1), (1, 3)])
def test_small_images_with_half_padding(n: int, rows: int, channels: int) -> None:
    shape = (rows, channels, 3, 3)
    found = [_map(weight, (n, n), padding=1) for weight in (torch.ones(shape, dtype=torch.float64), _random(shape, n))]
    assert _low(_value, found) == _loose(_value, found) == []


def _setting(one: Map) -> tuple[padded_norms._Coupling, padded_norms._Plan]:
    """The Gram matrix of a map whose largest weight is 1, and how it is factorised."""
    named = {name: option for name, option in one.options.items() if name != "groups"}
    axes = conv_geometry(one.weight, **named).axes(one.input_size)
    weight = one.weight.unflatten(0, (one.options.get("groups", 1), -1)).flatten(3)
    plan = padded_norms._plan(weight, axes)
    assert plan is not None
    taps = padded_norms._reordered(weight, axes, plan.order)
    taps = taps if plan.members == "inputs" else taps.transpose(1, 2)
    return padded_norms._coupling(taps, padded_norms._meetings([axes[i] for i in plan.order], plan.members)), plan


def _wrongly_judged(maps: list[Map]) -> list[Map]:
    """The maps for which a lambda just below sigma^2 is accepted, or one just above it is refused."""
    wrong = []
    for one in maps:
        setting, sigma_squared = _setting(one), one.true_norm**2
        below = padded_norms._certified(*setting, sigma_squared * (1 - 1e-7))
        above = padded_norms._certified(*setting, sigma_squared * (1 + 1e-7))
        if below is not None or above is None or not sigma_squared <= above <= sigma_squared * (1 + 2e-7):
            wrong.append(one)
    return wrong


@pytest.fixture(scope="module")
def judged() -> list[Map]:
    """Several windows one after another, both sides, groups of which only one is the largest."""
    grouped = _random((4, 2, 3, 3))
    grouped[3] *= 5
    return [
        _map(_random((4, 3, 3, 3)), (10, 10), padding=1),
        _map(_random((2, 3, 3, 3)), (12, 5), padding=1),
        _map(_random((2, 3, 3, 3)), (5, 12), stride=2, padding=1),
        _map(_random((3, 1, 4)), (40,), stride=3, padding=2),
        _map(grouped, (6, 7), padding=1, groups=4),
        _map(_random((2, 1, 2, 3, 2)), (4, 3, 5), dilation=2, padding=2),
    ]


def test_a_lambda_below_the_norm_is_refused_and_one_above_it_is_not(judged: list[Map]) -> None:
    assert _wrongly_judged(judged) == []
    assert {_setting(one)[1].members for one in judged} == {"inputs", "outputs"}


@pytest.mark.parametrize("columns", [1, 5, 32])
def test_the_size_of_the_steps_does_not_change_the_judgement(
    columns: int, judged: list[Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_norms, "STEP_COLUMNS", columns)
    assert _wrongly_judged(judged) == []


def test_the_same_check_catches_a_certificate_that_accepts_anything(
    judged: list[Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_norms, "_factorises", lambda coupling, plan, level: True)
    assert _wrongly_judged(judged) == judged


def test_the_same_check_catches_windows_that_forget_what_was_eliminated(
    judged: list[Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padded_norms, "STEP_COLUMNS", 5)
    monkeypatch.setattr(torch, "baddbmm", lambda rest, left, right, alpha: rest)
    assert _wrongly_judged(judged)


def test_a_matrix_with_no_numbers_is_refused() -> None:
    coupling, plan = _setting(_map(_random((2, 2, 3)), (6,), padding=1))
    for level in (math.nan, math.inf, 0.0):
        assert padded_norms._certified(coupling, plan, level) is None


def test_the_allowance_for_rounding_stays_small_at_the_limit_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded_norms, "_factorises", lambda coupling, plan, level: True)
    axes = [padded_norms.Axis(32, 3, 1, 1, 1, 32)] * 2
    plan = padded_norms._plan(torch.zeros(1, 16, 16, 9), axes)
    assert plan is not None and plan.work > padded_norms.MAX_SECTION_WORK / 4
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = padded_norms._Coupling(empty, empty, torch.zeros(0, 1, 16, 16, dtype=torch.float64), n_terms=25)
    level = padded_norms._certified(nothing, plan, 1.0)
    assert level is not None and 1.0 < level < 1.0 + 1e-8


def test_the_estimate_comes_from_below(judged: list[Map], monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (1, 4, 16):
        monkeypatch.setattr(padded_norms, "LANCZOS_STEPS", steps)
        for one in judged[:3]:
            axes = conv_geometry(one.weight, padding=1, stride=one.options.get("stride", 1)).axes(one.input_size)
            table = padded_norms._meetings(axes, "inputs")
            estimate = padded_norms._largest_from_below(
                one.weight.flatten(2).unsqueeze(0), table, math.prod(one.input_size)
            )
            assert 0 < estimate < one.true_norm**2


def test_taps_that_meet_only_padding_do_not_count() -> None:
    weight = torch.full((1, 1, 5, 5), 1e3, dtype=torch.float64)
    weight[0, 0, 2, 2] = 1e-200
    assert conv_norm(weight, padding=2, input_size=(1, 1)).value == pytest.approx(1e-200, rel=2e-3)
    weight[0, 0, 2, 2] = 0.0
    assert conv_norm(weight, padding=2, input_size=(1, 1)) == norms.MapNorm(0.0, "section")


def test_windows_apart_but_all_cut_by_the_border_are_no_exact_taps() -> None:
    one = _map(_random((2, 2, 3)), (2,), stride=3, padding=2)
    assert one.true_norm < 0.98 * conv_norm(one.weight, stride=3, padding=2).value
    assert _low(_value, [one]) == _loose(_value, [one]) == []


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_tiny_and_huge_weights(scale: float) -> None:
    weight = _random((2, 2, 3, 3))
    plain = _value(_map(weight, (6, 6), padding=1))
    bound = conv_norm(weight * scale, padding=1, input_size=(6, 6))
    assert bound.form == "section" and bound.value == pytest.approx(plain * scale, rel=1e-9)


def test_groups_of_very_different_sizes() -> None:
    weight = _random((3, 1, 3, 3)) * torch.tensor([1e-30, 1.0, 1e-9], dtype=torch.float64).reshape(3, 1, 1, 1)
    one = _map(weight, (7, 7), padding=1, groups=3)
    assert _low(_value, [one]) == _loose(_value, [one]) == []


@pytest.mark.parametrize("limit", ["MAX_SECTION_WORK", "MAX_SECTION_ENTRIES"])
def test_beyond_the_limits_the_other_forms_stand(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _random((2, 2, 3, 3))
    assert conv_norm(weight, padding=1, input_size=(6, 6)).form == "section"
    monkeypatch.setattr(padded_norms, limit, 1000)
    assert conv_norm(weight, padding=1, input_size=(6, 6)).form == "transfer"
    monkeypatch.undo()
    large = [padded_norms.Axis(112, 3, 1, 1, 1, 112)] * 2
    assert padded_norms.section_norm(torch.ones(1, 64, 64, 9), large, math.inf) is None


def test_a_bound_that_is_close_already_is_left() -> None:
    one = _map(_random((2, 1, 3, 3)), (6, 6), padding=1)
    axes = conv_geometry(one.weight, padding=1).axes(one.input_size)
    weight = one.weight.flatten(2).unsqueeze(0)
    assert padded_norms.section_norm(weight, axes, one.true_norm * 1.005) is None
    assert padded_norms.section_norm(weight, axes, one.true_norm * 1.007) is not None


def test_a_padding_that_repeats_inputs_takes_the_form_of_the_map_inside() -> None:
    weight = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    bound = conv_norm(weight, padding=1, padding_mode="reflect", input_size=(5, 5))
    true = dense_norm(lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), weight), (1, 5, 5))
    assert bound.form == "copies x section" and bound.value >= true


def test_an_answer_is_remembered_for_the_same_weights_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    factorises = padded_norms._factorises
    monkeypatch.setattr(padded_norms, "_factorises", lambda *given: calls.append(1) or factorises(*given))
    weight = _random((2, 1, 3, 3))
    first = conv_norm(weight, padding=1, input_size=(6, 6))
    assert conv_norm(weight.clone(), padding=1, input_size=(6, 6)) == first and len(calls) == 1
    assert conv_norm(weight, padding=1, input_size=(6, 7)) != first and len(calls) == 2
    weight[0, 0, 0, 0] += 1.0
    assert conv_norm(weight, padding=1, input_size=(6, 6)) != first and len(calls) == 3
