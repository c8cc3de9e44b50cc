"""`sipp.sparse` on the CPU against torch: the kinds of layer people have, and what callers do with the result.

`test_random_networks.py` has random networks, `test_numbers.py` the ends of float32.
"""

import copy
import math
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
from runtime.nets import Net, is_close, kernels, thin
from torch import nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.native import processor
from sipp.runtime import chunks, cpu_network, plan, sparse_network, timing

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


class Block(nn.Module):
    """Convolution, norm, activation, then a residual or a concatenation."""

    def __init__(self, channels, join):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.join = join

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(x)))
        return x + y if self.join == "add" else torch.cat((x, y), 1)


def small():
    return nn.Sequential(
        Block(3, "cat"), nn.Conv2d(6, 8, 3, 2), Block(8, "add"),
        nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def test_a_dilated_pool_that_begins_in_the_padding(never_dense: None) -> None:
    torch.manual_seed(0)
    pool = nn.MaxPool2d(3, 1, padding=1, dilation=2)
    net, x = thin(nn.Sequential(nn.Conv2d(8, 16, 3), pool, nn.Conv2d(16, 8, 3)), 0.5), torch.randn(8, 8, 12, 12)
    fast = sipp.sparse(net, x)
    assert "max of windows" in kernels(fast) and is_close(fast(x), net(x))


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
    ("n_tokens", "kind"),
    [(8, "none"), (48, "none"), (5, "none"), (48, "bool"), (16, "float"), (16, "causal"), (32, "dead"), (5, "dead")],
)
def test_attention(never_dense, n_tokens, kind):
    net = thin(Heads(), 0.5)
    x = torch.randn(3, n_tokens, 16)
    mask = torch.rand(3, 1, 1, n_tokens) < 0.7
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(n_tokens, n_tokens)
    if kind == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(n_tokens)
    if kind == "dead":
        mask[1] = False
    given = (x,) if kind == "none" else (x, mask)
    fast = sipp.sparse(net, given)
    assert kind == "dead" or not fast.latest.is_dense
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


@pytest.mark.parametrize("shape", [(), (6,), (3, 1, 6), (3, 5, 1), (2, 3, 5, 6), (6, 1, 1), (1, 1, 7, 7)])
def test_a_broadcast_sum_equals_torch(shape, never_dense):
    """A product plus something of another shape."""
    is_image = 7 in shape or shape == (6, 1, 1)
    product, last = (
        (nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 1)) if is_image else (nn.Linear(8, 6), nn.Linear(6, 6))
    )
    sum_of = Net(lambda p, q, shift, x: q((p(x) + shift).relu()), product, last, nn.Parameter(torch.randn(shape)))
    net, x = thin(sum_of, 0.4), torch.randn(3, 4, 7, 7) if is_image else torch.randn(3, 5, 8)
    fast = sipp.sparse(net, x)
    assert is_close(fast(x), net(x)) and fast(x).shape == net(x).shape
    assert any(kernel.startswith("sparse") for kernel in kernels(fast))


def test_points_a_few_at_a_time(never_dense, monkeypatch):
    monkeypatch.setattr(chunks, "NEAR_CACHE", 2_000)
    net = thin(small(), 0.3)
    x = torch.randn(48, 3, 8, 8)
    fast = sipp.sparse(net, x)
    assert fast.latest.chunk == 16
    assert is_close(fast(x), net(x))


@pytest.mark.parametrize(("factor", "is_dense"), [(1.01, True), (1 + 5e-4, True), (1 + 5e-5, False)])
def test_a_plan_that_gives_something_else_does_not_run_the_network(monkeypatch, factor, is_dense):
    """Rounding is what is promised, 1e-4 of the outputs; whatever runs, `bench` accepts."""
    monkeypatch.setattr(timing, "race", lambda fast, dense: ([1e-3], [math.inf]))
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: math.inf)
    net, x = thin(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)), 0.4), torch.randn(8, 12)
    assert not sipp.sparse(net, x).latest.is_dense
    real = plan.CpuPlan.run
    monkeypatch.setattr(plan.CpuPlan, "run", lambda *given: [factor * y for y in real(*given)])
    fast = sipp.sparse(net, x)
    assert fast.latest.is_dense == is_dense == ("the steps gave other outputs" in str(fast))
    assert torch.equal(fast(x), net(x)) == is_dense
    assert max(run.off_by for run in sipp.bench(net, x).runs) <= 1e-4


