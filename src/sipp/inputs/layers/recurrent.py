"""Patches of recurrent layers: every time step is one, for the input weights and for the hidden weights.

The states between two steps, and between two layers, show only while the layer runs. So it is run here, one layer and
direction at a time, by torch's own loops over the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sipp.errors import DataError, ModelError
from sipp.inputs.layers.registry import Adapter
from sipp.inputs.patches import WeightUse, by_size, sequences, vectors

Uses = Generator[WeightUse, None, Any]
States = list[Tensor]  # hidden h and, for an LSTM only, cell c

# They take the input (of packed sequences: the data and the sizes of its steps), the first states, the weights, whether
# there are biases, the number of layers, dropout, and whether it trains, goes both ways, has batches first
LOOPS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def recurrent_weights(module: nn.RNNBase) -> tuple[str, ...]:
    """The weight matrices of all layers and directions (biases are never pruned)."""
    kinds = ("weight_ih", "weight_hh", "weight_hr") if module.proj_size else ("weight_ih", "weight_hh")
    return tuple(
        f"{kind}{suffix}" for i in range(module.num_layers) for suffix in _suffixes(module, i) for kind in kinds
    )


def recurrent_uses(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Uses:
    """Per layer and direction: the inputs are x_t of weight_ih, h_{t-1} of weight_hh, unprojected h_t of weight_hr.

    Steps stand in the order of time in both directions, so that a position is the same one for all uses.
    """
    inputs, initial = _bind(args, kwargs)
    x_BTI, lengths_B = _by_sequence(module, inputs)
    is_real_BT = None if lengths_B is None else _steps_of(x_BTI) < lengths_B.to(x_BTI.device)[:, None]
    first = _first_states(module, initial, x_BTI)
    last: list[States] = []
    for layer in range(module.num_layers):
        afters = []
        for direction, suffix in enumerate(_suffixes(module, layer)):

            def turned(tensor: Tensor, is_turned: int = direction) -> Tensor:
                return _flip(tensor, lengths_B) if is_turned else tensor

            yield sequences(f"weight_ih{suffix}", x_BTI, n_points, is_real_BT)
            x, states = turned(x_BTI), [state[len(last)] for state in first]
            after, ends = _run(module, suffix, x, lengths_B, states)
            before = torch.cat((states[0][:, None].to(after.dtype), after[:, :-1]), 1)
            yield sequences(f"weight_hh{suffix}", turned(before), n_points, is_real_BT)
            if module.proj_size:
                unprojected = _unprojected(module, suffix, x, before, states[1])
                yield sequences(f"weight_hr{suffix}", turned(unprojected), n_points, is_real_BT)
            afters.append(turned(after))
            last.append(ends)
        x_BTI = torch.cat(afters, dim=-1) if len(afters) > 1 else afters[0]
    return _as_output(module, inputs, x_BTI, [torch.stack(states) for states in zip(*last)])


def cell_weights(module: nn.RNNCellBase) -> tuple[str, ...]:
    """The two weight matrices of a cell."""
    return ("weight_ih", "weight_hh")


def cell_uses(module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Uses:
    """One step: weight_ih is multiplied with x, weight_hh with h (zeros where none is given)."""
    x, initial = _bind(args, kwargs)
    is_lstm, zeros = isinstance(module, nn.LSTMCell), x.new_zeros(*x.shape[:-1], module.hidden_size)
    states = (zeros, zeros) if initial is None else tuple(initial) if is_lstm else (initial,)
    if any(state.shape != zeros.shape for state in states):
        raise DataError(f"takes states of {by_size(zeros.shape)}, not {by_size(states[0].shape)}")
    yield vectors("weight_ih", x, n_points)
    yield vectors("weight_hh", states[0], n_points)
    weights = module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
    x_BI, *states_BH = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, *states))
    if is_lstm:
        return tuple(state.view_as(zeros) for state in torch.lstm_cell(x_BI, states_BH, *weights))
    is_relu = getattr(module, "nonlinearity", "") == "relu"
    step = torch.gru_cell if isinstance(module, nn.GRUCell) else torch.rnn_relu_cell if is_relu else torch.rnn_tanh_cell
    return step(x_BI, states_BH[0], *weights).view_as(zeros)


def _suffixes(module: nn.RNNBase, layer: int) -> list[str]:
    """How the parameters of a layer's directions end."""
    return [f"_l{layer}", f"_l{layer}_reverse"] if module.bidirectional else [f"_l{layer}"]


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    given = dict(zip(("input", "hx"), args)) | kwargs
    if len(args) > 2 or not given.keys() <= {"input", "hx"} or "input" not in given:
        raise ModelError("is called with arguments other than input and hx; sipp can only score the plain call")
    return given["input"], given.get("hx")


