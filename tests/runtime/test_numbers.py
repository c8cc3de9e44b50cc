"""Numbers that once were not the model's: of the size of the batch, of memory, near zero, near the end of float32."""

import math

import pytest
import torch
import torch.nn.functional as F
from runtime.nets import Net, is_close, kernels, thin
from torch import nn

import sipp
from sipp.runtime import chunks, strip_kernel, timing
from sipp.runtime.buffers import Operand


def same_where_finite(found, wanted):
    return torch.equal(found.isfinite(), wanted.isfinite()) and is_close(
        found.nan_to_num(0, 0, 0), wanted.nan_to_num(0, 0, 0)
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, x: a(x) * (1 / x.shape[0]),
        lambda a, b, x: torch.add(a(x), b(x), alpha=1 / x.shape[0]),
        lambda a, b, x: torch.sub(a(x), b(x), alpha=len(x) / 8),
        lambda a, b, x: F.leaky_relu(a(x), 1 / len(x)),
        lambda a, b, x: F.hardtanh(a(x), -8 / len(x), 8 / len(x)),
        lambda a, b, x: F.hardtanh(a(x), 0, 6 * len(x) // 16),
        lambda a, b, x: F.elu(a(x), 4 / len(x)),
        lambda a, b, x: a(x)[:, len(x) // 16 : len(x) // 16 + 20],
        lambda a, b, x: F.pad(a(x), (len(x) // 16, 5 - len(x) // 16)),
        lambda a, b, x: a(x) + torch.full((40,), 1 / len(x)),
        lambda a, b, x: a(x) * torch.tensor(2 / len(x)),
        lambda a, b, x: F.linear(a(x), b.weight.new_ones(3, 40) / len(x)),
    ],
)
def test_numbers_of_the_size_of_the_batch(function, never_dense, monkeypatch):
    monkeypatch.setattr(chunks, "NEAR_CACHE", 500)
    net, x = thin(Net(function, nn.Linear(6, 40), nn.Linear(6, 40)), 0.5), torch.randn(64, 6)
    fast = sipp.sparse(net, x)
    assert fast.latest.chunk is None
    assert is_close(fast(x), net(x))


def test_numbers_that_do_not_depend_on_it_still_go_in_chunks(never_dense, monkeypatch):
    monkeypatch.setattr(chunks, "NEAR_CACHE", 500)
    net = Net(lambda a, x: F.leaky_relu(a(x).view(len(x), 5, 8) * 0.3, 0.2).flatten(1), nn.Linear(6, 40))
    x = torch.randn(64, 6)
    fast = sipp.sparse(thin(net, 0.5), x)
    assert fast.latest.chunk == 16
    assert is_close(fast(x), net(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x: a(x)[:, 8:].as_strided((4, 8), (40, 1), 8),
        lambda a, x: a(x).view(torch.int16).float(),
    ],
)
def test_what_reads_memory_is_torchs(function, never_dense):
    net = thin(Net(function, nn.Linear(6, 40)), 0.5)
    fast = sipp.sparse(net, torch.randn(24, 6))
    for n in (24, 9):
        x = torch.randn(n, 6)
        assert torch.equal(fast(x), net(x))
    assert fast.latest.is_dense and "depends on the memory layout" in str(fast)


def rotary(linear, x):
    pairs = torch.view_as_complex(linear(x).float().reshape(*x.shape[:2], -1, 2))
    angle = torch.outer(torch.arange(x.shape[1]), torch.arange(pairs.shape[2]) / 7)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(2)


@pytest.mark.parametrize("function", [rotary, lambda a, x: torch.view_as_complex(a(x).unflatten(2, (-1, 2))).abs()])
def test_rotary_embeddings(function, never_dense):
    net, x = thin(Net(function, nn.Linear(8, 8)), 0.5), torch.randn(3, 5, 8)
    fast = sipp.sparse(net, x)
    assert is_close(fast(x), net(x)) and kernels(fast)[0].startswith("sparse")


@pytest.mark.parametrize("n", [1, 24])
@pytest.mark.parametrize("act", [nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.GELU("tanh")])
def test_activations_from_the_smallest_to_the_largest(act, n, never_dense):
    identity = nn.Linear(40, 40, bias=False)
    identity.weight.data.copy_(torch.eye(40))
    net = nn.Sequential(identity, act).eval()
    fast = sipp.sparse(net, torch.zeros(n, 40))
    for low, high in ((-44, -30), (-30, -10), (-10, 0), (0, 10), (10, 30), (30, 38)):
        x = torch.logspace(low, high, 40, dtype=torch.float64).float()[torch.randperm(40)].expand(n, 40).clone()
        for given in (x, -x, x.roll(1)):
            found, wanted, exact = fast(given), net(given), act(given.double())
            near = torch.maximum(1e-4 * exact.abs(), 10 * (wanted - exact).abs()) + 1e-44
            near += 3e-7 * (given < -1) if isinstance(act, nn.GELU) else 0  # torch's own cancels there
            assert torch.equal(found.isfinite(), wanted.isfinite())
            assert bool(((found - exact).abs() <= near).all())


def test_what_is_masked_counts_nothing_however_large(never_dense):
    def attend(q, k, v, x, y, mask):
        q, k, v = (f(z).unflatten(-1, (2, 8)).transpose(1, 2) for f, z in ((q, x), (k, x), (v, y)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    net = thin(Net(attend, *(nn.Linear(16, 16) for _ in range(3))), 0.5)
    x, y, mask = torch.randn(2, 8, 16), torch.randn(2, 8, 16), torch.ones(1, 1, 1, 8, dtype=torch.bool)
    y[:, 5:] *= 1e36
    mask[..., 5:] = False
    fast = sipp.sparse(net, (x, y, mask))
    assert "attention of tokens" in kernels(fast)
    assert is_close(fast(x, y, mask), net(x, y, mask))


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_a_layer_norm_of_large_values(shift, never_dense):
    norm = thin(nn.LayerNorm(24), 1.0)
    fast = sipp.sparse(norm, torch.randn(16, 24))
    assert kernels(fast) == ["norm of tokens"]
    for scale in (1e-6, 1.0, 1e15, 1e18, 3e18, 1e19, 1e20, 1e30, 1e37):
        x = scale * (torch.randn(16, 24) + 8 * shift)
        assert same_where_finite(fast(x), norm(x).detach()), scale


def test_a_layer_norm_of_equal_values(never_dense):
    """Their mean is exact in torch, so nothing is left; a rounded mean would leave 1e-3."""
    norm = thin(nn.LayerNorm(12, eps=1e-2), 1.0)
    fast = sipp.sparse(norm, torch.randn(64, 12))
    assert kernels(fast) == ["norm of tokens"]
    x = (2000 + 1000 * torch.rand(64, 1)).repeat(1, 12)
    assert float((fast(x) - norm.double()(x.double())).abs().max()) < 1e-6


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("kind", ["image", "flat"])
@pytest.mark.parametrize("is_dense", [False, True])
def test_a_batch_norm_after_an_overflow(n, kind, is_dense, monkeypatch, never_dense):
    """The norm is folded into the weights, so what overflows in torch would not overflow here."""
    if is_dense:
        monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: 0.0)
    product, norm = (
        (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)) if kind == "image" else (nn.Linear(16, 6), nn.BatchNorm1d(6))
    )
    net = thin(nn.Sequential(product, norm, nn.ReLU()), 0.9)
    product.weight.data.abs_().mul_(1e3)  # sums that do not overflow on the way and come back
    norm.running_var.mul_(1e6)
    norm.weight.data[2] = 0
    fast = sipp.sparse(net, torch.randn(n, *((3, 6, 6) if kind == "image" else (16,))))
    for scale in (1.0, 1e30, 3e34, 1e35, 3e35, 1e36):
        x = scale * torch.rand(n, *((3, 6, 6) if kind == "image" else (16,)))
        assert same_where_finite(fast(x), net(x).detach())
    assert bool((~net(x).isfinite()).any())


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("addend", [None, torch.float32, torch.float64])
def test_an_overflow_that_an_activation_hides(act, dtype, addend, never_dense, monkeypatch):
    """In torch, minus infinity becomes NaN; what is left of it after the folded norm is finite, and becomes 0."""
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: 0.0)
    product, norm = nn.Linear(16, 6), nn.BatchNorm1d(6)
    net = thin(Net(lambda p, b, x, *more: act(sum(more, b(p(x)))), product, norm).to(dtype), 0.9)
    product.weight.data.fill_(-1e3)
    norm.running_var.mul_(1e6)
    x = 0.5 + torch.rand(4, 16, dtype=dtype)
    more = () if addend is None else (torch.rand(4, 6, dtype=addend),)
    fast = sipp.sparse(net, (x, *more))
    assert not fast.latest.is_dense
    x *= 1e36 if dtype == torch.float32 else 1e306
    assert not net(x, *more).isfinite().any()
    assert torch.equal(fast(x, *more).isnan(), net(x, *more).isnan())


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("kind", ["image", "flat"])
def test_an_overflow_before_a_norm_that_multiplies_by_zero(n, kind, never_dense):
    """In torch, infinity times 0 is NaN; nothing is left of the channel's weights once the norm is folded in."""
    product, norm = (
        (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)) if kind == "image" else (nn.Linear(16, 6), nn.BatchNorm1d(6))
    )
    net = thin(nn.Sequential(product, norm, nn.ReLU()), 0.9)
    norm.weight.data[2] = 0
    product.weight.data[2] = 1e6
    x = torch.rand(n, *((3, 6, 6) if kind == "image" else (16,)))
    fast = sipp.sparse(net, x)
    assert is_close(fast(x), net(x))
    wanted = net(1e33 * x).isnan()
    assert wanted[:, 2].all() and wanted.sum() == wanted[:, 2].numel()
    assert torch.equal(fast(1e33 * x).isnan(), wanted)


def test_an_overflow_in_a_layer_left_dense(never_dense, monkeypatch):
    """What a sparse layer reads from a dense one is watched too."""
    net = thin(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), 0.5)
    net[0].weight.data.fill_(1e3)
    net[1].weight.data.zero_()
    lost = iter([0.0])
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: next(lost, math.inf))
    fast = sipp.sparse(net, torch.randn(16, 8))
    assert kernels(fast)[0] == "dense" and kernels(fast)[1].startswith("sparse")
    x = torch.full((16, 8), 1e36)
    assert net(x).isnan().all() and fast(x).isnan().all()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, activation="gelu", norm_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.encoder(x))


