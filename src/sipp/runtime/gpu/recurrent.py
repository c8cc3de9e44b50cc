"""An LSTM on few sequences: a step is a sparse product, of the weights of input and state side by side, and the gates.

gates[r] = bias[r] + W[r] . (x_t, h)      (rows i, f, g, o)
c = sigmoid(f) c + sigmoid(i) tanh(g)      h = sigmoid(o) tanh(c)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sipp.runtime.gpu import recording
from sipp.runtime.gpu.linear import AGREEMENT, MOST_TOKENS, Way, fastest_way
from sipp.runtime.graph import ATEN, Op, Ref
from sipp.runtime.recurrent import LSTM
from sipp.runtime.steps import LEAST_GAIN, Step, Values, arguments_of

LSTM_CELL = ATEN.lstm_cell.default
RECURRENT = (LSTM, LSTM_CELL)
MOST_STEPS = 64  # of a sequence: each is three launches
N_ROUNDINGS = 4  # of one product, that a sequence may be off by


@dataclass(frozen=True)
class Read:
    """An operation that can be run here: the weights (input, state, biases) of each cell, and how its input lies."""

    cells: list[list[Tensor]]
    directions: int
    batch_first: bool
    is_cell: bool  # no dimension of time, results without a dimension of layers


def recurrent_reads(op: Op) -> list[int]:
    """The values that the step reads in calls to come: input, state, cell."""
    return [op.args[0].value, *(ref.value for ref in op.args[1])]


def recurrent_step(op: Op, values: Values, constants: Values) -> Step | None:
    """The step of a whole LSTM, or None where it is left to torch: other options, or dense is as fast."""
    read = _read(op, values, constants)
    if read is None:
        return None
    number, h0, c0 = recurrent_reads(op)
    state = values[h0] if read.is_cell else values[h0][0]
    ways = []
    for own in read.cells:
        weight = torch.cat(own[:2], 1)
        bias = (own[2].float() + own[3].float()).to(weight.dtype) if len(own) == 4 else None
        tokens = torch.randn(len(state), weight.shape[1], dtype=weight.dtype, device=weight.device)
        chosen = fastest_way(weight, bias, tokens, 1)
        if chosen.is_dense:
            return None
        ways.append(chosen.make(weight, bias))

    def fast(current: Values) -> None:
        current[op.out] = _run(read, ways, current[number], current[h0], current[c0])

    fast(values)
    results = values.pop(op.out)
    with torch.backends.cudnn.flags(allow_tf32=False):  # as exact as ours is
        expected = op.target(*arguments_of(values, op.args))
    if not all(_agree(own, other) for own, other in zip(results, expected)):
        return None
    seconds = recording.kernel_seconds([lambda: fast(values)])
    dense_seconds = recording.kernel_seconds([lambda: op.target(*arguments_of(values, op.args))])
    if seconds > LEAST_GAIN * dense_seconds:
        return None
    matrices = [w for own in read.cells for w in own[:2]]
    n_kept = sum(int((w != 0).sum()) for w in matrices)
    return Step(
        op.name, f"LSTM: {ways[0].name}", fast, op.out, n_kept / sum(w.numel() for w in matrices),
        sum(way.n_bytes for way in ways), sum(w.nbytes for w in matrices), seconds, dense_seconds,
        held=tuple(tensor for way in ways for tensor in way.tensors),
    )  # fmt: skip


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether they are the same to rounding of a few steps: numbers of a state are at most 1."""
    off_by = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1.0)
    return bool(off_by <= N_ROUNDINGS * AGREEMENT[found.dtype])


def _read(op: Op, values: Values, constants: Values) -> Read | None:
    """What is run here: few sequences, short ones, layers without projections, weights of its own."""
    x = values[op.args[0].value]
    is_cell = op.target is LSTM_CELL
    refs = [ref for ref in (op.args[2:] if is_cell else op.args[2]) if ref is not None]
    if x.ndim != (2 if is_cell else 3) or not x.numel():
        return None
    if not all(isinstance(ref, Ref) and ref.value in constants for ref in refs):
        return None
    weights = [constants[ref.value] for ref in refs]
    has_bias, n_layers, _, is_training, is_bidirectional, batch_first = (
        (len(refs) == 4, 1, 0.0, False, False, False) if is_cell else op.args[3:]
    )
    directions, per_cell = 2 if is_bidirectional else 1, 4 if has_bias else 2
    n_points, n_times = (
        (x.shape[0], 1) if is_cell else (x.shape[0 if batch_first else 1], x.shape[1 if batch_first else 0])
    )
    is_plain = not is_training and len(weights) == n_layers * directions * per_cell
    is_alike = all(w.dtype == x.dtype for w in weights)
    if not (is_plain and is_alike and n_points <= MOST_TOKENS and n_times <= MOST_STEPS):
        return None
    cells = [weights[i : i + per_cell] for i in range(0, len(weights), per_cell)]
    return Read(cells, directions, bool(batch_first), is_cell)


def _run(read: Read, ways: list[Way], x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, ...]:
    """What torch gives: outputs, states, cells; of one cell its state and its cell."""
    from sipp.runtime.gpu.kernels import gates  # Triton is asked for only here

    if read.is_cell:
        return _walk(ways[0], [x], h0, c0, gates)[1:]
    source = list((x.transpose(0, 1) if read.batch_first else x).unbind())
    states, cells = [], []
    for layer in range(len(ways) // read.directions):
        both_ways = []
        for direction in range(read.directions):
            n = layer * read.directions + direction
            steps, state, cell = _walk(ways[n], source[::-1] if direction else source, h0[n], c0[n], gates)
            both_ways.append(steps[::-1] if direction else steps)
            states.append(state)
            cells.append(cell)
        source = both_ways[0] if read.directions == 1 else [torch.cat(both, 1) for both in zip(*both_ways)]
    out = torch.stack(source, 1 if read.batch_first else 0)
    return out, torch.stack(states), torch.stack(cells)


def _walk(
    way: Way,
    source: list[Tensor],
    state: Tensor,
    cell: Tensor,
    gates: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """One cell along the sequence: its state after each step, the last one, and its cell."""
    steps = []
    for x in source:
        state, cell = gates(way.call(torch.cat((x, state), 1), way.tensors), cell)
        steps.append(state)
    return steps, state, cell
