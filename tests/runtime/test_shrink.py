"""`sipp.shrink` without a budget: the same outputs with fewer channels, whatever the network is made of."""

import copy
import io
import math
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracles.shrink import widths
from runtime.shrinkable_networks import Part, network
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.pruning.masking import hold
from sipp.results.shrunk import Shrunk
from sipp_lab.nets import build

N_NETWORKS, AT_ONCE = 24, 8
TOLERANCE = 1e-4  # of the largest output, in float32


def off_by(net: nn.Module, small: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        wanted, found = net.eval()(x.clone()), small.eval()(x.clone())
    return float((found - wanted).abs().max() / wanted.abs().max())


def shrunk(net: nn.Module, x: Tensor) -> Shrunk:
    """The smaller network, after it was compared on an input that `shrink` has not seen; the given one is as before."""
    state = copy.deepcopy(net.state_dict())
    small = sipp.shrink(net, x)
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert off_by(net, small.model, torch.randn(3, *x.shape[1:])) <= TOLERANCE
    assert type(small.model) is type(net) and small.model.state_dict().keys() == state.keys()
    assert small.n_parameters == sum(p.numel() for p in small.model.parameters())
    return small


@pytest.mark.parametrize("first", range(0, N_NETWORKS, AT_ONCE))
def test_random_networks(first: int) -> None:
    smaller = 0
    for seed in range(first, first + AT_ONCE):
        small = shrunk(*network(seed, most_parts=3))
        smaller += small.n_parameters < small.n_parameters_before
    assert smaller >= AT_ONCE - 3


@pytest.mark.parametrize("seed", range(12))
def test_chains_are_as_narrow_as_by_definition(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [5, *(rng.randint(2, 9) for _ in range(3)), 4]
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for layer in layers:
        layer.weight.data *= torch.rand(layer.weight.shape) < rng.choice([0.15, 0.3, 0.5])
    acts = [rng.choice([nn.ReLU, nn.Sigmoid, nn.Tanh])() for _ in layers]
    net = nn.Sequential(*[one for pair in zip(layers, acts) for one in pair][:-1])
    small = shrunk(net, torch.randn(2, 5))
    expected = widths([layer.weight.tolist() for layer in layers])
    assert [layer.after[0] for layer in small.layers[:-1]] == expected
    ends = [5, *expected, 4]
    assert small.n_parameters == sum((a + 1) * b for a, b in pairwise(ends))


# --- What goes, what stays: networks with dead rows and unread inputs, and the widths that are left -------------------


def dead(layer: nn.Module, *rows: int, unread: tuple[int, ...] = (), bias: float | None = None) -> nn.Module:
    """The layer with no weights in these rows, and none that read these inputs."""
    layer.weight.data[list(rows)] = 0.0
    layer.weight.data[:, list(unread)] = 0.0
    if bias is not None:
        layer.bias.data[list(rows)] = bias
    return layer


def convolutions(padding: int, constant: float) -> nn.Module:
    first = dead(nn.Conv2d(3, 6, 3), 1, 2, 3, bias=constant)
    return nn.Sequential(first, nn.ReLU(), nn.Conv2d(6, 4, 3, padding=padding))


def between(part: nn.Module) -> nn.Module:
    """Three of six channels are 0.5 in front of a part."""
    for inner in part.modules():
        if isinstance(inner, nn.Conv2d):
            dead(inner, unread=(0, 1, 2))
    return nn.Sequential(dead(nn.Conv2d(3, 6, 1), 0, 1, 2, bias=0.5), part, nn.Conv2d(6, 2, 1))


def stream(*, unread: tuple[int, ...] = (), written: bool = True) -> nn.Module:
    """Two blocks that write to one stream."""
    second = dead(nn.Linear(6, 6), *(() if written else (0,)), unread=unread)
    layers = dead(nn.Linear(4, 6), 0), second, dead(nn.Linear(6, 3), unread=(2,))
    return Part(lambda x, a, b, c: c((y := a(x)) + b(y).relu()), *layers)


def shared() -> nn.Module:
    one, other = dead(nn.Linear(6, 6), unread=(0, 1)), nn.Linear(6, 6)
    other.weight = one.weight
    layers = nn.Linear(4, 6), nn.ReLU(), one, nn.ReLU(), other, nn.ReLU(), dead(nn.Linear(6, 2), unread=(0, 1))
    return nn.Sequential(*layers)


def called_twice(constant: float) -> nn.Module:
    """A layer called on two constants takes over equal ones only."""
    layers = dead(nn.Linear(4, 5), 1, bias=0.4), dead(nn.Linear(4, 5), 1, bias=constant), nn.Linear(5, 3)
    return Part(lambda x, f, g, h: h(f(x)) + 2 * h(g(x)), *layers)


def scaled_by_zero() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    net[1].weight.data[:2], net[1].bias.data[:] = 0, 1.5
    return net


def functional() -> nn.Module:
    def both(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).relu(), v) + F.linear(x, w)[:, :1]  # the slice keeps all of the middle

    tensors = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(2, 5))
    tensors[0].data[:, :3] = 0
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Part(both, *tensors))


