"""Patches of recurrent layers: every time step is one, for the input weights and for the hidden weights.

The hidden states of the last layer are its output, and those of an inner layer are what the next one's input weights
are multiplied by. If that was not recorded, the recurrence is run again here, as the PyTorch documentation defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import WeightUse
from sipp.inputs.layers.linear import by_point, by_size, refuse_points_along_time

State = tuple[Tensor, Tensor]  # hidden h and, for an LSTM only, cell c

# torch's own loops over the steps; they take the input, the first state, the weights, whether there are biases, the
# number of layers, dropout, and whether it trains, goes both ways, has batches first
FUSED: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


def recurrent_weights(module: nn.RNNBase) -> tuple[str, ...]:
    """The weight matrices of all layers and directions (biases are never pruned)."""
    kinds = ("weight_ih", "weight_hh", "weight_hr") if module.proj_size else ("weight_ih", "weight_hh")
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return tuple(f"{k}_l{i}{d}" for i in range(module.num_layers) for d in directions for k in kinds)


def recurrent_recorded(module: nn.RNNBase) -> tuple[str, ...]:
    """The weights whose operands are the states of inner layers, if torch runs a layer in one operation: an LSTM's.

    Other types take one operation per step. Recording all of them costs more than running the recurrence again.
    """
    is_fused = module.mode == "LSTM" and not module.proj_size
    return tuple(f"weight_ih{_suffix(i, 0)}" for i in range(1, module.num_layers)) if is_fused else ()


def recurrent_uses(
    module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int
) -> Iterator[WeightUse]:
    """What the input weights of the first layer meet, in each direction: x_t. The other uses are known after it ran."""
    sequence_BTI, lengths_B, _, _ = _given(module, args, kwargs)
    n_sequences, n_steps = sequence_BTI.shape[:2]
    refuse_points_along_time(n_sequences, n_steps, n_points)
    for direction in range(_n_directions(module)):
        yield _use(f"weight_ih{_suffix(0, direction)}", sequence_BTI, lengths_B, n_points)


def recurrent_uses_after(
    module: nn.RNNBase,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
    operands: dict[str, list[Tensor]],
    n_points: int,
) -> Iterator[WeightUse]:
    """Per layer and direction: weight_ih meets x_t, weight_hh meets h_{t-1}, weight_hr meets the unprojected h_t.

    Steps stand in the order of time in both directions, so that a position is the same one for all uses.
    """
    sequence_BTI, lengths_B, hidden, cell = _given(module, args, kwargs)
    known = {} if module.proj_size else _states_seen(module, sequence_BTI, output, operands)
    for suffix, x, before, unprojected, _ in _replay(module, sequence_BTI, lengths_B, (hidden, cell), known):
        if x is not sequence_BTI:
            yield _use(f"weight_ih{suffix}", x, lengths_B, n_points)
        yield _use(f"weight_hh{suffix}", before, lengths_B, n_points)
        if module.proj_size:
            yield _use(f"weight_hr{suffix}", unprojected, lengths_B, n_points)


def _states_seen(
    module: nn.RNNBase, sequence_BTI: Tensor, output: Any, operands: dict[str, list[Tensor]]
) -> dict[int, Tensor]:
    """The h_t of the layers that show them (B x T, directions side by side): the last one, and those that were caught.

    Packed sequences are no single operation, and what their layers meet has another shape.
    """
    states = output[0] if isinstance(output, tuple) and not isinstance(output, PackedSequence) else output
    last_BTK = _padded(module, states)[0] if isinstance(states, PackedSequence | Tensor) else None
    n_sequences, n_steps = sequence_BTI.shape[:2]
    shape = n_sequences, n_steps, _n_directions(module) * module.hidden_size
    if last_BTK is None or tuple(last_BTK.shape) != shape:
        raise ModelError("does not give the hidden states of its last layer, so sipp cannot reproduce its output")
    known = {module.num_layers - 1: last_BTK}
    for layer in range(module.num_layers - 1):
        met = operands.get(f"weight_ih{_suffix(layer + 1, 0)}", [])
        if len(met) == 1 and tuple(met[0].shape) == (n_steps, n_sequences, shape[2]):
            known[layer] = met[0].transpose(0, 1)
    return known


def _n_directions(module: nn.RNNBase) -> int:
    return 2 if module.bidirectional else 1


def _use(parameter: str, steps_BTK: Tensor, lengths_B: Tensor | None, n_points: int) -> WeightUse:
    """The steps of each sequence as patches of its point; together if sequences are not points."""
    is_real_BT = None if lengths_B is None else _steps_of(steps_BTK) < lengths_B[:, None]
    if steps_BTK.shape[0] == n_points:
        return WeightUse(parameter, steps_BTK[:, None], real_BP=is_real_BT)
    together, is_real = steps_BTK.flatten(0, 1)[None, None], None if is_real_BT is None else is_real_BT.flatten()[None]
    return WeightUse(parameter, together, attributed=False, real_BP=is_real)


def _steps_of(sequence_BTK: Tensor) -> Tensor:
    return torch.arange(sequence_BTK.shape[1], dtype=torch.int64, device=sequence_BTK.device)


def recurrent_output(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states of the last layer, laid out as the layer's own output (the data of a PackedSequence)."""
    sequence_BTI, lengths_B, hidden, cell = _given(module, args, kwargs)
    afters = [after for *_, after in _replay(module, sequence_BTI, lengths_B, (hidden, cell), {})]
    output_BTK = torch.cat(afters[-_n_directions(module) :], dim=-1)
    inputs, _ = _bind(("input", "hx"), args, kwargs)
    if isinstance(inputs, PackedSequence):
        if inputs.sorted_indices is not None:
            output_BTK = output_BTK[inputs.sorted_indices]
        return torch.cat([output_BTK[:n, t] for t, n in enumerate(inputs.batch_sizes.tolist())])
    if inputs.ndim == 2:
        return output_BTK[0]
    return output_BTK if module.batch_first else output_BTK.transpose(0, 1)


