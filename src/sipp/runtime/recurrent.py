"""LSTM layers: each sequence is processed separately, with one sparse matrix-vector product per step.

gates[r] = bias[r] + W[r] . (x_t, h)      (the weights of input and state side by side, rows i, f, g, o)
c = sigmoid(f) c + sigmoid(i) tanh(g)      h = sigmoid(o) tanh(c)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.native import machine_code, memory, processor, vector
from sipp.runtime import timing
from sipp.runtime.activations import sigmoid, tanh
from sipp.runtime.buffers import Arena, Work
from sipp.runtime.graph import LSTM, Op
from sipp.runtime.kernel import LONG_SECONDS, PreparedKernel, tasks
from sipp.runtime.products import padded
from sipp.runtime.steps import Step, Values, arguments_of
from sipp.runtime.vector_kernel import MOST_COLUMNS, Windows, group_sums, pack_windows

N_GATES = 4


@dataclass(frozen=True)
class Cell:
    """One layer in one direction: its kernel, its state and cell (points x hidden), and its packed weights."""

    kernel: PreparedKernel
    state: Tensor
    cell: Tensor
    packed: Windows


def recurrent_step(op: Op, work: Work) -> Step | None:
    """The step of a whole LSTM; None to leave it to torch (unsupported options, or dense is faster)."""
    refs, has_bias, n_layers, _, is_training, is_bidirectional, batch_first = op.args[2:]
    x, values = work.input(op), work.values
    if is_training or x.ndim != 3 or not x.numel() or not work.are_constant(refs):
        return None
    weights = [work.constants[ref.value] for ref in refs]
    directions = 2 if is_bidirectional else 1
    per_cell = 4 if has_bias else 2
    reads = (op.args[0].value, *(ref.value for ref in op.args[1]))  # input, state and cell
    is_float = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (*weights, *(values[n] for n in reads)))
    has_projections = len(weights) != n_layers * directions * per_cell
    if not is_float or has_projections or any(w.shape[1] > MOST_COLUMNS // 2 for w in weights if w.ndim == 2):
        return None
    n_points, n_times = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    hidden = weights[1].shape[1]
    first = memory.zeros(n_points, n_times, x.shape[2])
    cells, source = [], first
    for layer in range(n_layers):
        out = memory.zeros(n_points, n_times, directions * hidden)
        for direction in range(directions):
            at = (layer * directions + direction) * per_cell
            cells.append(_cell(weights[at : at + per_cell], source, out, direction, work.arena))
        source = out
    result = source if batch_first else source.transpose(0, 1)

    def run_step(current: Values) -> None:
        given, h0, c0 = (current[n] for n in reads)
        first.copy_(given if batch_first else given.transpose(0, 1))
        for cell, h, c in zip(cells, h0, c0):
            cell.state.copy_(h)
            cell.cell.copy_(c)
            cell.kernel()
        states = (torch.stack([cell.state for cell in cells]), torch.stack([cell.cell for cell in cells]))
        current[op.out] = (result.clone(), *states)

    for cell in cells:
        cell.kernel.time_and_set_threads(LONG_SECONDS)
    seconds = timing.best_time(lambda: run_step(values))
    dense_seconds = timing.dense_time(lambda: LSTM(*arguments_of(values, op.args)))
    if not timing.is_enough_faster(seconds, dense_seconds):
        return None
    n_dense = sum(w.nbytes for w in weights if w.ndim == 2)
    n_kept = sum(int((w != 0).sum()) for w in weights if w.ndim == 2)
    return Step(
        op.name, "ours", run_step, op.out, f"sparse LSTM x {processor.LANES}", is_watched=True,
        keep=n_kept * vector.FLOAT_BYTES / n_dense, n_dense_bytes=n_dense, seconds=seconds, dense_seconds=dense_seconds,
        held=tuple(part for cell in cells for part in cell.packed.tensors), reads=reads,
    )  # fmt: skip


def _cell(own: list[Tensor], source: Tensor, out: Tensor, direction: int, arena: Arena) -> Cell:
    """Builds the kernel of one layer in one direction from its weights (input, state) and biases."""
    n_points, n_times, n_inputs = source.shape
    hidden = own[1].shape[1]
    packed = pack_windows(torch.cat(own[:2], 1).numpy())
    bias = padded(own[2] + own[3] if len(own) == 4 else None, len(own[0]))
    sizes = (_round_up(n_inputs + hidden), hidden, _round_up(N_GATES * hidden))
    vectors, cell, gates = (memory.zeros(n_points, size) for size in sizes)
    step, start = (-1, n_times - 1) if direction else (1, 0)
    n_out = out.shape[2]
    arguments = {
        "source": memory.strided_address(source[:, start:]),
        "source_per_point": vector.FLOAT_BYTES * n_times * n_inputs,
        "source_per_step": vector.FLOAT_BYTES * step * n_inputs,
        "out": memory.strided_address(out[:, start:, direction * hidden :]),
        "out_per_point": vector.FLOAT_BYTES * n_times * n_out,
        "out_per_step": vector.FLOAT_BYTES * step * n_out,
        "vectors": vectors,  # (x_t, h) of each point
        "vector_per_point": vector.FLOAT_BYTES * vectors.shape[1],
        "cell": cell,
        "gates": gates,
        "gates_per_point": vector.FLOAT_BYTES * gates.shape[1],
        "bias": bias,
        **packed.arguments,
        "n_points": n_points,
        "n_steps": n_times,
        "n_inputs": n_inputs,
        "n_hidden": hidden,
        "flag": arena.flag.cell,
    }
    lanes = next(n for n in (processor.LANES, 8, 1) if hidden % n == 0)
    kernel = PreparedKernel(
        ("recurrent", lanes),
        arguments,
        n_points,
        lambda b, args: _emit(b, args, lanes),
        also=(source, out),
    )
    return Cell(kernel, vectors[:, n_inputs : n_inputs + hidden], cell, packed)


def _round_up(n: int) -> int:
    """Rounded up to whole windows, which are read and written as a whole."""
    return -(-n // processor.LANES) * processor.LANES


def _emit(b: Any, args: machine_code.Arguments, lanes: int) -> None:
    n_inputs, hidden = args.number("n_inputs"), args.number("n_hidden")
    with tasks(b, lanes, args, args.number("n_points")) as (point, watch):
        line = b.add(args.number("vectors"), b.mul(point, args.number("vector_per_point")))
        cell = vector.address_of(b, args.number("cell"), b.mul(point, hidden))
        gates = b.add(args.number("gates"), b.mul(point, args.number("gates_per_point")))
        source = b.add(args.number("source"), b.mul(point, args.number("source_per_point")))
        out = b.add(args.number("out"), b.mul(point, args.number("out_per_point")))
        with vector.each(b, 0, args.number("n_steps")) as time:
            x = b.add(source, b.mul(time, args.number("source_per_step")))
            with vector.each(b, 0, n_inputs) as i:
                vector.store(b, vector.load(b, vector.address_of(b, x, i)), vector.address_of(b, line, i))
            with vector.each(b, 0, args.number("n_groups")) as group:  # gates = bias + W (x, h)
                sums = group_sums(b, args, group, line)
                vector.store(b, sums, vector.address_of(b, gates, b.mul(group, vector.I64(processor.LANES))))
            to = b.add(out, b.mul(time, args.number("out_per_step")))
            with vector.each(b, 0, hidden, lanes) as i:
                state = _emit_cell(
                    b, vector.of(lanes), vector.address_of(b, gates, i), hidden, vector.address_of(b, cell, i)
                )
                vector.store(b, state, vector.address_of(b, to, i))
                vector.store(b, state, vector.address_of(b, line, b.add(n_inputs, i)))
                watch(state)


def _emit_cell(b: Any, kind: Any, gates: Any, hidden: Any, cell: Any) -> Any:
    """Emits the update of the cell of some units; returns their new state."""
    i, f, g, o = (
        vector.load(b, vector.address_of(b, gates, b.mul(hidden, vector.I64(k))), kind) for k in range(N_GATES)
    )
    old = b.fmul(sigmoid(b, f), vector.load(b, cell, kind))
    new = vector.fused(b, sigmoid(b, i), tanh(b, g), old)
    vector.store(b, new, cell)
    return b.fmul(sigmoid(b, o), tanh(b, new))