def test_always_skips_the_zeros_even_where_torch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "race", lambda fast, dense: ([1.0], [0.5]))
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(16, 64)
    dense = sipp.sparse(model, x)
    assert dense.latest.is_dense and "torch runs all of it" in str(dense) and torch.equal(dense(x), model(x))
    fast = sipp.sparse(model, x, always=True)
    assert not fast.latest.is_dense
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_without_vector_code_torch_runs_it_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "HAS_VECTOR_CODE", False)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(16, 64)
    fast = sipp.sparse(model, x, always=True)
    assert fast.latest.is_dense and "no vector code" in str(fast) and torch.equal(fast(x), model(x))


def test_a_warning_says_when_more_threads_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "race", lambda fast, dense: ([0.5], [1.0]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(16, 64)
    with pytest.warns(UserWarning, match="2 threads took .* and one took"):
        fast = sipp.sparse(model, x)
    assert fast.latest.one_thread_seconds is not None and "one thread" in str(fast)


class Unusual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv1d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x, *, scale):
        y = torch.cumsum(self.conv(x), 2).transpose(1, 2)
        return {"out": self.linear(y) * scale, "sums": [y.sum(1), 3]}


def test_what_is_not_known_is_left_to_torch_and_listed(never_dense):
    net = thin(Unusual(), 0.5)
    x, scale = torch.randn(5, 3, 9), torch.tensor(2.0)
    fast = sipp.sparse(net, {"x": x, "scale": scale})
    given, wanted = fast(x=x, scale=scale), net(x, scale=scale)
    assert is_close(given["out"], wanted["out"]) and is_close(given["sums"][0], wanted["sums"][0])
    assert given["sums"][1] == 3
    assert "left to torch:   conv1d, cumsum, mul, sum, transpose; torch runs these as before" in str(fast)


@dataclass
class Results:
    first: torch.Tensor
    name: str


UNTRACED = {
    "branches": lambda layer, x: layer(x) if x.sum() > 0 else -layer(x),
    "a dataclass": lambda layer, x: Results(layer(x), "first"),
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


def subtracts(layer, x):
    x -= 0.5
    return layer(x)


def counts(norm, x):
    norm.num_batches_tracked += 1
    return norm(x)


@pytest.mark.parametrize(
    ("net", "x", "what"),
    [
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(2, 4), "changes input"),
        (Net(subtracts, nn.Linear(4, 4)), torch.randn(2, 4), "changes given_0"),
        (nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), torch.tensor([1]), r"changes 0\.weight"),
        (Net(counts, nn.BatchNorm1d(4)), torch.randn(2, 4), r"changes inner\.0\.num_batches_tracked"),
    ],
)
def test_what_writes_to_its_tensors_or_inputs_is_refused_at_once(net, x, what):
    before, state = x.clone(), copy.deepcopy(net.state_dict())
    with pytest.raises(ModelError, match=what):
        sipp.sparse(net.eval(), x)
    assert torch.equal(x, before) and all(torch.equal(state[name], value) for name, value in net.state_dict().items())


def test_other_dtypes_are_left_to_torch(never_dense):
    net = thin(small(), 0.3).double()
    x = torch.randn(8, 3, 8, 8, dtype=torch.float64)
    fast = sipp.sparse(net, x)
    assert not any(kernel.startswith("sparse") for kernel in kernels(fast))
    assert not fast.latest.is_dense
    assert fast(x).dtype == torch.float64 and is_close(fast(x), net(x))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, left=None, right=None, scale=1):
        parts = [layer(x) for layer, x in ((self.a, left), (self.b, right)) if x is not None]
        return (parts[0] if len(parts) == 1 else parts[0] + parts[1].neg()) * scale


