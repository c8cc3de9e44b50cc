"""A refit that computes nothing twice gives the same bits as one that computes everything anew."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.inputs.data import data_of
from sipp.repairing import network_pair, replaying
from sipp.repairing.data_split import split_batches
from sipp.repairing.network_pair import NetworkPair
from sipp.repairing.repair_network import repair_network
from sipp.repairing.repair_options import RepairOptions
from sipp.repairing.replaying import Replay


class Block(nn.Module):
    """A residual block whose one ReLU is called twice, the second time on a sum."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.first(x))) + x)


class Talking(nn.Module):
    """A layer that leaves a value for another one, past its output."""

    said: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.said = x.mean(1, keepdim=True)
        return x


class Listening(nn.Module):
    def __init__(self, talking: Talking) -> None:
        super().__init__()
        self.others = [talking]  # a list hides it: it is no child
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        said = self.others[0].said
        return self.linear(x if said is None else x + said)


class Sharing(nn.Module):
    """One ReLU for the whole network, in blocks and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.blocks = nn.ModuleList(Block(False) for _ in range(3))
        for block in self.blocks:
            block.relu = self.relu
        self.last = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.relu(block(x) - 0.3)
        return self.last(x)


def chain(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules, nn.Linear(10, 4))


def nets() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    talking = Talking()
    return {
        "blocks": chain(*(Block(False) for _ in range(3))),
        "in place": chain(nn.Linear(10, 10), nn.ReLU(inplace=True), *(Block(True) for _ in range(3))),
        "one ReLU": Sharing(),
        "past outputs": chain(nn.Linear(10, 10), talking, nn.Linear(10, 10), Listening(talking), nn.Linear(10, 10)),
    }


def points() -> list[Tensor]:
    return list(torch.randn(120, 10, generator=torch.Generator().manual_seed(1)).split(40))


def weights_of(dense: nn.Module) -> list[Tensor]:
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    return list(sipp.repair(dense, pruned, points()).model.state_dict().values())


@pytest.mark.parametrize("name", nets())
def test_what_is_replayed_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = nets()[name]
    found = weights_of(dense)
    for n_bytes in (0, 4000):  # nothing is kept, a little is
        monkeypatch.setattr(replaying, "REPLAY_BYTES", {"cpu": n_bytes})
        assert all(map(torch.equal, found, weights_of(dense)))


def n_calls(dense: nn.Module, monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> int:
    """How often linear layers compute in a repair."""
    monkeypatch.setattr(replaying, "REPLAY_BYTES", {"cpu": n_bytes})
    pruned = sipp.prune(dense, None, keep=0.5, method="magnitude")
    count, linear = 0, nn.functional.linear

    def counted(*args: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", counted)
    sipp.repair(dense, pruned, points())
    monkeypatch.setattr(nn.functional, "linear", linear)
    return count


def test_replaying_saves_a_quarter_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = chain(*(nn.Linear(10, 10) for _ in range(9)))
    assert n_calls(dense, monkeypatch, 1 << 20) < 0.75 * n_calls(dense, monkeypatch, 0)


def test_what_was_written_to_is_forgotten_and_forwards_come_back() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    x, replay = torch.randn(5, 3), Replay()
    own = net[1].forward = net[1].forward  # a user's own attribute stays
    with torch.no_grad():
        with replay.running(net, 0, {net[2]}):
            found = net(x)
        assert [path[-1][0] for path in replay.kept[0]] == ["1"]  # the output of "0" was overwritten in place
        for _ in range(2):
            with replay.running(net, 0, {net[2]}):
                assert torch.equal(found, net(x))
    assert vars(net[1])["forward"] is own and "forward" not in vars(net[0])


def test_nothing_is_kept_behind_weights_that_will_change() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Tanh())
    replay = Replay()
    with torch.no_grad():
        with replay.running(net, 0, {net[1][0]}):
            net(torch.randn(5, 3))
        assert [path[-1][0] for path in replay.kept[0]] == ["0"]
        with replay.running(net, 0, {net[2]}):
            net(torch.randn(5, 3))
        assert [path[-1][0] for path in replay.kept[0]] == ["0", "1"]  # "1" in place of what it holds
        with replay.running(net, 0, set()):
            net(torch.randn(5, 3))
    assert [path[-1][0] for path in replay.kept[0]] == [""]  # all of it in place of its parts


class Gated(nn.Module):
    """Two linear layers that share an input, and one whose output is added to a stream, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(10, 12), nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class Steering(Gated):
    """The same, but a value decides which way a pass takes."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if bool(gate.abs().max() == 0):
            raise ValueError("no gate is open")
        return x + self.down(torch.sigmoid(gate) * up)


@pytest.mark.parametrize(("kind", "n_runs"), [(Gated, 0), (Steering, 2)])
def test_layers_whose_output_is_not_read_are_not_run(
    monkeypatch: pytest.MonkeyPatch, kind: type[Gated], n_runs: int
) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(kind(), kind(), nn.Linear(10, 3)), torch.randn(100, 10)
    masks = sipp.prune(net, None, keep=0.5, method="magnitude").masks
    split = split_batches(data_of(x).batches())
    options = RepairOptions(error_feedbacks=(1.0,), budgets=("given",))
    ran, gather = list[int](), NetworkPair.moments

    def counted(self: NetworkPair, names: Any, *more: Any) -> Any:
        """How often layers run whose weights these are, with the values they had."""
        seen, modules = list[Any](), {s.module for s in self.pruned.layers if s.weights["weight"].name in names}
        handles = [
            module.register_forward_hook(lambda m, args, out: seen.append(out.abs().max() > 0)) for module in modules
        ]
        found = gather(self, names, *more)
        for handle in handles:
            handle.remove()
        ran.append(sum(map(int, seen)))
        return found

    monkeypatch.setattr(NetworkPair, "moments", counted)
    quick = repair_network(net, masks, split, options)
    # two batches: of gate and up, gate runs before up ends the pass; the second down, until its stream is found
    assert ran == [n_runs, 0, n_runs, n_runs, 0]
    monkeypatch.setattr(network_pair, "gives_zeros", lambda module: False)
    slow = repair_network(net, masks, split, options)
    assert ran[5:] == [2, 0, 2, 2, 0]
    assert all(map(torch.equal, quick.model.state_dict().values(), slow.model.state_dict().values()))
