"""Patches of recurrent layers: every time step is one, for the input weights and for the hidden weights.

A multi-layer RNN does not show the hidden states of its inner layers, so the recurrence is run here once more, in
the plain form of the PyTorch documentation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sipp.layers.linear import by_point
from sipp.records import Use

State = tuple[Tensor, Tensor]  # hidden h and, for an LSTM only, cell c


def recurrent_weights(module: nn.RNNBase) -> tuple[str, ...]:
    """The weight matrices of all layers and directions (biases are never pruned)."""
    kinds = ("weight_ih", "weight_hh", "weight_hr") if module.proj_size else ("weight_ih", "weight_hh")
    directions = ("", "_reverse") if module.bidirectional else ("",)
    return tuple(f"{k}_l{i}{d}" for i in range(module.num_layers) for d in directions for k in kinds)


def recurrent_uses(module: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Iterator[Use]:
    """Per layer and direction: weight_ih meets x_t, weight_hh meets h_{t-1}, weight_hr meets the unprojected h_t."""
    inputs, initial = _bind(("input", "hx"), args, kwargs)
    sequence_BTI, lengths_B = _padded(module, inputs)
    attributed = len(sequence_BTI) == n_points
    hidden, cell = _initial_states(module, initial, sequence_BTI)
    is_real_BT1 = torch.arange(sequence_BTI.shape[1], device=lengths_B.device) < lengths_B[:, None]
    is_real_BT1 = is_real_BT1[..., None].to(sequence_BTI.device)

    def use(parameter: str, steps_BTK: Tensor) -> Use:
        steps = torch.where(is_real_BT1, steps_BTK, torch.zeros_like(steps_BTK))
        if attributed:
            return Use(parameter, steps[:, None], counts_B=lengths_B)
        return Use(parameter, steps.flatten(0, 1)[None, None], counts_B=lengths_B.sum()[None], attributed=False)

    n_directions = 2 if module.bidirectional else 1
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(n_directions):
            suffix = f"_l{layer}" + ("_reverse" if direction else "")
            x = _flip(sequence_BTI, lengths_B) if direction else sequence_BTI
            k = layer * n_directions + direction
            before, unprojected, after = _run(module, suffix, x, (hidden[k], cell[k]))
            yield use(f"weight_ih{suffix}", x)
            yield use(f"weight_hh{suffix}", before)
            if module.proj_size:
                yield use(f"weight_hr{suffix}", unprojected)
            outputs.append(_flip(after, lengths_B) if direction else after)
        sequence_BTI = torch.cat(outputs, dim=-1)


def cell_uses(module: nn.RNNCellBase, args: tuple[Any, ...], kwargs: dict[str, Any], n_points: int) -> Iterator[Use]:
    """One step: weight_ih meets x, weight_hh meets h (zeros where none is given)."""
    x, state = _bind(("input", "hx"), args, kwargs)
    hidden = state[0] if isinstance(state, tuple) else state
    if hidden is None:
        hidden = x.new_zeros(*x.shape[:-1], module.hidden_size)
    yield Use("weight_ih", *by_point(x, n_points))
    yield Use("weight_hh", *by_point(hidden, n_points))


def _bind(names: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    given = dict(zip(names, args)) | kwargs
    return given[names[0]], given.get(names[1])


def _padded(module: nn.RNNBase, inputs: Tensor | PackedSequence) -> tuple[Tensor, Tensor]:
    """The sequences as B x T x I and their lengths, in the order of the points."""
    if isinstance(inputs, PackedSequence):
        sequence, lengths = pad_packed_sequence(inputs, batch_first=True)
        return sequence, lengths.to(sequence.device)
    if inputs.ndim == 2:  # unbatched
        inputs = inputs.unsqueeze(0 if module.batch_first else 1)
    sequence = inputs if module.batch_first else inputs.transpose(0, 1)
    return sequence, torch.full((len(sequence),), sequence.shape[1], device=sequence.device)


def _initial_states(module: nn.RNNBase, initial: Any, sequence_BTI: Tensor) -> State:
    """h_0 and c_0 for every layer and direction: (layers * directions) x B x size, zeros where none is given."""
    hidden, cell = initial if isinstance(initial, tuple) else (initial, None)
    n_states = module.num_layers * (2 if module.bidirectional else 1)
    n_batch = len(sequence_BTI)
    if hidden is None:
        hidden = sequence_BTI.new_zeros(n_states, n_batch, module.proj_size or module.hidden_size)
    if cell is None:
        cell = sequence_BTI.new_zeros(n_states, n_batch, module.hidden_size)
    return hidden.reshape(n_states, n_batch, -1), cell.reshape(n_states, n_batch, -1)


def _run(module: nn.RNNBase, suffix: str, x_BTI: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """h_{t-1}, the hidden state before projection, and h_t, each B x T x size, over all steps of one direction."""
    bias_ih = getattr(module, f"bias_ih{suffix}", None)
    bias_hh = getattr(module, f"bias_hh{suffix}", None)
    weight_hh = getattr(module, f"weight_hh{suffix}")
    projection = getattr(module, f"weight_hr{suffix}") if module.proj_size else None
    from_input_BTG = F.linear(x_BTI, getattr(module, f"weight_ih{suffix}"), bias_ih)
    hidden, cell = state
    before, unprojected, after = [], [], []
    for t in range(x_BTI.shape[1]):
        before.append(hidden)
        hidden, cell = _step(module, from_input_BTG[:, t], F.linear(hidden, weight_hh, bias_hh), hidden, cell)
        unprojected.append(hidden)
        if projection is not None:
            hidden = F.linear(hidden, projection)
        after.append(hidden)
    return torch.stack(before, 1), torch.stack(unprojected, 1), torch.stack(after, 1)


def _step(module: nn.RNNBase, from_x: Tensor, from_h: Tensor, hidden: Tensor, cell: Tensor) -> State:
    """The next (h, c) from the two pre-activations, as PyTorch defines RNN, LSTM and GRU."""
    if module.mode == "LSTM":
        in_gate, forget, new, out_gate = (from_x + from_h).chunk(4, dim=1)
        cell = forget.sigmoid() * cell + in_gate.sigmoid() * new.tanh()
        return out_gate.sigmoid() * cell.tanh(), cell
    if module.mode == "GRU":
        reset_x, update_x, new_x = from_x.chunk(3, dim=1)
        reset_h, update_h, new_h = from_h.chunk(3, dim=1)
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        update = (update_x + update_h).sigmoid()
        return (1 - update) * new + update * hidden, cell
    total = from_x + from_h
    return (total.relu() if module.mode == "RNN_RELU" else total.tanh()), cell


def _flip(sequence_BTK: Tensor, lengths_B: Tensor) -> Tensor:
    """Each sequence reversed within its own length; padding stays at the end."""
    steps = torch.arange(sequence_BTK.shape[1], device=sequence_BTK.device)[None]
    lengths = lengths_B[:, None].to(sequence_BTK.device)
    source_BT = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return sequence_BTK.gather(1, source_BT[..., None].expand_as(sequence_BTK))