def _by_sequence(module: nn.RNNBase, inputs: Tensor | PackedSequence) -> tuple[Tensor, Tensor | None]:
    """The sequences as B x T x I in the order of the points, and their lengths (None: all steps count)."""
    tensor = inputs.data if isinstance(inputs, PackedSequence) else inputs
    if not isinstance(tensor, Tensor):
        raise DataError(f"takes a tensor or a PackedSequence, not a {type(inputs).__name__}")
    if tensor.ndim not in ((2,) if tensor is not inputs else (2, 3)) or tensor.shape[-1] != module.input_size:
        raise DataError(f"takes sequences of {module.input_size} features, not {by_size(tensor.shape)}")
    if isinstance(inputs, PackedSequence):
        sequence, lengths = pad_packed_sequence(inputs, batch_first=True)
        return sequence, lengths
    if inputs.ndim == 2:  # unbatched
        return inputs[None], None
    return inputs if module.batch_first else inputs.transpose(0, 1), None


def _first_states(module: nn.RNNBase, initial: Any, x_BTI: Tensor) -> States:
    """h_0 and c_0 of every layer and direction: (layers * directions) x B x size, zeros where none are given."""
    n_states = module.num_layers * len(_suffixes(module, 0))
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)[: 2 if module.mode == "LSTM" else 1]
    if initial is None:
        return [x_BTI.new_zeros(n_states, len(x_BTI), size) for size in sizes]
    given = initial if module.mode == "LSTM" else (initial,)
    shapes = [(n_states, len(x_BTI), size) for size in sizes]
    fits = [one.shape in (shape, shape[::2]) for one, shape in zip(given, shapes)]  # without a batch, or with one
    if len(given) != len(shapes) or not all(fits):
        raise DataError(f"takes states of {' and '.join(map(by_size, shapes))}")
    return [one.reshape(shape) for one, shape in zip(given, shapes)]


def _run(
    module: nn.RNNBase, suffix: str, x_BTI: Tensor, lengths_B: Tensor | None, states: States
) -> tuple[Tensor, States]:
    """h_t of all steps of one direction (B x T x H), and the states after the last step of each sequence."""
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if module.bias else 2]
    kinds = (*kinds, "weight_hr") if module.proj_size else kinds
    weights = [getattr(module, f"{kind}{suffix}") for kind in kinds]
    options = module.bias, 1, 0.0, False, False

    def loop(*inputs: Tensor, order: Any = slice(None), last: tuple[bool, ...] = ()) -> tuple[Tensor, States]:
        given = [state[order][None] for state in states]
        result = LOOPS[module.mode](*inputs, given if len(given) > 1 else given[0], weights, *options, *last)
        return result[0], [end[0] for end in result[1:]]

    if lengths_B is None:
        return loop(x_BTI, last=(True,))
    packed = pack_padded_sequence(x_BTI, lengths_B, batch_first=True, enforce_sorted=False)
    data, ends = loop(packed.data, packed.batch_sizes, order=packed.sorted_indices)
    after, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True)
    return after, [end[packed.unsorted_indices] for end in ends]


def _unprojected(module: nn.RNNBase, suffix: str, x_BTI: Tensor, before_BTP: Tensor, cell: Tensor) -> Tensor:
    """What an LSTM projects at each step (B x T x H), from the states between the steps."""

    def gates(kind: str, inputs: Tensor) -> Tensor:
        return F.linear(
            inputs, getattr(module, f"weight_{kind}{suffix}"), getattr(module, f"bias_{kind}{suffix}", None)
        )

    in_gate, forget, new, out_gate = (gates("ih", x_BTI) + gates("hh", before_BTP)).chunk(4, dim=-1)
    added, kept, cells = in_gate.sigmoid() * new.tanh(), forget.sigmoid(), []
    for t in range(x_BTI.shape[1]):
        cell = kept[:, t] * cell + added[:, t]
        cells.append(cell)
    return out_gate.sigmoid() * torch.stack(cells, 1).tanh()


def _as_output(module: nn.RNNBase, inputs: Tensor | PackedSequence, output_BTH: Tensor, ends: States) -> Any:
    """The output and the last states, laid out as the layer gives them."""
    output: Any = output_BTH if module.batch_first else output_BTH.transpose(0, 1)
    if isinstance(inputs, PackedSequence):
        rows = output_BTH if inputs.sorted_indices is None else output_BTH[inputs.sorted_indices]
        data = torch.cat([rows[:n, t] for t, n in enumerate(inputs.batch_sizes.tolist())])
        output = inputs._replace(data=data)
    elif inputs.ndim == 2:  # unbatched
        output, ends = output_BTH[0], [end[:, 0] for end in ends]
    return output, tuple(ends) if len(ends) > 1 else ends[0]


def _steps_of(sequence_BTK: Tensor) -> Tensor:
    return torch.arange(sequence_BTK.shape[1], dtype=torch.int64, device=sequence_BTK.device)


def _flip(sequence_BTK: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Each sequence reversed within its own length; padding stays at the end."""
    if lengths_B is None:
        return sequence_BTK.flip(1)
    steps, lengths = _steps_of(sequence_BTK), lengths_B.to(sequence_BTK.device)[:, None]
    source_BT = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return sequence_BTK.gather(1, source_BT[..., None].expand_as(sequence_BTK))


RECURRENT: Adapter = Adapter(recurrent_weights, recurrent_uses)
CELL: Adapter = Adapter(cell_weights, cell_uses)
