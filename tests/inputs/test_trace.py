"""What the map says of twenty models, beside what a person says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import language_model, sequences
from torch import Tensor, nn

from sipp.inputs.trace import BY_VALUES, ELSEWHERE, NOT_MOVED, ModelMap, trace


def images(n: int = 6, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(1))


def rows(n: int = 6, size: int = 4) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(1))


def steps(n: int = 6, length: int = 5, size: int = 4) -> Tensor:
    return torch.randn(n, length, size, generator=torch.Generator().manual_seed(1))


def conv(n_in: int, n_out: int, size: int = 3, stride: int = 1, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False, **more)


# --- Networks ---------------------------------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


def vgg(norms: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in ((3, 4), (4, 6)):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=not norms)]
        layers += [nn.BatchNorm2d(n_out)] if norms else []
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(24, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 2))


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


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up, self.out = conv(3, 4), conv(4, 4, stride=2), conv(8, 4), conv(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = torch.relu(self.down(x))
        low = nn.functional.interpolate(torch.relu(self.low(down)), scale_factor=2)
        return self.out(torch.relu(self.up(torch.cat([down, low], 1))))


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def tied() -> nn.Module:
    """A module that is called twice."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2)


def routed_rows() -> Tensor:
    data = rows()
    data[:, 0] = torch.tensor([1.0, -1.0]).repeat(3)  # one of both that are run to each
    return data


# --- Descriptions -----------------------------------------------------------------------------------------------------

