"""Random networks of one layer on random inputs that do not fit it, through every public function that takes data.

Only success or an error of sipp's own may follow; a crash ends the process, so the cases run in one of their own:

    python tests/inputs/mismatches.py 0 250          # cases 0 to 250
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.layers import Adapter, WeightUse, register, vectors

N_POINTS = 4
Shape = tuple[int, ...]


class Taught(nn.Module):
    """A layer that sipp learns here, by an adapter that checks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class TaughtWindows(Taught):
    """The same weight, with an adapter whose windows are all wrong."""


def taught_uses(module, args, kwargs, n_points):
    yield vectors("weight", args[0], n_points)


def wild_uses(module, args, kwargs, n_points):
    x = args[0].reshape(len(args[0]), 1, 1, -1)
    choice = random.Random(str(tuple(x.shape)))
    yield WeightUse(
        "weight",
        x,
        n_position_dims=choice.choice([-1, 0, 1, 1, 2, 3]),
        row_start=choice.choice([0, 0, -1, 3, 9]),
        n_rows=choice.choice([None, None, 5, 7, 0]),
        counts_B=choice.choice([None, None, torch.tensor([9] * len(x)), torch.tensor(1)]),
        attributed=choice.random() < 0.7,
    )


register(Taught, Adapter(weights=lambda module: ("weight",), uses=taught_uses))
register(TaughtWindows, Adapter(weights=lambda module: ("weight",), uses=wild_uses))


class Net(nn.Module):
    """One layer, called by `call` on a changed input, and a sum over all but the points."""

    def __init__(self, layer: nn.Module, change: Callable[[Tensor], Tensor], call: Callable[..., object]) -> None:
        super().__init__()
        self.layer, self.change, self.call = layer, change, call

    def forward(self, x: Tensor) -> Tensor:
        out = self.call(self.layer, self.change(x))
        while isinstance(out, tuple):
            out = out[0]
        return out.flatten(1) if out.ndim > 1 else out[:, None]


def plain(layer: nn.Module, x: Tensor) -> object:
    return layer(x)


def with_state(rng: random.Random) -> Callable[[nn.Module, Tensor], object]:
    """A call of a recurrent layer or cell with states that may or may not fit."""
    shapes = [tuple(rng.choice([1, 2, 3, 4, 5, 6]) for _ in range(rng.choice([1, 2, 3, 3]))) for _ in range(2)]
    fits = rng.random() < 0.4
    as_tuple = rng.random() < 0.5

    def call(layer: nn.Module, x: Tensor) -> object:
        if fits and isinstance(layer, nn.RNNBase):
            n = x.shape[0 if layer.batch_first else 1] if x.ndim == 3 else 1
            slots = layer.num_layers * (2 if layer.bidirectional else 1)
            states = [torch.rand(slots, n, size) for size in (layer.proj_size or layer.hidden_size, layer.hidden_size)]
        else:
            states = [torch.rand(shape) for shape in shapes]
        return layer(x, tuple(states) if as_tuple else states[0])

    return call


def packed(rng: random.Random) -> Callable[[nn.Module, Tensor], object]:
    longest = rng.choice([1, 2, 3, 5])

    def call(layer: nn.Module, x: Tensor) -> object:
        lengths = [1 + (i * 7 + 1) % longest for i in range(x.shape[0])]
        return layer(pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False))[0].data

    return call


