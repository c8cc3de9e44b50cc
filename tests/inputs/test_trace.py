"""What the map says of a model, beside what a person says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import language_model, sequences
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs.trace import BY_VALUES, ELSEWHERE, NOT_MOVED, ModelMap, trace


def images(n: int = 6, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(1))


def rows(n: int = 6, size: int = 4) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(1))


def steps(n: int = 6, length: int = 5, size: int = 4) -> Tensor:
    return torch.randn(n, length, size, generator=torch.Generator().manual_seed(1))


def map_of(model: nn.Module, data: Any, **options: Any) -> ModelMap:
    return trace(model.eval(), data, **options)


def added_to(found: ModelMap) -> dict[str, str]:
    """By weight, the latest weight that the stream behind its layer depends on."""
    return {name: one.latest for name, one in found.sums.items()}


def conv(n_in: int, n_out: int, size: int = 3, stride: int = 1, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False, **more)


# --- Plain networks ---------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def test_a_perceptron() -> None:
    model = mlp()
    found = map_of(model, rows())
    assert found.order == ("0.weight", "2.weight", "4.weight")
    assert found.n_uses == dict.fromkeys(found.order, 1)
    assert (found.no_chain, found.run.depends_on_values, found.unassigned) == ("", "", {})
    assert (found.sums, found.norms, found.blocks) == ({}, {}, None)
    assert {name: place.name for name, place in found.places.items()} == {
        "0.weight": "0.bias", "2.weight": "2.bias", "4.weight": "4.bias"
    }  # fmt: skip
    assert [one.name for one in found.run.operations if one.module in "024"] == ["t", "addmm"] * 3
    assert str(found).splitlines() == [
        "Sequential: 3 weights in 3 layers, 8 operations on 3 inputs",
        "a chain of fully-connected layers",
        "0.weight  Linear  5 x 4",
        "2.weight  Linear  3 x 5",
        "4.weight  Linear  2 x 3",
    ]


def vgg(norms: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 4), (4, 6)):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=not norms)]
        layers += [nn.BatchNorm2d(n_out)] if norms else []
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 2))


def test_vgg_without_norms() -> None:
    model = vgg(norms=False)
    found = map_of(model, images())
    assert found.order == ("0.weight", "3.weight", "7.weight", "10.weight")
    assert (found.sums, found.norms, found.blocks, found.unassigned) == ({}, {}, None, {})
    assert {place.kind for place in found.places.values()} == {"bias"}
    assert found.no_chain == "||kernel||_F does not bound a convolution (0)"


def test_vgg_with_norms() -> None:
    model = vgg(norms=True)
    found = map_of(model, images())
    assert found.norms == {"0.weight": "1", "4.weight": "5"}
    assert found.places["0.weight"].name == "1.running_mean" and found.places["0.weight"].sign == -1
    assert found.places["9.weight"].name == "9.bias"


class Basic(nn.Module):
    """A residual block of two convolutions; the shortcut is a projection, or padded with zeros (as on CIFAR)."""

    def __init__(self, n_in: int, n_out: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(n_in, n_out, stride=stride), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = conv(n_out, n_out), nn.BatchNorm2d(n_out)
        self.n_more, self.stride = n_out - n_in, stride
        self.down = nn.Sequential(conv(n_in, n_out, 1, stride), nn.BatchNorm2d(n_out)) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.down is not None:
            x = self.down(x)
        elif self.n_more:
            x = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.n_more))
        out += x
        return torch.relu(out)


class ResNet(nn.Module):
    def __init__(self, projects: bool) -> None:
        super().__init__()
        self.conv, self.bn = conv(3, 4), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Basic(4, 4, 1, projects=False), Basic(4, 4, 1, projects=False))
        self.layer2 = nn.Sequential(Basic(4, 8, 2, projects=projects), Basic(8, 8, 1, projects=False))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def test_a_residual_network_with_padded_shortcuts() -> None:
    model = ResNet(projects=False)
    found = map_of(model, images())
    assert found.blocks is not None
    assert (found.blocks.names, found.blocks.at) == (("layer1.0", "layer1.1", "layer2.0", "layer2.1"), 0)
    assert added_to(found) == {
        "layer1.0.conv2.weight": "conv.weight",
        "layer1.1.conv2.weight": "layer1.0.conv2.weight",
        "layer2.0.conv2.weight": "layer1.1.conv2.weight",
        "layer2.1.conv2.weight": "layer2.0.conv2.weight",
    }
    assert found.sums["layer1.0.conv2.weight"].norms == ("layer1.0.bn2",)
    assert found.norms["layer1.0.conv1.weight"] == "layer1.0.bn1"
    assert found.places["layer1.0.conv1.weight"].name == "layer1.0.bn1.running_mean"
    assert not found.unassigned


def test_a_residual_network_with_projections() -> None:
    found = map_of(ResNet(projects=True), images())
    assert added_to(found) == {
        "layer1.0.conv2.weight": "conv.weight",
        "layer1.1.conv2.weight": "layer1.0.conv2.weight",
        "layer2.0.down.0.weight": "layer2.0.conv2.weight",  # the later one of two that are added
        "layer2.1.conv2.weight": "layer2.0.down.0.weight",
    }


class DenseNet(nn.Module):
    """Two layers, each on all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv(3, 4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (4, 6, 8))
        self.layers = nn.ModuleList(conv(n, 2) for n in (4, 6))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, layer in zip(self.norms, self.layers):
            x = torch.cat([x, layer(torch.relu(norm(x)))], 1)
        return self.fc(torch.relu(self.norms[-1](x)).mean((2, 3)))


