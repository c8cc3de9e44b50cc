"""T21: masks, values and targets are those of the slow definition; budgets hold; what validates worse is not taken."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles import joint as oracle
from oracles.refit import conv_patches
from oracles.sparsegpt import sparsegpt as sparsegpt_oracle
from repairing.fit_points import fit_points
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sipp
from sipp.inputs.batches import Weight
from sipp.inputs.data import data_of
from sipp.inputs.outputs import output_error
from sipp.pruning import ranked as weights_module
from sipp.pruning.largest_scores import even_layers, obeys_pattern
from sipp.repairing import (
    data_split as data_split_module,
    layer_fit,
    layer_search,
    network as repair_module,
    repair_network,
    sums,
    walk,
)
from sipp.repairing.data_split import DataSplit, in_large_batches, split_batches
from sipp.repairing.layer_search import GROWTHS, LeastSquares, MaskRule, search
from sipp.repairing.moments import Moments, WeightMoments
from sipp.repairing.repair_task import RepairTask
from sipp.repairing.sparsegpt import sparsegpt
from sipp.results.options import Pattern
from sipp.results.pruned import Repaired

PLAIN: dict[str, Any] = {
    "error_feedback": 1.0,
    "ridges": (1e-3,),
    "keeps_budgets": True,
}


def f64(tensor: Tensor) -> oracle.Array:
    return tensor.detach().double().numpy()


def alike(*shape: int, seed: int = 0) -> Tensor:
    """Points whose neighbouring features are alike and not centred, so that one makes up for another."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise + 0.9 * noise.roll(1, 1) + 0.5


def parts_of(data: Any) -> DataSplit:
    return split_batches(data_of(data, device=torch.device("cpu"), n_points=None).batches())


def repair(net: nn.Module, masks: dict[str, Tensor], split: DataSplit, **options: Any) -> Repaired:
    return repair_network(net, masks, split, RepairTask(**options))


def found(net: nn.Module, points: Any, *, keep: float = 0.4, **options: Any) -> tuple[dict[str, Tensor], Repaired]:
    """The masks by magnitude, and what the search makes of them."""
    masks = sipp.prune(net, None, keep=keep, method="magnitude").masks
    return masks, repair(net, masks, parts_of(points), **(PLAIN | options))


def system(x_PK: oracle.Array, t_PF: oracle.Array, w_FK: oracle.Array) -> LeastSquares:
    x, t = torch.from_numpy(x_PK), torch.from_numpy(t_PF)
    return LeastSquares((x.T @ x)[None], (t.T @ x)[None], torch.from_numpy(w_FK)[None], len(x))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["layer", "2:4", "1:3", "rows"])
@pytest.mark.parametrize("takes_newton", [False, True])  # on a CPU, and on a GPU
def test_the_search_is_the_definition(
    kind: str, seed: int, takes_newton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_search._System, "takes_newton", takes_newton)
    fan_in = 10
    random = np.random.default_rng(seed)
    x_PK = random.normal(size=(200, fan_in)) @ random.normal(size=(fan_in, fan_in))
    w_FK = random.normal(size=(7, fan_in)) * np.logspace(-0.7, 0.3, 7)[:, None]
    t_PF = x_PK @ w_FK.T + random.normal(size=(200, 7))
    n_m = tuple(map(int, kind.split(":"))) if ":" in kind else None
    lives_F = np.full(7, kind == "rows")
    start_FK = oracle.largest(np.abs(w_FK), 20, n_m, lives_F)  # type: ignore[arg-type]
    pattern = None if n_m is None else Pattern(*n_m)
    rule = MaskRule(int(start_FK.sum()), torch.ones(7, fan_in, dtype=torch.bool), torch.from_numpy(lives_F), pattern)
    mask_FK, n_rounds = search([system(x_PK, t_PF, w_FK)], torch.from_numpy(start_FK), rule)
    wanted_FK, wanted_rounds = oracle.search(x_PK, t_PF, w_FK, start_FK, False, n_m, lives_F)  # type: ignore[arg-type]
    assert np.array_equal(mask_FK.numpy(), wanted_FK) and n_rounds == wanted_rounds
    assert not np.array_equal(wanted_FK, start_FK)
    if kind == "rows":
        assert bool(mask_FK.any(1).all()) and int(mask_FK.sum()) == 20


