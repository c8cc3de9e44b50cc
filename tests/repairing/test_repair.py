"""What `sipp.repair` promises: never worse on validation points, masks kept, models untouched, the same bits twice."""

import copy
import math

import pytest
import torch
from repairing.fit_points import fit_points, split_of, split_positions
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.repairing import polishing
from sipp.results import numerics
from sipp.results.pruned import Pruned
from sipp.results.repair import Repair


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5)).to(dtype).eval()


def points(n: int = 120, dtype: torch.dtype = torch.float32) -> Tensor:
    noise = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    return (noise + 0.9 * noise.roll(1, 1) + 0.5).to(dtype)


def done(record: Pruned) -> Repair:
    assert record.repair is not None
    return record.repair


def error(dense: nn.Module, other: nn.Module, x: Tensor) -> float:
    return float((other(x) - dense(x)).norm() / dense(x).norm())


def is_masked(record: Pruned) -> bool:
    return all(bool((record.model.get_parameter(name)[~mask] == 0).all()) for name, mask in record.masks.items())


@pytest.mark.parametrize("steps", [0, 20])
def test_the_output_comes_nearer_and_the_masks_stay(steps: int) -> None:
    dense = net()
    pruned = sipp.prune(dense, None, keep=0.4, method="magnitude")
    fixed = sipp.repair(dense, pruned, points(), steps=steps)
    fresh = points(400)[120:]
    assert error(dense, fixed.model, fresh) < 0.8 * error(dense, pruned.model, fresh)
    assert is_masked(fixed) and fixed.masks.keys() == pruned.masks.keys() and fixed.kept == pruned.kept
    assert all(torch.equal(fixed.masks[name], mask) for name, mask in pruned.masks.items())
    assert list(fixed.model.state_dict()) == list(dense.state_dict())


def test_a_polish_brings_the_refit_nearer_and_says_how_far() -> None:
    dense, data = net(), points(600)
    pruned = sipp.prune(dense, None, keep=0.3, method="magnitude")
    found = done(sipp.repair(dense, pruned, data, steps=60, learning_rate=1e-2))
    refit = sipp.repair(dense, pruned, data)
    before, after = done(refit).output_after, found.output_after
    assert before is not None and after is not None and found.polish is not None and after < 0.98 * before
    assert 0 < found.polish.best <= found.polish.taken <= 60
    validation, test = (data[some] for some in split_positions(600)[1:])
    assert (found.n_validation, found.n_test, found.n_fit) == (len(validation), len(test), 540) == (30, 30, 540)
    assert math.isclose(before, error(dense, refit.model, test), rel_tol=1e-4)
    assert math.isclose(done(refit).output_validation or 0, error(dense, refit.model, validation), rel_tol=1e-4)


def test_a_polish_that_gains_nothing_stops_early_and_changes_nothing() -> None:
    dense = net()
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    refit, wild = (sipp.repair(dense, pruned, points(), steps=s, learning_rate=1e6) for s in (0, 64))
    polish = done(wild).polish
    n_looks = 2 * polishing.PATIENCE  # in a second round on mixtures too
    assert polish is not None and polish.best == 0 and polish.taken == 64 // polishing.N_CHECKS * n_looks
    assert all(torch.equal(a, b) for a, b in zip(refit.model.state_dict().values(), wild.model.state_dict().values()))