def test_a_dense_network() -> None:
    model = DenseNet()
    found = map_of(model, images())
    assert found.order == ("first.weight", "layers.0.weight", "layers.1.weight", "fc.weight")
    assert (found.sums, found.norms, found.blocks, found.unassigned) == ({}, {}, None, {})
    assert {name: place.kind for name, place in found.places.items() if place.kind != "none"} == {"fc.weight": "bias"}


class Inverted(nn.Module):
    """MobileNet's block: expand, a filter a channel, project; no activation before the sum."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.expand, self.bn1 = conv(n, 2 * n, 1), nn.BatchNorm2d(2 * n)
        self.depth, self.bn2 = conv(2 * n, 2 * n, groups=2 * n), nn.BatchNorm2d(2 * n)
        self.project, self.bn3 = conv(2 * n, n, 1), nn.BatchNorm2d(n)

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.relu6(self.bn1(self.expand(x)))
        return x + self.bn3(self.project(nn.functional.relu6(self.bn2(self.depth(out)))))


def test_blocks_of_a_mobile_net() -> None:
    model = nn.Sequential(conv(3, 4), Inverted(4), Inverted(4))
    found = map_of(model, images())
    assert found.blocks is not None and found.blocks.names == ("1", "2")
    assert added_to(found) == {"1.project.weight": "0.weight", "2.project.weight": "1.project.weight"}
    assert found.norms["1.depth.weight"] == "1.bn2"


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up, self.out = conv(3, 4), conv(4, 4, stride=2), conv(8, 4), conv(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = torch.relu(self.down(x))
        low = nn.functional.interpolate(torch.relu(self.low(down)), scale_factor=2)
        return self.out(torch.relu(self.up(torch.cat([down, low], 1))))


def test_a_concatenation_across_the_network() -> None:
    model = UNet()
    found = map_of(model, images())
    assert found.order == ("down.weight", "low.weight", "up.weight", "out.weight")
    assert (found.sums, found.norms, found.blocks, found.unassigned) == ({}, {}, None, {})


# --- Sequences --------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """An LSTM and a layer on each of its states, in either layout."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.lstm, self.fc = nn.LSTM(4, 3, 2, batch_first=batch_first), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.fc(self.lstm(x)[0])
        return self.fc(self.lstm(x.transpose(0, 1))[0]).transpose(0, 1)


LSTM = ("lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.weight_ih_l1", "lstm.weight_hh_l1")


def test_an_lstm_with_the_batch_first() -> None:
    found = map_of(Tagger(batch_first=True), steps())
    assert found.order == (*LSTM, "fc.weight")
    assert not found.unassigned and found.n_uses["fc.weight"] == 1
    assert found.places["lstm.weight_hh_l1"].name == "lstm.bias_hh_l1"
    assert found.no_chain == "layer lstm (LSTM)"


def test_an_lstm_with_time_first_knows_its_batch_and_the_layer_behind_it_does_not() -> None:
    found = map_of(Tagger(batch_first=False), steps())
    assert found.order == (*LSTM, "fc.weight")
    assert found.unassigned == {"fc.weight": ELSEWHERE}
    assert str(found).splitlines()[-1] == f"not assigned to inputs, {ELSEWHERE}: fc.weight"


def test_as_many_steps_as_inputs_are_not_mistaken_for_them() -> None:
    found = map_of(Tagger(batch_first=False), steps(3, 3))
    assert found.unassigned == {"fc.weight": NOT_MOVED}


