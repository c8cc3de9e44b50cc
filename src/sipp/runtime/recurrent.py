"""LSTM layers: every point on its own goes through the sequence, one sparse matrix times one vector a step.

gates[r] = bias[r] + W[r] . (x_t, h)      (the weights of input and state side by side, rows i, f, g, o)
c = sigmoid(f) c + sigmoid(i) tanh(g)      h = sigmoid(o) tanh(c)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.runtime import curves, steps
from sipp.runtime.buffers import Arena
from sipp.runtime.code import FLOAT, I64, Loop, constant, generate, vector
from sipp.runtime.graph import ATEN, Op, Ref
from sipp.runtime.packing import LANES, Windows, pack_windows
from sipp.runtime.product import raise_flag
from sipp.runtime.single import MOST_COLUMNS, addresses, group_sums, padded_bias
from sipp.runtime.steps import Job, Step, Values, best_time, given
from sipp.runtime.tiles import MOST_LANES
from sipp.scoring.kernels.cpu.llvm import fused

LSTM = ATEN.lstm.input
N_GATES = 4

# Numbers of the job, after its head; strides in bytes
(
    INPUT, INPUT_POINT, INPUT_STEP, N_INPUTS, OUT, OUT_POINT, OUT_STEP, VECTORS, CELL, GATES, BIAS, ENDS, VALUES,
    PLACES, WINDOWS, N_GROUPS, N_POINTS, N_STEPS, N_HIDDEN, VECTOR_POINT, GATES_POINT, FLAG,
) = range(22)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One layer in one direction: its job, the state and the cell it works on (points x hidden), its weights."""

    job: Job
    state: Tensor
    cell: Tensor
    packed: Windows


def recurrent_step(op: Op, values: Values, arena: Arena, constants: dict[int, Tensor]) -> Step | None:
    """The step of a whole LSTM, or None where it is left to torch: other options, or dense is faster."""
    found = _read(op, values, constants)
    if found is None:
        return None
    x, weights, n_layers, directions, batch_first = found
    n_points, n_times = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    hidden, per_cell = weights[1].shape[1], len(weights) // (n_layers * directions)
    number, h0, c0 = (ref.value for ref in (op.args[0], *op.args[1]))
    first = torch.zeros((n_points, n_times, x.shape[2]), dtype=torch.float32, device="cpu")
    cells, source = [], first
    for layer in range(n_layers):
        out = torch.zeros((n_points, n_times, directions * hidden), dtype=torch.float32, device="cpu")
        for direction in range(directions):
            at = (layer * directions + direction) * per_cell
            cells.append(_cell(weights[at : at + per_cell], source, out, direction, arena))
        source = out
    result = source if batch_first else source.transpose(0, 1)

    def fast(current: Values) -> None:
        first.copy_(current[number] if batch_first else current[number].transpose(0, 1))
        for cell, h, c in zip(cells, current[h0], current[c0]):
            cell.state.copy_(h)
            cell.cell.copy_(c)
            cell.job()
        states = (torch.stack([cell.state for cell in cells]), torch.stack([cell.cell for cell in cells]))
        current[op.out] = (result.clone(), *states)

    seconds = best_time(lambda: fast(values))
    dense_seconds = steps.dense_time(lambda: LSTM(*given(values, op.args)))
    if seconds > steps.LEAST_GAIN * dense_seconds:
        return None
    fast(values)
    n_dense = sum(w.nbytes for w in weights if w.ndim == 2)
    n_kept = sum(int((w != 0).sum()) for w in weights if w.ndim == 2)
    return Step(
        op.name, f"sparse LSTM x {LANES}", fast, op.out, n_kept * FLOAT / n_dense,
        sum(cell.packed.n_bytes for cell in cells), n_dense, seconds, dense_seconds,
    )  # fmt: skip


