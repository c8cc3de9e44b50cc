"""`sipp.shrink`: the same outputs with fewer channels, whatever the network is made of."""

import copy
import io
import math
import random
import warnings
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from oracles.shrink import widths
from runtime.shrinkable_networks import Part, network
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.pruning.masking import hold_masks
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


# --- what goes, what stays ------------------------------------------------------------------------------------------


def conv_net(*, padding: int, is_dead_at: float) -> nn.Module:
    """Two convolutions; three of six channels between them are constant: what a relu leaves of this number."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=padding))
    net[0].weight.data[1:4] = 0
    net[0].bias.data[1:4] = is_dead_at
    return net


@pytest.mark.parametrize(("padding", "is_dead_at", "left"), [(0, 0.5, 3), (1, -0.5, 3), (1, 0.5, 4)])
def test_a_constant_in_front_of_padding_needs_one_channel(padding: int, is_dead_at: float, left: int) -> None:
    small = shrunk(conv_net(padding=padding, is_dead_at=is_dead_at), torch.randn(2, 3, 8, 8))
    assert small.layers[0].after == (left, 3, 3, 3) and small.layers[1].after == (4, left, 3, 3)


def test_what_nobody_reads_goes_with_all_that_it_reads() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    net[4].weight.data[:, 2:] = 0  # so only the first two rows of the layer before are read
    net[2].weight.data[:2, 3:] = 0  # and these read three channels only
    small = shrunk(net, torch.randn(2, 4))
    assert [layer.after for layer in small.layers] == [(3, 4), (2, 3), (2, 2)]
    assert [(m.in_features, m.out_features) for m in small.model if isinstance(m, nn.Linear)] == [
        (4, 3),
        (3, 2),
        (2, 2),
    ]


def test_a_residual_stream_loses_channels_that_no_block_needs() -> None:
    torch.manual_seed(0)
    first, second, third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
    net = Part(lambda x, a, b, c: c((y := a(x)) + b(y).relu()), first, second, third)  # two blocks write to one stream
    first.weight.data[0] = 0
    third.weight.data[:, 2] = 0
    assert shrunk(net, torch.randn(2, 4)).layers[0].after == (6, 4)  # the second block writes 0, and reads 2
    second.weight.data[:, 2] = 0
    assert shrunk(net, torch.randn(2, 4)).layers[0].after == (5, 4)  # nobody reads 2
    second.weight.data[0] = 0
    assert shrunk(net, torch.randn(2, 4)).layers[0].after == (4, 4)  # 0 is constant in both


def test_groups_of_a_convolution_keep_equal_sizes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=4), nn.Conv2d(8, 2, 1))
    net[0].weight.data[[0, 2, 3, 4, 6]] = 0
    net[2].weight.data[:, [0, 2, 3, 4, 6]] = 0
    small = shrunk(net, torch.randn(2, 3, 6, 6))  # of the groups 01, 23, 45, 67 one dies, the others have one left
    middle = small.model[1]
    assert (middle.groups, middle.in_channels, middle.out_channels) == (3, 3, 3)
    net[2].weight.data[:, 0] = 1.0
    assert shrunk(net, torch.randn(2, 3, 6, 6)).model[1].weight.shape == (6, 1, 3, 3)


def test_depthwise_layers_lose_channels() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 2, 1)
    )
    net[3].weight.data[:, :5] = 0
    small = shrunk(net.eval(), torch.randn(2, 3, 6, 6))
    assert small.model[2].groups == 3 and small.model[1].num_features == 3 and len(small.model[1].running_mean) == 3


def test_norms_over_channels_keep_them() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    net[0].weight.data[:4] = 0
    small = shrunk(net, torch.randn(2, 4))
    assert small.n_parameters == small.n_parameters_before and small.left_alone == ("1 (layer_norm)",)
    assert "left alone" in str(small)


def test_a_number_of_channels_in_the_code_stays() -> None:
    torch.manual_seed(0)
    flat = Part(lambda x: x.view(-1, 6 * 16))
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1), flat, nn.Linear(6 * 16, 2))
    net[0].weight.data[2:] = 0
    net[1].weight.data[2:] = 0
    small = shrunk(net, torch.randn(2, 3, 4, 4))
    assert [layer.after[:2] for layer in small.layers] == [(2, 3), (6, 2), (2, 96)]


def test_constants_that_follow_the_size_of_the_batch_are_not_taken_over() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), Part(lambda x: x / len(x)), nn.Linear(6, 2))
    net[0].weight.data[:3] = 0
    small = shrunk(net, torch.randn(2, 4))
    assert small.layers[0].after == (6, 4)


IMAGES, SEQUENCES = (torch.randn(2, 3, 6, 8), torch.randn(2, 3, 12, 16), torch.randn(1, 3, 12, 5)), (
    torch.randn(2, 5, 3), torch.randn(2, 20, 3), torch.randn(3, 2, 3),
)  # fmt: skip


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, a, b: b(a(x).mean(1) * x.shape[1] ** 0.5), SEQUENCES),
        (lambda x, a, b: b(a(x) / x.shape[1]), SEQUENCES),
        (lambda x, a, b: b(a(x) / x.shape[2]), IMAGES),
        (lambda x, a, b: b(a(x) * x.shape[3]), IMAGES),
        (lambda x, a, b: b(a(x) * (x.shape[2] / x.shape[3])), IMAGES),
        (lambda x, a, b: b(a(x).mean((2, 3), keepdim=True) * (x.shape[2] * x.shape[3]) ** 0.5), IMAGES),
    ],
)
def test_constants_that_follow_other_sizes_are_not_taken_over(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    torch.manual_seed(0)
    make: Callable[[int, int], nn.Module] = nn.Linear if inputs is SEQUENCES else lambda n, m: nn.Conv2d(n, m, 1)
    net = Part(function, make(3, 8), make(8, 4))
    net.modules_held[0].weight.data[:3] = 0
    small = shrunk(net, inputs[0])
    for x in inputs:
        assert off_by(net, small.model, x) <= TOLERANCE


def test_channels_filled_with_a_size_are_not_taken_over() -> None:
    torch.manual_seed(0)

    def forward(x: Tensor, a: nn.Module, b: nn.Module) -> Tensor:
        return b(a(F.pad(x, (0, 0, 0, 0, 0, 2), value=float(x.shape[2]))))

    net = Part(
        lambda x, first, a, b: forward(first(x), a, b), *(nn.Conv2d(n, m, 1) for n, m in ((3, 4), (6, 5), (5, 2)))
    )
    net.modules_held[1].weight.data[:3, :4] = 0  # these rows read what was filled in
    small = shrunk(net, IMAGES[0])
    for x in IMAGES:
        assert off_by(net, small.model, x) <= TOLERANCE


def test_a_network_with_a_table_of_positions_is_tried_with_fewer() -> None:
    torch.manual_seed(0)

    def forward(x: Tensor, table: nn.Module, a: nn.Module, b: nn.Module) -> Tensor:
        length = x.shape[1]
        return b(a(x + table(torch.arange(length))).mean(1) * length)

    net = Part(forward, nn.Embedding(8, 3), nn.Linear(3, 8), nn.Linear(8, 4))
    net.modules_held[1].weight.data[:3] = 0
    small = shrunk(net, torch.randn(2, 8, 3))  # no longer sequence is accepted
    assert off_by(net, small.model, torch.randn(2, 3, 3)) <= TOLERANCE


def test_numbers_that_are_the_same_at_all_sizes_are_taken_over() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1), Part(lambda x: x / 2 + 1), nn.Conv2d(8, 4, 3))
    net[0].weight.data[:3] = 0
    assert [layer.after[:2] for layer in shrunk(net, torch.randn(2, 3, 8, 8)).layers] == [(5, 3), (4, 5)]


def test_a_layer_that_died_altogether_keeps_one_channel() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    net[2].weight.data.zero_()
    small = shrunk(net, torch.randn(2, 4))
    assert [layer.after for layer in small.layers] == [(1, 4), (1, 1), (2, 1)]


def test_flat_images_lose_whole_channels() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6 * 36, 4))
    net[3].weight.data.view(4, 6, 36)[:, 2:5] = 0
    net[3].weight.data.view(4, 6, 36)[0, 2, 7] = 1.0
    assert shrunk(net, torch.randn(2, 3, 8, 8)).layers[1].after == (4, 4 * 36)


def test_shared_weights_stay_shared() -> None:
    torch.manual_seed(0)
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = one.weight
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), one, nn.ReLU(), other, nn.ReLU(), nn.Linear(6, 2))
    one.weight.data[:, :2] = 0
    net[6].weight.data[:, :2] = 0
    small = shrunk(net, torch.randn(2, 4))
    assert small.model[2].weight is small.model[4].weight and small.model[2].weight.shape == (4, 4)
    assert [layer.multiply_adds for layer in small.layers] == [32, 64, 16]


def test_embeddings_and_one_and_three_dimensions() -> None:
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))
    words[1].weight.data[:, 1:4] = 0
    small = sipp.shrink(words, torch.randint(0, 9, (2, 5)))
    assert small.model[0].embedding_dim == 3 and torch.equal(small.model(torch.arange(9)), words(torch.arange(9)))
    for n, conv, turned in ((1, nn.Conv1d, nn.ConvTranspose1d), (3, nn.Conv3d, nn.ConvTranspose3d)):
        net = nn.Sequential(conv(2, 5, 2), nn.Sigmoid(), turned(5, 4, 2, 2), conv(4, 2, 1))
        net[0].weight.data[1:4] = 0
        net[3].weight.data[:, 1:] = 0
        found = [layer.after[:2] for layer in shrunk(net, torch.randn(2, 2, *[4] * n)).layers]
        assert found == [(3, 2), (3, 1), (2, 1)]


@pytest.mark.parametrize(("other", "left"), [(-0.7, 5), (0.4, 4)])
def test_a_layer_called_on_two_constants_takes_over_equal_ones_only(other: float, left: int) -> None:
    torch.manual_seed(0)
    first, second, shared = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 3)
    for layer, number in ((first, 0.4), (second, other)):
        layer.weight.data[1] = 0
        layer.bias.data[1] = number
    net = Part(lambda x, f, g, h: h(f(x)) + 2 * h(g(x)), first, second, shared)
    assert shrunk(net, torch.randn(2, 4)).layers[1].after == (3, left)


def test_a_bias_that_others_read_takes_over_nothing() -> None:
    torch.manual_seed(0)
    net = Part(
        lambda x, f, w, b: F.linear(f(x), w, b) * b,
        nn.Linear(4, 5), nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3)),
    )  # fmt: skip
    net.modules_held[0].weight.data[:3] = 0
    assert shrunk(net, torch.randn(2, 4)).layers[0].after == (3, 4)  # one of the three stands for the others


def test_a_weight_that_is_an_embedding_too_takes_over_nothing() -> None:
    torch.manual_seed(0)
    words, inner = nn.Embedding(9, 6), nn.Linear(6, 6)
    inner.weight.data[1:3], inner.weight.data[:, 2] = 0, 0
    inner.bias.data[1:3] = torch.tensor([0.9, 0.5])
    net = Part(lambda x, f, g: F.linear(g(f(x)), f.weight), words, inner)
    small = sipp.shrink(net, torch.arange(9))
    torch.testing.assert_close(small.model(torch.arange(9)), net(torch.arange(9)))
    assert small.n_parameters == small.n_parameters_before


def test_groups_called_twice_keep_the_channels_of_both() -> None:
    torch.manual_seed(0)
    first, second, groups, last, other = (
        nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    last.weight.data[:, 2:] = 0
    other.weight.data[:, :3] = 0  # so the first layer has to keep 0, 1 and 3, and the second what it has
    net = Part(lambda x, f, g, h, k, m: k(h(f(x)) + h(g(x))) + m(f(x)), first, second, groups, last, other)
    assert [layer.after[0] for layer in shrunk(net, torch.randn(2, 3, 4, 4)).layers] == [3, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("between", "left"),
    [
        (nn.AvgPool2d(3, 1, 1), 6),  # zeros are averaged in: no constant is left
        (nn.AvgPool2d(3, 1), 3),
        (nn.Sequential(nn.Hardtanh(-1, -0.25), nn.MaxPool2d(3, 1, 1)), 3),
        (Part(lambda x, f: (x - 0.5) * f(x), nn.Conv2d(6, 6, 3, padding=1)), 3),  # 0 times anything
        (nn.ZeroPad2d(1), 6),
        (Part(lambda x: x.sum((2, 3), keepdim=True)), 6),  # of as many as there are positions
    ],
)
def test_constant_channels_are_removed_if_the_layer_between_allows_it(between: nn.Module, left: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 1), between, nn.Conv2d(6, 2, 1))
    net[0].weight.data[:3] = 0
    net[0].bias.data[:3] = 0.5
    for inner in between.modules():
        if isinstance(inner, nn.Conv2d):
            inner.weight.data[:, :3] = 0
    small = shrunk(net, torch.randn(2, 3, 6, 6))
    assert small.layers[0].after[0] == left and small.layers[-1].after[1] == left


def test_a_norm_of_scale_zero_makes_a_constant() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    net[1].weight.data[:2] = 0
    net[1].bias.data[:] = 1.5
    assert shrunk(net, torch.randn(2, 4)).layers[0].after == (4, 4)


# --- counts, records, files -----------------------------------------------------------------------------------------


def test_multiply_adds_are_counted() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, groups=4), nn.ConvTranspose2d(8, 2, 2, 2), nn.Flatten(2),
        nn.Linear(64, 5), nn.LSTM(5, 7, batch_first=True),
    )  # fmt: skip
    net = nn.Sequential(*net[:5], Part(lambda x, f: f(x)[0] @ f(x)[0].mT, net[5]))
    small = sipp.shrink(net, torch.randn(2, 3, 12, 12))
    by_hand = [2 * 36 * 8 * 27, 2 * 16 * 8 * 18, 2 * 16 * 8 * 8, 2 * 2 * 5 * 64]
    assert [layer.multiply_adds_before for layer in small.layers] == by_hand
    recurrent, product = 2 * 2 * 4 * 7 * (5 + 7), 2 * 2 * 2 * 7
    assert small.left_alone == ("4 (linear)", "5.modules_held.0 (lstm)")
    assert small.multiply_adds_before == sum(by_hand) + 2 * recurrent + product == small.multiply_adds


def test_the_zoo_shrinks_and_its_files_are_smaller() -> None:
    torch.manual_seed(0)
    net = build("digits-cnn").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that died
        pruned = sipp.prune(net, None, keep=0.02, method="magnitude")
    small = sipp.shrink(pruned)
    assert small.multiply_adds < small.multiply_adds_before and "x fewer" in str(small) and "Shrunk" in repr(small)
    x = torch.randn(5, 1, 8, 8)
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
    net, x = conv_net(padding=1, is_dead_at=0.5), torch.randn(2, 3, 8, 8)
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
    hold_masks(net, masks)
    small = sipp.shrink(net, torch.randn(2, 4))
    assert small.layers[0].after == (3, 4)
    assert [m.training for m in small.model.modules()] == [m.training for m in net.modules()]
    assert [p.requires_grad for p in small.model.parameters()] == [p.requires_grad for p in net.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    net, x = conv_net(padding=1, is_dead_at=0.5).to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    small = sipp.shrink(net, x)
    assert small.layers[0].after[0] == 4 and all(p.dtype == dtype for p in small.model.parameters())
    assert off_by(net, small.model, x) <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: (nn.Bilinear(2, 2, 2), None), OptionError, "example"),
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
    first, second = nn.Linear(4, 8), nn.Linear(8, 2)
    net = Part(lambda x, a, b: b((y := a(x)) * y.shape[1]), first, second)
    second.weight.data[:, 4:] = 0
    with pytest.raises(ModelError, match=r"differs by .* so it is not returned"):
        sipp.shrink(net, torch.randn(2, 4))


def test_a_network_that_tells_its_number_of_channels_is_not_given() -> None:
    net = Part(lambda x, f, g: (g(f(x)), f(x).shape[1]), nn.Linear(4, 8), nn.Linear(8, 2))
    assert sipp.shrink(net, torch.randn(2, 4)).n_parameters == 58
    net.modules_held[0].weight.data[4:] = 0
    with pytest.raises(ModelError, match="other plain numbers, on the example or at other sizes of it"):
        sipp.shrink(net, torch.randn(2, 4))


def test_functional_calls_of_a_weight() -> None:
    torch.manual_seed(0)

    def both(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).relu(), v) + F.linear(x, w)[:, :1]

    net = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), Part(both, nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(2, 5)))
    )
    net[2].tensors_held[0].data[:, :3] = 0
    small = shrunk(net, torch.randn(2, 4))
    assert [layer.after for layer in small.layers] == [(3, 4), (5, 3), (2, 5)]  # the slice keeps all of the middle


@pytest.mark.parametrize("total", [torch.sum, torch.mean, torch.amax, torch.std])
def test_a_number_of_all_channels_keeps_those_it_is_made_of(total: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), Part(lambda x: total(x)[None]))
    net[0].weight.data[:2] = 0
    assert [layer.after for layer in shrunk(net, torch.randn(3, 4)).layers] == [(4, 4), (5, 4)]


def test_results_that_nobody_reads_keep_no_channel() -> None:
    """Such as the indices of a pooling."""
    torch.manual_seed(0)
    pooled = Part(lambda x: F.max_pool2d(x, 2, return_indices=True)[0].flatten(1))
    net = nn.Sequential(nn.Conv2d(3, 6, 1), pooled, nn.Linear(24, 2))
    net[0].weight.data[:2] = 0
    small = shrunk(net, torch.randn(2, 3, 4, 4))
    assert [layer.after[0] for layer in small.layers] == [4, 2] and not small.left_alone


def test_a_weight_of_one_dimension_is_left_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Part(F.linear, nn.Parameter(torch.randn(6))))
    assert shrunk(net, torch.randn(2, 4)).left_alone == ("2 (linear)",)


def test_outputs_that_are_minus_infinity_on_purpose() -> None:
    """As scores of tokens that must not come next: the same ones before and after."""
    torch.manual_seed(0)
    is_out = torch.arange(5) < 2
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), Part(lambda x: x.masked_fill(is_out, -math.inf)))
    net[0].weight.data[:2] = 0
    x = torch.randn(3, 4)
    small = sipp.shrink(net, x)
    assert small.layers[0].after == (4, 4) and small.off_by <= TOLERANCE
    torch.testing.assert_close(small.model(x), net(x))
