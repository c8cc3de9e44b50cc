"""What maxima over points say of new inputs (T18, T19): the stated share is kept over many draws of S.

The event that must be rare: more inputs lie beyond the statement than its share allows. At confidence 1 - b it may
happen in a share b of draws. Each claim has broken versions beside it that the same count catches.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from oracles.rates import too_often
from torch import Tensor, nn

import sipp
from sipp.bounds.assumption import floored, measure_constant
from sipp.bounds.statements import network_coverage, network_epsilon
from sipp.results.bounds import Coverage
from sipp.scoring.found import Sensitivities
from sipp.scoring.sensitivities import measure_sensitivities
from sipp.scoring.task import task_of

CONFIDENCE = 0.8
N_POPULATION = 6000
N_TRIALS = 300


# --- T12: one maximum a layer ----------------------------------------------------------------------------------------


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = (3, 4, 4, 4, 4, 2)
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


@cache
def population() -> tuple[Sensitivities, np.ndarray]:
    """The scores of many points, and Q_l(x) / ||f(x)|| of each layer (L x points)."""
    model = chain()
    inputs = torch.randn(N_POPULATION, 3, generator=torch.Generator().manual_seed(0))
    scores = measure_sensitivities(task_of(model, inputs))
    quadrants = [layer.quadrants_B for layer in scores.layers]
    assert all(one is not None for one in quadrants)
    return scores, torch.stack(quadrants).numpy()  # type: ignore[arg-type]


def drawn(scores: Sensitivities, chosen: np.ndarray) -> Sensitivities:
    """The scores as these points alone would have given their norms."""
    at = torch.from_numpy(chosen)
    layers = tuple(replace(layer, quadrants_B=layer.quadrants_B[at]) for layer in scores.layers)
    return replace(scores, layers=layers, keys=frozenset(str(i).encode() for i in chosen.tolist()))


def lowest_layer(values_LN: np.ndarray, seen_Ln: np.ndarray) -> np.ndarray:
    """Coefficients that only weigh the layer whose maximum over S is the least extreme: chosen with S, to fail."""
    beyond = (values_LN > seen_Ln.max(1, keepdims=True)).mean(1)
    return np.eye(len(values_LN))[int(beyond.argmax())]


def paper_events(*, is_one_maximum: bool = False, n_copies: int = 1) -> int:
    """How often more points lie beyond epsilon than the statement says, with coefficients chosen by an adversary."""
    scores, values_LN = population()
    rng, n, events = np.random.default_rng(7), 40, 0
    lipschitz = [1.0] * len(scores.layers)  # so that the coefficients are eps
    for _ in range(N_TRIALS):
        chosen = rng.choice(N_POPULATION, n, replace=False)
        found = drawn(scores, chosen)
        eps = lowest_layer(values_LN, values_LN[:, chosen]).tolist()
        epsilon, _ = network_epsilon(found, eps, lipschitz)
        covered = network_coverage(found, CONFIDENCE, None)
        if is_one_maximum:
            covered = Coverage.of(n, 1, CONFIDENCE)
        if n_copies > 1:
            covered = Coverage.of(n * n_copies, len(scores.layers), CONFIDENCE)
        beyond = float((np.asarray(eps) @ values_LN > epsilon * (1 + 1e-12)).mean())
        events += beyond > covered.share
    return events


def test_the_papers_statement_keeps_its_share_also_against_coefficients_chosen_with_s() -> None:
    assert not too_often(paper_events(), N_TRIALS, 1 - CONFIDENCE)


def test_one_maximum_with_coefficients_chosen_on_its_points_is_caught() -> None:
    assert too_often(paper_events(is_one_maximum=True), N_TRIALS, 1 - CONFIDENCE)


def test_counting_copies_as_points_is_caught() -> None:
    assert too_often(paper_events(n_copies=10), N_TRIALS, 1 - CONFIDENCE)


def test_a_holdout_needs_one_maximum_only() -> None:
    """New points: the coefficients are fixed before they are seen, so q = 1, and the share is smaller."""
    scores, values_LN = population()
    rng, n, events = np.random.default_rng(3), 40, 0
    lipschitz = [1.0] * len(scores.layers)
    for _ in range(N_TRIALS):
        chosen, held = np.split(rng.choice(N_POPULATION, 2 * n, replace=False), 2)
        eps = lowest_layer(values_LN, values_LN[:, chosen]).tolist()
        calibration, holdout = drawn(scores, chosen), drawn(scores, held)
        epsilon, _ = network_epsilon(calibration, eps, lipschitz, holdout)
        covered = network_coverage(calibration, CONFIDENCE, holdout)
        assert (covered.q, covered.n) == (1, n)
        events += float((np.asarray(eps) @ values_LN > epsilon * (1 + 1e-12)).mean()) > covered.share
    assert not too_often(events, N_TRIALS, 1 - CONFIDENCE)
    assert Coverage.of(40, 1, CONFIDENCE).share < Coverage.of(40, 5, CONFIDENCE).share


# --- T13: points that did not choose the pruning ---------------------------------------------------------------------

N_SOUND = 50


def linear() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(12, 3, bias=False)


def errors(dense: nn.Linear, weights_MFK: Tensor, inputs: Tensor) -> Tensor:
    """||(W^ - W) x|| / ||W x|| of every network and point: for one layer T13 is the true error."""
    with torch.no_grad():
        moved = torch.einsum("mfk,nk->mnf", (weights_MFK - dense.weight).double(), inputs.double()).norm(dim=-1)
        return moved / (inputs.double() @ dense.weight.double().T).norm(dim=-1)


def test_the_sound_statement_keeps_its_share() -> None:
    model, fresh = linear(), torch.rand(3000, 12, generator=torch.Generator().manual_seed(9))
    events = 0
    for trial in range(N_SOUND):
        points = torch.rand(40, 12, generator=torch.Generator().manual_seed(100 + trial))
        pruned = sipp.prune(model, points, keep=0.6, method="sipp-det", bound="sound", confidence=CONFIDENCE)
        assert pruned.bound.met and pruned.bound.coverage is not None
        assert (pruned.bound.coverage.n, pruned.bound.coverage.q) == (10, 1)
        expected = errors(model, pruned.model.weight.detach()[None], points[30:]).max()
        assert pruned.bound.epsilon == pytest.approx(float(expected), rel=1e-5)
        beyond = float(
            (errors(model, pruned.model.weight.detach()[None], fresh) > pruned.bound.epsilon).double().mean()
        )
        events += beyond > pruned.bound.coverage.share
    assert not too_often(events, N_SOUND, 1 - CONFIDENCE)


@pytest.mark.parametrize("is_broken", [False, True])
def test_points_that_chose_the_mask_cannot_judge_it(is_broken: bool) -> None:
    """The mask is the best of many on S; judged on S itself (as before), the stated share is exceeded too often."""
    model, generator = linear(), torch.Generator().manual_seed(4)
    masks = torch.rand(400, 3, 12, generator=generator) < 0.6
    fresh = torch.rand(3000, 12, generator=generator)
    beyond_all = errors(model, model.weight.detach() * masks, fresh)
    events = 0
    for _ in range(N_TRIALS):
        points = torch.rand(40, 12, generator=generator)
        chosen, judges = (points, points) if is_broken else (points[:30], points[30:])
        ratios = errors(model, model.weight.detach() * masks, torch.cat([chosen, judges]))
        best = int(ratios[:, : len(chosen)].amax(1).argmin())
        epsilon, share = float(ratios[best, len(chosen) :].max()), Coverage.of(len(judges), 1, CONFIDENCE).share
        events += float((beyond_all[best] > epsilon).double().mean()) > share
    assert too_often(events, N_TRIALS, 1 - CONFIDENCE) == is_broken


# --- T19: the measured constant --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_broken", [False, True])
def test_the_measured_constant_keeps_its_share(is_broken: bool) -> None:
    """Broken: the sensitivities of the holdout count, too, so that none of its points can exceed its own."""
    torch.manual_seed(3)
    model = nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        model.weight.abs_()
    generator = torch.Generator().manual_seed(5)
    weight = model.weight.detach().double()

    def draw(n: int) -> Tensor:
        return torch.rand(n, 6, generator=generator) ** 6  # a few large values: ratios that are seldom large

    def ratios(x: Tensor) -> Tensor:
        product = weight * x.double()[:, None]
        return product / product.sum(-1, keepdim=True)

    fresh, events, n_trials = ratios(draw(2000)), 0, 150
    for _ in range(n_trials):
        calibration, new = draw(36), draw(12)
        scores = measure_sensitivities(task_of(model, torch.cat([calibration, new]) if is_broken else calibration))
        holdout = measure_sensitivities(task_of(model, new))
        if is_broken:
            scores = replace(scores, keys=scores.keys - holdout.keys)
        found = measure_constant(scores, holdout, CONFIDENCE)
        assert found.c_constant is not None and found.n == 12
        excess = (fresh / floored(scores.layers[0].sensitivity_FK)).flatten(1).amax(1)
        events += float((excess > found.c_constant).double().mean()) > found.share
    assert too_often(events, n_trials, 1 - CONFIDENCE) == is_broken
