"""sipp-blend (T20): the candidate that moves the output least on held-back points, found by brute force here."""

import math

import pytest
import torch
from draws import scored_and_held_back
from torch import Tensor, nn

import sipp
from sipp.pruning import cut, rank
from sipp.pruning.blending import best_of
from sipp.pruning.ranking import POWERS
from sipp.results.blend import BlendChoice, BlendTrial
from sipp.results.options import PruneOptions
from sipp.scoring.task import task_of

pytestmark = pytest.mark.filterwarnings("ignore")
BY_ROWS = (0.0, "mean")  # how the one that is no blend is noted: magnitude times the length of its input, within rows


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 15), nn.ReLU(), nn.Linear(15, 3))


def points(n: int = 80, seed: int = 1) -> Tensor:
    return torch.rand(n, 12, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-2, 1, 12)


def by_hand(model: nn.Module, x: Tensor, keep: float) -> dict[tuple[float, str], float]:
    """{(p, reduce): output error on the held-back inputs}, s from the others, everything sorted."""
    (scored,), (held_back,) = scored_and_held_back(x)
    weights = {name: value.detach().double() for name, value in model.named_parameters() if name.endswith("weight")}
    sensitivities = {r: sipp.sensitivity(model, [scored], reduce=r) for r in ("max", "mean")}
    budget = round(keep * sum(weight.numel() for weight in weights.values()))
    f = model(held_back).detach().double()
    found = {}
    for p, reduce in [(0.0, "max"), *((p, r) for p in POWERS for r in ("max", "mean"))]:
        scores = {n: (sensitivities[reduce][n].double() ** p) * w.abs() ** (1 - p) for n, w in weights.items()}
        least = torch.cat([score.flatten() for score in scores.values()]).sort(descending=True).values[budget - 1]
        state = model.state_dict() | {n: torch.where(scores[n] >= least, w, 0.0).float() for n, w in weights.items()}
        g = torch.func.functional_call(model, state, (held_back,)).detach().double()
        found[p, reduce] = float((g - f).norm() / f.norm())
    masks = sipp.prune(model, [scored], keep=keep, method="wanda").masks
    state = model.state_dict() | {n: torch.where(masks[n], w, 0.0).float() for n, w in weights.items()}
    g = torch.func.functional_call(model, state, (held_back,)).detach().double()
    return found | {BY_ROWS: float((g - f).norm() / f.norm())}


@pytest.mark.parametrize("keep", [0.4])
def test_the_choice_is_the_one_of_brute_force(keep: float) -> None:
    model, x = net(), points()
    pruned = sipp.prune(model, [x], keep=keep, method="sipp-blend", floor=0)
    expected = by_hand(model, x, keep)
    assert pruned.choice is not None and pruned.choice.n_inputs == 20
    found = {(one.p, one.reduce): one.error for one in pruned.choice.tried}
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(expected[key], rel=1e-4) for key in expected)
    least = min(min(error, BlendChoice.LOST) for error in expected.values())
    slack = {key: BlendChoice.MAGNITUDE_NOISE if key == (0.0, "max") else BlendChoice.NOISE for key in expected}
    first = next(key for key, error in expected.items() if min(error, BlendChoice.LOST) <= (1 + slack[key]) * least)
    assert (pruned.choice.taken.p, pruned.choice.taken.reduce) == first
    _, (held_back,) = scored_and_held_back(x)
    with torch.no_grad():
        moved = float((pruned.model(held_back) - model(held_back)).norm() / model(held_back).norm())
    assert moved == pytest.approx(pruned.choice.taken.error, rel=1e-4)  # and the network has the mask of the choice


def test_the_blend_is_the_default_and_has_a_floor_and_statements() -> None:
    pruned = sipp.prune(net(), [points()], keep=0.5)
    assert pruned.method == PruneOptions.method == "sipp-blend" and not any(layer.dead_rows for layer in pruned.layers)
    assert pruned.guarantee is not None and pruned.kept == pruned.budget
    assert (
        "held-back inputs used to choose it" in " ".join(str(pruned).split())
        and sipp.prune(net(), [points()], keep=0.5, method="magnitude").choice is None
    )


def test_the_blend_works_with_two_points_and_with_an_iterator() -> None:
    few = sipp.prune(net(), [points(2)], keep=0.5)
    assert few.choice is not None and few.choice.n_inputs == 2 and not few.choice.is_held_back
    assert "held-back" not in str(few) and "2 inputs that were also used for scoring" in " ".join(str(few).split())
    once = sipp.prune(net(), iter([points(40), points(40, seed=2)]), keep=0.5)
    again = sipp.prune(net(), [points(40), points(40, seed=2)], keep=0.5)
    assert once.choice == again.choice and once.choice.n_inputs == 20 and once.choice.is_held_back