def attends(rng: random.Random) -> Callable[[nn.Module, Tensor], object]:
    """Self-attention, or with keys, values and masks that may or may not fit."""
    kind = rng.choice(["self", "cross", "padding", "mask", "two"])
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 6]) for _ in range(rng.choice([1, 2, 3])))
    dtype = rng.choice([torch.bool, torch.float32, torch.int64])

    def call(layer: nn.Module, x: Tensor) -> object:
        other = torch.rand(shape)
        if kind == "cross":
            return layer(x, other, other)
        if kind == "two":
            return layer(x, x, other)
        if kind == "padding":
            n = x.shape[:2] if layer.batch_first or x.ndim < 3 else (x.shape[1], x.shape[0])
            mask = torch.zeros(n, dtype=torch.bool) if len(shape) > 1 else other.to(dtype)
            mask.flatten()[-1:] = True
            return layer(x, x, x, key_padding_mask=mask)
        if kind == "mask":
            return layer(x, x, x, attn_mask=other.to(dtype))
        return layer(x, x, x, need_weights=bool(dtype == torch.bool))

    return call


def a_conv(rng: random.Random, n_axes: int) -> tuple[nn.Module, Shape, Callable[..., object]]:
    groups = rng.choice([1, 1, 2])
    padding = rng.choice([0, 1, "same", 2])
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n_axes - 1](
        2 * groups,
        2 * groups,
        rng.choice([1, 2, 3]),
        stride=1 if padding == "same" else rng.choice([1, 2]),
        padding=padding,
        dilation=rng.choice([1, 1, 2]),
        groups=groups,
        padding_mode=rng.choice(["zeros", "zeros", "reflect", "replicate", "circular"]),
        bias=rng.random() < 0.5,
    )
    return layer, (2 * groups, *(rng.choice([3, 4, 5]) for _ in range(n_axes))), plain


def a_recurrent(rng: random.Random) -> tuple[nn.Module, Shape, Callable[..., object]]:
    kind = rng.choice([nn.RNN, nn.LSTM, nn.GRU])
    options = {"proj_size": 2} if kind is nn.LSTM and rng.random() < 0.4 else {}
    layer = kind(6, 3, rng.choice([1, 2]), batch_first=rng.random() < 0.6, bidirectional=rng.random() < 0.4, **options)
    return layer, (rng.choice([1, 3, N_POINTS]), 6), rng.choice([plain, plain, with_state(rng), packed(rng)])


def a_cell(rng: random.Random) -> tuple[nn.Module, Shape, Callable[..., object]]:
    return rng.choice([nn.RNNCell, nn.LSTMCell, nn.GRUCell])(6, 3), (6,), rng.choice([plain, with_state(rng)])


def an_attention(rng: random.Random) -> tuple[nn.Module, Shape, Callable[..., object]]:
    sizes = {"kdim": rng.choice([4, 6]), "vdim": rng.choice([5, 6])} if rng.random() < 0.4 else {}
    layer = nn.MultiheadAttention(6, 2, batch_first=rng.random() < 0.6, add_zero_attn=rng.random() < 0.2, **sizes)
    return layer, (rng.choice([1, 3, N_POINTS]), 6), attends(rng)


def a_linear(rng: random.Random) -> tuple[nn.Module, Shape, Callable[..., object]]:
    return nn.Linear(6, 5, bias=rng.random() < 0.5), rng.choice([(6,), (3, 6)]), plain


def a_taught(rng: random.Random) -> tuple[nn.Module, Shape, Callable[..., object]]:
    return rng.choice([Taught, TaughtWindows])(), rng.choice([(6,), (3, 6)]), plain


def a_transposed(rng: random.Random) -> tuple[nn.Module, Shape, Callable[..., object]]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(5, 6), rng.choice([(6,), (3, 6)]), plain


LAYERS = {
    "Linear": a_linear,
    "Conv1d": lambda rng: a_conv(rng, 1),
    "Conv2d": lambda rng: a_conv(rng, 2),
    "Conv3d": lambda rng: a_conv(rng, 3),
    "recurrent": a_recurrent,
    "cell": a_cell,
    "attention": an_attention,
    "taught": a_taught,
    "transformers Conv1D": a_transposed,
}