def test_the_search_finds_what_magnitude_cannot_see() -> None:
    """Two inputs that are nearly one: magnitude keeps both of their weights, the search one of them and another."""
    random = np.random.default_rng(0)
    x_PK = random.normal(size=(300, 4))
    x_PK[:, 1] = x_PK[:, 0] + 0.01 * random.normal(size=300)
    w_FK = np.array([[1.0, 1.1, 0.9, 0.1]])
    start_FK = np.array([[True, True, False, False]])
    rule = MaskRule(2, torch.ones(1, 4, dtype=torch.bool), torch.tensor([False]))
    mask_FK, _ = search([system(x_PK, x_PK @ w_FK.T, w_FK)], torch.from_numpy(start_FK), rule)
    assert mask_FK[0, 2] and int(mask_FK[0, :2].sum()) == 1


def test_the_first_mask_stays_where_a_system_has_no_factor() -> None:
    """As rounding may leave the covariances of features that hardly vary."""
    n_rows = 5
    xx_GKK = 3.0 - 2.0 * torch.eye(8, dtype=torch.float64)[None]
    rows_GRK = torch.arange(8.0 * n_rows, dtype=torch.float64).view(1, n_rows, 8)
    start_FK = torch.arange(8).expand(n_rows, 8) < 3
    found = search([LeastSquares(xx_GKK, rows_GRK, rows_GRK, 10.0)], start_FK, MaskRule(3 * n_rows, None, None))
    assert torch.equal(found[0], start_FK) and found[1] == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    fan_in=st.integers(1, 40),
    alike=st.sampled_from([0.0, 1.0, 100.0]),
    growth=st.sampled_from([growth for _, growth in layer_search.GROWTHS]),
)
def test_an_inverse_by_newton_is_that_of_the_larger_system(seed: int, fan_in: int, alike: float, growth: float) -> None:
    generator, rho = torch.Generator().manual_seed(seed), 0.3
    x_PK = torch.randn(60, fan_in, generator=generator, dtype=torch.float64)
    x_PK += alike * x_PK[:, :1]  # up to a system of rank one, nearly
    unit_KK = torch.corrcoef(x_PK.T).view(fan_in, fan_in)
    eye_KK = torch.eye(fan_in, dtype=torch.float64)
    before_GKK, system_GKK = torch.linalg.inv(unit_KK + rho * eye_KK)[None], (unit_KK + rho * growth * eye_KK)[None]
    found_GKK = layer_search._newton_inverse(system_GKK.float(), before_GKK.float(), growth)
    wanted_GKK = torch.linalg.inv(system_GKK)
    assert float((found_GKK - wanted_GKK).norm() / wanted_GKK.norm()) < 2 * layer_search.NEWTON_ERROR


class Operations(TorchDispatchMode):
    """Counts operations that a GPU would be asked for: views and memory are none."""

    FREE = ("view", "_unsafe_view", "transpose", "slice", "diagonal", "empty", "unsqueeze", "expand", "t")
    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func.__name__.split(".")[0] not in self.FREE
        return func(*args, **(kwargs or {}))