def test_a_round_that_learns_its_points_by_heart_is_followed_by_one_on_mixtures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few points and many weights: the first round stops gaining early. The better on validation points is kept."""
    dense = net()
    pruned = sipp.prune(dense, None, keep=0.6, method="magnitude")
    found = {}
    for overfitted in (polishing.OVERFITTED, 0.0):  # 0: there is no second round
        monkeypatch.setattr(polishing, "OVERFITTED", overfitted)
        found[overfitted] = done(sipp.repair(dense, pruned, points(40), steps=160, learning_rate=5e-3))
    both, first = found.values()
    assert both.polish is not None and first.polish is not None and not first.polish.mixes
    assert first.polish.best < 0.75 * 160 and both.polish.taken > first.polish.taken
    assert both.output_validation is not None and first.output_validation is not None
    assert both.output_validation <= first.output_validation
    assert both.polish.mixes is (both.output_validation < first.output_validation)


@pytest.mark.parametrize(("dtype", "gain"), [(torch.bfloat16, 0.95), (torch.float64, 0.8)])
def test_other_precisions(dtype: torch.dtype, gain: float) -> None:
    dense = net(dtype)
    pruned = sipp.prune(dense, None, keep=0.4, method="magnitude")
    fixed = sipp.repair(dense, pruned, points(dtype=dtype))
    assert error(dense, fixed.model, points(dtype=dtype)) < gain * error(dense, pruned.model, points(dtype=dtype))
    assert is_masked(fixed) and all(p.dtype == dtype for p in fixed.model.parameters())


def test_a_polish_in_float16_gains_as_much_as_one_in_float32() -> None:
    """Adam's steps are summed up in float32: most are too small for 16 bits, and its epsilon is 0 in float16."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 5)).eval().half()
    gains, data = [], points(600).half()
    for one, x in ((dense, data), (copy.deepcopy(dense).float(), data.float())):
        pruned = sipp.prune(one, None, keep=0.4, method="magnitude")
        fixed, refit = (sipp.repair(one, pruned, list(x.split(60)), steps=steps) for steps in (100, 0))
        assert done(fixed).polish.best > 0 and is_masked(fixed)  # type: ignore[union-attr]
        assert all(p.grad is None and p.dtype == x.dtype for p in fixed.model.parameters())
        gains.append(error(one, fixed.model, x) / error(one, refit.model, x))
    assert gains[0] < 0.95 and abs(gains[0] - gains[1]) < 0.02


def test_inputs_far_from_zero_are_refitted_as_near_ones_are() -> None:
    """Their products in float32 hold little but the mean."""
    torch.manual_seed(0)
    near, x, errors = nn.Linear(8, 5), points(400), []
    for offset in (0.0, 1e4):
        dense = copy.deepcopy(near)
        dense.bias.data -= offset * near.weight.data.sum(1)  # the same outputs
        pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
        fixed, fresh = sipp.repair(dense, pruned, x[:200] + offset), x[200:] + offset
        errors.append(float((fixed.model(fresh) - dense(fresh)).norm() / near(x[200:]).norm()))
        assert not done(fixed).layers[0].left_alone
    assert errors[0] < 1 and errors[1] < 1.02 * errors[0]


def test_sums_that_are_not_finite_leave_the_layer_alone() -> None:
    dense = nn.Linear(8, 5).double()
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    fixed = sipp.repair(dense, pruned, points(dtype=torch.float64) * 1e200)
    assert "not finite" in done(fixed).layers[0].left_alone and torch.equal(fixed.model.weight, pruned.model.weight)


def test_dead_rows_and_rows_of_zeros() -> None:
    """A row without weights still gets the mean of what it gave; one that was zero in the dense network stays zero."""
    torch.manual_seed(0)
    dense = nn.Linear(8, 4)
    dense.weight.data[2] = 0
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[1] = False
    mask[0, ::2] = False
    fixed = sipp.repair(dense, sipp.assess(dense, {"weight": mask}, points()), points())
    x = fit_points(points())
    assert bool((fixed.model.weight[1:3] == 0).all())
    assert torch.allclose(fixed.model.bias[1] - dense.bias[1], (x @ dense.weight[1]).mean(), atol=1e-5)
    assert torch.allclose(fixed.model.bias[2], dense.bias[2], atol=1e-6)
    assert torch.allclose(fixed.model.weight[3], dense.weight[3], atol=1e-6)


def test_a_layer_that_would_be_worse_is_left_alone() -> None:
    """The removed feature runs along with the kept one where it is fitted, and against it on the validation points."""
    torch.manual_seed(0)
    dense = nn.Linear(2, 3, bias=False)
    dense.weight.data.copy_(torch.tensor([[1.0, 0.5], [1.0, 0.4], [1.0, 0.3]]))
    one = torch.randn(100, 1)
    sign = torch.full((100, 1), -1.0)
    sign[split_positions(100)[0]] = 1.0
    data = torch.cat([one, sign * one], 1)
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    fixed = sipp.repair(dense, pruned, data)
    (layer,) = done(fixed).layers
    assert "no refit was better" in layer.left_alone and layer.error_after == layer.error_before
    assert torch.equal(fixed.model.weight, pruned.model.weight)
    good = sipp.repair(dense, pruned, torch.cat([one, one], 1))
    assert torch.allclose(good.model.weight[:, 0], torch.tensor([1.5, 1.4, 1.3]), atol=0.01)