def in_the_code(view: Callable[[Tensor], Tensor]) -> nn.Module:
    layers = dead(nn.Conv2d(3, 8, 1), *range(2, 8)), dead(nn.Conv2d(8, 6, 1), *range(2, 6))
    return nn.Sequential(*layers, Part(view), nn.Linear(96, 2))


IMAGES, ROWS = (2, 3, 8, 8), (2, 4)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[int]]] = {  # input; rows left of each layer
    "a constant goes into the bias": (lambda: convolutions(0, 0.5), IMAGES, [3, 4]),
    "a zero in front of padding": (lambda: convolutions(1, -0.5), IMAGES, [3, 4]),
    "a constant in front of padding needs one channel": (lambda: convolutions(1, 0.5), IMAGES, [4, 4]),
    "zeros are averaged in": (lambda: between(nn.AvgPool2d(3, 1, 1)), IMAGES, [6, 2]),
    "an average": (lambda: between(nn.AvgPool2d(3, 1)), IMAGES, [3, 2]),
    "a maximum": (lambda: between(nn.Sequential(nn.Hardtanh(-1, -0.25), nn.MaxPool2d(3, 1, 1))), IMAGES, [3, 2]),
    "nothing times anything": (
        lambda: between(Part(lambda x, f: (x - 0.5) * f(x), nn.Conv2d(6, 6, 3, padding=1))), IMAGES, [3, 3, 2],
    ),
    "padded with zeros": (lambda: between(nn.ZeroPad2d(1)), IMAGES, [6, 2]),
    "a sum of all positions": (lambda: between(Part(lambda x: x.sum((2, 3), keepdim=True))), IMAGES, [6, 2]),
    "numbers that are the same at all sizes": (lambda: between(Part(lambda x: x / 2 + 1)), IMAGES, [3, 2]),
    "indices of a pool": (
        lambda: between(Part(lambda x: F.max_pool2d(x, 2, return_indices=True)[0])), IMAGES, [3, 2],
    ),
    "what nobody reads, with what it reads": (
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), dead(nn.Linear(8, 6), unread=(3, 4, 5, 6, 7)), nn.ReLU(),
            dead(nn.Linear(6, 2), unread=(2, 3, 4, 5)),
        ), ROWS, [3, 2, 2],
    ),
    "a layer that died keeps one": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.ReLU(), dead(nn.Linear(6, 5), *range(5)), nn.ReLU(), nn.Linear(5, 2)
        ), ROWS, [1, 1, 2],
    ),
    "a stream that one block writes to": (lambda: stream(), ROWS, [6, 6, 3]),
    "a stream without a channel that nobody reads": (lambda: stream(unread=(2,)), ROWS, [5, 5, 3]),
    "a stream with a constant": (lambda: stream(unread=(2,), written=False), ROWS, [4, 4, 3]),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8),
            dead(nn.Conv2d(8, 2, 1), unread=(0, 1, 2, 3, 4)),
        ).eval(), IMAGES, [3, 3, 2],
    ),
    "flat images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Flatten(),
            dead(nn.Linear(216, 4), unread=tuple(range(72, 180))),
        ), IMAGES, [3, 4],
    ),
    "a norm over channels": (
        lambda: nn.Sequential(dead(nn.Linear(4, 8), 0, 1), nn.LayerNorm(8), nn.Linear(8, 2)), ROWS, [8, 2],
    ),
    "zeros in a layer that mixes channels": (
        lambda: nn.Sequential(dead(nn.Conv2d(3, 6, 1), 0, 1), dead(nn.ConvTranspose2d(6, 2, 1), *range(6))), IMAGES,
        [6, 6],
    ),
    "a scale of zero": (scaled_by_zero, ROWS, [4, 2]),
    "shared weights": (shared, ROWS, [4, 4, 2]),
    "two equal constants": (lambda: called_twice(0.4), ROWS, [4, 3, 4]),
    "two other constants": (lambda: called_twice(-0.7), ROWS, [5, 3, 5]),
    "functional calls": (functional, ROWS, [3, 5, 2]),
    "a number of channels in a view": (lambda: in_the_code(lambda x: x.view(-1, 96)), (2, 3, 4, 4), [2, 6, 2]),
    "no number in a view": (lambda: in_the_code(lambda x: x.flatten(1)), (2, 3, 4, 4), [2, 2, 2]),
    "convolutions of one dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 5, 2), nn.Sigmoid(), dead(nn.Conv1d(5, 4, 2), unread=(1, 2))), (2, 2, 6),
        [3, 4],
    ),
    "convolutions of three": (
        lambda: nn.Sequential(nn.Conv3d(2, 5, 2), nn.Sigmoid(), dead(nn.Conv3d(5, 4, 2), unread=(1, 2))),
        (2, 2, 4, 4, 4), [3, 4],
    ),
    **{
        f"a {total.__name__} of all channels": (
            lambda total=total: nn.Sequential(
                dead(nn.Linear(4, 6), 0, 1), nn.ReLU(), nn.Linear(6, 5), Part(lambda x: total(x)[None])
            ), ROWS, [4, 5],
        )
        for total in (torch.sum, torch.amax, torch.std)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_widths_that_are_left(name: str) -> None:
    torch.manual_seed(0)
    make, shape, left = CASES[name]
    small = shrunk(make(), torch.randn(shape))
    assert [layer.after[0] for layer in small.layers] == left


SEQUENCES = torch.randn(2, 5, 3), torch.randn(2, 20, 3), torch.randn(3, 2, 3)
PICTURES = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 12, 16), torch.randn(1, 3, 12, 5)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, a, b: b(a(x) / len(x)), SEQUENCES),
        (lambda x, a, b: b(a(x).mean(1) * x.shape[1] ** 0.5), SEQUENCES),
        (lambda x, a, b: b(a(x) / x.shape[1]), SEQUENCES),
        (lambda x, a, b: b(a(x) * (x.shape[2] / x.shape[3])), PICTURES),
        (lambda x, a, b: b(a(x).mean((2, 3), keepdim=True) * (x.shape[2] * x.shape[3]) ** 0.5), PICTURES),
        (lambda x, a, b: b(F.pad(a(x)[:, :6], (0, 0, 0, 0, 0, 2), value=float(x.shape[2]))), PICTURES),
    ],
)
def test_constants_that_follow_sizes_are_not_taken_over(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    torch.manual_seed(0)
    make: Callable[[int, int], nn.Module] = nn.Linear if inputs is SEQUENCES else lambda n, m: nn.Conv2d(n, m, 1)
    net = Part(function, dead(make(3, 8), 0, 1, 2), make(8, 4))
    small = shrunk(net, inputs[0])
    for x in inputs:
        assert off_by(net, small.model, x) <= TOLERANCE


def test_a_network_with_a_table_of_positions_is_tried_with_fewer() -> None:
    torch.manual_seed(0)

    def forward(x: Tensor, table: nn.Module, a: nn.Module, b: nn.Module) -> Tensor:
        length = x.shape[1]
        return b(a(x + table(torch.arange(length))).mean(1) * length)

    net = Part(forward, nn.Embedding(8, 3), dead(nn.Linear(3, 8), 0, 1, 2), nn.Linear(8, 4))
    small = shrunk(net, torch.randn(2, 8, 3))  # no longer sequence is accepted
    assert off_by(net, small.model, torch.randn(2, 3, 3)) <= TOLERANCE


def test_embeddings_and_a_weight_that_is_one_too() -> None:
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(9, 6), dead(nn.Linear(6, 3), unread=(1, 2, 3)))
    small = sipp.shrink(words, torch.randint(0, 9, (2, 5)))
    assert small.model[0].embedding_dim == 3 and torch.equal(small.model(torch.arange(9)), words(torch.arange(9)))
    inner = dead(nn.Linear(6, 6), 1, 2, unread=(2,), bias=0.7)
    net = Part(lambda x, f, g: F.linear(g(f(x)), f.weight), nn.Embedding(9, 6), inner)
    small = sipp.shrink(net, torch.arange(9))
    torch.testing.assert_close(small.model(torch.arange(9)), net(torch.arange(9)))
    assert small.n_parameters == small.n_parameters_before


