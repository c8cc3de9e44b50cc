"""The generated loops by themselves, without tracing a network: any size, zeros, one sign, huge and tiny values."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from fresh_process import run_python
from hypothesis import HealthCheck, given, settings, strategies as st
from oracles import runtime as oracle

from sipp.native import machine_code, processor, vector
from sipp.runtime import images, timing
from sipp.runtime.activations import BY_TORCH, activate
from sipp.runtime.buffers import Arena, Buffer, Work, image_buffer, token_buffer
from sipp.runtime.graph import ATEN, ATTENTION, CONV, LINEAR, LSTM, Op, Slot
from sipp.runtime.images import AVERAGE, CAT, MAX, PAD
from sipp.runtime.kernel import PreparedKernel
from sipp.runtime.plan import MAKERS

EACH = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = st.sampled_from(["both signs", "zeros", "negative", "huge", "tiny", "mostly zero"])
KEEPS = st.sampled_from([0.0, 0.05, 0.3, 1.0])
X, WEIGHT, BIAS, ADDEND, OUT = range(5)  # numbers of values


def draw(kind, *shape, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    scale = {"zeros": 0.0, "huge": 1e15, "tiny": 1e-15}.get(kind, 1.0)
    if kind == "negative":
        return -values.abs()
    return (values if kind != "mostly zero" else values * (values > 1)) * scale


def thinned(weight, keep, seed):
    return weight * (torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < keep)


def any_way(seed):
    """Every way to cut an output is run; which one is taken follows from the seed, and not from a clock."""
    order = np.random.default_rng(seed)

    def time_and_set_threads(self, limit=math.inf):
        self.alone()
        return float(order.random())

    return mock.patch.object(PreparedKernel, "time_and_set_threads", time_and_set_threads)


def made(op, values, arena, constants=(), border=(0, 0)):
    """The step of an operation, once run; its result is among the values."""
    step = MAKERS[op.target](op, Work({n: values[n] for n in constants}, values, arena, border))
    step.run(values)
    assert not arena.flag.is_raised
    return step


def agrees(found, wanted, size):
    """To float32's rounding of sums whose terms have this size together; infinite values are none here."""
    found, room = found.detach().double().numpy(), 1e-5 * np.asarray(size) + 1e-37
    return found.shape == np.shape(wanted) and bool((np.abs(found - wanted) <= room).all())


@EACH
@given(
    st.integers(1, 20), st.sampled_from([1, 2, 3]), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4),
    st.tuples(st.integers(1, 4), st.integers(1, 4)), st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)), st.tuples(st.integers(1, 2), st.integers(1, 2)),
    st.tuples(st.integers(4, 9), st.integers(4, 11)), st.booleans(), KEEPS, KINDS, st.integers(0, 99),
)  # fmt: skip
def test_convolutions(
    never_dense,
    n,
    groups,
    channels,
    rows,
    border,
    kernel,
    stride,
    padding,
    dilation,
    size,
    has_sum,
    keep,
    kind,
    seed,
):
    if any((k - 1) * d >= side for k, d, side in zip(kernel, dilation, size)):
        return
    x = draw(kind, n, groups * channels, *size, seed=seed)
    weight = thinned(draw(kind, groups * rows, channels, *kernel, seed=seed + 1), keep, seed)
    bias = draw(kind, groups * rows, seed=seed + 2)
    given = stride, padding, dilation, groups
    wanted = oracle.convolution(x.numpy(), weight.numpy(), bias.numpy(), *given)
    most = oracle.convolution(x.abs().numpy(), weight.abs().numpy(), bias.abs().numpy(), *given)
    values = {X: x, WEIGHT: weight, BIAS: bias, ADDEND: draw(kind, *wanted.shape, seed=seed + 3)}
    if has_sum:
        wanted, most = wanted + values[ADDEND].numpy(), most + values[ADDEND].abs().numpy()
    args = (Slot(X), Slot(WEIGHT), Slot(BIAS), list(stride), list(padding), list(dilation), groups)
    op = Op("conv", CONV, args, {}, OUT, addend=ADDEND if has_sum else None)
    arena = Arena()
    with any_way(seed):
        step = made(op, values, arena, (WEIGHT, BIAS), (border, border))
    assert step.kernel.startswith("sparse")
    assert agrees(values[OUT], wanted, most)
    assert float(arena.buffer_of(values[OUT]).data_CHWN[:, :border].abs().max()) == 0  # the next layer relies on it


