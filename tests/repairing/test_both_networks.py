"""A network that is walked block by block is repaired to the same bits as one that is run whole, with less work."""

import copy
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from shorter import search_once
from torch import Tensor, nn

import sipp
from sipp.inputs.data import data_of
from sipp.inputs.layers import find_prunable_layers
from sipp.inputs.probing import Probes
from sipp.repairing import choosing, layer_targets, network_fit, network_pair, repair_network
from sipp.repairing import layer_usage as usage_module
from sipp.repairing.data_split import split_batches
from sipp.repairing.layer_fit import LayerTask
from sipp.repairing.layer_usage import DenseOutputs, layer_usage, masked_layers
from sipp.repairing.moments import Moments
from sipp.repairing.network_pair import NetworkPair, _Shared
from sipp.repairing.repair_options import RepairOptions
from sipp.results import ranking as ranking_records


class Model(nn.Module):
    """A transformer with weights before and behind its blocks."""

    def __init__(self, n_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoder(layer, n_blocks, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return self.last(self.encoder(self.first(x), src_key_padding_mask=padding_mask))


def residual_cnn() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
            self.na, self.nb = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x))))))

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def data(kind: str) -> list[dict[str, Tensor]] | Tensor:
    torch.manual_seed(1)
    if kind == "images":
        return torch.randn(40, 2, 6, 6)
    x = torch.randn(40, 6, 5)
    if kind == "sequences":
        return [{"x": x[:25]}, {"x": x[25:]}]
    padding = torch.arange(6) >= torch.randint(3, 7, (40, 1))
    return [{"x": x[:25], "padding_mask": padding[:25]}, {"x": x[25:], "padding_mask": padding[25:]}]