def test_a_round_of_the_search_is_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds of a small layer take a GPU as long as it takes to ask for their operations.

    To choose the largest is five of them, with one a row, and is done in every round: a round that goes by the last
    threshold is shorter, but keeps too many or too few weights, and the networks it finds are less accurate.
    """
    random = np.random.default_rng(0)
    x_PK, w_FK = random.normal(size=(200, 10)), random.normal(size=(7, 10))
    start_FK = torch.from_numpy(oracle.largest(np.abs(w_FK), 20, None, np.full(7, True)))
    rule = MaskRule(20, None, torch.ones(7, dtype=torch.bool), all_live=True)
    counts = []
    for n_rounds in (1, 2):
        monkeypatch.setattr(layer_search, "MOST_ROUNDS", n_rounds)
        with Operations() as operations:
            search([system(x_PK, x_PK @ w_FK.T, w_FK)], start_FK, rule)
        counts.append(operations.n)
    assert counts[1] - counts[0] <= 10


def test_rows_without_patches_keep_their_mask_and_weights() -> None:
    torch.manual_seed(0)
    x_GKP = torch.randn(1, 4, 50, dtype=torch.float64)
    weight = Weight("weight", (), "Linear", 6, 4, rows_last=False)
    layer = nn.Linear(4, 6, bias=False).double()
    before, mask = layer.weight.detach().clone(), torch.rand(6, 4) < 0.5
    sums = WeightMoments()
    for part in (sums.fit, sums.validation):
        part[2, 3, 1] = Moments.zeros(1, 3, 4, x_GKP.device)  # rows 2 to 4
        part[2, 3, 1].add_inputs(x_GKP @ x_GKP.mT, x_GKP.sum(-1))
        part[2, 3, 1].n = 50.0
    task = layer_fit.LayerTask("joint", 1.0, (1e-3,), None, keeps_rows=False)
    found, _ = layer_fit.fit_layer(task, layer, weight, mask, sums, layer_fit.NOWHERE)
    others = [0, 1, 5]
    assert torch.equal(found[others], mask[others]) and int(found.sum()) == int(mask.sum())
    assert torch.equal(layer.weight[others], before[others] * mask[others])
    assert not torch.equal(layer.weight[2:5], before[2:5] * mask[2:5])


def test_split_sums_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that is fast at TF32; a CPU multiplies the parts in float32."""
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5)), alike(200, 12)
    _, whole = found(net, points)
    asked = list[tuple[torch.dtype, int]]()

    def gains(device: torch.device, dtype: torch.dtype, n: int) -> bool:
        asked.append((dtype, n))
        return True

    monkeypatch.setattr(sums, "gains_by_split", gains)
    _, split = found(net, points)
    assert set(asked) == {(torch.float32, k * k * n) for k in (12, 20) for n in (180, 10)}
    assert all(torch.equal(mask, split.masks[name]) for name, mask in whole.masks.items())
    for one, other in zip(whole.record.layers, split.record.layers):
        assert other.error_after == pytest.approx(one.error_after, rel=1e-4)


def check_layer(
    net: nn.Module,
    made: Repaired,
    given: dict[str, Tensor],
    name: str,
    x: oracle.Array,
    t: oracle.Array,
    **options: Any,
) -> oracle.Array:
    """Asserts that mask and values are the oracle's on this target; gives the intercepts."""
    layer = next(one for one in made.record.layers if one.name == name)
    assert layer.mask_origin == "searched" and layer.n_moved > 0
    flat = [f64(model.get_parameter(name)).reshape(t.shape[1], -1) for model in (net, made.model)]
    start = given[name].flatten(1).numpy()
    mask_FK, n_rounds = oracle.search(x, t, flat[0], start, True, **options)
    assert np.array_equal(made.masks[name].flatten(1).numpy(), mask_FK) and layer.rounds == n_rounds
    v_FK, b_F = oracle.refit(x, t, flat[0], mask_FK, layer.ridge, True)
    assert np.allclose(flat[1], v_FK, rtol=1e-4, atol=1e-5)
    return b_F


@pytest.mark.parametrize("a", [1.0, 0.25, 0.0])
def test_layers_one_after_another(a: float) -> None:
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double(), alike(200, 12).double()
    masks, made = found(net, points, error_feedback=a)
    x, w = fit_points(points), [f64(net[i].weight) for i in (0, 2)]
    b_F = check_layer(net, made, masks, "0.weight", f64(x), oracle.aim(f64(x), f64(x), w[0], a))
    assert np.allclose(f64(made.model[0].bias - net[0].bias), b_F, atol=1e-6)
    x_hat, x_dense = f64(made.model[:2](x)), f64(net[:2](x))
    b_F = check_layer(net, made, masks, "2.weight", x_hat, oracle.aim(x_hat, x_dense, w[1], a))
    assert np.allclose(f64(made.model[2].bias - net[2].bias), b_F, atol=1e-6)


class Block(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + x), behind a convolution; then the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.conv1 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, 4)

    def inside(self, x: Tensor) -> Tensor:
        return self.bn1(self.conv1(x)).relu()

    def first(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x)).relu()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out = self.bn2(self.conv2(self.inside(x)))
        out += x
        return self.linear(out.relu().mean((2, 3)))


def block() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    net, points = Block().double(), alike(100, 3, 4, 5).double()
    for one in (net.norm, net.bn1, net.bn2):
        nn.init.uniform_(one.weight, 0.5, 2.0)
    net.train()(points)
    return net.eval(), points


def patches(images: oracle.Array) -> oracle.Array:
    return np.concatenate([conv_patches(image, (3, 3), (1, 1), (1, 1), (1, 1)) for image in images])