def test_named_arguments_come_in_any_order(never_dense):
    net, left, right = thin(Two(), 0.4), torch.randn(3, 8), torch.randn(3, 8)
    fast = sipp.sparse(net, {"right": right, "left": left})
    wanted = net(left, right)
    for given in (fast(right=right, left=left), fast(left=left, right=right), fast(left, right=right)):
        assert is_close(given, wanted)
    assert is_close(fast(left=left), net(left=left)) and is_close(fast(right=left), net(right=left))
    assert is_close(fast(left=left, scale=2), net(left=left, scale=2))
    assert is_close(fast(left=left, scale=True), net(left=left, scale=True))  # 1 == True == 1.0


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_autocast_is_what_it_is_in_each_call(never_dense, is_made_inside):
    net, x = thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3), torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_made_inside):
        fast = sipp.sparse(net, x)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            found, wanted = fast(x), net(x)
        assert found.dtype == wanted.dtype == torch.bfloat16
        assert torch.allclose(found.float(), wanted.float(), atol=0.02)
        assert fast(x).dtype == torch.float32 and is_close(fast(x), net(x))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_compiled_is_shared_and_not_copied(never_dense, copied):
    """A shallow copy would empty the weights that the other one reads."""
    fast = sipp.sparse(thin(nn.Linear(8, 6), 0.4), torch.randn(5, 8))
    with pytest.raises(ModelError, match=r"call sipp\.sparse"):
        copied(fast)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.randn(5, 7), "float32 5 x 7.*give inputs of the shape"),
        (torch.ones(5, 8, dtype=torch.int64), "its parameters are float32"),
        (torch.empty(5, 8, device="meta"), "on meta; give it on the CPU"),
        (torch.ones(5, 8).to_sparse(), "sparse tensor; give a dense one"),
        (None, "NoneType"),
    ],
)
def test_an_input_that_the_model_does_not_take_is_named(never_dense, bad, words):
    net, x = thin(nn.Linear(8, 6), 0.4), torch.randn(5, 8)
    fast = sipp.sparse(net, x)
    n_bytes = fast.n_bytes
    with pytest.raises(DataError, match=words):
        fast(bad)
    assert fast.n_bytes == n_bytes and is_close(fast(x), net(x))
    assert any(kernel.startswith("sparse") for kernel in kernels(fast))


def images(n):
    return torch.randn(n, 3, 8, 8)


def net(keep, stem=1.0):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    thin(layers[0], stem)
    return thin(layers[1:], keep) and layers.eval()


def check(fast, model, x):
    with torch.no_grad():
        wanted = model(x)
    found = fast(x)
    assert is_close(found, wanted)
    assert found.is_inference() == torch.is_inference_mode_enabled() and not found.requires_grad


@pytest.mark.parametrize("made", MODES)
def test_made_and_called_in_any_mode(never_dense, made):
    with MODES[made]():
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
        thin(model[2], 0.3)  # the first layer keeps all of its weights, and is not packed for the next compilation
        fast = sipp.sparse(model, torch.randn(4, 8))
        x = torch.randn(4, 8)
    for n, met in enumerate(MODES, 1):  # new shapes
        with MODES[met]():
            check(fast, model, x)
            y = torch.randn(n, 8)
            check(fast, model, y)
        for mode in MODES.values():
            with mode():
                check(fast, model, x)
                check(fast, model, y)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.02])
def test_every_pair_of_shapes(never_dense, keep):
    model = net(keep)
    for first, second in ((2, 16), (16, 3)):
        fast = sipp.sparse(model, images(first))
        for n in (second, first, second):
            check(fast, model, images(n))