@pytest.mark.parametrize("kind", ["sequences", "padded", "images"])
@pytest.mark.parametrize("way", ["joint", "refit"])
def test_block_by_block_has_the_bits_of_the_whole(kind: str, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = residual_cnn().eval() if kind == "images" else Model(2).eval()
    search_once(monkeypatch)

    def weights() -> list[Tensor]:
        done = sipp.prune(
            net, data(kind), keep=0.5, method="magnitude", floor=0.001, statements=False, repair=way, progress=False
        )
        return list(done.model.state_dict().values())

    by_blocks = weights()
    monkeypatch.setattr(repair_network, "find_blocks", lambda model, batch, named=None: None)
    assert all(map(torch.equal, by_blocks, weights()))


def test_each_block_is_run_as_often_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def n_calls(n_blocks: int) -> float:
        """How often a block is called in a refit, in the mean."""
        net, count = Model(n_blocks).eval(), 0
        pruned = sipp.prune(net, None, keep=0.5, method="magnitude", floor=0.001, progress=False)
        forward = nn.TransformerEncoderLayer.forward

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal count
            count += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(nn.TransformerEncoderLayer, "forward", counted)
        sipp.repair(net, pruned, data("sequences"), progress=False)
        monkeypatch.setattr(nn.TransformerEncoderLayer, "forward", forward)
        return count / n_blocks

    assert n_calls(8) < 1.2 * n_calls(4)


@pytest.mark.parametrize("kind", ["images", "sequences"])
def test_several_fits_ask_the_dense_network_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = residual_cnn().eval() if kind == "images" else Model(3).eval()
    parts, run, n_passes = split_batches(data_of(data(kind)).batches()), network_pair.runner, 0

    def counted(model: nn.Module, *args: Any, **options: Any) -> Any:
        nonlocal n_passes
        n_passes += any(model is one for one in net.modules())
        return run(model, *args, **options)

    def fitted(keep: float, known: DenseOutputs | None) -> tuple[list[Tensor], int]:
        """The weights that are found, and how often the dense network or a part of it was run for them."""
        nonlocal n_passes
        n_passes = 0
        masks = sipp.prune(net, None, keep=keep, method="magnitude", floor=0.001).masks
        options = RepairOptions(error_feedbacks=(1.0,), budgets=("given",))
        found = repair_network.repair_network(net, masks, replace(parts, dense_outputs=known), options)
        return list(found.model.state_dict().values()), n_passes

    for module in (network_pair, usage_module):
        monkeypatch.setattr(module, "runner", counted)
    known = DenseOutputs()
    _, at_first = fitted(0.6, known)
    (again, later), (alone, without) = fitted(0.4, known), fitted(0.4, None)
    n_streams = sum(len(corrected) for _, corrected in known.targets)
    assert all(map(torch.equal, again, alone)) and at_first == without
    assert later == n_streams < without / 2  # those that look whether a stream is aligned, on the first batch
    monkeypatch.setattr(usage_module, "TARGET_BYTES", {"cpu": 1})
    full = DenseOutputs()
    assert all(map(torch.equal, fitted(0.4, full)[0], alone)) and not full.targets and full.n_bytes == 0


def test_sums_are_shared_by_the_same_windows_alone() -> None:
    shared, x = _Shared(), torch.randn(3, 1, 4, 5)
    sums = shared.keep(x, Moments.zeros(1, 0, 5, x.device))
    assert shared.of(x) is sums and shared.of(x.view(3, 1, 4, 5)) is sums
    assert shared.of(x.clone()) is None and shared.of(x[:2]) is None and shared.of(x.transpose(0, 2)) is None
    x.add_(1)
    assert shared.of(x) is None


def test_large_networks_of_linear_layers_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(net: nn.Module, points: Any) -> tuple[float, int]:
        masks = sipp.prune(net, None, keep=0.5, method="magnitude", floor=0.001).masks
        found = repair_network.repair_network(net, masks, split_batches(data_of(points).batches()), RepairOptions())
        tried = [one.budgets == "magnitude" or one.error_feedback != 0.25 for one in found.trials]
        return found.record.error_feedback or 0.0, sum(tried)

    torch.manual_seed(0)
    mlp, points = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(40, 5)
    assert chosen(mlp, points)[1] > 0
    monkeypatch.setattr(choosing, "MOST_WEIGHTS_OF_SMALL", 10)
    monkeypatch.setattr(ranking_records, "MOST_WEIGHTS_OF_SMALL", 10)
    assert chosen(mlp, points) == (0.25, 0)
    assert chosen(residual_cnn().eval(), data("images"))[1] > 0  # nor are convolutions taken for such


class Forked(nn.Module):
    """Goes one of two ways, by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(x) if bool(x.sum() > 0) else self.below(x)


def test_batches_that_are_alike_are_counted_once_unless_values_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    n_passes = 0
    run = usage_module.runner

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal n_passes
        n_passes += 1
        return run(*args, **options)

    monkeypatch.setattr(usage_module, "runner", counted)
    points = [torch.rand(8, 4), -torch.rand(8, 4), torch.rand(8, 4), torch.rand(5, 4)]
    batches = list(data_of(points, device=torch.device("cpu")).batches())
    census = {}
    for net in (nn.Linear(4, 3), Forked()):
        n_passes = 0
        census[type(net)] = layer_usage(net, find_prunable_layers(net), batches, {}), n_passes
    plain, n_plain = census[nn.Linear]
    assert [uses["weight"] for uses in plain.n_uses] == [1] * 4 and n_plain == 1  # a few points of 29
    assert plain.target_bytes["weight"] == 29 * 3 * 4
    forked, n_forked = census[Forked]
    assert [uses["above.weight"] for uses in forked.n_uses] == [1, 0, 1, 1] and n_forked == 4


def first_choice(task: Any, layer_task: Any, masks: dict[str, Tensor], *more: Any) -> choosing.Choice:
    return choosing.Choice(1.0, "given", masks, ())


def repaired() -> sipp.Pruned:
    return sipp.prune(
        Model(3).eval(), data("sequences"), keep=0.5, method="magnitude", statements=False, repair=True, progress=False
    )


def test_targets_live_until_their_weights_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = list[tuple[str, Any]](), list[set[str]]()
    made, summed = layer_targets.dense_targets, network_fit.moments_to_targets
    monkeypatch.setattr(repair_network, "choose", first_choice)

    def noted(pair: NetworkPair, corrected: Any, names: Any, i: int) -> Any:
        found = made(pair, corrected, names, i)
        alive.extend((name, weakref.ref(one)) for name in names for one in found[name])
        return found

    def looked(pair: NetworkPair, corrected: Any, names: Any, kept: Any) -> Any:
        most.append({name for name, one in alive if one() is not None})
        assert {*names} <= most[-1] <= {*kept[0]}
        return summed(pair, corrected, names, kept)

    monkeypatch.setattr(layer_targets, "dense_targets", noted)
    monkeypatch.setattr(network_fit, "moments_to_targets", looked)
    repaired()
    in_block = [{name for name in names if name.startswith("encoder.layers.1.")} for names in most]
    assert [len(names) for names in in_block if names] == [4, 3, 2, 1]


def test_a_block_that_is_finished_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, find = list[int](), network_fit.find_residual_layers
    replays = []

    def looked(pair: NetworkPair, *more: Any, **options: Any) -> Any:
        kept.append(sum(len(one.kept) for one in replays))
        replays.extend((pair.pruned.replay, pair.dense.replay))
        return find(pair, *more, **options)

    monkeypatch.setattr(repair_network, "choose", first_choice)
    monkeypatch.setattr(network_fit, "find_residual_layers", looked)
    repaired()
    assert len(kept) >= 5 and kept[2:4] == kept[1:3]  # of what lies before the blocks; nothing of blocks


def test_residual_connections_are_looked_for_on_two_points(monkeypatch: pytest.MonkeyPatch) -> None:
    n_points, find = list[int](), layer_targets.find_residual_connections

    def looked(model: Any, layers: Any, order: Any, batch: Any, **options: Any) -> Any:
        found = find(model, layers, order, batch, **options)
        n_points.extend([batch.n_points] if found else [])
        return found

    monkeypatch.setattr(layer_targets, "find_residual_connections", looked)
    monkeypatch.setattr(repair_network, "choose", first_choice)
    repaired()
    assert n_points and set(n_points) == {2}


def test_behind_its_last_weight_a_dense_block_is_kept_as_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, fit = list[list[Any]](), network_fit._fit_pair

    def looked(task: Any, layer_task: Any, pair: NetworkPair, *more: Any) -> Any:
        yield from fit(task, layer_task, pair, *more)
        if pair.dense.replay.mode != "off":
            paths.extend(list(one) for one in pair.dense.replay.kept.values())

    monkeypatch.setattr(network_fit, "_fit_pair", looked)
    repaired()
    assert paths and all(one == [(("", 0),)] for one in paths)


def test_a_look_at_the_layers_keeps_no_outputs() -> None:
    net, forms = Model(2).eval(), Probes()
    masks = {name: p != 0 for name, p in net.named_parameters() if p.ndim > 1}
    layer_usage(net, masked_layers(net, masks), split_batches(data_of(data("sequences")).batches()).batches, forms)
    assert forms and all(one.alone is None for one in forms.values())


def test_copies_of_the_network_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most, copy_of = list[weakref.ref[nn.Module]](), list[int](), network_fit.copy_of

    def noted(model: nn.Module) -> nn.Module:
        made = copy_of(model)
        alive.append(weakref.ref(made))
        most.append(sum(one() is not None for one in alive))
        return made

    for module in (network_fit, repair_network):
        monkeypatch.setattr(module, "copy_of", noted)
    monkeypatch.setattr(repair_network, "choose", first_choice)
    net = Model(2).eval()
    masks = {name: p.detach().abs() > p.detach().abs().median() for name, p in net.named_parameters() if p.ndim > 1}
    parts = split_batches(data_of(data("sequences")).batches())
    repair_network.repair_network(net, masks, parts, RepairOptions())
    assert most == [1, 1]


def test_the_network_is_looked_at_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    order, copy_of, usage_of = list[str](), network_fit.copy_of, network_fit.usage_of
    monkeypatch.setattr(repair_network, "choose", first_choice)
    monkeypatch.setattr(network_fit, "copy_of", lambda model: (order.append("copy"), copy_of(model))[1])
    monkeypatch.setattr(network_fit, "usage_of", lambda *given: (order.append("look"), usage_of(*given))[1])
    repaired()
    assert order[:2] == ["look", "copy"]


@pytest.mark.parametrize(("n_layers", "modes"), [(1, {"check"}), (3, {"check", "trust"})])
def test_a_replay_is_trusted_once_it_was_compared(
    n_layers: int, modes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block with one layer has nothing to compare, so later blocks are not trusted on its account."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh()] * n_layers
    blocks = nn.Sequential(*(nn.Sequential(*map(copy.deepcopy, layers)) for _ in range(4)))
    net = nn.Sequential(blocks, nn.Linear(8, 3)).eval()
    found, fit = set[str](), network_fit._fit_pair

    def looked(task: Any, layer_task: Any, pair: NetworkPair, *more: Any) -> Any:
        found.add(pair.pruned.replay.mode)
        yield from fit(task, layer_task, pair, *more)

    monkeypatch.setattr(network_fit, "_fit_pair", looked)
    said: dict[str, Any] = {"keep": 0.5, "method": "magnitude", "blocks": "0", "statements": False, "progress": False}
    sipp.prune(net, torch.randn(60, 8), repair=True, **said)
    assert found == modes


def test_weights_that_no_input_reaches_stand_last_in_the_order_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 5)
            self.idle = nn.ModuleList(nn.Linear(6, 5) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    net = Unused()
    masks = {name: p.detach().abs() > 0.2 for name, p in net.named_parameters() if p.ndim > 1}
    costs = list[int]()
    split = split_batches(data_of(torch.randn(50, 6)).batches())
    layer = LayerTask("joint", 1.0, (1e-3,), None, keeps_rows=False)
    task = network_fit.NetworkTask.of(net, masks, split.batches[0], chunk_bytes=1 << 20)
    made = network_fit.fit_network(task, layer, masks, split, advance=costs.append)
    assert [one.name for one in made.layers] == list(masks) and len(costs) == len(masks)