def test_nan_in_a_transformer_and_an_lstm(never_dense):
    x = torch.randn(2, 8, 24)
    bad = x.clone()
    bad[0, 3, 5] = float("nan")
    for net in (thin(Attention(), 0.3), thin(nn.LSTM(24, 8, batch_first=True), 0.3)):
        fast = sipp.sparse(net, x)
        given, wanted = fast(bad), net(bad)
        if isinstance(wanted, tuple):
            given, wanted = given[0], wanted[0]
        assert wanted.isnan().any() and not wanted.isnan().all()
        assert is_close(given, wanted)


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("n", [1, 9])
def test_an_infinity_on_the_way(never_dense, by_torch, n):
    """Finite inputs, an infinity by a layer of ours or by torch."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 3)
    net = Net(lambda a, b, x: b(torch.exp(a(x)) if by_torch else a(x) * 1.0), first, second).eval()
    second.weight.data.zero_()  # a layer that would see nothing of it
    first.weight.data.fill_(10.0)
    x = torch.full((n, 4), 1e3 if by_torch else 3e38)
    fast = sipp.sparse(net, torch.zeros(n, 4))
    assert net(x)[:, 0].isnan().all()
    assert is_close(fast(x), net(x))


def test_what_is_not_finite_is_seen_through_views_and_means(never_dense):
    net = thin(Net(lambda layer, x: layer(x.log().flatten(1)), nn.Linear(64, 6)), 0.1)
    with torch.no_grad():
        net.inner[0].weight[:, 0] = 0
    x = torch.rand(4, 8, 8) + 0.1
    fast = sipp.sparse(net, x)
    x[0, 0, 0] = 0
    assert torch.equal(fast(x).isnan(), net(x).isnan()) and bool(net(x).isnan().any())

    pooled = thin(nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(2, 3, 3)), 0.1)
    with torch.no_grad():
        pooled[1].weight[:, 0] = 0
    images = torch.rand(2, 2, 8, 8)
    fast = sipp.sparse(pooled, images)
    images[:, 0] = 3e38  # the sum of a window is more than float32 holds
    assert torch.equal(fast(images).isfinite(), pooled(images).isfinite())


@pytest.mark.parametrize("is_input", [True, False])
@pytest.mark.parametrize("is_conjugated", [True, False])
def test_complex_numbers_that_are_not_finite(is_input, is_conjugated, never_dense):
    """A layer of ours reads them as pairs of real ones, through a view."""

    def function(layer, z):
        z = z if is_input else z * 1.0
        return layer(torch.view_as_real(z.conj().resolve_conj() if is_conjugated else z).flatten(1))

    net = thin(Net(function, nn.Linear(32, 6)), 0.3)
    net.inner[0].weight.data[:, 0] = 0
    z = torch.randn(4, 16, dtype=torch.complex64)
    fast = sipp.sparse(net, z)
    assert kernels(fast)[-1].startswith("sparse")
    z[0, 0] = complex(math.nan, 1.0)
    assert net(z)[0].isnan().all() and is_close(fast(z), net(z))


def test_no_two_threads_add_to_the_same_sums():
    """Strips that overlap are written twice, which is harmless for results and not for sums of several rounds."""
    n_rounds = []
    for height, width, n in ((1, 1, 592), (7, 7, 16), (5, 9, 8), (1, 3, 400), (8, 8, 16)):
        operand = Operand(torch.zeros(1), 0, width * n, n, height * width * n, n=n)
        for way in strip_kernel.tilings(height, width, operand, operand, None, "none", False, lambda *size: [1, 3]):
            n_rounds.append(way.n_rounds)
            if way.n_rounds > 1:
                assert len(way.strips) * len(way.tile.in_out) * way.tile.lanes == height * width * n
    assert set(n_rounds) == {1, 3}


def test_where_the_example_is_not_finite_torch_runs_it(never_dense, monkeypatch):
    """A plan that gives up in every call would cost its own time, the model's, and that of packing weights."""
    broken = thin(nn.Linear(8, 6), 0.4)
    broken.weight.data[0, 0] = math.nan
    monkeypatch.setattr(timing, "race", None)  # it could not win
    fast = sipp.sparse(broken, torch.randn(3, 8))
    assert fast.latest.is_dense and "not finite" in str(fast)


