"""Repeated blocks are found where a state passes from one to the next, and nowhere else."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from sipp.inputs.data import Batch, data_of
from sipp.inputs.structure import Blocks, find_blocks
from sipp.inputs.trace import trace, trace_layers
from sipp.repairing import Part


def recorded(model: Any, batch: Any) -> Any:
    return trace_layers(model, (), batch).recording


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, by: float = 1.0) -> Tensor:
        return x + by * torch.tanh(self.inner(x)) * (1.0 if mask is None else mask)


class Tupled(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, by: float = 1.0) -> tuple[Tensor, None]:  # type: ignore[override]
        return Block.forward(self, x, mask, by=by), None


class Net(nn.Module):
    """Blocks between two layers, called in one of several ways."""

    def __init__(self, way: str, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.way = nn.Linear(4, 6), nn.Linear(6, 2), way
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.sum(1, keepdim=True) > 0).float()
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if self.way == "named" or (self.way == "named later" and i > 0):
                x = block(x=x, mask=mask, by=0.5)
            elif self.way == "tuple":
                x = block(x, mask)[0]
            elif self.way == "activation between":
                x = torch.relu(block(x))
            elif self.way == "mask of a state":  # what a block computes is given past the state
                mask = (x > 0).float()
                x = block(x, mask)
            else:
                x = block(x, mask, by=1.0 + i)
            if self.way == "twice":
                x = block(x)
        return self.last(x)


class Talking(Block):
    """Leaves a value for the next one, past its output."""

    said: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor, mask: Tensor | None = None, *, by: float = 1.0) -> Tensor:
        x = super().forward(x) + sum(self.said, torch.zeros(()))
        self.said.append(x.mean())
        return x


def batch() -> Batch:
    return next(iter(data_of(torch.randn(5, 4, generator=torch.Generator().manual_seed(1))).batches()))


def blocks_in(net: nn.Module) -> Blocks | None:
    return find_blocks(net, recorded(net, batch()))


NAMES = ("blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize(
    ("way", "kind", "at", "n_none"), [("plain", Block, 0, None), ("named", Block, "x", None), ("tuple", Tupled, 0, 1)]
)
def test_blocks_are_found_and_walked(way: str, kind: type[Block], at: int | str, n_none: int | None) -> None:
    net, points = Net(way, kind).eval(), batch()
    blocks = blocks_in(net)
    assert blocks == Blocks(NAMES, at, n_none, NAMES)
    kept: Any = None
    for i, end in enumerate((*NAMES, "")):  # each part by itself, from what the block before it gave
        outputs: list[Any] = []
        part = Part(i, NAMES[:i], end, ())
        made = part.run(net, kept, lambda outputs=outputs: outputs.append(net(*points.args)))
        assert len(outputs) == (not end)
        kept = made if made is None else blocks.as_output(blocks.state_of(made))
    assert torch.equal(outputs[0], net(points.args[0]))
    assert not any("forward" in vars(module) or module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("way", ["activation between", "mask of a state", "twice", "named later"])
def test_what_does_not_pass_a_state_alone_has_none(way: str) -> None:
    assert blocks_in(Net(way).eval()) is None


def test_a_plain_sequence_is_no_block() -> None:
    assert blocks_in(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))) is None


def test_blocks_that_speak_past_their_outputs_are_not_taken() -> None:
    Talking.said.clear()
    assert blocks_in(Net("plain", Talking).eval()) is None


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Residual(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class SkipsAtTheEnd(nn.Module):
    """The output of the last block is added to that of the first, behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Bare() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return first + self.blocks[2](self.blocks[1](first))


def test_a_sum_behind_the_block_of_its_layer_is_told_from_one_inside() -> None:
    found = trace(SkipsAtTheEnd().eval(), torch.rand(5, 6))
    assert found.blocks is not None and found.blocks.ends == (NAMES[0],)
    assert not found.residuals
    inside = trace(nn.Sequential(nn.Linear(4, 6), Residual(), Residual()).eval(), torch.rand(5, 4)).residuals
    assert {name: one.latest for name, one in inside.items()} == {
        "1.inner.weight": "0.weight",
        "2.inner.weight": "1.inner.weight",
    }