@EACH
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 70), st.integers(1, 40), st.booleans(), KEEPS,
    KINDS, st.integers(0, 99),
)  # fmt: skip
def test_linear_layers_on_any_number_of_tokens(never_dense, lead, columns, rows, has_addend, keep, kind, seed):
    x = draw(kind, *lead, columns, seed=seed)
    weight, bias = thinned(draw(kind, rows, columns, seed=seed + 1), keep, seed), draw(kind, rows, seed=seed + 2)
    wanted = oracle.linear(x.numpy(), weight.numpy(), bias.numpy())
    most = oracle.linear(x.abs().numpy(), weight.abs().numpy(), bias.abs().numpy())
    values = {X: x, WEIGHT: weight, BIAS: bias, ADDEND: draw(kind, *lead, rows, seed=seed + 3)}
    if has_addend:
        wanted, most = wanted + values[ADDEND].numpy(), most + values[ADDEND].abs().numpy()
    op = Op(
        "linear",
        LINEAR,
        (Slot(X), Slot(WEIGHT), Slot(BIAS)),
        {},
        OUT,
        addend=ADDEND if has_addend else None,
    )
    with any_way(seed):
        step = made(op, values, Arena(), (WEIGHT, BIAS))
    assert step.kernel.startswith("sparse, one vector" if math.prod(lead) == 1 else "sparse")
    assert agrees(values[OUT], wanted, most)


@EACH
@given(
    st.integers(1, 20), st.integers(1, 5), st.tuples(st.integers(3, 9), st.integers(3, 9)), st.integers(1, 3),
    st.integers(1, 3), st.integers(0, 1), st.booleans(), KINDS, st.integers(0, 99),
)  # fmt: skip
def test_pooling(n, channels, size, kernel, stride, padding, is_max, kind, seed):
    padding = min(padding, kernel // 2)
    arena = Arena()
    buffer = arena.take(arena.image(n, channels, *size, (1, 2)))
    x = draw(kind, n, channels, *size, seed=seed)
    buffer.inner.copy_(x)
    values = {X: buffer.inner}
    op = Op("pool", MAX if is_max else AVERAGE, (Slot(X), [kernel] * 2, [stride] * 2, [padding] * 2), {}, OUT)
    assert made(op, values, arena).kernel.endswith("of windows")
    wanted = oracle.pooling(x.numpy(), kernel, stride, padding, is_max)
    assert agrees(values[OUT], wanted, oracle.pooling(x.abs().numpy(), kernel, stride, padding, False) * (not is_max))


@pytest.mark.parametrize("is_max", [True, False])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("width", [4, 8, 12, 16, 32])
def test_pooling_of_one_image_in_vectors_of_a_row(width, kernel, stride, is_max):
    arena, shape = Arena(), (3, 5, stride * (width - 1) + kernel)
    buffer = arena.take(arena.image(1, *shape, (1, 1)))
    x = draw("both signs", 1, *shape, seed=width)
    buffer.inner.copy_(x)
    values = {X: buffer.inner}
    made(Op("pool", MAX if is_max else AVERAGE, (Slot(X), [kernel] * 2, [stride] * 2), {}, OUT), values, arena)
    wanted = oracle.pooling(x.numpy(), kernel, stride, 0, is_max)
    assert wanted.shape[-1] == width and agrees(values[OUT], wanted, 1.0)


def test_pooling_of_images_of_two_gigabytes():
    """Only the first and the last line are read, so that hardly any of the memory is touched."""
    n_lines = 2**26 + 1
    source = Buffer(torch.empty(1, n_lines, 1, 8), (0, 0), 8)
    out = image_buffer(8, 1, 2, 1)
    source.data_CHWN[0, 0], source.data_CHWN[0, -1] = 1.0, 2.0
    columns = [range(1)], [1]
    images._kernel(True, ([range(1), range(n_lines - 1, n_lines)], [1, 1]), columns, source, out)()
    assert out.data_CHWN.flatten().tolist() == [1.0] * 8 + [2.0] * 8


@EACH
@given(st.integers(2, 40), st.integers(1, 30), KINDS.filter(lambda kind: kind != "huge"), st.integers(0, 99))
def test_layer_norms(n_tokens, features, kind, seed):
    x, gain, shift = (draw(kind, *shape, seed=seed) for shape in ((n_tokens, features), (features,), (features,)))
    values = {X: x, WEIGHT: gain, BIAS: shift}
    op = Op("norm", ATEN.layer_norm.default, (Slot(X), [features], Slot(WEIGHT), Slot(BIAS), 1e-3), {}, OUT)
    assert made(op, values, Arena(), (WEIGHT, BIAS)).kernel == "norm of tokens"
    wanted = oracle.layer_norm(x.numpy(), gain.numpy(), shift.numpy(), 1e-3)
    assert agrees(values[OUT], wanted, 20 * (1 + np.abs(wanted)))


@EACH
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.booleans(),
    st.sampled_from(["both signs", "zeros", "negative", "tiny", "mostly zero"]), st.integers(0, 99),
)  # fmt: skip
def test_attention(n, heads, eighths, fours, sizes, has_mask, kind, seed):
    n_queries, n_keys, size = 8 * eighths, 4 * fours, 4 * sizes
    arena, values = Arena(), {}
    for number, n_tokens in ((X, n_queries), (WEIGHT, n_keys), (BIAS, n_keys)):
        data = arena.take(token_buffer(n * n_tokens, heads * size)).data_CHWN
        columns = data.shape[3]
        values[number] = data.as_strided((n, heads, n_tokens, size), (n_tokens, size * columns, 1, columns))
        values[number].copy_(2 * draw(kind, n, heads, n_tokens, size, seed=seed + number))
    mask = torch.zeros(n_queries, n_keys)
    if has_mask:
        mask[torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -math.inf
        mask[:, 0] = 0.5
    values[ADDEND] = mask
    args = (Slot(X), Slot(WEIGHT), Slot(BIAS), *([Slot(ADDEND)] if has_mask else []))
    assert made(Op("attend", ATTENTION, args, {}, OUT), values, arena).kernel == "attention of tokens"
    q, k, v = (values[number].numpy() for number in (X, WEIGHT, BIAS))
    wanted = oracle.attention(q, k, v, 1 / math.sqrt(size), mask.numpy())
    assert agrees(values[OUT], wanted, np.abs(v).max() + 0 * wanted)


@EACH
@given(st.integers(1, 20), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 2), st.integers(0, 99))
def test_concatenations_and_padding(n, channels, more, seed):
    arena, values = Arena(), {}
    for i, own in enumerate(channels):
        values[i] = arena.take(arena.image(n, own, 3, 4, (1, 1))).inner
        values[i].copy_(torch.randn(values[i].shape, generator=torch.Generator().manual_seed(seed + i)))
    made(Op("cat", CAT, ([Slot(i) for i in range(len(channels))], 1), {}, OUT), values, arena, border=(1, 2))
    assert torch.equal(values[OUT], torch.cat([values[i] for i in range(len(channels))], 1))
    pads = [more, 1, 0, more, 1, more]
    made(Op("pad", PAD, (Slot(0), pads), {}, OUT), values, arena)
    assert torch.equal(values[OUT], torch.nn.functional.pad(values[0], pads))


