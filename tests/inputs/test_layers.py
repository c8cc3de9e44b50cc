"""Every layer type against the brute-force oracle: rows, patches and points as THEORY's table defines them.

Recurrent and attention models run in float64, so that the oracle and the model see the same hidden values: a hidden
value of either sign within float32 rounding of zero would decide a whole quadrant.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import sensitivity as oracle
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import sipp
from sipp.errors import DataError
from sipp.inputs.layers import find_prunable_layers

BOTH = pytest.mark.parametrize("reduce", ["max", "mean"])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values with a tenth of exact zeros, as rectified activations have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (x * (torch.rand(*shape, generator=generator) > 0.1)).to(dtype)


def seeded(make: Callable[[], nn.Module], seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module made under a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype)


def agree(got: dict[str, Tensor], expected: dict[str, np.ndarray]) -> None:
    """Fail with words where scores differ from the oracle."""
    assert not oracle.disagreements(got, expected)


class Calls(nn.Module):
    """A model around one module, called the way `call` says."""

    def __init__(self, module: nn.Module, call: Callable[..., object]) -> None:
        super().__init__()
        self.m = module
        self.call = call

    def forward(
        self, x: Tensor, h0: Tensor | None = None, c0: Tensor | None = None, lengths: Tensor | None = None
    ) -> object:
        given = {"h0": h0, "c0": c0, "lengths": lengths}
        return self.call(self.m, x, **{name: tensor for name, tensor in given.items() if tensor is not None})


# --- Linear ----------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", [(7, 6), (3, 5, 6), (2, 3, 2, 6), (4, 1, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool, reduce: str) -> None:
    model = seeded(lambda: nn.Linear(6, 5, bias=bias))
    x = randn(*shape)
    agree(sipp.sensitivity(model, [x], reduce=reduce), {"weight": oracle.linear_sensitivity(model.weight, x, reduce)})


@BOTH
def test_linear_chain(reduce: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    model = model.double()
    x = randn(9, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = {f"{i}.weight": oracle.linear_sensitivity(model[i].weight, model[:i](x), reduce) for i in (0, 2, 4)}
    agree(sipp.sensitivity(model, [x[:4], x[4:]], reduce=reduce), expected)


def test_linear_on_unbatched_vectors() -> None:
    model = seeded(lambda: Calls(nn.Linear(6, 4), lambda m, x: torch.stack([m(point) for point in x])))
    x = randn(5, 6)
    agree(sipp.sensitivity(model, [x]), {"m.weight": oracle.linear_sensitivity(model.m.weight, x, "max")})


def test_integer_inputs_and_embeddings() -> None:
    """Tokens are inputs too; embeddings and norms are never among the scores."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 3)), dtype=torch.float64)
    ids = torch.arange(6).reshape(2, 3)
    with torch.no_grad():
        expected = {"2.weight": oracle.linear_sensitivity(model[2].weight, model[:2](ids), "mean")}
    agree(sipp.sensitivity(model, [ids], reduce="mean"), expected)


REARRANGED: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "flattened": lambda m, x: m(x.flatten(0, 1)),
    "one call a step": lambda m, x: [m(x_t) for x_t in x.unbind(1)],
}


@BOTH
@pytest.mark.parametrize("call", REARRANGED.values(), ids=REARRANGED)
def test_a_point_is_a_data_point_however_the_model_lays_it_out(call: Callable, reduce: str) -> None:
    model = seeded(lambda: Calls(nn.Linear(6, 4), call))
    x = randn(3, 5, 6)
    expected = {"m.weight": oracle.linear_sensitivity(model.m.weight, x, reduce)}
    agree(sipp.sensitivity(model, [x], reduce=reduce), expected)


@pytest.mark.parametrize("call", [lambda m, x: [m(point) for point in x], lambda m, x: m(x.transpose(0, 1))])
def test_mean_refuses_inputs_whose_points_cannot_be_told_apart(call: Callable) -> None:
    model = seeded(lambda: Calls(nn.Linear(6, 4), call))
    with pytest.raises(DataError, match=r"m\.weight"):
        sipp.sensitivity(model, [randn(3, 5, 6)], reduce="mean")


