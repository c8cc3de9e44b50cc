"""Whole networks against torch: the kinds of layer people have (`test_search.py` has random ones)."""

import copy
import functools
import math
from dataclasses import dataclass

import pytest
import torch
from fresh_process import run_python
from runtime.nets import Net, is_close, kernels, thin
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import sipp
from sipp.errors import DataError, ModelError
from sipp.runtime import chunks, cpu_network, cpu_plan, examples, steps
from sipp_lab.nets import build


def small():
    return nn.Sequential(
        Block(3, "cat"), nn.Conv2d(6, 8, 3, 2), Block(8, "add"),
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


class Block(nn.Module):
    """Convolution, norm, activation, then a residual or a concatenation."""

    def __init__(self, channels, join):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.join = join

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return x + y if self.join == "add" else torch.cat((x, y), 1)


@pytest.mark.parametrize("name", ["resnet20", "densenet22", "lenet-5"])
def test_known_networks(never_dense, name):
    torch.manual_seed(0)
    net = thin(build(name), 0.1)
    x = torch.randn(3, *((1, 28, 28) if name == "lenet-5" else (3, 32, 32)))
    assert is_close(sipp.sparse(net, x)(x), net(x))


@pytest.mark.parametrize("n", [1, 2, 5, 6, 8])
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(2), nn.Identity()])
def test_a_norm_of_few_flat_images(never_dense, pool, n):
    """Fewer images than a vector has places are not rounded up to one, as tokens are."""
    torch.manual_seed(0)
    size = 6 * (4 if isinstance(pool, nn.AdaptiveAvgPool2d) else 20)
    net = thin(nn.Sequential(nn.Conv2d(3, 6, 3), pool, nn.Flatten(), nn.LayerNorm(size), nn.Linear(size, 4)), 0.4)
    x = torch.randn(n, 3, 6, 7)
    fast = sipp.sparse(net, x)
    assert is_close(fast(x), net(x)) and ("norm of tokens" in kernels(fast)) == (n > 1)