# --- Counts, records, files -------------------------------------------------------------------------------------------


def test_multiply_adds_are_counted_and_what_is_left_alone_is_named() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 2, 2, 2), nn.Flatten(2),
        nn.Linear(64, 5), nn.LSTM(5, 7, batch_first=True),
    )  # fmt: skip
    net = nn.Sequential(*net[:5], Part(lambda x, f: f(x)[0] @ f(x)[0].mT, net[5]))
    small = sipp.shrink(net, torch.randn(2, 3, 12, 12))
    by_hand = [2 * 36 * 8 * 27, 2 * 16 * 8 * 18, 2 * 16 * 8 * 8, 2 * 2 * 5 * 64]
    assert [layer.multiply_adds_before for layer in small.layers] == by_hand
    recurrent, product = 2 * 2 * 4 * 7 * (5 + 7), 2 * 2 * 2 * 7
    assert {"1 (conv2d)", "2 (conv_transpose2d)", "5.modules_held.0 (lstm)"} <= set(small.left_alone)
    assert small.multiply_adds_before == sum(by_hand) + 2 * recurrent + product == small.multiply_adds


def test_the_zoo_shrinks_and_its_files_are_smaller() -> None:
    torch.manual_seed(0)
    net = build("digits-cnn").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that died
        pruned = sipp.prune(net, None, keep=0.02, method="magnitude")
    x = torch.randn(5, 1, 8, 8)
    small = sipp.shrink(pruned, x)
    assert small.multiply_adds < small.multiply_adds_before and "x fewer" in str(small) and "Shrunk" in repr(small)
    assert off_by(pruned.model, small.model, x) <= TOLERANCE
    file = io.BytesIO()
    torch.save(small.model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), small.model(x))
    fresh = copy.deepcopy(small.model)
    fresh.load_state_dict(small.model.state_dict())
    small.model.train()(x).sum().backward()
    assert all(p.grad is not None for p in small.model.parameters())