def test_an_encoder_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    found = map_of(nn.TransformerEncoder(layer, 2), steps())
    names = "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"
    assert found.order == tuple(f"layers.{i}.{name}" for i in (0, 1) for name in names)
    assert found.blocks is not None and found.blocks.names == ("layers.0", "layers.1")
    assert added_to(found) == {
        "layers.0.self_attn.out_proj.weight": "",
        "layers.0.linear2.weight": "layers.0.self_attn.out_proj.weight",
        "layers.1.self_attn.out_proj.weight": "layers.0.linear2.weight",
        "layers.1.linear2.weight": "layers.1.self_attn.out_proj.weight",
    }
    assert not found.unassigned


def test_gpt2() -> None:
    found = map_of(language_model("GPT2"), sequences(), exclude="lm_head")
    names = "attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"
    assert found.order == tuple(f"transformer.h.{i}.{name}" for i in (0, 1) for name in names)
    assert found.blocks is not None and found.blocks.names == ("transformer.h.0", "transformer.h.1")
    assert added_to(found)["transformer.h.1.mlp.c_proj.weight"] == "transformer.h.1.attn.c_proj.weight"
    assert len(found.sums) == 4 and {place.kind for place in found.places.values()} == {"bias"}
    assert (found.unassigned, found.run.depends_on_values) == ({}, "")


IN_LLAMA = (
    *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
)


def test_llama() -> None:
    found = map_of(language_model("Llama"), sequences(), exclude="lm_head")
    assert found.order == tuple(f"model.layers.{i}.{name}" for i in (0, 1) for name in IN_LLAMA)
    q, k, v, o, gate, up, down = found.order[:7]
    assert found.same_input[:4] == ((q, k, v), (o,), (gate, up), (down,))
    assert found.blocks is not None and found.blocks.names == ("model.layers.0", "model.layers.1")
    assert added_to(found) == {
        o: "",
        down: o,
        "model.layers.1.self_attn.o_proj.weight": down,
        "model.layers.1.mlp.down_proj.weight": "model.layers.1.self_attn.o_proj.weight",
    }
    assert found.norms == {} and {place.kind for place in found.places.values()} == {"none"}
    assert (found.unassigned, found.run.depends_on_values) == ({}, "")


def test_gemma_has_norms_behind_layers_which_are_no_sums() -> None:
    found = map_of(language_model("Gemma3"), sequences(), exclude="lm_head")
    assert found.order[:7] == tuple(f"model.layers.0.{name}" for name in IN_LLAMA)
    assert found.norms["model.layers.0.self_attn.o_proj.weight"] == "model.layers.0.post_attention_layernorm"
    assert found.norms["model.layers.1.mlp.down_proj.weight"] == "model.layers.1.post_feedforward_layernorm"
    assert len(found.norms) == 4 and found.sums == {} and found.blocks is not None


def test_a_mixture_of_experts() -> None:
    found = map_of(language_model("Mixtral"), sequences(), exclude="lm_head")
    experts = {name for name in found.order if "experts" in name}
    assert len(experts) == 4 and all(found.n_uses[name] == 4 for name in experts)
    assert set(found.unassigned) == experts
    assert found.blocks is not None and len(found.sums) == 2


