"""T21: masks, values and targets of a whole network are those of the slow definition; budgets and rows hold."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles import joint as oracle
from oracles.patterns import obeys
from oracles.refit import conv_patches
from oracles.sparsegpt import sparsegpt as sparsegpt_oracle
from repairing.fit_points import alike, even_masks, f64, fit_points, split_of
from torch import Tensor, nn

import sipp
from sipp.inputs.outputs import output_error
from sipp.pruning.rows import even_layers
from sipp.repairing import Repaired, data_split, repair_network
from sipp.results import numerics
from sipp.results.options import Pattern


def found(net: nn.Module, points: Any, *, keep: float = 0.4, **options: Any) -> tuple[dict[str, Tensor], Repaired]:
    """The largest weights of each layer, the same share of all, and what the search makes of them."""
    masks = even_masks(net, keep)
    return masks, repair_network(net, masks, split_of(points), **options)


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
    mask_FK, _ = oracle.search(x, t, flat[0], start, True, **options)
    assert np.array_equal(made.masks[name].flatten(1).numpy(), mask_FK)
    v_FK, b_F = oracle.refit(x, t, flat[0], mask_FK, layer.ridge, True)
    assert np.allclose(flat[1], v_FK, rtol=1e-4, atol=1e-5)
    return b_F


@pytest.mark.parametrize("a", [1.0, 0.25])  # of networks that are small, and that are like a language model
def test_layers_one_after_another(a: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double(), alike(200, 12).double()
    monkeypatch.setattr(numerics, "MOST_WEIGHTS_OF_SMALL", 10**9 if a == 1.0 else 10)
    masks, made = found(net, points)
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


def test_budgets_rows_and_patterns() -> None:
    net, points = block()
    masks, made = found(net, points, keep=0.25)
    for name, mask in made.masks.items():
        weight = made.model.get_parameter(name)
        assert int(mask.sum()) == int(masks[name].sum()) and bool((weight[~mask] == 0).all())
    assert any(not torch.equal(mask, masks[name]) for name, mask in made.masks.items())
    masks = {name: p.abs() >= p.abs().amax(1, keepdim=True) for name, p in net.named_parameters() if p.ndim > 1}
    for way in ("joint", "sparsegpt"):
        alive = repair_network(net, masks, split_of(points), way, keeps_rows=True)  # type: ignore[arg-type]
        assert all(bool(mask.flatten(1).any(1).all()) for mask in alive.masks.values())
        assert sum(int(mask.sum()) for mask in alive.masks.values()) == sum(int(mask.sum()) for mask in masks.values())
    masks = sipp.prune(net, None, pattern="2:4", method="magnitude").masks
    for way in ("joint", "alps", "sparsegpt"):
        made = repair_network(net, masks, split_of(points), way, pattern=Pattern(2, 4))  # type: ignore[arg-type]
        assert all(obeys(mask.flatten(1).tolist(), 2, 4) for mask in made.masks.values())
        assert all(int(mask.sum()) == int(masks[name].sum()) for name, mask in made.masks.items())
        assert any(layer.mask_origin == "searched" and layer.n_moved for layer in made.record.layers)


def test_of_a_sparse_network_a_layer_gets_no_more_than_it_has_left() -> None:
    net, points = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 20)), alike(60, 40)
    with torch.no_grad():
        net[0].weight[:, 4:] = 0  # 200 are left here, 1,000 there
    masks = sipp.prune(net, None, budget=900, method="magnitude").masks
    made = repair_network(net, masks, split_of(points))
    assert sum(int(mask.sum()) for mask in made.masks.values()) == 900
    assert not any(bool((mask & (net.get_parameter(name) == 0)).any()) for name, mask in made.masks.items())
    full = sipp.prune(net, None, keep=0.9, method="magnitude").masks  # more than are left: zeros are kept as well
    made = repair_network(net, full, split_of(points))
    assert sum(int(mask.sum()) for mask in made.masks.values()) == sum(int(mask.sum()) for mask in full.values())


@pytest.mark.parametrize("keeps_rows", [False, True])
def test_budgets_of_layers_are_half_way_to_the_same_share_of_all(keeps_rows: bool) -> None:
    net, points = block()
    masks = sipp.prune(net, None, keep=0.25, method="lamp").masks
    kept = {name: int(mask.sum()) for name, mask in masks.items()}
    made = repair_network(net, masks, split_of(points), keeps_rows=keeps_rows)
    counts = {name: int(mask.sum()) for name, mask in made.masks.items()}
    assert sum(counts.values()) == sum(kept.values())
    assert all(bool((made.model.get_parameter(n)[~mask] == 0).all()) for n, mask in made.masks.items())
    sizes = [(len(mask), mask[0].numel()) for mask in masks.values()]
    even = even_layers(sizes, sum(kept.values()), least=int(keeps_rows))
    wanted = {name: math.sqrt(n * share) for (name, n), share in zip(kept.items(), even)}
    scale = sum(kept.values()) / sum(wanted.values())
    assert all(abs(counts[name] - scale * n) <= 1 for name, n in wanted.items()) and counts != kept
    moved = {name: int((made.masks[name] & ~mask).sum()) for name, mask in masks.items()}  # from the given masks
    assert {layer.name: layer.n_moved for layer in made.record.layers} == moved


def test_the_errors_of_a_record_are_those_of_the_network_that_is_returned() -> None:
    """Validation and test points are never fitted."""
    torch.manual_seed(0)
    net, points = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6)).double(), alike(200, 12).double()
    masks, made = found(net, points)
    split = split_of(points)
    assert (made.record.n_fit, made.record.n_validation, made.record.n_test) == (180, 10, 10)
    assert made.record.output_after == output_error(net, made.model, split.test) is not None
    assert made.record.output_validation == output_error(net, made.model, split.validation) is not None
    x = torch.cat([batch.args[0] for batch in split.fit])
    check_layer(net, made, masks, "0.weight", f64(x), oracle.aim(f64(x), f64(x), f64(net[0].weight), 1.0))


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


def test_on_a_gpu_the_same_points_are_fitted_in_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked here: batches that a GPU takes many of give the network that the small ones give, but for rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    batches = [*alike(200, 12).split(20), alike(30, 12, seed=1)]
    masks, small = found(net, batches)
    monkeypatch.setattr(data_split, "points_at_once", lambda batch, widest: 100)
    parts, before = data_split.in_large_batches(split_of(batches), 16), split_of(batches)
    assert [batch.n_points for batch in parts.fit] == [90, 90, 27] and len(before.fit) == 11
    assert len(parts.validation) == 1
    assert all(
        torch.equal(*(torch.cat([batch.args[0] for batch in some]) for some in both))
        for both in ((parts.fit, before.fit), (parts.validation, before.validation), (parts.test, before.test))
    )
    large = repair_network(net, masks, before)
    assert {name: int(mask.sum()) for name, mask in large.masks.items()} == {n: int(m.sum()) for n, m in masks.items()}
    x = alike(50, 12, seed=2)
    torch.testing.assert_close(large.model(x), small.model(x), rtol=1e-4, atol=1e-5)