@pytest.mark.parametrize(
    ("errors", "p"),
    [
        ([0.5, 0.3, 0.4], 0.1),  # the least
        ([0.325, 0.3, 0.4], 0.0),  # magnitude: within a tenth
        ([0.335, 0.3, 0.4], 0.1),  # and not beyond
        ([0.5, 0.315, 0.3], 0.1),  # within a twentieth, for the others
        ([0.5, 0.32, 0.3], 0.25),
        ([math.inf, 1.2, 0.95], 0.0),  # nothing is left of any output
    ],
)
def test_a_difference_that_is_noise_decides_nothing(errors: list[float], p: float) -> None:
    tried = [BlendTrial(p, "max", error) for p, error in zip((0.0, 0.1, 0.25), errors)]
    assert best_of(tried).p == p


def test_the_blend_picks_wanda_if_row_scales_differ() -> None:
    """Rows of very different scales, each of them read: what compares rows with each other drops whole rows."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rows = nn.Linear(12, 30, bias=False)
            with torch.no_grad():
                self.rows.weight.mul_(torch.logspace(-3, 3, 30)[:, None])

        def forward(self, x: Tensor) -> Tensor:
            return self.rows(x) / torch.logspace(-3, 3, 30)

    # means far from 0 keep sensitivities, which are shares of a row's sum, from seeing the lengths
    x = torch.randn(80, 12, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 12)
    pruned = sipp.prune(Scaled(), [x], keep=0.4, floor=0)
    assert pruned.choice is not None
    errors = {one.name: one.error for one in pruned.choice.tried}
    least = min(error for name, error in errors.items() if "rows" not in name)
    own = sipp.prune(Scaled(), scored_and_held_back(x)[0], keep=0.4, method="wanda", floor=0)
    assert errors["magnitude times input length within rows"] < 0.9 * least
    assert pruned.choice.taken.by_rows and str(pruned.choice).startswith("magnitude times input length within rows")
    assert all(torch.equal(mask, own.masks[name]) for name, mask in pruned.masks.items())


def test_a_blend_whose_output_is_not_finite_is_not_taken() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums = nn.Linear(6, 2, bias=False)
            with torch.no_grad():
                self.sums.weight.copy_(torch.tensor([[1.0] * 6, [0.01] * 6]))  # magnitude leaves nothing of row 1

        def forward(self, x: Tensor) -> Tensor:
            return self.sums(x).log()

    x = 0.5 + torch.rand(80, 6, generator=torch.Generator().manual_seed(0))
    pruned = sipp.prune(Log(), [x], budget=6, floor=0)
    assert pruned.choice is not None and pruned.choice.tried[0] == BlendTrial(0.0, "max", math.inf)
    assert math.isfinite(pruned.choice.taken.error) and bool(pruned.model(x).isfinite().all())


def test_weights_that_an_earlier_step_pruned_come_last_in_every_blend() -> None:
    model = net()
    task, generator = task_of(model, [points()]), torch.Generator().manual_seed(0)
    alive = {w.name: torch.rand(w.n_rows, w.fan_in, generator=generator) < 0.4 for w in task.weights}
    ranking = rank(task, PruneOptions(method="sipp-blend", floor=0), alive=alive)
    n_alive = sum(int(mask.sum()) for mask in alive.values())
    for budget in (n_alive // 2, n_alive):
        masks = cut(ranking, budget, seed=0).masks
        assert sum(int(mask.sum()) for mask in masks.values()) == budget
        assert not any(bool((mask & ~alive[name]).any()) for name, mask in masks.items())


@pytest.mark.parametrize("budget", [20, 120])
def test_an_untrained_network_is_cut_by_shares_of_its_layers_whatever_is_left(budget: int) -> None:
    model, x = net(), points()
    with torch.no_grad():
        model[4].weight.mul_(1e-3)  # magnitude and sensitivity would leave it nothing
    task = task_of(model, [x], norm_stats="batch")
    pruned = cut(rank(task, PruneOptions(method="sipp-blend", floor=0)), budget, seed=0)
    assert pruned.choice.tried == (pruned.choice.taken,) and pruned.choice.taken.is_shared
    assert "shares" in str(pruned.choice)
    sensitivities, parts = sipp.sensitivity(model, scored_and_held_back(x)[0]), {}
    for name, s in sensitivities.items():
        squares = (s.double() ** 0.25 * model.get_parameter(name).detach().double().abs() ** 0.75) ** 2
        parts[name] = squares / (squares.flatten() * (squares.flatten() >= squares[..., None])).sum(-1)
    least = torch.cat([part.flatten() for part in parts.values()]).sort(descending=True).values[budget - 1]
    assert all(torch.equal(mask, parts[name] >= least * (1 - 1e-9)) for name, mask in pruned.masks.items())
    assert bool(pruned.masks["4.weight"].any())


class _Classes(nn.Module):
    """Its output is the number of a class: nothing to measure a distance with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).argmax(1)


def test_an_output_without_real_numbers_is_not_said_to_stay() -> None:
    torch.manual_seed(0)
    pruned = sipp.prune(_Classes(), torch.rand(100, 8), keep=0.3, progress=False)
    assert pruned.choice is not None and pruned.choice.n_inputs == 0 and pruned.moved is None
    assert "nothing to compare" in str(pruned.choice) and "0 %" not in str(pruned)