class Routed(nn.Module):
    """Two experts, each on the inputs that the first number sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = ((x[:, 0] > 0) == bool(i)).nonzero().flatten()
            out = out.index_add(0, at, expert(x[at]))
        return self.last(out)


def test_experts_that_are_sent_some_inputs() -> None:
    data = rows()
    data[:, 0] = torch.tensor([1.0, -1.0]).repeat(3)  # one of both that are run to each
    found = map_of(Routed(), data)
    assert found.unassigned == {"experts.0.weight": BY_VALUES, "experts.1.weight": BY_VALUES}
    assert found.run.depends_on_values == "nonzero in the model itself"


# --- Odd networks -----------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))))


def test_a_weight_of_two_layers() -> None:
    found = map_of(Tied(), rows())
    assert [(use.weight, use.module) for use in found.uses] == [("a.weight", "a"), ("a.weight", "b"), ("c.weight", "c")]
    assert found.places["a.weight"].kind == "none"
    assert "a.weight is used twice" in found.no_chain


def test_a_layer_that_is_called_twice() -> None:
    layer = nn.Linear(4, 4)
    found = map_of(nn.Sequential(layer, nn.Tanh(), layer), rows())
    assert found.n_uses == {"0.weight": 2} and not found.unassigned
    assert [use.call for use in found.uses] == [i for i, call in enumerate(found.run.calls) if call.module == "0"]
    assert "used 2 times" in str(found)


@pytest.mark.parametrize("wrapped", [nn.DataParallel, torch.compile])
def test_wrappers_change_nothing(wrapped: Any) -> None:
    model = mlp().eval()
    assert str(map_of(wrapped(model), rows())) == str(map_of(model, rows()))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def test_a_branch_that_goes_by_values() -> None:
    found = map_of(Branching(), rows().abs())
    assert found.run.depends_on_values == "_local_scalar_dense in the model itself"
    assert found.order == ("a.weight",) and found.unassigned == {}
    assert "not used by these inputs: b.weight" in str(found)


class Asking(nn.Module):
    """A layer, and something else that is done with the inputs."""

    def __init__(self, asks: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.a, self.asks = nn.Linear(4, 4), asks
        self.register_buffer("state", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.asks(x, self.state)
        return self.a(x)


def through_a_view(x: Tensor, state: Tensor) -> bool:
    state[:, 1:3].copy_(x[:, :2])
    return bool(state.sum() > 0)


def through_a_list(x: Tensor, state: Tensor) -> bool:
    zeros = [torch.zeros(3, 4)]
    torch._foreach_add_(zeros, [x])
    return bool(zeros[0].sum() > 0)


@pytest.mark.parametrize(
    ("operation", "asks"),
    [
        ("_local_scalar_dense", lambda x, state: bool(nn.functional.linear(x, torch.ones(4, 4)).relu().max() > 1)),
        ("_local_scalar_dense", lambda x, state: torch.zeros(3, 4).add_(x).sum().item()),
        ("_local_scalar_dense", lambda x, state: bool(torch.where(torch.arange(4) > 1, x, 0.0).any())),
        ("_local_scalar_dense", lambda x, state: bool(nn.functional.scaled_dot_product_attention(x, x, x).sum() > 0)),
        ("_local_scalar_dense", through_a_view),
        ("_local_scalar_dense", through_a_list),
        ("index", lambda x, state: x[x > 0]),
        ("nonzero", lambda x, state: x.nonzero()),
    ],
)
def test_control_flow_that_depends_on_values_is_found(operation: str, asks: Callable[[Tensor, Tensor], object]) -> None:
    assert map_of(Asking(asks), rows()).run.depends_on_values == f"{operation} in the model itself"


@pytest.mark.parametrize(
    "asks",
    [
        lambda x, state: bool((torch.arange(x.shape[1]) > 2).all()) and x,  # as transformers asks of positions
        lambda x, state: x[:, torch.arange(4) > 1],
        lambda x, state: x @ torch.ones(4, 4) if bool(state.sum() > 0) else x,
        lambda x, state: x[:, torch.tensor([1, 2])],
    ],
)
def test_control_flow_by_positions_or_weights_is_not_flagged(asks: Callable[[Tensor, Tensor], object]) -> None:
    assert map_of(Asking(asks), rows()).run.depends_on_values == ""


class Elsewhere(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        ways: dict[str, Any] = {
            "linear": lambda x: nn.functional.linear(x, self.a.weight),
            "transposed": lambda x: x @ self.a.weight.T[:, :4],
            "data": lambda x: x * self.a.weight.data[0],
            "sum": lambda x: x * self.a.weight.sum(),
            "shape": lambda x: x * self.a.weight.shape[0] + torch.zeros_like(self.a.weight)[0],
            "view": lambda x: x if len(self.a.weight.T) == 4 else -x,
        }
        return self.b(ways[self.way](self.a(x)))


@pytest.mark.parametrize("way", ["linear", "transposed", "data", "sum"])
def test_a_weight_that_is_read_elsewhere_is_refused(way: str) -> None:
    with pytest.raises(ModelError, match=r"a\.weight is read by \w+ while a is not running"):
        map_of(Elsewhere(way), rows())


@pytest.mark.parametrize("way", ["shape", "view"])
def test_a_shape_or_a_view_of_a_weight_is_no_read(way: str) -> None:
    assert map_of(Elsewhere(way), rows()).order == ("a.weight", "b.weight")


def test_one_input_has_nothing_to_be_exchanged_with() -> None:
    found = map_of(Tagger(batch_first=False), steps(1))
    assert (found.n_points, found.unassigned) == (1, {})


def test_values_written_in_place_are_others() -> None:
    """What reads a tensor before and after it was written reads two numbers, also through a view."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            view = first[:, :2]
            view.mul_(2.0)
            return self.b(first)

    run = map_of(Writing(), rows()).run
    a, b = run.calls_of["a"][0], run.calls_of["b"][0]
    assert b.reads != a.makes
    assert run.operations[run.maker[b.reads[0]]].name == "mul"