def changed(rng: random.Random, x: Tensor) -> Tensor:
    """A tensor of another shape, rank, layout, dtype or memory."""
    kind = rng.choice(["size", "size", "rank", "permute", "dtype", "empty", "memory", "none"])
    if kind == "size":
        dim = rng.randrange(x.ndim)
        return torch.rand(*x.shape[:dim], rng.choice([1, 2, 3, 5, 7, 9, 40]), *x.shape[dim + 1 :])
    if kind == "rank":
        return rng.choice([x.flatten(), x.sum(-1), x[0], x[None], x[..., None], x.sum()])
    if kind == "permute":
        return x.permute(rng.sample(range(x.ndim), x.ndim))
    if kind == "dtype":
        dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
        return (x * 3).to(rng.choice(dtypes))
    if kind == "empty":
        return x[..., :0] if rng.random() < 0.5 else x[:, :0] if x.ndim > 1 else x
    if kind == "memory":
        wide = torch.rand(*x.shape, 2)[..., 1]
        return rng.choice([wide, x[:1].expand(x.shape), x.flip(0), x.mT.contiguous().mT if x.ndim > 2 else x])
    return x


def other_weights(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.9)
    return twin


def labelled(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, torch.zeros(len(x) if x.ndim else 1, dtype=torch.int64))]


FUNCTIONS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "sensitivity": lambda m, x: sipp.sensitivity(m, x),
    "sensitivity of batches": lambda m, x: sipp.sensitivity(m, [x]),
    "mean": lambda m, x: sipp.sensitivity(m, [x], reduce="mean"),
    "prune": lambda m, x: sipp.prune(m, x, keep=0.5),
    "simple": lambda m, x: sipp.prune(m, [x], keep=0.5, method="sipp-simple"),
    "prune, sound": lambda m, x: sipp.prune(m, [x], keep=0.5, bound="sound"),
    "snip": lambda m, x: sipp.prune(m, labelled(x), keep=0.5, method="snip"),
    "sample_size": lambda m, x: sipp.sample_size(m, x),
    "certify": lambda m, x: sipp.certify(m, other_weights(m), x),
    "certify_accuracy": lambda m, x: sipp.certify_accuracy(m, other_weights(m), labelled(x)),
    "prune_to": lambda m, x: sipp.prune_to(
        m, [x], [x + 1 if x.is_floating_point() else x], epsilon=0.5, method="magnitude"
    ),
    "check_assumption": lambda m, x: sipp.check_assumption(m, [x]),
    "assess": lambda m, x: sipp.assess(m, other_weights(m), [x], bound="sound", holdout=[x]),
}


def run_case(index: int) -> tuple[str, str, str]:
    """(layer, function, outcome) of one case; the outcome is a traceback where it is neither success nor ours."""
    rng = random.Random(index)
    torch.manual_seed(index)
    name, function = rng.choice(list(LAYERS)), rng.choice(list(FUNCTIONS))
    layer, shape, call = LAYERS[name](rng)
    x = torch.rand(N_POINTS, *shape) - 0.3
    inside = rng.random() < 0.4  # the model itself makes the misfit: the data are as they should be
    seed = rng.random()
    model = Net(layer, (lambda t: changed(random.Random(seed), t)) if inside else lambda t: t, call)
    data = x if inside else changed(rng, x)
    try:
        FUNCTIONS[function](model, data)
    except (DataError, ModelError, OptionError) as error:
        return name, function, type(error).__name__
    except Exception:
        return name, function, traceback.format_exc(limit=-6)
    return name, function, "success"


def run_cases(start: int, stop: int) -> int:
    """Runs the cases in this process, prints a line each; returns the number of those with a foreign error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    n_bad = 0
    for index in range(start, stop):
        print("case", index, flush=True)
        name, function, outcome = run_case(index)
        n_bad += "\n" in outcome
        print("result", index, name, function, outcome.replace("\n", "\n    "), sep="|", flush=True)
    return n_bad


if __name__ == "__main__":
    sys.exit(run_cases(int(sys.argv[1]), int(sys.argv[2])) > 0)