@pytest.mark.parametrize("way", ["given", "computed", "padding"])
@pytest.mark.parametrize("by_torch", [True, False])
def test_masks_of_minus_infinity(way, by_torch, never_dense):
    """They are no reason to leave a network to torch; NaN and infinity in a mask are."""

    def function(layer, x, mask):
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, -math.inf) if way == "padding" else mask
        mask = mask * 2.0 if way == "computed" else mask
        if by_torch:
            return layer(x, src_mask=mask)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in layer(x).split(16, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) if by_torch else nn.Linear(16, 48)
    net, x = thin(Net(function, layer), 0.4), torch.randn(3, 8, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    if way == "padding":
        mask = mask.isinf()
    fast = sipp.sparse(net, (x, mask))
    assert not fast.latest.is_dense and ("attention of tokens" in kernels(fast)) != by_torch
    assert is_close(fast(x, mask), net(x, mask))
    for bad in (math.nan, math.inf) if way != "padding" else ():
        mask[2, 1] = bad
        assert net(x, mask)[..., 2, :].isnan().all() and is_close(fast(x, mask), net(x, mask))


def test_a_call_that_is_not_finite_leaves_the_next_ones_as_they_were(never_dense):
    net, x = thin(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), 0.1), torch.randn(16, 64)
    fast = sipp.sparse(net, x)
    wanted, n_bytes = fast(x), fast.n_bytes
    bad = x.clone()
    bad[3, 5] = math.inf
    with torch.no_grad():
        assert torch.equal(fast(bad).isnan(), net(bad).isnan())
    assert fast.n_bytes > n_bytes  # the model's own weights are needed
    assert torch.equal(fast(x), wanted)
    assert is_close(fast(x[:5]), net(x[:5]))