# --- Convolutions; more of their geometry in tests/properties ---------------------------------------------------------


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d-stride-pad-dilation": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), (3, 9)),
    "1d-same-even-kernel": (lambda: nn.Conv1d(2, 3, 4, padding="same"), (2, 7)),
    "2d-stride-leaves-a-rest": (lambda: nn.Conv2d(2, 3, 2, stride=3), (2, 6, 7)),
    "2d-same-dilation": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 2)), (2, 5, 5)),
    "2d-same-reflect": (lambda: nn.Conv2d(2, 3, (4, 3), padding="same", padding_mode="reflect"), (2, 5, 5)),
    "2d-circular": (lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="circular", dilation=2), (3, 6, 5)),
    "2d-depthwise-multiplier": (lambda: nn.Conv2d(3, 6, 3, groups=3, stride=2, bias=False), (3, 5, 5)),
    "3d": (lambda: nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=1, dilation=(2, 1, 1), groups=2), (2, 4, 4, 2)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: str) -> None:
    make, shape = CONVOLUTIONS[case]
    conv = seeded(make)
    x = randn(3, *shape, seed=1)
    groups = oracle.conv_points(conv, x)
    for reduce in ("max", "mean"):
        agree(sipp.sensitivity(conv, [x], reduce=reduce), {"weight": oracle.conv_sensitivity(conv, groups, reduce)})


def test_convolution_on_unbatched_images() -> None:
    model = seeded(lambda: Calls(nn.Conv2d(2, 3, 2), lambda m, x: torch.stack([m(image) for image in x])))
    x = randn(3, 2, 4, 4)
    expected = oracle.conv_sensitivity(model.m, oracle.conv_points(model.m, x), "max")
    agree(sipp.sensitivity(model, [x]), {"m.weight": expected})


# --- Recurrent layers ------------------------------------------------------------------------------------------------

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "rnn-tanh": lambda: nn.RNN(4, 5, batch_first=True),
    "rnn-relu-2-bidirectional": lambda: nn.RNN(4, 3, 2, nonlinearity="relu", batch_first=True, bidirectional=True),
    "lstm": lambda: nn.LSTM(4, 5, batch_first=True),
    "lstm-2-bidirectional": lambda: nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True),
    "lstm-no-bias-dropout": lambda: nn.LSTM(4, 3, 2, batch_first=True, bias=False, dropout=0.5),
    "lstm-projected": lambda: nn.LSTM(4, 5, batch_first=True, proj_size=2),
    "lstm-projected-2-bidirectional": lambda: nn.LSTM(4, 4, 2, batch_first=True, bidirectional=True, proj_size=2),
    "gru": lambda: nn.GRU(4, 5, batch_first=True),
    "gru-2-bidirectional": lambda: nn.GRU(4, 3, 2, batch_first=True, bidirectional=True),
    "gru-3": lambda: nn.GRU(4, 3, 3, batch_first=True),
}


def sequences(x: Tensor, lengths: Tensor | None = None) -> list[np.ndarray]:
    """One (T, K) array per point of x (N, T, K), cut to its length."""
    return [oracle.f64(point[: len(point) if lengths is None else int(lengths[n])]) for n, point in enumerate(x)]


def recurrent(name: str, *, batch_first: bool = True) -> nn.Module:
    module = seeded(RECURRENT[name], dtype=torch.float64)
    module.batch_first = batch_first
    return module


def expected_recurrent(points: dict, module: nn.Module, reduce: str) -> dict[str, np.ndarray]:
    return oracle.named_sensitivity(module, points, reduce, prefix="m.")


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    module = recurrent(name)
    x = randn(3, 4, 4, dtype=torch.float64)
    points, outputs = oracle.recurrent_points(module, sequences(x))
    module.eval()
    np.testing.assert_allclose(oracle.f64(module(x)[0]), np.stack(outputs), atol=1e-12)  # the oracle's own forward
    for reduce in ("max", "mean"):
        got = sipp.sensitivity(Calls(module, lambda m, x: m(x)), [x], reduce=reduce)
        agree(got, expected_recurrent(points, module, reduce))