def test_the_end_of_a_block_corrects_what_the_stream_has_lost() -> None:
    net, points = block()
    _, made = found(net, points, keep=0.3)
    assert {layer.name: layer.corrects for layer in made.record.layers} == {
        name: name == "conv2.weight" for name in ("stem.weight", "conv1.weight", "conv2.weight", "linear.weight")
    }
    assert all(layer.intercept == ("bias" if "linear" in layer.name else "norm") for layer in made.record.layers)
    x, pruned = fit_points(points), made.model
    s, s_hat = net.first(x), pruned.first(x)  # type: ignore[operator]
    gain_F = net.bn2.weight / (net.bn2.running_var + net.bn2.eps).sqrt()
    lost_PF = f64(((s - s_hat) / gain_F.view(1, -1, 1, 1)).movedim(1, -1).reshape(-1, 6))
    halves = [(f64(net.inside(s))[:, at], f64(pruned.inside(s_hat))[:, at]) for at in (slice(0, 3), slice(3, 6))]  # type: ignore[operator]
    for g, (dense, own) in enumerate(halves):  # the budget is the layer's, the least squares are each group's
        rows = slice(3 * g, 3 * g + 3)
        mask_FK, v_FK = (f64(t)[rows].reshape(3, -1) for t in (made.masks["conv2.weight"], pruned.conv2.weight))  # type: ignore[union-attr, arg-type]
        w_FK = f64(net.conv2.weight)[rows].reshape(3, -1)
        t_PF = oracle.aim(patches(own), patches(dense), w_FK, 1.0, lost_PF[:, rows])
        wanted_FK, _ = oracle.refit(patches(own), t_PF, w_FK, mask_FK > 0, 1e-3, True)
        assert np.allclose(v_FK, wanted_FK, rtol=1e-4, atol=1e-5)
    _, without = found(net, points, keep=0.3, corrects_streams=False)
    assert not any(layer.corrects for layer in without.record.layers)
    assert not torch.equal(without.masks["conv2.weight"], made.masks["conv2.weight"])