def cell_uses(
    module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int
) -> Iterator[WeightUse]:
    """One step: weight_ih meets x, weight_hh meets h (zeros where none is given)."""
    x, hidden, _ = _given_to_cell(module, args, kwargs)
    yield WeightUse("weight_ih", *by_point(x, n_points))
    yield WeightUse("weight_hh", *by_point(hidden, n_points))


def cell_output(module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The next hidden state."""
    x, hidden, cell = _given_to_cell(module, args, kwargs)
    x_BI, hidden_BH, cell_BH = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, hidden, cell))
    weights = module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
    if isinstance(module, nn.LSTMCell):
        return torch.lstm_cell(x_BI, (hidden_BH, cell_BH), *weights)[0].view_as(hidden)
    is_relu = getattr(module, "nonlinearity", "") == "relu"
    step = torch.gru_cell if isinstance(module, nn.GRUCell) else torch.rnn_relu_cell if is_relu else torch.rnn_tanh_cell
    return step(x_BI, hidden_BH, *weights).view_as(hidden)


def _bind(names: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    given = dict(zip(names, args)) | kwargs
    if len(args) > len(names) or not given.keys() <= set(names) or names[0] not in given:
        raise ModelError(
            f"is called with arguments other than {' and '.join(names)}; sipp can only score the plain call"
        )
    return given[names[0]], given.get(names[1])


def _given(
    module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The sequences (B x T x I), their lengths (`_padded`), h_0 and c_0 of every layer and direction, all checked."""
    inputs, initial = _bind(("input", "hx"), args, kwargs)
    tensor = inputs.data if isinstance(inputs, PackedSequence) else inputs
    if not isinstance(tensor, Tensor):
        raise DataError(f"takes a tensor or a PackedSequence, not a {type(inputs).__name__}")
    if tensor.ndim not in ((2,) if isinstance(inputs, PackedSequence) else (2, 3)):
        raise DataError(f"takes sequences of 2 dimensions, or 3 with a batch, not {by_size(tensor.shape)}")
    if tensor.shape[-1] != module.input_size:
        raise DataError(
            f"takes {module.input_size} features, not {tensor.shape[-1]} (its input is {by_size(tensor.shape)})"
        )
    if tensor.numel() == 0:
        raise DataError(f"takes sequences of at least one step, not {by_size(tensor.shape)}")
    sequence_BTI, lengths_B = _padded(module, inputs)
    hidden, cell = _initial_states(module, initial, sequence_BTI, is_batched=tensor is not inputs or tensor.ndim == 3)
    return sequence_BTI, lengths_B, hidden, cell


def _given_to_cell(
    module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """x, h and c of one step (zeros where none is given), all of them checked."""
    x, state = _bind(("input", "hx"), args, kwargs)
    if not isinstance(x, Tensor) or x.ndim not in (1, 2) or x.shape[-1] != module.input_size:
        got = by_size(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise DataError(f"takes {module.input_size} features, alone or for each input of a batch, not {got}")
    shape = (*x.shape[:-1], module.hidden_size)
    hidden, cell = _states(state, isinstance(module, nn.LSTMCell), (shape, shape))
    zeros = x.new_zeros(shape)
    return x, zeros if hidden is None else hidden, zeros if cell is None else cell


def _states(
    given: Any, is_lstm: bool, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[Tensor | None, Tensor | None]:
    """h and, for an LSTM, c as they were given; raises unless they have these shapes."""
    if given is None:
        return None, None
    if isinstance(given, tuple | list) != is_lstm or (is_lstm and len(given) != 2):
        raise DataError(f"takes {'(h, c)' if is_lstm else 'one tensor'} as its state, not a {type(given).__name__}")
    states = tuple(given) if is_lstm else (given,)
    for name, state, shape in zip("hc", states, shapes):
        if not isinstance(state, Tensor) or tuple(state.shape) != shape:
            got = by_size(state.shape) if isinstance(state, Tensor) else f"a {type(state).__name__}"
            raise DataError(f"takes a state {name} of {by_size(shape)}, not {got}")
    return states[0], states[1] if is_lstm else None


def _padded(module: nn.RNNBase, inputs: Tensor | PackedSequence) -> tuple[Tensor, Tensor | None]:
    """The sequences as B x T x I and their lengths (None: all steps count), in the order of the points."""
    if isinstance(inputs, PackedSequence):
        sequence, lengths = pad_packed_sequence(inputs, batch_first=True)
        return sequence, lengths.to(sequence.device)
    if inputs.ndim == 2:  # unbatched
        inputs = inputs.unsqueeze(0 if module.batch_first else 1)
    return inputs if module.batch_first else inputs.transpose(0, 1), None


def _initial_states(module: nn.RNNBase, initial: Any, sequence_BTI: Tensor, *, is_batched: bool) -> State:
    """h_0 and c_0 for every layer and direction: (layers * directions) x B x size, zeros where none is given."""
    n_states = module.num_layers * _n_directions(module)
    n_batch = (len(sequence_BTI),) if is_batched else ()
    sizes = (module.proj_size or module.hidden_size, module.hidden_size)
    shapes = ((n_states, *n_batch, sizes[0]), (n_states, *n_batch, sizes[1]))
    given = _states(initial, module.mode == "LSTM", shapes)
    hidden, cell = (
        sequence_BTI.new_zeros(n_states, len(sequence_BTI), size)
        if state is None
        else state.reshape(n_states, len(sequence_BTI), size)
        for state, size in zip(given, sizes)
    )
    return hidden, cell


def _replay(
    module: nn.RNNBase, sequence_BTI: Tensor, lengths_B: Tensor | None, initial: State, known: dict[int, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Layer by layer and direction by direction: suffix of the names, x_t, h_{t-1}, unprojected h_t and h_t (B x T).

    Layers whose h_t are `known` are not run.
    """
    hidden, cell = initial
    n_directions = _n_directions(module)
    for layer in range(module.num_layers):
        shown = known[layer].chunk(n_directions, dim=-1) if layer in known else None
        outputs = []
        for direction in range(n_directions):
            suffix, k = _suffix(layer, direction), layer * n_directions + direction

            def turned(tensor: Tensor, is_turned: int = direction) -> Tensor:
                return _flip(tensor, lengths_B) if is_turned else tensor

            if shown is None:
                states = _run(module, suffix, turned(sequence_BTI), (hidden[k], cell[k]))
                before, unprojected, after = map(turned, states)
            else:
                unprojected = after = shown[direction]
                before = turned(_before(hidden[k], turned(after)))
            yield suffix, sequence_BTI, before, unprojected, after
            outputs.append(after)
        sequence_BTI = known[layer] if layer in known else torch.cat(outputs, dim=-1)


def _suffix(layer: int, direction: int) -> str:
    return f"_l{layer}" + ("_reverse" if direction else "")


def _before(hidden: Tensor, after_BTH: Tensor) -> Tensor:
    """h_{t-1} of each step, from h_0 and all h_t."""
    return torch.cat((hidden[:, None].to(after_BTH.dtype), after_BTH[:, :-1]), 1)


def _run(module: nn.RNNBase, suffix: str, x_BTI: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """h_{t-1}, the hidden state before projection, and h_t, each B x T x size, over all steps of one direction."""
    bias_ih = getattr(module, f"bias_ih{suffix}", None)
    bias_hh = getattr(module, f"bias_hh{suffix}", None)
    weight_ih, weight_hh = getattr(module, f"weight_ih{suffix}"), getattr(module, f"weight_hh{suffix}")
    hidden, cell = state
    if not module.proj_size:
        weights = [w for w in (weight_ih, weight_hh, bias_ih, bias_hh) if w is not None]
        given: Any = (hidden[None], cell[None]) if module.mode == "LSTM" else hidden[None]
        after_BTH = FUSED[module.mode](x_BTI, given, weights, bias_ih is not None, 1, 0.0, False, False, True)[0]
        return _before(hidden, after_BTH), after_BTH, after_BTH
    projection = getattr(module, f"weight_hr{suffix}")
    from_input_BTG = F.linear(x_BTI, weight_ih, bias_ih)
    before, unprojected, after = [], [], []
    for t in range(x_BTI.shape[1]):
        before.append(hidden)
        gates = from_input_BTG[:, t] + F.linear(hidden, weight_hh, bias_hh)
        in_gate, forget, new, out_gate = gates.chunk(4, dim=-1)  # only an LSTM has projections
        cell = forget.sigmoid() * cell + in_gate.sigmoid() * new.tanh()
        unprojected.append(out_gate.sigmoid() * cell.tanh())
        hidden = F.linear(unprojected[-1], projection)
        after.append(hidden)
    return torch.stack(before, 1), torch.stack(unprojected, 1), torch.stack(after, 1)


def _flip(sequence_BTK: Tensor, lengths_B: Tensor | None) -> Tensor:
    """Each sequence reversed within its own length; padding stays at the end."""
    if lengths_B is None:
        return sequence_BTK.flip(1)
    steps, lengths = _steps_of(sequence_BTK), lengths_B[:, None]
    source_BT = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return sequence_BTK.gather(1, source_BT[..., None].expand_as(sequence_BTK))