def test_a_plan_that_gives_something_else_does_not_run_the_network(never_dense, monkeypatch):
    monkeypatch.setattr(cpu_network, "rounding_tolerance", examples.rounding_tolerance)
    net, x = thin(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), 0.4), torch.randn(8, 12)
    assert not sipp.sparse(net, x).latest.is_dense
    real = cpu_plan.CpuPlan.run
    monkeypatch.setattr(cpu_plan.CpuPlan, "run", lambda *given: [1.01 * y for y in real(*given)])
    fast = sipp.sparse(net, x)
    assert fast.latest.is_dense and "the steps gave other outputs" in str(fast)
    assert torch.equal(fast(x), net(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, activation="gelu", norm_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("shape", [(2, 8, 24), (1, 5, 24), (3, 1, 24), (2, 16, 24)])
def test_transformer(never_dense, shape):
    net = thin(Attention(), 0.3)
    x = torch.randn(shape)
    fast = sipp.sparse(net, x)
    assert any(kernel.startswith("sparse") for kernel in kernels(fast))
    assert is_close(fast(x), net(x))


class Heads(nn.Module):
    """Attention as most people write it, with or without a mask."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, mask=None):
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("n_tokens", "kind"), [*((n, "none") for n in (8, 16, 32, 48, 5)), *((n, "bool") for n in (8, 48, 5)),
                           (16, "float"), (48, "float"), (32, "dead"), (5, "dead")],
)  # fmt: skip
def test_attention(never_dense, n_tokens, kind):
    net = thin(Heads(), 0.5)
    x = torch.randn(3, n_tokens, 16)
    mask = torch.rand(3, 1, 1, n_tokens) < 0.7
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(n_tokens, n_tokens)
    if kind == "dead":
        mask[1] = False
    given = (x,) if kind == "none" else (x, mask)
    fast = sipp.sparse(net, given)
    assert ("attention of tokens" in kernels(fast)) == (n_tokens != 5)
    assert is_close(fast(*given), net(*given))


@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}])
def test_lstm_outputs_and_states(never_dense, options):
    net = thin(nn.LSTM(5, 12, **options), 0.4)
    x = torch.randn(4, 3, 5)
    states = tuple(torch.randn(2 * 2 if options.get("bidirectional") else 1, 4 if options.get("batch_first") else 3, 12)
                   for _ in range(2))  # fmt: skip
    fast = sipp.sparse(net, (x, states))
    (out, (h, c)), (want, (want_h, want_c)) = fast(x, states), net(x, states)
    assert is_close(out, want) and is_close(h, want_h) and is_close(c, want_c)


def test_points_a_few_at_a_time(never_dense, monkeypatch):
    monkeypatch.setattr(chunks, "NEAR_CACHE", 2_000)
    net = thin(small(), 0.3)
    x = torch.randn(48, 3, 8, 8)
    fast = sipp.sparse(net, x)
    assert fast.latest.chunk == 16
    assert is_close(fast(x), net(x))


class MixesPoints(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        y = self.conv(x)
        return y - y.mean(0, keepdim=True)


def test_points_that_mix_are_run_at_once(never_dense, monkeypatch):
    monkeypatch.setattr(chunks, "NEAR_CACHE", 2_000)
    x = torch.randn(48, 3, 8, 8)
    net = MixesPoints().eval()
    fast = sipp.sparse(net, x)
    assert fast.latest.chunk is None
    assert is_close(fast(x), net(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spreads_as_in_torch(never_dense, bad):
    net = thin(nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3)), 0.1)
    x = torch.randn(8, 3, 6, 6)
    fast = sipp.sparse(net, x)
    x[2, 1, 3, 3] = bad
    assert is_close(fast(x), net(x))
    assert net(x).isnan().any()


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


def test_other_shapes_compile_once_more(never_dense):
    net = thin(small(), 0.3)
    fast = sipp.sparse(net, torch.randn(4, 3, 8, 8))
    for n, side in ((9, 8), (4, 12), (4, 8), (9, 8)):
        x = torch.randn(n, 3, side, side)
        assert is_close(fast(x), net(x))
    assert len(fast._plans) == 3


def test_the_model_is_left_as_it_was(never_dense):
    net = small().train()
    before = copy.deepcopy(net.state_dict())
    fast = sipp.sparse(net, torch.randn(4, 3, 8, 8))
    fast(torch.randn(4, 3, 8, 8))
    assert net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_a_result_is_the_callers_own(never_dense):
    net = thin(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), 0.5)
    x = torch.randn(8, 3, 6, 6)
    fast = sipp.sparse(net, x)
    first = fast(x)
    kept = first.clone()
    fast(torch.randn_like(x))
    assert torch.equal(first, kept)


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x, *, scale):
        y = torch.cumsum(self.conv(x), 2).transpose(1, 2)
        return {"out": self.linear(y) * scale, "sums": [y.sum(1), 3]}


def test_always_skips_the_zeros_even_where_torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([1.0], [0.5]))
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(16, 64)
    assert sipp.sparse(model, x).latest.is_dense
    fast = sipp.sparse(model, x, always=True)
    assert not fast.latest.is_dense
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_warning_says_when_more_threads_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([0.5], [1.0]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(16, 64)
    with pytest.warns(UserWarning, match="2 threads took .* and one took"):
        fast = sipp.sparse(model, x)
    assert fast.latest.one_thread_seconds is not None and "one thread" in str(fast)


def test_what_is_not_known_is_left_to_torch_and_listed(never_dense):
    net = thin(Unusual(), 0.5)
    x, scale = torch.randn(5, 3, 9), torch.tensor(2.0)
    fast = sipp.sparse(net, {"x": x, "scale": scale})
    given, wanted = fast(x=x, scale=scale), net(x, scale=scale)
    assert is_close(given["out"], wanted["out"]) and is_close(given["sums"][0], wanted["sums"][0])
    assert given["sums"][1] == 3
    assert "left to torch:   conv1d, cumsum" in str(fast)


def test_dense_where_dense_is_faster(always_dense):
    net = build("lenet-5").eval()
    x = torch.randn(2, 1, 28, 28)
    fast = sipp.sparse(net, x)
    assert fast.latest.is_dense and "torch runs all of it" in str(fast)
    assert "dense" in kernels(fast)
    assert torch.equal(fast(x), net(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_that_torch_runs_have_their_row(always_dense, kind):
    net = thin(kind(12, 6, batch_first=True), 0.5).eval()
    fast = sipp.sparse(net, torch.randn(3, 5, 12))
    (row,) = [step for step in fast.steps if step.keep is not None]
    assert row.kernel == "torch" and row.n_bytes == row.n_dense_bytes == sum(
        w.nbytes for w in net.parameters() if w.ndim == 2
    )
    assert row.keep == pytest.approx(0.5, abs=0.2) and row.seconds is None and row.dense_seconds is not None
    assert fast.n_bytes == fast.n_dense_bytes


def test_the_table_gives_the_speed_with_its_spread(never_dense, monkeypatch):
    net, x = thin(nn.Linear(64, 64), 0.1), torch.randn(4, 64)
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([1.0] * 10, [2.0] * 10))
    assert "2.0 x faster (2.0 to 2.0)" in str(sipp.sparse(net, x)) and "x faster" in repr(sipp.sparse(net, x))
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([1.0, 4.0] * 5, [20.0, 1.2] * 5))
    assert "timings vary too much here to tell" in " ".join(str(sipp.sparse(net, x)).split())


def test_a_plan_of_dense_layers(always_dense, monkeypatch):
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([1e-3], [math.inf]))
    net = build("lenet-5").eval()
    x = torch.randn(2, 1, 28, 28)
    fast = sipp.sparse(net, x)
    assert "dense" in kernels(fast) and not fast.latest.is_dense
    assert is_close(fast(x), net(x))


def test_other_dtypes_are_left_to_torch(never_dense):
    net = thin(small(), 0.3).double()
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    fast = sipp.sparse(net, x)
    assert not any(kernel.startswith("sparse") for kernel in kernels(fast))
    assert not fast.latest.is_dense
    assert fast(x).dtype == torch.float64 and is_close(fast(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_half_precision_norms_run_in_torch(dtype, is_mixed, never_dense):
    """Their parameters may be float32, and torch computes them in it: far from 0 nothing of that is lost."""
    conv, norms = thin(nn.Conv2d(3, 8, 3), 0.5), (nn.BatchNorm2d(3), nn.BatchNorm2d(8))
    norms[0].running_mean.fill_(100.0)
    norms[0].running_var.fill_(0.01)
    net = nn.Sequential(nn.ReLU(), norms[0], conv, norms[1]).eval().to(dtype)
    if is_mixed:
        for norm in norms:
            norm.float()
    x = 100 + torch.randint(-1, 2, (8, 3, 8, 8)).to(dtype)
    found, wanted = sipp.sparse(net, x)(x), net(x)
    assert found.dtype == dtype and is_close(found.float(), wanted.float())


def test_memory_falls_with_the_zeros(never_dense):
    x = torch.randn(16, 256)
    sizes = [sipp.sparse(thin(nn.Linear(256, 512), keep), x).n_bytes for keep in (0.5, 0.1, 0.02)]
    assert sizes[0] > 3 * sizes[1] > 6 * sizes[2]
    assert sizes[1] < 512 * 256 * 4 / 3


def test_what_a_model_caches_holds_values_and_not_those_of_a_trace(never_dense, monkeypatch):
    """Also for the part of the batch that runs at a time."""
    monkeypatch.setattr(chunks, "NEAR_CACHE", 2_000)

    @functools.lru_cache
    def offset(n):
        return torch.full((8, 1, 1), 1 / n)

    net = thin(Net(lambda conv, x: conv(x) + offset(len(x)), nn.Conv2d(3, 8, 3)), 0.3)
    sipp.sparse(net, torch.randn(64, 3, 9, 9))
    assert offset.cache_info().currsize == 2
    assert {type(offset(n)) for n in (64, 16)} == {torch.Tensor}


def test_wrong_input_says_so():
    net = nn.Linear(3, 2)
    with pytest.raises(ModelError, match="not an nn"):
        sipp.sparse(lambda x: x, torch.zeros(1, 3))
    with pytest.raises(DataError, match="give a tensor"):
        sipp.sparse(net, "an example")


@dataclass
class Results:
    first: torch.Tensor
    name: str


def packs(lstm, x):
    packed = pack_padded_sequence(x, [len(x[0])] * len(x), batch_first=True)
    return lstm(packed)[1][0]


UNTRACED = {
    "branches": lambda layer, x: layer(x) if x.sum() > 0 else -layer(x),
    "a dataclass": lambda layer, x: Results(layer(x), "first"),
    "numpy": lambda layer, x: layer(torch.from_numpy(x.numpy() + 1)),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_what_cannot_be_traced_is_left_to_torch(never_dense, name, capfd):
    torch.manual_seed(0)
    net, x = thin(Net(UNTRACED[name], nn.Linear(6, 4)), 0.5), torch.randn(5, 6)
    fast = sipp.sparse(net, x)
    for given in (x, -x, x[:3], -x[:3]):
        found, wanted = fast(given), net(given)
        if isinstance(wanted, Results):
            assert found.name == wanted.name
            found, wanted = found.first, wanted.first
        assert is_close(found, wanted) and not found.requires_grad
        assert fast.latest.is_dense and fast.latest.how.startswith("torch runs all of it: torch.export cannot trace it")
    assert "cannot trace it" in str(fast) and "left to torch:   everything" in str(fast)
    assert capfd.readouterr().err == ""


def test_packed_sequences_are_left_to_torch(never_dense):
    lstm = thin(nn.LSTM(6, 4, batch_first=True), 0.5)
    fast, inside = sipp.sparse(lstm, (pack([6, 3]),)), sipp.sparse(Net(packs, lstm), torch.ones(2, 3, 6))
    for lengths in ([6, 3], [5, 4], [4, 4, 1]):
        given = pack(lengths)
        (found, _), (wanted, _) = fast(given), lstm(given)
        assert is_close(found.data, wanted.data) and torch.equal(found.batch_sizes, wanted.batch_sizes)
    for n in (2, 3):
        x = torch.randn(n, 3, 6)
        assert is_close(inside(x), packs(lstm, x))


def pack(lengths):
    return pack_padded_sequence(torch.randn(len(lengths), 6, 6), lengths, batch_first=True)


def test_a_later_call_that_cannot_be_traced_is_left_to_torch(never_dense):
    net = thin(nn.Transformer(16, 2, 1, 1, 32, batch_first=True), 0.5)
    a, b, mask = torch.randn(3, 6, 16), torch.randn(3, 4, 16), nn.Transformer.generate_square_subsequent_mask(4)
    fast = sipp.sparse(net, (a, b))
    assert not fast.latest.is_dense and is_close(fast(a, b), net(a, b))
    for tgt_mask in (mask, torch.zeros(4, 4)):  # whether a mask is causal is read from its values
        assert is_close(fast(a, b, tgt_mask=tgt_mask), net(a, b, tgt_mask=tgt_mask)) and fast.latest.is_dense
    assert is_close(fast(a, b), net(a, b))


def counts(norm, x):
    norm.num_batches_tracked += 1
    return norm(x)


def counts_anew(norm, x):
    norm.num_batches_tracked = norm.num_batches_tracked + 1
    return norm(x)


def subtracts(layer, x):
    x -= 0.5
    return layer(x)


def subtracts_unseen(layer, x):
    x.data -= 0.5
    return layer(x)


@pytest.mark.parametrize(
    ("net", "x", "what"),
    [
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(2, 4), "changes input 1"),
        (Net(subtracts, nn.Linear(4, 4)), torch.randn(2, 4), "changes input 1"),
        (Net(subtracts_unseen, nn.Linear(4, 4)), torch.randn(2, 4), "changes input 1"),
        (nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), torch.tensor([1]), r"changes 0\.weight"),
        (Net(counts, nn.BatchNorm1d(4)), torch.randn(2, 4), r"changes inner\.0\.num_batches_tracked"),
        (Net(counts_anew, nn.BatchNorm1d(4)), torch.randn(2, 4), r"changes inner\.0\.num_batches_tracked"),
    ],
)
def test_what_writes_to_its_tensors_or_inputs_is_refused_at_once(net, x, what):
    before, state = x.clone(), copy.deepcopy(net.state_dict())
    with pytest.raises(ModelError, match=what):
        sipp.sparse(net.eval(), x)
    assert torch.equal(x, before) and all(torch.equal(state[name], value) for name, value in net.state_dict().items())


def test_the_whole_is_timed_as_it_will_run(monkeypatch):
    """Steps are timed on one thread; which of the two networks is run is decided on all of them, in turns."""
    calls, clock = [], [0.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock[0])

    def taking(name, seconds):
        def call():
            calls.append((name, torch.get_num_threads()))
            clock[0] += seconds.pop() if len(seconds) > 1 else seconds[0]

        return call

    fast, dense = steps.race(taking("fast", [0.5, 0.2, 0.7]), taking("dense", [0.4, 0.3, 0.9]))
    assert (min(fast), min(dense)) == (pytest.approx(0.2), pytest.approx(0.3)) and len(fast) == steps.TURNS
    assert [name for name, _ in calls] == ["fast", "dense"] * steps.TURNS
    assert {n for _, n in calls} == {torch.get_num_threads()}


def test_sparse_works_as_the_first_call_of_a_program():
    code = (
        "import torch, sipp; net = torch.nn.Linear(64, 64); net.weight.data[:, 3:] = 0; x = torch.ones(1, 64); "
        "from sipp.runtime import steps; steps.dense_time = lambda *_: 1e9; steps.race = lambda *_: ([1.0], [2.0]); "
        "fast = sipp.sparse(net, x); assert fast.steps[0].kernel.startswith('sparse'), fast.steps; "
        "assert (fast(x) - net(x)).abs().max() < 1e-5"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