def _read(op: Op, values: Values, constants: dict[int, Tensor]) -> Any:
    """(input, weights, ..) of an LSTM that can be run here, else None."""
    refs, has_bias, n_layers, _, is_training, is_bidirectional, batch_first = op.args[2:]
    directions = 2 if is_bidirectional else 1
    x = values[op.args[0].value]
    if is_training or x.ndim != 3 or not all(isinstance(ref, Ref) and ref.value in constants for ref in refs):
        return None
    weights = [constants[ref.value] for ref in refs]
    is_plain = len(weights) == n_layers * directions * (4 if has_bias else 2)  # no projections
    tensors = [x, *weights, *(values[ref.value] for ref in op.args[1])]
    is_float = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    is_small = all(w.shape[1] <= MOST_COLUMNS // 2 for w in weights if w.ndim == 2)
    if not (is_plain and is_float and is_small and x.numel()):
        return None
    return x, weights, n_layers, directions, batch_first


def _cell(own: list[Tensor], source: Tensor, out: Tensor, direction: int, arena: Arena) -> Cell:
    """One layer in one direction, from weights (input, state) and biases to its job."""
    n_points, n_times, n_inputs = source.shape
    hidden = own[1].shape[1]
    packed = pack_windows(torch.cat(own[:2], 1).numpy())
    bias = padded_bias(own[2] + own[3] if len(own) == 4 else None, len(own[0]))
    shapes = [(n_points, n) for n in (_whole(n_inputs + hidden), hidden, _whole(N_GATES * hidden))]
    vectors, cell, gates = (torch.zeros(shape, dtype=torch.float32, device="cpu") for shape in shapes)
    step, start = (-1, n_times - 1) if direction else (1, 0)
    n_out = out.shape[2]
    numbers = [
        source.data_ptr() + FLOAT * start * n_inputs, FLOAT * n_times * n_inputs, FLOAT * step * n_inputs, n_inputs,
        out.data_ptr() + FLOAT * (start * n_out + direction * hidden), FLOAT * n_times * n_out, FLOAT * step * n_out,
        vectors.data_ptr(), cell.data_ptr(), gates.data_ptr(), bias.data_ptr(), *addresses(packed),
        len(packed.ends) - 1, n_points, n_times, hidden, FLOAT * shapes[0][1], FLOAT * shapes[2][1],
        arena.flag.address,
    ]  # fmt: skip
    lanes = next(n for n in (MOST_LANES, 8, 1) if hidden % n == 0)
    keep = (packed, bias, source, out, vectors, cell, gates, arena.flag)
    job = Job(generate(("recurrent", lanes), lambda loop: _emit(loop, lanes)), numbers, n_points, keep)
    return Cell(job, vectors[:, n_inputs : n_inputs + hidden], cell, packed)


def _whole(n: int) -> int:
    """Rounded up to whole windows: these are read and written at once."""
    return -(-n // LANES) * LANES


def _emit(loop: Loop, lanes: int) -> None:
    b = loop.b
    n_inputs, hidden = loop.number(N_INPUTS), loop.number(N_HIDDEN)
    bad = loop.cells([constant(0.0, lanes)])[0]
    with loop.each(*loop.share(loop.number(N_POINTS))) as point:
        line = b.add(loop.number(VECTORS), b.mul(point, loop.number(VECTOR_POINT)))
        cell = loop.at(loop.number(CELL), b.mul(point, hidden))
        gates = b.add(loop.number(GATES), b.mul(point, loop.number(GATES_POINT)))
        source = b.add(loop.number(INPUT), b.mul(point, loop.number(INPUT_POINT)))
        out = b.add(loop.number(OUT), b.mul(point, loop.number(OUT_POINT)))
        with loop.each(I64(0), loop.number(N_STEPS)) as time:
            x = b.add(source, b.mul(time, loop.number(INPUT_STEP)))
            with loop.each(I64(0), n_inputs) as i:
                loop.store(loop.load(loop.at(x, i)), loop.at(line, i))
            _emit_gates(loop, line, gates)
            to = b.add(out, b.mul(time, loop.number(OUT_STEP)))
            with loop.each(I64(0), hidden, lanes) as i:
                state = _emit_cell(loop, lanes, loop.at(gates, i), hidden, loop.at(cell, i))
                loop.store(state, loop.at(to, i))
                loop.store(state, loop.at(line, b.add(n_inputs, i)))
                b.store(fused(b, state, constant(0.0, lanes), b.load(bad)), bad)
    raise_flag(loop, b.load(bad), lanes, loop.number(FLAG))


def _emit_gates(loop: Loop, line: Any, gates: Any) -> None:
    """gates = bias + W (x, h)."""
    with loop.each(I64(0), loop.number(N_GROUPS)) as group:
        given = [line, *(loop.number(n) for n in (BIAS, ENDS, VALUES, PLACES, WINDOWS))]
        loop.store(group_sums(loop, group, given), loop.at(gates, loop.b.mul(group, I64(LANES))))


def _emit_cell(loop: Loop, lanes: int, gates: Any, hidden: Any, cell: Any) -> Any:
    """The new state of some units; their cell is updated."""
    b = loop.b
    i, f, g, o = (loop.load(loop.at(gates, b.mul(hidden, I64(k))), vector(lanes)) for k in range(N_GATES))
    old = b.fmul(curves.sigmoid(b, f, lanes), loop.load(cell, vector(lanes)))
    new = fused(b, curves.sigmoid(b, i, lanes), curves.tanh(b, g, lanes), old)
    loop.store(new, cell)
    return b.fmul(curves.sigmoid(b, o, lanes), curves.tanh(b, new, lanes))