SMALL_STACK = """
import math, threading, torch
from runtime.test_kernels import *

arena, values = Arena(), {}
for number in (X, WEIGHT, BIAS):
    data = arena.take(token_buffer(1024, 4)).data_CHWN
    values[number] = data.as_strided((1, 1, 1024, 4), (1024, 4 * data.shape[3], 1, data.shape[3]))
    values[number].copy_(torch.randn(1, 1, 1024, 4))
step = made(Op("attend", ATTENTION, (Slot(X), Slot(WEIGHT), Slot(BIAS)), {}, OUT), values, arena)
before = values[OUT].clone()
values[OUT].zero_()
threading.stack_size(64 * 1024)
worker = threading.Thread(target=step.run, args=(values,))
worker.start()
worker.join()
assert torch.equal(values[OUT], before)
"""


def test_attention_on_a_thread_with_a_small_stack():
    """1,024 keys have 256 KB of scores; in a process of its own, as the stack's end is not always seen."""
    done = run_python(SMALL_STACK)
    assert done.returncode == 0, done.stderr[-2000:]


@EACH
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), KEEPS, KINDS, st.integers(0, 99))
def test_lstms(never_dense, n, n_times, n_inputs, hidden, keep, kind, seed):
    x = draw(kind if kind != "huge" else "both signs", n, n_times, n_inputs, seed=seed)
    shapes = [(4 * hidden, n_inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    weights = [draw("both signs", *shape, seed=seed + i) * 0.5 for i, shape in enumerate(shapes)]
    weights[:2] = [thinned(weight, keep, seed) for weight in weights[:2]]
    state, cell = 100, 101
    values = {X: x, state: torch.zeros(1, n, hidden), cell: torch.zeros(1, n, hidden)}
    constants = {10 + i: weight for i, weight in enumerate(weights)}
    refs = [Slot(number) for number in constants]
    op = Op("lstm", LSTM, (Slot(X), [Slot(state), Slot(cell)], refs, True, 1, 0.0, False, False, True), {}, OUT)
    values |= constants
    assert made(op, values, Arena(), constants).kernel.startswith("sparse LSTM")
    bias = (weights[2] + weights[3]).numpy()
    wanted = [oracle.lstm(line, weights[0].numpy(), weights[1].numpy(), bias) for line in x.numpy()]
    assert agrees(values[OUT][0], np.array(wanted), np.full(np.shape(wanted), 5.0))


def by_code(name, lanes, values):
    """The activation of each number, by generated code."""

    def emit(b, args):
        with vector.each(b, *args.share(args.number("n"))) as i:
            place = b.mul(i, i.type(lanes))
            value = vector.load(b, vector.address_of(b, args.number("x"), place), vector.of(lanes))
            vector.store(b, activate(b, name, value), vector.address_of(b, args.number("out"), place))

    x = np.array(values, np.float32)
    out = np.empty_like(x)
    numbers = {"n": len(x) // lanes, "x": x.ctypes.data, "out": out.ctypes.data}
    code = machine_code.generate(("test", name, lanes), numbers, emit)
    machine_code.run(code, machine_code.argument_list(code, numbers), 2, 2)
    return out


@pytest.mark.parametrize("lanes", sorted({1, 8, processor.LANES}))
@pytest.mark.parametrize("name", list(oracle.ACTIVATIONS))
def test_activations_at_their_ends(name, lanes):
    ends = [0.0, -0.0, 1e-38, -1e-38, 1e-45, 5.99, 6.01, 88.0, -88.0, 89.5, -89.5, 1e4, -1e4, 3e38, -3e38]
    ends += list(np.linspace(-9, 9, 17))
    found = by_code(name, lanes, ends)
    wanted = BY_TORCH[name](torch.tensor(ends, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=2e-6)
    odd = [math.nan, math.inf] * 8
    assert np.isnan(by_code(name, lanes, odd)[::2]).all()  # what is not finite is seen by whoever reads it


def on_threads(kind, n_points):
    """On how many threads the kernel of such a step runs, if torch has two."""
    arena, values, used = Arena(), {}, []
    if kind == "pooling":
        buffer = arena.take(image_buffer(n_points, 8, 4, 4))
        values[X] = buffer.inner
        op = Op(kind, MAX, (Slot(X), [2, 2]), {}, OUT)
    elif kind == "norm":
        values[X] = torch.randn(8 * n_points, 16)
        op = Op(kind, ATEN.layer_norm.default, (Slot(X), [16], None, None), {}, OUT)
    elif kind == "attention":
        for number in (X, WEIGHT, BIAS):
            data = arena.take(token_buffer(8 * n_points, 8)).data_CHWN
            pitch = data.shape[3]
            values[number] = data.as_strided((n_points, 1, 8, 8), (8, 8 * pitch, 1, pitch))
        op = Op(kind, ATTENTION, (Slot(X), Slot(WEIGHT), Slot(BIAS)), {}, OUT)
    else:
        lstm = torch.nn.LSTM(8, 8)
        tensors = [torch.randn(3, n_points, 8), *torch.zeros(2, 1, n_points, 8), *lstm.parameters()]
        values |= dict(enumerate(each.detach() for each in tensors))
        weights = [Slot(n) for n in range(3, 7)]
        op = Op(kind, LSTM, (Slot(0), [Slot(1), Slot(2)], weights, True, 1, 0.0, False, False, False), {}, 99)
    constants = range(3, 7) if kind == "lstm" else ()
    step = MAKERS[op.target](op, Work({n: values[n] for n in constants}, values, arena))
    with (
        mock.patch.object(torch, "get_num_threads", return_value=2),
        mock.patch.object(machine_code, "run", lambda code, numbers, n_tasks, n_threads: used.append(n_threads)),
    ):
        step.run(values)
    return used


@pytest.mark.parametrize("kind", ["pooling", "norm", "attention", "lstm"])
def test_short_kernels_stay_on_one_thread(kind, monkeypatch):
    """Starting a second thread takes longer than they do."""
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: math.inf)
    for seconds, n_threads in ((1e-6, 1), (1e-2, 2)):
        monkeypatch.setattr(timing, "best_time", lambda function, limit=math.inf, seconds=seconds: seconds)
        assert on_threads(kind, 16) == [n_threads]