class Steep(nn.Module):
    """Tells only the sign of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.layer.weight.data.copy_(torch.tensor([[0.01, -0.009]]))
        self.layer.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(1e4 * self.layer(x))


def test_a_better_layer_that_makes_the_output_worse_is_undone() -> None:
    """Most outputs are just above zero: the mean that fits the few large ones turns them around."""
    dense = Steep()
    fit, validation, _ = split_positions(100)
    seldom = torch.zeros(100)
    seldom[[*fit[::7], validation[0]]] = 1.0
    data = torch.stack([1 + 1e-4 * torch.rand(100, generator=torch.Generator().manual_seed(0)), 30 * seldom], 1)
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    fixed = sipp.repair(dense, pruned, data)
    (layer,) = done(fixed).layers
    assert layer.left_alone == "undone" and layer.error_after is None
    assert "no closer" in done(fixed).undone
    assert done(fixed).output_after == done(fixed).output_before
    assert torch.equal(fixed.model.layer.bias, pruned.model.layer.bias)
    assert "undone" in str(fixed)


def test_old_promises_are_withdrawn_and_new_ones_can_be_had() -> None:
    dense = net()
    pruned = sipp.prune(dense, points(), keep=0.5, method="sipp-det")
    assert pruned.guarantee is not None and pruned.layers[0].eps is not None
    fixed = sipp.repair(dense, pruned, points())
    assert fixed.guarantee is None and fixed.measured is None and not fixed.bound.met and fixed.bound.epsilon is None
    assert all(layer.eps is None and layer.eps_F is None and layer.bound is None for layer in fixed.layers)
    assert "sipp.assess" in str(fixed) and "refitted" in str(fixed) and "0.weight" in str(fixed.repair)
    judged = sipp.assess(dense, fixed.model, points())
    assert judged.layers[0].eps is not None and judged.layers[0].eps > 0


def test_wrong_input_is_refused() -> None:
    dense = net()
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    with pytest.raises(DataError, match="at least 10"):
        sipp.repair(dense, pruned, points(9))
    with pytest.raises(DataError, match="5 different inputs"):
        sipp.repair(dense, pruned, points(5).repeat(40, 1))
    with pytest.raises(OptionError, match="not the record of a pruning"):
        sipp.repair(dense, pruned.model, points())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="steps"):
        sipp.repair(dense, pruned, points(), steps=-1)
    with pytest.raises(ModelError, match="in the dense network only"):
        sipp.repair(nn.Linear(8, 5), pruned, points())
    revived = copy.deepcopy(pruned)
    revived.model[0].weight.data.fill_(1)
    with pytest.raises(ModelError, match="a pruned weight is not zero"):
        sipp.repair(dense, revived, points())


def test_networks_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = net()
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    monkeypatch.setattr(numerics, "device_of", lambda model: torch.device("cuda" if model is dense else "cpu"))
    with pytest.raises(ModelError, match="are on cuda and cpu"):
        sipp.repair(dense, pruned, points())


def test_held_back_points_make_batches_no_larger_than_those_given() -> None:
    x = points(130)
    parts = split_of(list(x.split(40)))
    assert [batch.n_points for batch in parts.fit] == [36, 36, 36, 9]
    assert [batch.n_points for batch in parts.validation] == [7] and [batch.n_points for batch in parts.test] == [6]
    fit, validation, test = split_positions(130)
    assert sorted(fit + validation + test) == list(range(130))
    assert sorted(i // 10 for i in validation + test) == list(range(13))  # one of every ten
    assert len({i % 10 for i in validation + test}) > 3  # at no place of its own
    assert torch.equal(torch.cat([batch.args[0] for batch in parts.validation]), x[validation])
    assert torch.equal(torch.cat([batch.args[0] for batch in parts.test]), x[test])
    parts = split_of(list(x.split(5)))
    assert [batch.n_points for batch in parts.validation] == [5, 2] and [b.n_points for b in parts.test] == [5, 1]


def test_with_few_points_all_held_back_points_choose() -> None:
    x = points(70)
    parts = split_of(x)
    held_back = torch.cat([batch.args[0] for batch in parts.validation])
    assert torch.equal(held_back, x[split_positions(70)[1]]) and len(held_back) == 7 and not parts.test