@BOTH
@pytest.mark.parametrize("name", ["lstm-projected-2-bidirectional", "gru-2-bidirectional", "rnn-tanh"])
def test_recurrent_time_first(name: str, reduce: str) -> None:
    module = recurrent(name, batch_first=False)
    x = randn(3, 5, 4, dtype=torch.float64)
    points, _ = oracle.recurrent_points(module, sequences(x))
    model = Calls(module, lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1))
    agree(sipp.sensitivity(model, [x[:1], x[1:]], reduce=reduce), expected_recurrent(points, module, reduce))


@BOTH
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ["lstm-projected-2-bidirectional", "lstm", "gru-2-bidirectional", "rnn-tanh"])
def test_recurrent_with_given_state(name: str, batch_first: bool, reduce: str) -> None:
    module = recurrent(name, batch_first=batch_first)
    n_slots = module.num_layers * (2 if module.bidirectional else 1)
    x = randn(3, 4, 4, dtype=torch.float64)
    h0 = randn(3, n_slots, module.proj_size or module.hidden_size, seed=1, dtype=torch.float64)
    c0 = randn(3, n_slots, module.hidden_size, seed=2, dtype=torch.float64)

    def call(m: nn.Module, x: Tensor, h0: Tensor, c0: Tensor) -> object:
        h, c = h0.transpose(0, 1).contiguous(), c0.transpose(0, 1).contiguous()
        return m(x if batch_first else x.transpose(0, 1), (h, c) if m.mode == "LSTM" else h)

    h_first, c_first = oracle.f64(h0.transpose(0, 1)), oracle.f64(c0.transpose(0, 1))
    points, _ = oracle.recurrent_points(module, sequences(x), h_first, c_first)
    got = sipp.sensitivity(Calls(module, call), [{"x": x, "h0": h0, "c0": c0}], reduce=reduce)
    agree(got, expected_recurrent(points, module, reduce))


@BOTH
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("lstm-2-bidirectional", [5, 3, 1]),
        ("lstm-projected-2-bidirectional", [2, 5, 3]),
        ("gru-2-bidirectional", [1, 2, 5]),
        ("gru-3", [4, 4, 2]),
        ("rnn-relu-2-bidirectional", [3, 5, 2]),
    ],
)
def test_recurrent_packed(name: str, lengths: list[int], batch_first: bool, reduce: str) -> None:
    module = recurrent(name, batch_first=batch_first)
    x = randn(3, 5, 4, seed=3, dtype=torch.float64)
    x[0, lengths[0] :] = 7.0  # what lies in the padding must not be met
    is_sorted = lengths == sorted(lengths, reverse=True)

    def call(m: nn.Module, x: Tensor, lengths: Tensor) -> object:
        x = x if batch_first else x.transpose(0, 1)
        return m(pack_padded_sequence(x, lengths.cpu(), batch_first=batch_first, enforce_sorted=is_sorted))

    points, _ = oracle.recurrent_points(module, sequences(x, torch.tensor(lengths)))
    got = sipp.sensitivity(Calls(module, call), [{"x": x, "lengths": torch.tensor(lengths)}], reduce=reduce)
    agree(got, expected_recurrent(points, module, reduce))


@BOTH
def test_recurrent_module_called_twice_on_packed_input(reduce: str) -> None:
    """A point's patches from a packed call and from a plain call are one union, whatever order packing used."""
    module = recurrent("gru")
    lengths = torch.tensor([2, 4, 3])
    x = randn(3, 4, 4, dtype=torch.float64)

    def call(m: nn.Module, x: Tensor, lengths: Tensor) -> object:
        return m(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)), m(x)

    uses = [oracle.recurrent_points(module, sequences(x, cut))[0] for cut in (lengths, None)]
    points = {name: oracle.union(*(use[name] for use in uses)) for name in uses[0]}
    got = sipp.sensitivity(Calls(module, call), [{"x": x, "lengths": lengths}], reduce=reduce)
    agree(got, expected_recurrent(points, module, reduce))