LSTM = ("lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.weight_ih_l1", "lstm.weight_hh_l1")
IN_ENCODER = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
IN_GPT2 = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
IN_LLAMA = (
    *("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight"),
    *("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
)


def each(form: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of two blocks."""
    return tuple(form.format(i) + name for i in (0, 1) for name in names)


def chain(form: str, *names: str) -> dict[str, str]:
    """Of two blocks, the layers that are added to what follows the one before."""
    layers = each(form, names)
    return dict(zip(layers, ("", *layers)))


def facts(found: ModelMap) -> dict[str, Any]:
    """A map in a person's words."""
    kinds = {name: place.kind for name, place in found.places.items()}
    return {
        "order": found.order,
        "residuals": {name: one.latest for name, one in found.residuals.items()},  # the latest weight before the stream
        "blocks": () if found.blocks is None else found.blocks.names,
        "unassigned": found.unassigned,
        "values": found.recording.depends_on_values,
        "twice": {name: n for name, n in found.n_uses.items() if n > 1},
        "intercepts": {kind: sum(one == kind for one in kinds.values()) for kind in sorted(set(kinds.values()))},
        "no_chain": found.no_chain,
    }


NOTHING: dict[str, Any] = {"residuals": {}, "blocks": (), "unassigned": {}, "values": "", "twice": {}}
Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]


def case(make: Callable[[], nn.Module], data: Callable[[], Tensor], **said: Any) -> Case:
    """A network, its data, and what a person says of it; what is not said is nothing."""
    return make, data, NOTHING | said


CASES: dict[str, Case] = {
    "perceptron": case(mlp, rows, order=("0.weight", "2.weight", "4.weight"), intercepts={"bias": 3}, no_chain=""),
    "VGG": case(
        lambda: vgg(norms=False),
        images,
        order=("0.weight", "3.weight", "7.weight", "10.weight"),
        intercepts={"bias": 4},
        no_chain="||kernel||_F does not bound a convolution (0)",
    ),
    "VGG with BatchNorm": case(
        lambda: vgg(norms=True),
        images,
        order=("0.weight", "4.weight", "9.weight", "12.weight"),
        intercepts={"bias": 2, "norm": 2},
    ),
    "ResNet, shortcuts padded": case(
        lambda: ResNet(projects=False),
        images,
        blocks=("layer1.0", "layer1.1", "layer2.0", "layer2.1"),
        residuals={
            "layer1.0.conv2.weight": "conv.weight",
            "layer1.1.conv2.weight": "layer1.0.conv2.weight",
            "layer2.0.conv2.weight": "layer1.1.conv2.weight",
            "layer2.1.conv2.weight": "layer2.0.conv2.weight",
        },
        intercepts={"bias": 1, "norm": 9},
    ),
    "ResNet, shortcuts projected": case(
        lambda: ResNet(projects=True),
        images,
        blocks=("layer1.0", "layer1.1", "layer2.0", "layer2.1"),
        residuals={
            "layer1.0.conv2.weight": "conv.weight",
            "layer1.1.conv2.weight": "layer1.0.conv2.weight",
            "layer2.0.down.0.weight": "layer2.0.conv2.weight",  # the later one of two that are added
            "layer2.1.conv2.weight": "layer2.0.down.0.weight",
        },
    ),
    "DenseNet": case(
        DenseNet,
        images,
        order=("first.weight", "layers.0.weight", "layers.1.weight", "fc.weight"),
        intercepts={"bias": 1, "none": 3},
    ),
    "MobileNet's block": case(
        lambda: nn.Sequential(conv(3, 4), Inverted(4), Inverted(4)),
        images,
        blocks=("1", "2"),
        residuals={"1.project.weight": "0.weight", "2.project.weight": "1.project.weight"},
    ),
    "a concatenation across the network": case(
        UNet, images, order=("down.weight", "low.weight", "up.weight", "out.weight")
    ),
    "LSTM": case(
        lambda: Tagger(batch_first=True),
        steps,
        order=(*LSTM, "fc.weight"),
        no_chain="layer lstm (LSTM)",
        intercepts={"bias": 5},
    ),
    "LSTM, time first": case(
        lambda: Tagger(batch_first=False), steps, order=(*LSTM, "fc.weight"), unassigned={"fc.weight": ELSEWHERE}
    ),
    "LSTM, as many steps as inputs": case(
        lambda: Tagger(batch_first=False), lambda: steps(3, 3), unassigned={"fc.weight": NOT_MOVED}
    ),
    "encoder of torch": case(
        encoder,
        steps,
        order=each("layers.{}.", IN_ENCODER),
        blocks=("layers.0", "layers.1"),
        residuals=chain("layers.{}.", "self_attn.out_proj.weight", "linear2.weight"),
    ),
    "GPT-2": case(
        lambda: language_model("GPT2"),
        sequences,
        order=each("transformer.h.{}.", IN_GPT2),
        blocks=("transformer.h.0", "transformer.h.1"),
        residuals=chain("transformer.h.{}.", "attn.c_proj.weight", "mlp.c_proj.weight"),
        intercepts={"bias": 8},
    ),
    "Llama": case(
        lambda: language_model("Llama"),
        sequences,
        order=each("model.layers.{}.", IN_LLAMA),
        blocks=("model.layers.0", "model.layers.1"),
        residuals=chain("model.layers.{}.", "self_attn.o_proj.weight", "mlp.down_proj.weight"),
        intercepts={"none": 14},
    ),
    "Gemma": case(  # norms behind layers: what is added is no layer's output
        lambda: language_model("Gemma3"),
        sequences,
        order=each("model.layers.{}.", IN_LLAMA),
        blocks=("model.layers.0", "model.layers.1"),
    ),
    "experts that are sent some inputs": case(
        Routed,
        routed_rows,
        unassigned={"experts.0.weight": BY_VALUES, "experts.1.weight": BY_VALUES},
        values="nonzero in the model itself",
    ),
    "a weight of two layers": case(
        Tied, rows, order=("a.weight", "c.weight"), twice={"a.weight": 2}, intercepts={"bias": 1, "none": 1}
    ),
    "a module called twice": case(tied, rows, order=("0.weight",), twice={"0.weight": 2}),
    "a branch that goes by values": case(
        Branching, lambda: rows().abs(), order=("a.weight",), values="_local_scalar_dense in the model itself"
    ),
    "one input": case(lambda: Tagger(batch_first=False), lambda: steps(1), order=(*LSTM, "fc.weight")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_map_says_what_a_person_says(case: str) -> None:
    make, data, said = CASES[case]
    model = make().eval()
    found = trace(model, data(), exclude="lm_head" if hasattr(model, "lm_head") else None)
    found_facts = facts(found)
    assert {name: found_facts[name] for name in said} == said
    assert found.n_points == (1 if case == "one input" else 3)


def test_weights_that_read_the_same_are_one_group() -> None:
    found = trace(language_model("Llama").eval(), sequences(), exclude="lm_head")
    q, k, v, o, gate, up, down = found.order[:7]
    assert found.same_input[:4] == ((q, k, v), (o,), (gate, up), (down,))


def test_a_mixture_of_experts() -> None:
    found = trace(language_model("Mixtral").eval(), sequences(), exclude="lm_head")
    experts = {name for name in found.order if "experts" in name}
    assert len(experts) == 4 and all(found.n_uses[name] == 4 for name in experts)
    assert set(found.unassigned) == experts
    assert found.blocks is not None and len(found.residuals) == 2


@pytest.mark.parametrize("wrapped", [nn.DataParallel, torch.compile])
def test_wrappers_change_nothing(wrapped: Any) -> None:
    model = mlp().eval()
    assert str(trace(wrapped(model), rows())) == str(trace(model, rows()))


def printed(model: nn.Module, data: Tensor, **options: Any) -> list[str]:
    return str(trace(model.eval(), data, **options)).splitlines()


def test_a_map_prints_like_a_table_of_contents() -> None:
    assert printed(mlp(), rows()) == [
        "Sequential: 3 weights in 3 layers, 8 operations on 3 inputs",
        "0.weight  Linear  5 x 4  intercept 0.bias",
        "2.weight  Linear  3 x 5  intercept 2.bias",
        "4.weight  Linear  2 x 3  intercept 4.bias",
        "a chain of fully-connected layers",
    ]
    assert printed(Tagger(batch_first=False), steps())[-2] == f"not assigned to inputs, {ELSEWHERE}: fc.weight"
    assert "used 2 times" in str(trace(tied(), rows()))
    assert "not used by these inputs: b.weight" in str(trace(Branching(), rows().abs()))
    assert "left as they are: 0 (Linear)" in str(trace(mlp(), rows(), exclude="0"))


def test_blocks_are_headings_and_those_that_are_alike_are_one() -> None:
    lines = printed(ResNet(projects=True), images())
    assert lines[1:-1] == [
        "4 blocks pass a state along (argument 0)",
        "conv.weight      Conv2d  4 x 27  intercept bn.running_mean",
        "layer1.0 to layer1.1",
        "  conv1.weight   Conv2d  4 x 36  intercept bn1.running_mean",
        "  conv2.weight   Conv2d  4 x 36  intercept bn2.running_mean     + stream into the block",
        "layer2.0",
        "  conv1.weight   Conv2d  8 x 36  intercept bn1.running_mean",
        "  conv2.weight   Conv2d  8 x 72  intercept bn2.running_mean",
        "  down.0.weight  Conv2d  8 x 4   intercept down.1.running_mean  + stream after conv2",
        "layer2.1",
        "  conv1.weight   Conv2d  8 x 72  intercept bn1.running_mean",
        "  conv2.weight   Conv2d  8 x 72  intercept bn2.running_mean     + stream into the block",
        "fc.weight        Linear  3 x 8   intercept fc.bias",
    ]
    assert lines[-1].startswith("no plain chain: ")
    lines = printed(language_model("Llama"), sequences(), exclude="lm_head")
    assert "+ inputs (not corrected)" in lines[5] + lines[6] and max(map(len, lines)) <= 100
    assert lines[-2] == "left as they are: model.embed_tokens (embedding), lm_head (head)"


# --- Values that decide what runs -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("operation", "asks"),
    [
        ("_local_scalar_dense", lambda x, state: torch.zeros(3, 4).add_(x).sum().item()),
        ("_local_scalar_dense", lambda x, state: bool(nn.functional.scaled_dot_product_attention(x, x, x).sum() > 0)),
        ("_local_scalar_dense", through_a_view),
        ("index", lambda x, state: x[x > 0]),
        ("", lambda x, state: bool((torch.arange(x.shape[1]) > 2).all()) and x),  # as transformers asks of positions
        ("", lambda x, state: x @ torch.ones(4, 4) if bool(state.sum() > 0) else x),
        ("", lambda x, state: x[:, torch.tensor([1, 2])]),
    ],
)
def test_control_flow_that_depends_on_the_inputs_is_found(
    operation: str, asks: Callable[[Tensor, Tensor], object]
) -> None:
    found = trace(Asking(asks).eval(), rows()).recording.depends_on_values
    assert found == (f"{operation} in the model itself" if operation else "")


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

    run = trace(Writing(), rows()).recording
    a, b = run.calls_of["a"][0], run.calls_of["b"][0]
    assert b.reads != a.makes
    assert run.operations[run.maker[b.reads[0]]].name == "mul"
