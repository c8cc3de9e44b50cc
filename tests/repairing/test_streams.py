"""Which layers end in an addition to a residual stream, found by the map, whatever the model looks like."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from repairing.fit_points import even_masks, split_of
from torch import Tensor, nn

from sipp.inputs.trace import trace
from sipp.repairing import repair_network
from sipp.repairing.sums import meeting_streams, streams_in


class Net(nn.Module):
    """Layers a, b, c and norms, put together by a function."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.layer_norm, self.dropout = nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Dropout(0.5)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def plus_in_place(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    x += net.b(x.relu())
    return x


def added_to_the_layer(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    out = net.b(x.relu())
    out += x
    return out


def of_two(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    return net.b(x) + net.c(x)


def read_twice(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    out = net.b(x.relu())
    return (out + x) * out.sigmoid()


def called_twice(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    return x + net.b(x) + net.b(x.relu())


def written_to(net: Any, x: Tensor) -> Tensor:
    x = net.a(x)
    out = net.b(x)
    out[:, 0] = 0.0
    return x + out


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], set[str]]] = {
    "x + layer": (lambda net, x: (y := net.a(x)) + net.b(y.relu()), {"b.weight"}),
    "torch.add": (lambda net, x: torch.add(net.b(y := net.a(x)), y), {"b.weight"}),
    "x += layer": (plus_in_place, {"b.weight"}),
    "layer += x": (added_to_the_layer, {"b.weight"}),
    "norm and dropout between": (lambda net, x: (y := net.a(x)) + net.dropout(net.norm(net.b(y))), {"b.weight"}),
    "copies between": (
        lambda net, x: (y := net.a(x)) + net.b(y).contiguous().clone().view(20, 6).to(y.dtype),
        {"b.weight"},
    ),
    "another shape between": (lambda net, x: (y := net.a(x)) + net.b(y).view(6, 20).reshape(20, 6), set()),
    "the later of two": (of_two, {"c.weight"}),
    "a nonlinearity between": (lambda net, x: (y := net.a(x)) + net.b(y).relu(), set()),
    "a norm by the point between": (lambda net, x: (y := net.a(x)) + net.layer_norm(net.b(y)), set()),
    "the input itself": (lambda net, x: x + net.b(x), set()),
    "a bias": (lambda net, x: net.b(net.a(x)) + torch.ones(6), set()),
    "times something": (lambda net, x: torch.add(y := net.a(x), net.b(y), alpha=2), set()),
    "concatenation": (lambda net, x: torch.cat([y := net.a(x), net.b(y)], 1), set()),
    "read twice": (read_twice, set()),
    "called twice": (called_twice, set()),
    "written to": (written_to, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_streams_are_found(case: str) -> None:
    run, wanted = CASES[case]
    torch.manual_seed(0)
    net, x = Net(run).eval(), torch.randn(20, 6)
    nn.init.uniform_(net.norm.weight, 0.5, 2.0)
    net.norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    found = streams_in(trace(net, x), inputs_differ=False)
    assert set(found) == wanted
    for name, stream in found.items():
        met, outputs = dict[str, Tensor](), list[Tensor]()
        hook = net.get_submodule(stream.module).register_forward_hook(
            lambda module, args, output, outputs=outputs: outputs.append(output.clone())
        )
        with torch.no_grad(), meeting_streams(net, {name: stream}, met.__setitem__):
            net(x)
        hook.remove()
        gain_F, bias_F = torch.ones(6), torch.zeros(6)
        for norm in map(net.get_submodule, stream.norms):
            gain_F, bias_F = norm.weight / (norm.running_var + norm.eps).sqrt(), norm(torch.zeros(1, 6))  # type: ignore[operator]
        with torch.no_grad():
            assert torch.allclose(met[name] + gain_F * outputs[0] + bias_F, net(x), atol=1e-5)
    assert not any(module._forward_hooks for module in net.modules())


def corrected(net: nn.Module, data: Any) -> list[str]:
    """The weights that correct a stream, of a network that a search fits with half of its weights."""
    made = repair_network(net, even_masks(net), split_of(data))
    return [layer.name for layer in made.record.layers if layer.corrects]


class Padded(nn.Module):
    """Tokens with a mask, as transformers take them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.head(x)
        x = x + self.down(F.gelu(self.up(x)))
        return (x * attention_mask[..., None]).sum(1)


def test_padding_does_not_count() -> None:
    """What stands in the padding changes nothing."""
    torch.manual_seed(0)
    net = Padded().eval()
    ids, real = torch.randint(30, (60, 7)), (torch.arange(7) < torch.randint(2, 8, (60, 1))).long()
    made = []
    for fill in (0, 5):
        data = [{"input_ids": torch.where(real > 0, ids, fill), "attention_mask": real}]
        made.append(repair_network(net, even_masks(net), split_of(data)))
    assert [layer.name for layer in made[0].record.layers if layer.corrects] == ["down.weight"]
    for one, two in zip(made[0].model.parameters(), made[1].model.parameters()):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6)


class Overwrites(nn.Module):
    """Its last layer corrects a stream, and the input of that layer is written to before they are added."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.a, self.b, self.factor = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inside = self.a(x).relu()
        out = self.b(inside)
        if self.factor != 1.0:
            inside.mul_(self.factor)
        return x + out


def test_an_input_that_is_written_to_before_the_addition_is_met_as_it_was() -> None:
    x, made = torch.randn(60, 6), []
    for factor in (1.0, 3.0):
        net = Overwrites(factor).eval()
        made.append(repair_network(net, even_masks(net), split_of(x)))
    assert [layer.corrects for layer in made[1].record.layers] == [False, False, True]
    assert all(map(torch.equal, made[0].model.parameters(), made[1].model.parameters()))
