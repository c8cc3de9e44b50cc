"""A refit that computes nothing twice gives the same bits as one that computes everything anew."""

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.repairing import replaying
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
    pruned = sipp.prune(dense, None, keep=0.5, method="wt")
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
    pruned = sipp.prune(dense, None, keep=0.5, method="wt")
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