class Stream(nn.Module):
    """A stream that four blocks add to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for one in self.blocks:
            x = x + one(x)
        return x


@pytest.mark.parametrize(
    "off", [{"method": "refit"}, {"error_feedback": 0.0}, {"corrects_streams": False}], ids=lambda off: next(iter(off))
)
def test_each_part_brings_the_output_nearer(off: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, points = Stream().double(), alike(600, 12).double()
    new, wanted = (x := alike(400, 12, seed=1).double()), net(x).detach()
    errors = []
    for options in ({}, off):
        _, made = found(net, points, keep=0.3, **options)
        errors.append(float((made.model(new).detach() - wanted).norm()))
    assert errors[0] < 0.95 * errors[1]
    assert [layer.corrects for layer in found(net, points)[1].record.layers] == [False] + [False, True] * 4


def test_budgets_rows_and_patterns() -> None:
    net, points = block()
    masks, made = found(net, points, keep=0.25)
    for name, mask in made.masks.items():
        weight = made.model.get_parameter(name)
        assert int(mask.sum()) == int(masks[name].sum()) and bool((weight[~mask] == 0).all())
    assert any(not torch.equal(mask, masks[name]) for name, mask in made.masks.items())
    masks = {name: p.abs() >= p.abs().amax(1, keepdim=True) for name, p in net.named_parameters() if p.ndim > 1}
    for way in ("joint", "sparsegpt"):
        alive = repair(net, masks, parts_of(points), **(PLAIN | {"floor": 0.0, "method": way}))
        assert all(bool(mask.flatten(1).any(1).all()) for mask in alive.masks.values())
        assert all(int(mask.sum()) == int(masks[name].sum()) for name, mask in alive.masks.items())
    masks = sipp.prune(net, None, pattern="2:4", method="magnitude").masks
    for way in ("joint", "alps", "sparsegpt"):
        made = repair(net, masks, parts_of(points), pattern=Pattern(2, 4), method=way)
        assert all(obeys_pattern(mask.flatten(1), Pattern(2, 4)) for mask in made.masks.values())
        assert all(int(mask.sum()) == int(masks[name].sum()) for name, mask in made.masks.items())
        assert (
            any(layer.mask_origin == "searched" and layer.n_moved for layer in made.record.layers)
            and made.record.budgets == "given"
        )


def test_weights_that_were_zero_stay_zero() -> None:
    net, points = block()
    with torch.no_grad():
        net.conv1.weight[:, ::2] = 0.0
    _, made = found(net, points, keep=0.3)
    assert int(made.masks["conv1.weight"][:, ::2].sum()) == 0
    assert next(layer for layer in made.record.layers if layer.name == "conv1.weight").n_moved > 0


def test_what_is_worse_on_validation_points_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    net, points = block()
    _, made = found(net, points, keep=0.3)
    for layer in made.record.layers:
        assert layer.error_after is not None and layer.error_first_mask is not None
        assert layer.error_after <= layer.error_first_mask

    def worst(rows: Any, mask_FK: Tensor, rule: MaskRule, growths: Any) -> tuple[Tensor, int]:
        dense_FK = torch.cat([one.dense_GRK.flatten(0, 1) for one in rows])
        return rule.largest(-dense_FK.abs()), 1

    monkeypatch.setattr(layer_fit, "search", worst)
    masks, bad = found(net, points, keep=0.3)
    assert all(layer.mask_origin == "first" and layer.n_moved == 0 for layer in bad.record.layers)
    assert all(torch.equal(mask, masks[name]) for name, mask in bad.masks.items())


def test_a_first_mask_that_is_clearly_worse_is_not_solved_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 80), nn.ReLU(), nn.Linear(80, 48)).double(), alike(200, 12).double()
    solve, n_rows = layer_fit.solve_rows, list[int]()

    def counted(xx_GKK: Tensor, wanted_GRK: Tensor, *more: Any) -> Tensor:
        n_rows.append(wanted_GRK.shape[1])
        return solve(xx_GKK, wanted_GRK, *more)

    monkeypatch.setattr(layer_fit, "solve_rows", counted)
    _, quick = found(net, points, ridges=(1e-3,))
    assert n_rows == [16, 16, 80, 16, 16, 48]
    assert all(one.mask_origin == "searched" and one.error_first_mask is None for one in quick.record.layers)
    monkeypatch.setattr(layer_fit, "CLEARLY_BETTER", 0.0)
    _, slow = found(net, points, ridges=(1e-3,))
    assert all(one.error_after < one.error_first_mask for one in slow.record.layers)  # type: ignore[operator]
    for one, other in zip(quick.model.state_dict().values(), slow.model.state_dict().values()):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-13)  # rows of both masks are solved together: rounding
    monkeypatch.undo()
    monkeypatch.setattr(layer_fit, "search", lambda rows, mask_FK, rule, growths: (mask_FK, 1))
    _, same = found(net, points)
    assert all(one.mask_origin == "first" for one in same.record.layers)


def test_budgets_that_are_nearly_the_same_stay() -> None:
    net, points = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 20)), alike(40, 40)
    masks = sipp.prune(net, points, keep=0.5, method="wanda").masks
    made = repair(net, masks, parts_of(points), **(PLAIN | {"keeps_budgets": False}))
    assert made.record.budgets == "given"
    assert all(int(mask.sum()) == int(masks[name].sum()) for name, mask in made.masks.items())


def test_of_a_sparse_network_a_layer_gets_no_more_than_it_has_left() -> None:
    net, points = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 20)), alike(60, 40)
    with torch.no_grad():
        net[0].weight[:, 4:] = 0  # 200 are left here, 1,000 there
    masks = sipp.prune(net, None, budget=900, method="magnitude").masks
    made = repair(net, masks, parts_of(points), **(PLAIN | {"keeps_budgets": False}))
    assert sum(int(mask.sum()) for mask in made.masks.values()) == 900
    assert not any(bool((mask & (net.get_parameter(name) == 0)).any()) for name, mask in made.masks.items())
    full = sipp.prune(net, None, keep=0.9, method="magnitude").masks  # more than are left: zeros are kept as well
    made = repair(net, full, parts_of(points), **(PLAIN | {"keeps_budgets": False}))
    assert sum(int(mask.sum()) for mask in made.masks.values()) == sum(int(mask.sum()) for mask in full.values())


@pytest.mark.parametrize("floor", [None, 0.1])
def test_budgets_of_layers_are_half_way_to_the_same_share_of_all(floor: float | None) -> None:
    net, points = block()
    masks = sipp.prune(net, None, keep=0.25, method="lamp").masks
    kept = {name: int(mask.sum()) for name, mask in masks.items()}
    made = repair(net, masks, parts_of(points), **(PLAIN | {"keeps_budgets": False, "floor": floor}))
    counts = {name: int(mask.sum()) for name, mask in made.masks.items()}
    assert sum(counts.values()) == sum(kept.values()) and made.record.budgets == "between"
    assert all(bool((made.model.get_parameter(n)[~mask] == 0).all()) for n, mask in made.masks.items())
    sizes = [(len(mask), mask[0].numel()) for mask in masks.values()]
    even = even_layers(sizes, sum(kept.values()), least=0 if floor is None else 1)
    wanted = {name: math.sqrt(n * share) for (name, n), share in zip(kept.items(), even)}
    scale = sum(kept.values()) / sum(wanted.values())
    assert all(abs(counts[name] - scale * n) <= 1 for name, n in wanted.items()) and counts != kept
    _, stays = found(net, points, keep=0.25)
    assert stays.record.budgets == "given"


def test_the_errors_of_a_record_are_those_of_the_network_that_is_returned() -> None:
    """Validation and test points are never fitted."""
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double(), alike(200, 12).double()
    masks, made = found(net, points)
    split = parts_of(points)
    assert (made.record.n_fit, made.record.n_validation, made.record.n_test) == (180, 10, 10)
    assert made.record.output_after == output_error(net, made.model, split.test) is not None
    assert made.record.output_validation == output_error(net, made.model, split.validation) is not None
    x = torch.cat([batch.args[0] for batch in split.fit])
    check_layer(net, made, masks, "0.weight", f64(x), oracle.aim(f64(x), f64(x), f64(net[0].weight), 1.0))


def test_ridges_are_chosen_layer_by_layer() -> None:
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double(), alike(200, 12).double()
    for ridges in ((10.0, 1e-3), (1e-3, 10.0)):
        _, made = found(net, points, keep=0.3, ridges=ridges)
        _, small = found(net, points, keep=0.3)
        assert [one.ridge for one in made.record.layers] == [1e-3] * 2
        assert [one.error_after for one in made.record.layers] == [one.error_after for one in small.record.layers]


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_record_speaks_of_the_masks_that_were_given(monkeypatch: pytest.MonkeyPatch, is_undone: bool) -> None:
    """The record compares with the given masks, even if the search begins with other budgets."""
    torch.manual_seed(3)
    net, x = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)), alike(100, 30)
    given = sipp.prune(net, None, keep=0.4, method="lamp", progress=False)
    if is_undone:
        monkeypatch.setattr(repair_module, "_errors", lambda *_: repair_module._Errors(errors.pop(), None))
    errors = [2.0, 1.0]  # the last first: after it, before it
    options = RepairTask(error_feedback=1.0)
    split = split_batches(data_of(x).batches())
    repaired = repair_network(net, given.masks, split, options)
    moved = {name: int((repaired.masks[name] & ~mask).sum()) for name, mask in given.masks.items()}
    assert {layer.name: layer.n_moved for layer in repaired.record.layers} == moved
    assert bool(repaired.record.undone) is is_undone and all(moved.values()) is not is_undone
    assert repaired.record.budgets == ("given" if is_undone else "between")
    assert all((layer.error_after is None) is is_undone for layer in repaired.record.layers)


def test_an_output_that_is_no_nearer_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    net, points = block()
    errors = iter([0.1, 0.2])
    monkeypatch.setattr(repair_module, "output_error", lambda *args: next(errors))
    masks, made = found(net, points)
    assert made.record.undone and all(one.mask_origin == "unfitted" and one.n_moved == 0 for one in made.record.layers)
    for name, mask in masks.items():
        assert torch.equal(made.model.get_parameter(name), net.get_parameter(name) * mask)
        assert torch.equal(made.masks[name], mask)


def test_the_error_feedback_is_smaller_for_large_networks_of_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, points = Stream(), alike(100, 12)
    masks = sipp.prune(net, None, keep=0.3, method="lamp").masks
    (images, image_points), taken = block(), []
    image_masks = sipp.prune(images, None, keep=0.3, method="lamp").masks
    for small in (10**9, 100):
        monkeypatch.setattr(weights_module, "MOST_WEIGHTS_OF_SMALL", small)
        for model, own, x in ((net, masks, points), (images, image_masks, image_points)):
            taken.append(repair(model, own, parts_of(x)).record.error_feedback)
    assert taken == [1.0, 1.0, 0.25, 1.0]
    assert repair(net, masks, parts_of(points), error_feedback=0.5).record.error_feedback == 0.5


def test_the_same_bits_twice_and_the_model_as_it_was() -> None:
    net, points = block()
    net.train()
    before = copy.deepcopy(net.state_dict())
    _, one = found(net, points)
    _, two = found(net, points)
    assert all(torch.equal(a, b) for a, b in zip(one.model.state_dict().values(), two.model.state_dict().values()))
    assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(m._forward_pre_hooks or m._forward_hooks or "forward" in vars(m) for m in net.modules())


def test_alps_is_the_search_without_target_stream_and_intercept() -> None:
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double(), alike(200, 12).double()
    masks, made = found(net, points, method="alps")
    x = [f64(fit_points(points)), f64(made.model[:2](fit_points(points)))]  # type: ignore[index]
    for i, inputs in zip((0, 2), x):
        name, w_FK = f"{i}.weight", f64(net[i].weight)
        given = (inputs, inputs @ w_FK.T, w_FK, masks[name].numpy(), False)
        mask_FK, _ = oracle.search(*given, growths=(1.3, 1.2, 1.1))  # the schedule of its paper
        v_FK, _ = oracle.refit(inputs, inputs @ w_FK.T, w_FK, mask_FK, 0.01, False)
        assert np.array_equal(made.masks[name].numpy(), mask_FK)
        assert np.allclose(f64(made.model.get_parameter(name)), v_FK, rtol=1e-6, atol=1e-8)
        assert torch.equal(made.model.get_parameter(f"{i}.bias"), net[i].bias)
    assert all(layer.mask_origin == "searched" and not layer.corrects for layer in made.record.layers)


@pytest.mark.parametrize("kind", ["layer", "2:4", "1:3"])
@pytest.mark.parametrize("fan_in", [10, 150])
def test_sparsegpt_is_its_definition(kind: str, fan_in: int) -> None:
    random = np.random.default_rng(0)
    x_PK = random.normal(size=(2 * fan_in, fan_in)) @ random.normal(size=(fan_in, fan_in))
    x_PK[:, 3] = 0.0  # an input that never occurs
    w_FK = random.normal(size=(5, fan_in))
    n_m = tuple(map(int, kind.split(":"))) if ":" in kind else None
    n_kept = w_FK.size * 2 // 5
    rows = system(x_PK, x_PK @ w_FK.T, w_FK)
    nothing = torch.zeros(5, dtype=torch.bool)
    rule = MaskRule(n_kept, torch.ones(w_FK.shape, dtype=torch.bool), nothing, None if n_m is None else Pattern(*n_m))
    mask_FK, values_FK = sparsegpt([rows], rule)
    wanted_mask_FK, wanted_FK = sparsegpt_oracle(x_PK, w_FK, n_kept, n_m)  # type: ignore[arg-type]
    assert np.array_equal(mask_FK.numpy(), wanted_mask_FK)
    assert np.allclose(values_FK.numpy(), wanted_FK, rtol=1e-6, atol=1e-8)
    if n_m is None:
        assert int(mask_FK.sum()) == n_kept


def test_sparsegpt_prunes_a_network_and_its_groups() -> None:
    net, points = block()
    masks, made = found(net, points, keep=0.3, method="sparsegpt")
    assert all(int(mask.sum()) == int(masks[name].sum()) for name, mask in made.masks.items())
    assert all(
        layer.mask_origin == "searched" and layer.ridge is None and layer.intercept == "none"
        for layer in made.record.layers
    )
    inputs = patches(f64(fit_points(points)))
    w_FK = f64(net.stem.weight).reshape(6, -1)
    mask_FK, v_FK = sparsegpt_oracle(inputs, w_FK, int(masks["stem.weight"].sum()), None)
    assert np.array_equal(made.masks["stem.weight"].flatten(1).numpy(), mask_FK)
    assert np.allclose(f64(made.model.stem.weight).reshape(6, -1), v_FK, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr, arg-type]
    assert (
        made.record.output_before is not None
        and made.record.output_after is not None
        and made.record.output_after < made.record.output_before
    )


def test_recurrent_and_attention_weights() -> None:
    torch.manual_seed(0)
    lstm, points = nn.LSTM(5, 8, batch_first=True), alike(80, 6, 5)
    masks, made = found(lstm, points)
    assert {layer.name for layer in made.record.layers} == set(masks) and any(
        layer.n_moved for layer in made.record.layers
    )
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    masks, made = found(encoder, alike(80, 6, 8))
    assert all(layer.mask_origin != "unfitted" for layer in made.record.layers)
    assert [layer.name for layer in made.record.layers if layer.corrects] == ["linear2.weight"]


def test_outputs_that_are_no_numbers_leave_the_layer_as_it_was() -> None:
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double(), alike(100, 8).double()
    points = points * 1e200
    masks, made = found(net, points)
    assert all(layer.mask_origin == "unfitted" and layer.left_alone for layer in made.record.layers)
    for name, mask in masks.items():
        assert torch.equal(made.model.get_parameter(name), net.get_parameter(name) * mask)


def test_on_a_gpu_the_same_points_are_fitted_in_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked here: batches that a GPU takes many of give the network that the small ones give, but for rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    batches = [*alike(200, 12).split(20), alike(30, 12, seed=1)]
    masks, small = found(net, batches)
    monkeypatch.setattr(data_split_module, "_room", lambda batch, widest: 100)
    parts, before = in_large_batches(parts_of(batches), 16), parts_of(batches)
    assert [batch.n_points for batch in parts.fit] == [90, 90, 27] and len(before.fit) == 11
    assert len(parts.validation) == 1
    assert all(
        torch.equal(*(torch.cat([batch.args[0] for batch in some]) for some in both))
        for both in ((parts.fit, before.fit), (parts.validation, before.validation), (parts.test, before.test))
    )
    large = repair(net, masks, before, **PLAIN)
    assert {name: int(mask.sum()) for name, mask in large.masks.items()} == {n: int(m.sum()) for n, m in masks.items()}
    x = alike(50, 12, seed=2)
    torch.testing.assert_close(large.model(x), small.model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("widest", "memory", "n_sequences"),
    [(1536, 139 << 30, 42), (11008, 139 << 30, 5), (1536, 24 << 30, 8), (1536, 1 << 30, 0)],
)
def test_a_narrow_network_takes_more_sequences_at_once(widest: int, memory: int, n_sequences: int) -> None:
    assert data_split_module.sequences_at_once(2048, widest, memory) == n_sequences


def test_a_polish_has_the_batches_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """How large they are decides how it learns; on a GPU only the fit has larger ones."""
    torch.manual_seed(0)
    net, sizes, polish = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), [], repair_module.polish

    def noted(dense: nn.Module, model: nn.Module, masks: Any, split: DataSplit, **options: Any) -> Any:
        sizes.extend(batch.n_points for batch in split.fit)
        return polish(dense, model, masks, split, **options)

    monkeypatch.setattr(data_split_module, "_room", lambda batch, widest: 100)
    monkeypatch.setattr(repair_module, "polish", noted)
    points = list(alike(200, 12).split(20))
    pruned = sipp.prune(net, None, keep=0.4, method="magnitude", progress=False)
    sipp.repair(net, pruned, points, moves_mask=True, steps=2, progress=False)
    assert sizes == [18] * 10


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)])
def test_only_a_network_in_half_precision_is_multiplied_in_tf32(dtype: torch.dtype, allowed: bool) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in net.named_parameters() if p.ndim == 2}
    batch = next(data_of(torch.rand(20, 6).to(dtype)).batches())
    assert walk.task_for(net, masks, batch, chunk_bytes=1 << 20).allow_tf32 is allowed


@pytest.mark.parametrize(("wide", "expected"), [(12, layer_search.ALPS_GROWTHS), (4096, GROWTHS)])
def test_wide_layers_are_searched_in_fewer_rounds(wide: int, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    seen = []

    def noted(rows: Any, mask_FK: Tensor, rule: MaskRule, growths: Any) -> tuple[Tensor, int]:
        seen.append(growths)
        return search(rows, mask_FK, rule, growths)

    monkeypatch.setattr(layer_fit, "WIDE", wide)
    monkeypatch.setattr(layer_fit, "search", noted)
    found(nn.Sequential(nn.Linear(12, 24)).double(), alike(200, 12).double())
    assert seen and seen[-1] == expected


def test_data_that_repeats_loses_no_class() -> None:
    """One point of each of ten classes in turn: classes are held back alike."""
    points = torch.randn(2000, 3)
    classes = {row.numpy().tobytes(): i % 10 for i, row in enumerate(points)}
    split = parts_of(points)
    for part in (split.fit, split.validation, split.test):
        met = [classes[row.numpy().tobytes()] for batch in part for row in batch.args[0]]
        counts = [met.count(i) for i in range(10)]
        assert min(counts) >= 0.3 * len(met) / 10 and max(counts) <= 2 * len(met) / 10
    assert len(fit_points(points)) == 1800