def test_recurrent_on_unbatched_sequences() -> None:
    module = recurrent("lstm-2-bidirectional")
    x = randn(3, 4, 4, dtype=torch.float64)
    points, _ = oracle.recurrent_points(module, sequences(x))
    model = Calls(module, lambda m, x: [m(sequence) for sequence in x])
    agree(sipp.sensitivity(model, [x]), expected_recurrent(points, module, "max"))


CELLS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "rnn-tanh": ("RNN_TANH", lambda: nn.RNNCell(4, 5)),
    "rnn-relu": ("RNN_RELU", lambda: nn.RNNCell(4, 5, nonlinearity="relu")),
    "lstm": ("LSTM", lambda: nn.LSTMCell(4, 3)),
    "lstm-no-bias": ("LSTM", lambda: nn.LSTMCell(4, 3, bias=False)),
    "gru": ("GRU", lambda: nn.GRUCell(4, 3)),
}


def call_cell(cell: nn.Module, x: Tensor) -> Tensor:
    """Hidden states (N, T, H); the first call is given no state."""
    state, states = None, []
    for x_t in x.unbind(1):
        state = cell(x_t) if state is None else cell(x_t, state)
        states.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("name", CELLS)
def test_cell_in_a_loop(name: str) -> None:
    mode, make = CELLS[name]
    cell = seeded(make, dtype=torch.float64)
    x = randn(3, 4, 4, dtype=torch.float64)
    points, outputs = oracle.cell_points(cell, mode, sequences(x))
    np.testing.assert_allclose(oracle.f64(call_cell(cell, x)), np.stack(outputs), atol=1e-12)
    for reduce in ("max", "mean"):
        got = sipp.sensitivity(Calls(cell, call_cell), [x[:2], x[2:]], reduce=reduce)
        agree(got, expected_recurrent(points, cell, reduce))


# --- Half precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_convolutions_and_recurrent_layers(dtype: torch.dtype) -> None:
    """Scored in float32 on the values the model holds; a first layer meets exactly the given values."""
    conv, images = seeded(lambda: nn.Conv2d(1, 3, 2), dtype=dtype), randn(3, 1, 3, 3).to(dtype)
    expected = {"weight": oracle.conv_sensitivity(conv, oracle.conv_points(conv, images), "max")}
    agree(sipp.sensitivity(conv, [images]), expected)
    lstm, x = seeded(RECURRENT["lstm"], dtype=dtype), randn(2, 5, 4).to(dtype)
    got = sipp.sensitivity(lstm, [x])
    agree({"w": got["weight_ih_l0"]}, {"w": oracle.linear_sensitivity(lstm.weight_ih_l0, x, "max")})
    assert got["weight_hh_l0"].dtype == torch.float32
    assert torch.isfinite(got["weight_hh_l0"]).all() and got["weight_hh_l0"].amax() > 0.5


# --- Weights that modules share ---------------------------------------------------------------------------------------


def test_a_tied_weight_is_one_weight_with_all_its_names_and_layers() -> None:
    """Also in modules that were not chosen: its uses there are scored, and its second name is no other tensor."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    layers = find_prunable_layers(net, include="0")
    assert [(layer.module_name, layer.weights["weight"].aliases) for layer in layers] == [
        ("0", ("2.weight",)),
        ("2", ("2.weight",)),
    ]
    masks = sipp.prune(net, None, keep=0.5, method="magnitude", include="0").masks
    assessed = sipp.assess(net, masks, randn(20, 4))
    assert assessed.guarantee is not None and assessed.guarantee.left_out == ""
