"""The whole way: exact budgets, the given model untouched, the same seed the same bits, a table to read."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.utils.data import TensorDataset

import sipp
from sipp.errors import DataError, OptionError
from sipp.results.options import Method

SIPP_METHODS = ["sipp-det", "sipp-rand", "sipp-hybrid", "sipp-simple"]
METHODS = [*SIPP_METHODS, "magnitude", "snip", "random"]


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    )


def batches(n: int = 24, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 2, 6, 6, generator=generator)
    labels = torch.randint(0, 5, (n,), generator=generator)
    return [(images[:10], labels[:10]), (images[10:], labels[10:])]


def quiet_prune(model: nn.Module, data: object, **options: object) -> sipp.Pruned:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sipp.prune(model, data, **options)  # type: ignore[arg-type]


def n_nonzero(model: nn.Module, names: list[str]) -> int:
    return sum(int(model.get_parameter(name).count_nonzero()) for name in names)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep", [0.9, 0.4, 0.1, 0.02])
def test_exactly_the_budget_is_kept(method: Method, keep: float) -> None:
    model = small_net()
    for seed in (0, 1):
        pruned = quiet_prune(model, batches(), keep=keep, method=method, seed=seed)
        assert pruned.budget == round(keep * pruned.n_weights)
        positive = sum(int((score > 0).sum()) for score in sipp.sensitivity(model, batches()).values())
        wanted = min(pruned.budget, positive) if method in ("sipp-rand", "sipp-hybrid") else pruned.budget
        assert pruned.kept == wanted == sum(int(mask.sum()) for mask in pruned.masks.values())
        assert n_nonzero(pruned.model, list(pruned.masks)) == wanted
        assert sum(layer.kept for layer in pruned.layers) == wanted


@pytest.mark.parametrize("method", ["sipp-det", "sipp-simple"])
def test_det_keeps_the_globally_largest_sensitivities(method: Method) -> None:
    model = small_net()
    scores = sipp.sensitivity(model, batches())
    pruned = sipp.prune(model, batches(), budget=200, method=method)
    order = torch.cat([score.flatten() for score in scores.values()]).argsort(descending=True, stable=True)[:200]
    expected = torch.zeros(pruned.n_weights, dtype=torch.bool)
    expected[order] = True
    assert torch.equal(torch.cat([pruned.masks[name].flatten() for name in scores]), expected)


def test_the_given_model_is_left_alone_and_the_copy_is_plain() -> None:
    model = small_net().train()
    before = copy.deepcopy(model.state_dict())
    pruned = sipp.prune(model, batches(), keep=0.5)
    assert model.training and pruned.model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert type(pruned.model) is type(model)
    assert list(pruned.model.state_dict()) == list(before)
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in pruned.model.modules())
    assert torch.equal(pruned.model[0].bias, model[0].bias)


@pytest.mark.parametrize("method", METHODS)
def test_keep_one_changes_nothing(method: Method) -> None:
    model = small_net()
    pruned = sipp.prune(model, batches(), keep=1.0, method=method)
    assert pruned.kept == pruned.n_weights and all(bool(mask.all()) for mask in pruned.masks.values())
    for key, value in model.state_dict().items():
        assert torch.equal(pruned.model.state_dict()[key], value)
    if method in SIPP_METHODS:
        assert all(layer.eps == 0 for layer in pruned.layers) and pruned.bound.epsilon == 0


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(draws: str) -> None:
    model = small_net()
    first, again, other = (
        quiet_prune(model, batches(), keep=0.3, method="sipp-rand", draws=draws, seed=seed) for seed in (5, 5, 6)
    )
    states = [torch.cat([p.model.get_parameter(name).flatten() for name in p.masks]) for p in (first, again, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_dead_inputs_leave_fewer_to_draw_from_and_the_record_says_so() -> None:
    model = nn.Linear(10, 4)
    data = torch.rand(20, 10)
    data[:, 5:] = 0  # half of the weights never matter
    pruned = sipp.prune(model, data, keep=0.8, method="sipp-rand")
    assert (pruned.budget, pruned.kept) == (32, 20)
    assert "only 20 weights" in str(pruned)
    assert sipp.prune(model, data, keep=0.8, method="sipp-det").kept == 32


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_tied_weights_stay_tied() -> None:
    pruned = sipp.prune(Tied(), torch.randn(10, 6), keep=0.5)
    assert list(pruned.masks) == ["first.weight"]
    assert pruned.model.first.weight is pruned.model.second.weight


def test_torch_prune_accepts_the_masks() -> None:
    model = small_net()
    pruned = sipp.prune(model, batches(), keep=0.5, method="sipp-det")
    for name, mask in pruned.masks.items():
        module = model.get_submodule(name.rpartition(".")[0])
        torch_prune.custom_from_mask(module, "weight", mask)
        assert torch.equal(module.weight, pruned.model.get_parameter(name))


def test_wrapped_models_have_canonical_names() -> None:
    model = small_net()
    plain = sipp.prune(model, batches(), keep=0.5)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        pruned = sipp.prune(wrapped, batches(), keep=0.5)  # type: ignore[arg-type]
        assert list(pruned.masks) == list(plain.masks)
        assert all(torch.equal(pruned.masks[name], mask) for name, mask in plain.masks.items())


def test_as_many_points_as_the_theory_asks_for_whatever_holds_them() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    needed = sipp.sample_size(model, torch.rand(1, 4), delta=1e-4)
    data = torch.rand(needed, 4)
    loader = list(data.split(7))
    sources = [data, TensorDataset(data), loader, iter(loader), (b for b in loader)]
    for source in sources:
        options = {"keep": 0.5, "delta": 1e-4, "method": "sipp-det", "c_constant": 1e4}
        pruned = sipp.prune(model, source, **options)
        assert pruned.guarantee.n == needed == pruned.guarantee.n_needed
        assert pruned.guarantee.met
    short = sipp.prune(model, data[:20], keep=0.5, delta=1e-4, method="sipp-det")
    assert not short.guarantee.met and f"n=20, needs {needed}" in short.guarantee.reason


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"keep": 0.0}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"keep": -0.1}, "keep"),
        ({"keep": float("nan")}, "keep"),
        ({"keep": 1e-9}, "keep"),
        ({}, "exactly one"),
        ({"keep": 0.5, "budget": 3}, "exactly one"),
        ({"budget": 0}, "budget"),
        ({"budget": 10**9}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"keep": 0.5, "method": "sip-det"}, "sipp-det"),
        ({"keep": 0.5, "draws": "always"}, "until"),
        ({"keep": 0.5, "delta": 0.0}, "delta"),
        ({"keep": 0.5, "c_constant": 0.0}, "c_constant"),
        ({"keep": 0.5, "k_constant": -1.0}, "k_constant"),
        ({"keep": 0.5, "reduce": "median"}, "reduce"),
        ({"keep": 0.5, "norm_stats": "none"}, "norm_stats"),
        ({"keep": 0.5, "loss": "cross_entropy"}, "loss"),
    ],
)
def test_options_out_of_range_are_named(options: dict, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        sipp.prune(small_net(), batches(), **options)


def test_methods_that_need_data_or_labels_say_so() -> None:
    with pytest.raises(OptionError, match="needs data"):
        sipp.prune(small_net(), None, keep=0.5)
    with pytest.raises(DataError, match="labels"):
        sipp.prune(small_net(), [inputs for inputs, _ in batches()], keep=0.5, method="snip")
    assert sipp.prune(small_net(), None, keep=0.5, method="magnitude").kept > 0


def test_a_cause_is_warned_of_once_however_many_layers_it_meets() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(6)))
    with torch.no_grad():
        for i in range(3):
            model[i].weight.mul_(1e-3)
    with pytest.warns(UserWarning, match="lost all") as caught:
        pruned = sipp.prune(model, None, keep=0.02, method="magnitude")
    (text,) = (str(warning.message) for warning in caught)
    assert all(f"{layer.name} ({layer.dead_rows} of 10)" in text for layer in pruned.layers[:5])
    assert pruned.layers[0].dead_rows == 10 and "and 1 more" in text


def test_what_a_holdout_or_a_sound_bound_needs_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    calibration, holdout = torch.rand(20, 3), torch.rand(10, 3)
    with pytest.raises(OptionError, match="holdout"):
        sipp.prune(model, None, keep=0.9, method="magnitude", holdout=holdout)
    with pytest.raises(OptionError, match="twice"):
        sipp.prune(model, iter([calibration]), keep=0.9, bound="sound")


class Language(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.embedding(tokens))))


def test_a_weight_tied_to_an_embedding_is_left_alone_with_a_word() -> None:
    with pytest.warns(UserWarning, match="head.weight is tied to an embedding"):
        pruned = sipp.prune(Language(), torch.randint(0, 11, (8, 5)), keep=0.5, method="sipp-det")
    assert list(pruned.masks) == ["body.weight"]


def test_frozen_weights_are_named_at_the_callers_line() -> None:
    model = small_net()
    model.get_parameter("0.weight").requires_grad_(False)
    with pytest.warns(UserWarning, match=r"1 of 3 prunable weights are frozen") as told:
        sipp.prune(model, None, keep=0.5, method="magnitude")
    assert [one.filename for one in told] == [__file__]


@pytest.mark.parametrize("method", ["magnitude", "snip", "sipp-det"])
def test_without_statements_the_same_weights_are_kept_and_less_is_said(method: str) -> None:
    full = sipp.prune(small_net(), batches(), keep=0.5, method=method)
    bare = sipp.prune(small_net(), batches(), keep=0.5, method=method, statements=False)
    assert all(torch.equal(full.masks[name], bare.masks[name]) for name in full.masks)
    assert full.moved == bare.moved is not None
    if method == "sipp-det":  # which scores anyway
        assert str(full) == str(bare)
    else:
        assert full.guarantee is not None and bare.guarantee is None
        assert "sipp.assess" in bare.bound.reason and "statements" in str(bare)
    for wrong in ({"bound": "sound"}, {"holdout": batches()}):
        with pytest.raises(OptionError, match="statements=False"):
            sipp.prune(small_net(), batches(), keep=0.5, method=method, statements=False, **wrong)