def test_onnx_of_a_smaller_network(tmp_path) -> None:
    pytest.importorskip("onnx", reason="the extra `onnx` is not installed")
    pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")
    net, x = convolutions(1, 0.5), torch.randn(2, 3, 8, 8)
    made = sipp.export(sipp.shrink(net, x), tmp_path / "small.onnx", x)
    assert made.off_by <= TOLERANCE and made.n_inputs is None


def test_the_certificate_is_carried_and_holds() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    net[2].weight.data[:, 8:] *= 1e-3
    data, holdout = torch.rand(100, 8), torch.rand(300, 8)
    best = sipp.prune_to(net, data, holdout, epsilon=0.5, method="magnitude", progress=False)
    small = sipp.shrink(best, data[:2])
    assert best.certificate is not None and small.certificate == best.certificate
    assert small.n_parameters < small.n_parameters_before and "With 95 % confidence" in str(small)
    small.model[2].weight.data *= 0.5
    assert "With 95 % confidence" not in str(small)
    with pytest.raises(DataError, match="calibration"):
        sipp.certify(net, sipp.shrink(sipp.prune(net, data, keep=0.5, progress=False), data[:2]), data)
    best.model[0].weight.data[0, 0] += 1.0
    assert sipp.shrink(best, data[:2]).certificate is None  # it is about other weights