@pytest.mark.parametrize("way", ["never_dense", "always_dense"])
@pytest.mark.parametrize("kind", ["encoder", "layer", "attention"])
def test_a_sequence_without_a_token_is_as_with_gradients(way, kind, request):
    """Fused kernels of torch, which run where no gradient is recorded, give NaN there."""
    request.getfixturevalue(way)
    torch.manual_seed(0)
    if kind == "attention":
        held = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
        model = Net(lambda layer, x, mask: layer(x, x, x, key_padding_mask=mask, need_weights=False)[0], held)
    else:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.5, batch_first=True)
        held = nn.TransformerEncoder(layer, 1) if kind == "encoder" else layer
        model = Net(lambda net, x, mask: net(x, src_key_padding_mask=mask), held)
    thin(model, 0.5)
    x, mask = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    for first in (False, True):  # whether that sequence is in the example
        mask[1] = first
        fast = sipp.sparse(model, (x, mask))
        mask[1] = True
        wanted = model(x, mask).detach()
        assert wanted.isfinite().all() and is_close(fast(x, mask), wanted)
    assert is_close(fast(x[:, :3], mask[:, :3]), model(x[:, :3], mask[:, :3]))  # compiled anew
    assert torch.backends.mha.get_fastpath_enabled() and not any(module.training for module in model.modules())


def test_a_linear_layer_reads_the_images_of_the_layer_before(never_dense):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6 * 16, 40)).eval()
    x, pruned = torch.randn(64, 1, 10, 10), sipp.prune(model, None, keep=0.3, method="magnitude")
    fast = sipp.sparse(pruned, x)
    assert [kernel.split()[0] for kernel in kernels(fast)][::3] == ["sparse", "sparse"]
    assert is_close(fast(x), pruned.model(x)) and not fast.latest.is_dense
