"""A network that is walked block by block is repaired to the same bits as one that is run whole, with less work."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from repairing.fit_points import even_masks, split_of
from torch import Tensor, nn

from sipp.inputs.trace import trace
from sipp.repairing import repair_network, walk
from sipp.repairing.parts import parts_in


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
    n_parts = list[int]()

    def weights(takes_blocks: bool) -> list[Tensor]:
        def noted(found: Any, names: Any) -> Any:
            parts = parts_in(found if takes_blocks else replace(found, blocks=None), names)
            n_parts.append(len(parts))
            return parts

        monkeypatch.setattr(walk, "parts_in", noted)
        done = repair_network(net, even_masks(net), split_of(data(kind)), way)
        return list(done.model.state_dict().values())

    assert all(map(torch.equal, weights(True), weights(False)))
    assert n_parts == [3, 1]


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Decorated(nn.Module):
    """A chain of blocks, and a way around it."""

    def __init__(self, around: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around, self.last = around, nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Step() for _ in range(4))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
            if self.around == "writes" and len(states) < 5:
                states[-1].mul_(0.5)
            if self.around == "shares" and len(states) in (2, 4):
                states[-1] = self.shared(states[-1])
        return self.last(states[-1] + states[2] if self.around == "skips" else states[-1])


@pytest.mark.parametrize(("around", "ends"), [("", [1, 2, 3, 4]), ("writes", []), ("skips", [1, 2]), ("shares", [])])
def test_a_part_ends_where_all_that_follows_reads_one_output(around: str, ends: list[int]) -> None:
    net, points = Decorated(around).eval(), torch.randn(60, 8)
    found = trace(net, points)
    parts = parts_in(found, found.order)
    assert [part.end for part in parts] == [*(f"blocks.{i - 1}" for i in ends), ""]
    assert [len(part.finished) for part in parts] == [0, *ends]
    assert [group for part in parts for group in part.groups] == [(name,) for name in found.order]


class Overwriting(nn.Module):
    """A block that writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.mul_(0.5).add_(0.1)))


def test_a_block_may_write_to_the_output_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    inside = [Overwriting() for _ in range(3)]
    net, points, made = nn.Sequential(nn.Linear(8, 8), *inside, nn.Linear(8, 3)), torch.randn(60, 8), []
    for takes_blocks in (True, False):
        monkeypatch.setattr(
            walk,
            "parts_in",
            lambda found, names, all_=takes_blocks: parts_in(found if all_ else replace(found, blocks=None), names),
        )
        made.append(repair_network(net, even_masks(net), split_of(points)).model.state_dict())
    assert trace(net, points).blocks is not None
    assert all(map(torch.equal, made[0].values(), made[1].values()))


def test_weights_that_no_input_reaches_stand_last_in_the_order_of_the_model() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(6, 5)
            self.idle = nn.ModuleList(nn.Linear(6, 5) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    torch.manual_seed(0)
    net = Unused()
    made = repair_network(net, even_masks(net), split_of(torch.randn(50, 6)))
    assert [one.name for one in made.record.layers] == list(made.masks)
    assert [one.left_alone for one in made.record.layers] == ["", *["no inputs reach it"] * 6]