@pytest.fixture
def n_compiled(monkeypatch):
    """How many times something was compiled, by the number of traces."""
    calls = []
    real = cpu_network.trace
    monkeypatch.setattr(cpu_network, "trace", lambda *given: calls.append(given) or real(*given))
    return calls


class Gives(nn.Module):
    """Returns what is its own: a parameter, a buffer, a tensor it holds, a view, its input."""

    def __init__(self):
        super().__init__()
        self.a, self.own = nn.Linear(8, 6), nn.Parameter(torch.ones(3))
        self.register_buffer("also", torch.full((2, 2), 3.0))
        self.table = torch.full((4,), 2.0)

    def forward(self, x):
        return {"a": self.a(x), "own": [self.own, self.own[1:], self.also.T], "table": self.table, "x": x, "n": 3}


@pytest.mark.parametrize("race", ["never_dense", "always_dense"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_results_are_the_callers_own(request, race, mode):
    request.getfixturevalue(race)
    model, x = thin(Gives(), 0.4), torch.randn(3, 8)
    fast = sipp.sparse(model, x)
    with mode():
        found = fast(x)
        before = {name: torch.utils._pytree.tree_map(_copied, value) for name, value in found.items()}
        for value in torch.utils._pytree.tree_leaves(found):
            if isinstance(value, torch.Tensor):
                value.fill_(7.0)
        again = fast(x)
    assert not torch.equal(x, torch.full_like(x, 7.0)) and again["n"] == 3
    pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (again, before)))
    assert all(torch.equal(one, other) for one, other in pairs if isinstance(one, torch.Tensor))


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def twice(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = layer(x).cumsum(1)
    return y, y.flatten()


def test_results_share_no_memory_with_each_other(never_dense: None) -> None:
    x = torch.rand(4, 16)
    whole, part = sipp.sparse(Net(twice, nn.Linear(16, 16)), x)(x)
    before = part.clone()
    whole.zero_()
    assert torch.equal(part, before)


def test_nine_shapes_in_turn_compile_eight_times(never_dense, n_compiled):
    model = thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3)
    fast = sipp.sparse(model, torch.randn(2, 8))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for n in range(2, 11):
                x = torch.randn(n, 8)
                assert is_close(fast(x), model(x))
    assert len(n_compiled) == sparse_network.MOST_PLANS == 8
    assert len([each for each in said if "more than 8 kinds of input" in str(each.message)]) == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 6)

    def forward(self, x, scale):
        return self.a(x) * scale


@pytest.mark.filterwarnings("ignore:more than 8 kinds")
def test_number_arguments_are_part_of_the_signature(never_dense, n_compiled):
    model, x = thin(Scaled(), 0.4), torch.randn(3, 8)
    fast = sipp.sparse(model, (x, 1.0))
    for scale in (0.0, 2.0, 0.0, 1.0):
        assert is_close(fast(x, scale), model(x, scale))
    assert len(n_compiled) == 3
    for i in range(40):
        assert is_close(fast(x, 0.1 * i), model(x, 0.1 * i))
    assert len(n_compiled) == sparse_network.MOST_PLANS
    with pytest.raises(DataError, match="contains a ndarray"):
        fast(x, x.numpy())


def test_memory_falls_with_the_zeros_and_counts_all_plans_and_shared_weights_once(never_dense):
    sizes = [sipp.sparse(thin(nn.Linear(256, 512), keep), torch.randn(16, 256)).n_bytes for keep in (0.5, 0.1, 0.02)]
    assert sizes[0] > 3 * sizes[1] > 6 * sizes[2] and sizes[1] < 512 * 256 * 4 / 3
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False)).eval()
    thin(model[2], 0.1)
    fast = sipp.sparse(model, torch.randn(3, 64))
    first = fast.n_bytes
    fast(torch.randn(3, 64))
    assert fast.n_bytes == first
    fast(torch.randn(9, 64))
    packed = sum(step.n_bytes for step in fast.steps if step.kernel.startswith("sparse"))
    assert fast.n_bytes == first + packed and packed > 0
