"""The scores of other papers against their definitions (`oracles/scores.py`), and the model left alone."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from oracles import scores as oracle
from torch import Tensor, nn
from torch.func import functional_call

import sipp
from sipp.errors import DataError, ModelError
from sipp.pruning.rows import largest
from sipp.scoring import gradient_scores, input_scores
from sipp.scoring.methods import METHODS, method_of, scores_of
from sipp.scoring.task import task_of

Rows = list[tuple[str, slice, Tensor]]  # rows of a weight, and the patches that they meet, P x K


def score(method: str, model: nn.Module, data: Any, **options: Any) -> dict[str, Tensor]:
    return scores_of(task_of(model, data, **options), method_of(method))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Last(nn.Module):
    """The last output of a module, through a linear one."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.module, self.out = module, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.module(x, x, x)[0] if isinstance(self.module, nn.MultiheadAttention) else self.module(x)[0]
        return self.out(found[:, -1])


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mix(x, y, y)[0]


class SelfAndCross(Cross):
    """One attention for a sequence itself, then for another: its rows meet one input, then different ones."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mix(x, x, x)[0] + self.mix(x, y, y)[0]


# --- Scores of weights alone ------------------------------------------------------------------------------------------

WEIGHTS = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3e-20, -2e18, 7.0]), min_size=6, max_size=6)
LAYERS = st.one_of(
    st.builds(nn.Linear, st.integers(1, 30), st.integers(1, 30)),
    st.builds(nn.Conv2d, st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 3, (2, 5)])),
    st.builds(lambda n: nn.Conv1d(4 * n, 8, 3, groups=4), st.integers(1, 3)),
    st.builds(nn.LSTM, st.integers(1, 6), st.integers(1, 4)),
)


@given(WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_magnitude_and_lamp(values: list[float]) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].weight = nn.Parameter(torch.tensor(values).view(2, 3))
    weight = model[0].weight.detach()
    assert torch.equal(score("magnitude", model, None)["0.weight"], weight.abs())
    torch.testing.assert_close(score("lamp", model, None)["0.weight"], oracle.lamp(weight), rtol=1e-12, atol=0.0)


@given(st.lists(LAYERS, min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_erk_has_the_counts_of_its_definition_at_every_budget(layers: list[nn.Module], keep: float, seed: int) -> None:
    scores = score("erk", nn.Sequential(*layers), None, seed=seed)
    shapes = [tuple(one.shape) for one in scores.values()]
    budget = round(keep * sum(map(math.prod, shapes)))
    kept = [int(mask.sum()) for mask in largest(list(scores.values()), budget)]
    assert sum(kept) == budget
    most = 0.5 + len(shapes) / 2 + 1e-9  # each is rounded, and the total exact: the others may have to make room
    for found, expected in zip(kept, oracle.erk_counts(shapes, budget)):
        assert abs(found - expected) <= most


@pytest.mark.parametrize("method", ["random", "erk"])
def test_places_are_drawn_by_the_seed(method: str) -> None:
    model = nn.Sequential(nn.Linear(30, 40))
    first, again, other = (score(method, model, None, seed=seed)["0.weight"] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    top = first.flatten().argsort(descending=True)[:300].double() / first.numel()  # not the first ones, nor the last
    assert 0.4 < float(top.mean()) < 0.6


def test_erk_leaves_pruned_what_was_pruned_with_another_seed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 64))
    first = sipp.prune(model, None, keep=0.3, method="erk", seed=1)
    second = sipp.prune(first.model, None, keep=0.1, method="erk", seed=2)
    assert all(bool((first.masks[name] | ~mask).all()) for name, mask in second.masks.items())


# --- Scores of inputs -------------------------------------------------------------------------------------------------


def of_linear() -> tuple[nn.Module, list[Any], Rows]:
    model, x = nn.Sequential(nn.Linear(5, 4)), drawn(12, 3, 5)
    x[..., 1] = x[..., 0] + 0.1 * x[..., 1]  # one that another can make up for
    x[..., 3] = 0.0
    model[0].weight.data[1, 2] = 0.0
    return model, [x[:5], x[5:]], [("0.weight", slice(4), x.reshape(-1, 5))]


def of_conv() -> tuple[nn.Module, list[Any], Rows]:
    model, x = nn.Sequential(nn.Conv2d(4, 6, 2, stride=2, padding=1, groups=2)), drawn(5, 4, 5, 5)
    patches = F.unfold(x.double(), 2, stride=2, padding=1).movedim(1, 2).reshape(-1, 2, 8)
    return model, [x], [("0.weight", slice(3 * g, 3 * g + 3), patches[:, g]) for g in (0, 1)]


def of_lstm() -> tuple[nn.Module, list[Any], Rows]:
    model, x = nn.LSTM(3, 4, batch_first=True).double(), drawn(6, 5, 3).double()
    before = torch.cat([torch.zeros(6, 1, 4), model(x)[0].detach()[:, :-1]], 1)
    rows = slice(16)
    return model, [x], [("weight_ih_l0", rows, x.reshape(-1, 3)), ("weight_hh_l0", rows, before.reshape(-1, 4))]


def of_attention() -> tuple[nn.Module, list[Any], Rows]:
    """The rows of one weight meet different inputs."""
    x, y = drawn(6, 3, 4), drawn(6, 5, 4, seed=1)
    met = [(slice(4), x.reshape(-1, 4)), (slice(4, 12), y.reshape(-1, 4))]
    return Cross(), [((x, y), None)], [("mix.in_proj_weight", *one) for one in met]


def of_two_attentions() -> tuple[nn.Module, list[Any], Rows]:
    """The rows of one weight meet the same inputs in one call, and different ones in another."""
    x, y = drawn(6, 3, 4), drawn(6, 5, 4, seed=1)
    met = [(slice(4), torch.cat([x, x], 1)), (slice(4, 12), torch.cat([x, y], 1))]
    return SelfAndCross(), [((x, y), None)], [("mix.in_proj_weight", rows, z.reshape(-1, 4)) for rows, z in met]


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 700])
@pytest.mark.parametrize("case", [of_linear, of_conv, of_lstm, of_attention, of_two_attentions])
def test_wanda_and_obs(case: Callable[[], Any], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_scores, "CHUNK_BYTES", {"cpu": chunk_bytes})
    torch.manual_seed(0)
    model, data, rows = case()
    weights = {name: weight.detach().flatten(1) for name, weight in model.named_parameters() if weight.ndim > 1}
    found = {method: score(method, model, data) for method in ("wanda", "obs")}
    for name, part, patches in rows:
        for method, expected in (
            ("wanda", oracle.wanda(weights[name][part], patches)),
            ("obs", oracle.obs(weights[name][part], patches, input_scores.DAMPING)),
        ):
            rtol, atol = 1e-8, 1e-12 * float(expected.max())
            torch.testing.assert_close(found[method][name].flatten(1)[part], expected, rtol=rtol, atol=atol)


def test_inputs_that_are_zero_score_zero_and_others_that_are_nothing_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    assert not bool(score("obs", model, torch.zeros(4, 3))["0.weight"].any())
    with pytest.raises(DataError, match="NaN"):
        score("obs", model, torch.full((4, 3), float("nan")))
    with pytest.raises(ModelError, match=r"0\.weight.*overflow"):
        score("obs", model.double(), torch.full((4, 3), 1e200, dtype=torch.float64))


# --- Scores of gradients ----------------------------------------------------------------------------------------------

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), (2, 3, 3)),
    "lstm": (lambda: Last(nn.LSTM(3, 4, batch_first=True), 4), (4, 3)),
    "attention": (lambda: Last(nn.MultiheadAttention(4, 2, batch_first=True), 4), (3, 4)),
}


def case_of(kind: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(5)
    make, shape = NETS[kind]
    data = [(torch.randn(n, *shape, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in (4, 7)]
    return make().double(), data


def by_definition(
    definition: Callable[..., Tensor], model: nn.Module, names: list[str], data: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """A definition of the loss of all data as a function of the named weights, end to end."""
    shapes = [model.get_parameter(name).shape for name in names]

    def total_loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        named = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            losses = [F.cross_entropy(functional_call(model, named, x), y, reduction="sum") for x, y in data]
        return torch.stack(losses).sum()

    with torch.backends.mkldnn.flags(enabled=False):
        return definition(total_loss, torch.cat([model.get_parameter(name).detach().flatten() for name in names]))


@pytest.mark.parametrize("kind", NETS)
def test_snip_and_grasp(kind: str) -> None:
    model, data = case_of(kind)
    found = {method: score(method, model, iter(data)) for method in ("snip", "grasp")}
    flat = {method: torch.cat([one.flatten() for one in scores.values()]) for method, scores in found.items()}
    expected = by_definition(oracle.snip, model, list(found["snip"]), data)
    torch.testing.assert_close(flat["snip"], expected.float(), rtol=1e-3, atol=1e-6)
    expected = by_definition(oracle.grasp, model, list(found["grasp"]), data)
    assert bool((expected > 0).any()) and bool((expected < 0).any())  # the sign decides, not the magnitude
    falling = expected[flat["grasp"].argsort(descending=True, stable=True)]  # kept first: S from the smallest on
    assert bool((falling.diff() >= -1e-9 * expected.abs().max()).all())
    assert int(flat["grasp"].max()) > 0.8 * len(falling)  # ordinals, not a constant


def test_ordinals_are_exact_where_a_shift_is_not() -> None:
    layers = [torch.tensor([[1e-30, -1.0]]).double(), torch.tensor([2e-30, 0.0, -0.0, 1e-30]).double()]
    first, second = gradient_scores.ordinals(layers)
    assert first.tolist() == [[2.0, 0.0]] and second.tolist() == [3.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("n_steps", [1, 7])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_synflow_leaves_what_its_definition_leaves(kind: str, n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_scores, "STEPS", n_steps)
    torch.manual_seed(2)
    if kind == "linear":
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    else:
        norm, pool = nn.BatchNorm2d(4), nn.AvgPool2d(2)
        norm.running_var.fill_(3.0)
        model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), norm, nn.ReLU(), pool, nn.Flatten(), nn.Linear(4, 3))
    shape = (3,) if kind == "linear" else (2, 3, 3)
    scores, x = score("synflow", model, torch.randn(5, *shape)), torch.randn(2, *shape)
    flat = torch.cat([one.flatten() for one in scores.values()])
    assert len(flat.unique()) == len(flat)
    for budget in (1, 2, 5, 9, 17, 25):
        kept = flat.argsort(descending=True)[:budget].sort().values.tolist()
        assert kept == oracle.synflow(model, list(scores), shape, n_steps, budget)
    again = score("synflow", model, [(-7 * x, None)], norm_stats="batch")  # the data gives the shape alone
    assert all(torch.equal(again[name], one) for name, one in scores.items())


def test_synflow_of_tokens_and_nested_outputs_and_of_what_has_no_flow() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.out = nn.Embedding(9, 3), nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            hidden = self.lstm(self.embed(tokens))[0]
            return hidden, {"tags": self.out(hidden[:, -1])}

    scores = score("synflow", Tagger(), torch.arange(8).view(2, 4))
    assert all(len(one.unique()) > 1 for one in scores.values())
    with pytest.raises(ModelError, match="synflow cannot rank the weights"):
        score("synflow", nn.Sequential(nn.Linear(3, 3), nn.Threshold(1e9, 0.0)), torch.ones(2, 3))


# --- All of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [row.name for row in METHODS if not row.uses_sensitivities])
def test_the_model_is_left_alone(method: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).train()
    data = [(drawn(n, 1, 6, 6, seed=n), torch.arange(n) % 4) for n in (5, 8)]
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before = copy.deepcopy(model.state_dict())
    for norm_stats in ("running", "batch"):
        scores = score(method, model, data, norm_stats=norm_stats)
    assert {name: one.shape for name, one in scores.items()} == {
        name: model.get_parameter(name).shape for name in ("0.weight", "4.weight")
    }
    assert all(bool((one >= 0).all()) and one.is_floating_point() for one in scores.values())
    assert model.training and not model[0].weight.requires_grad
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    if method in ("snip", "grasp"):
        nan = float("nan")
        with pytest.raises(ModelError, match=r"0\.weight.*NaN"):
            score(method, model, data, loss=lambda output, labels: output.square().sum() * nan)