def test_training_modes_devices_and_masks_are_as_given() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    net[2].eval()
    masks = {"0.weight": torch.ones(8, 4, dtype=torch.bool)}
    masks["0.weight"][3:] = False
    net[0].weight.requires_grad_(False)
    hold(net, masks)
    small = sipp.shrink(net, torch.randn(2, 4))
    assert small.layers[0].after == (3, 4)
    assert [m.training for m in small.model.modules()] == [m.training for m in net.modules()]
    assert [p.requires_grad for p in small.model.parameters()] == [p.requires_grad for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    net, x = convolutions(1, 0.5).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    small = sipp.shrink(net, x)
    assert small.layers[0].after[0] == 4 and all(p.dtype == dtype for p in small.model.parameters())
    assert off_by(net, small.model, x) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: (nn.Linear(3, 2), None), DataError, "the example must be a tensor, .*, not a NoneType"),
        (lambda: (nn.Linear(3, 2), torch.ones(2, 5)), DataError, "5"),
        (lambda: ("net", None), ModelError, "nn.Module"),
        (lambda: (Part(lambda x: x if x.sum() > 0 else -x), torch.ones(2, 3)), ModelError, "torch.export"),
        (lambda: (Part(lambda x: None), torch.ones(2, 3)), ModelError, "no tensor"),
    ],
)  # fmt: skip
def test_what_cannot_be_shrunk_is_named(make: Callable, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sipp.shrink(*make())


def test_a_network_that_would_compute_something_else_is_not_given() -> None:
    """A layer whose outputs depend on how many channels it reads, beyond what a trace shows."""
    layers = nn.Linear(4, 8), dead(nn.Linear(8, 2), unread=(4, 5, 6, 7))
    net = Part(lambda x, a, b: b((y := a(x)) * y.shape[1]), *layers)
    with pytest.raises(ModelError, match=r"differs by .* so it is not returned"):
        sipp.shrink(net, torch.randn(2, 4))


def test_outputs_that_are_minus_infinity_on_purpose() -> None:
    """As scores of tokens that must not come next: the same ones before and after."""
    torch.manual_seed(0)
    is_out = torch.arange(5) < 2
    last = Part(lambda x: x.masked_fill(is_out, -math.inf))
    net, x = nn.Sequential(dead(nn.Linear(4, 6), 0, 1), nn.ReLU(), nn.Linear(6, 5), last), torch.randn(3, 4)
    small = sipp.shrink(net, x)
    assert small.layers[0].after == (4, 4) and small.off_by <= TOLERANCE
    torch.testing.assert_close(small.model(x), net(x))


def test_caches_are_left_as_they_were() -> None:
    """Those of transformers' configurations: off while the network is traced, and then on only where they were on."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 2))).eval()
    net[0].config, net[1].config = SimpleNamespace(use_cache=True), SimpleNamespace(use_cache=False)
    small = sipp.shrink(net, torch.rand(2, 4)).model
    assert small[0].config.use_cache is True and small[1].config.use_cache is False
