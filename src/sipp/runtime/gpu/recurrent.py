"""An LSTM on few sequences: each time step is one sparse product (input and state weights joined) and the gates.

gates[r] = bias[r] + W[r] . (x_t, h)      (rows i, f, g, o)
c = sigmoid(f) c + sigmoid(i) tanh(g)      h = sigmoid(o) tanh(c)
"""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.runtime.gpu import recording
from sipp.runtime.gpu.linear import AGREEMENT, MOST_TOKENS, LinearKernel, fastest_kernel
from sipp.runtime.graph import Op, Ref
from sipp.runtime.recurrent import LSTM, LSTM_CELL, Lstm, read_lstm, recurrent_reads
from sipp.runtime.steps import Step, Values, arguments_of, is_enough_faster

RECURRENT = (LSTM, LSTM_CELL)
MOST_STEPS = 64  # of a sequence; each takes three launches
N_ROUNDINGS = 4  # allowed error of a sequence, in multiples of that of one product


def recurrent_step(op: Op, values: Values, constants: Values) -> Step | None:
    """The step of a whole LSTM; None to leave it to torch (unsupported options, or dense is as fast)."""
    lstm = _read(op, values, constants)
    if lstm is None:
        return None
    number, h0, c0 = recurrent_reads(op)
    state = values[h0] if op.target is LSTM_CELL else values[h0][0]
    kernels = []
    for own in lstm.cells:
        weight = torch.cat(own[:2], 1)
        bias = (own[2].float() + own[3].float()).to(weight.dtype) if len(own) == 4 else None
        generator = torch.Generator(weight.device).manual_seed(0)  # the caller's own goes on as it would
        size = len(state), weight.shape[1]
        tokens = torch.randn(size, dtype=weight.dtype, device=weight.device, generator=generator)
        chosen = fastest_kernel(weight, bias, tokens, lambda n_bytes: 1)
        if chosen.is_dense:
            return None
        kernels.append(chosen.make(weight, bias))

    def fast(current: Values) -> None:
        x, state, cell = current[number], current[h0], current[c0]
        is_cell = op.target is LSTM_CELL
        current[op.out] = (
            _run_cell(kernels[0], [x], state, cell)[1:] if is_cell else _run_layers(lstm, kernels, x, state, cell)
        )

    fast(values)
    results = values.pop(op.out)
    with torch.backends.cudnn.flags(allow_tf32=False):  # as exact as ours
        expected = op.target(*arguments_of(values, op.args))
    if not all(_agree(own, other) for own, other in zip(results, expected)):
        return None
    seconds = recording.kernel_seconds([lambda: fast(values)])
    dense_seconds = recording.kernel_seconds([lambda: op.target(*arguments_of(values, op.args))])
    if not is_enough_faster(seconds, dense_seconds):
        return None
    matrices = [w for own in lstm.cells for w in own[:2]]
    n_kept = sum(int((w != 0).sum()) for w in matrices)
    return Step(
        op.name, f"LSTM: {kernels[0].name}", fast, op.out, n_kept / sum(w.numel() for w in matrices),
        sum(way.n_bytes for way in kernels), sum(w.nbytes for w in matrices), seconds, dense_seconds,
        held=tuple(tensor for way in kernels for tensor in way.tensors),
    )  # fmt: skip


def _agree(outputs: Tensor, expected: Tensor) -> bool:
    """Whether outputs agree up to the rounding of a few steps (states are at most 1)."""
    off_by = (outputs.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1.0)
    return bool(off_by <= N_ROUNDINGS * AGREEMENT[outputs.dtype])


def _read(op: Op, values: Values, constants: Values) -> Lstm | None:
    """The LSTM if it is supported: few, short sequences, constant weights, no projections."""
    x, is_cell = values[op.args[0].value], op.target is LSTM_CELL
    if is_cell:
        refs = [ref for ref in op.args[2:] if ref is not None]
        is_own = len(refs) in (2, 4) and all(isinstance(ref, Ref) and ref.value in constants for ref in refs)
        lstm = Lstm([[constants[ref.value] for ref in refs]], 1, False) if is_own else None
    else:
        lstm = read_lstm(op, constants)
    if lstm is None or x.ndim != (2 if is_cell else 3) or not x.numel():
        return None
    n_points, n_times = (len(x), 1) if is_cell else x.shape[:2] if lstm.batch_first else (x.shape[1], x.shape[0])
    is_alike = all(weight.dtype == x.dtype for own in lstm.cells for weight in own)
    return lstm if is_alike and n_points <= MOST_TOKENS and n_times <= MOST_STEPS else None


def _run_layers(lstm: Lstm, kernels: list[LinearKernel], x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, ...]:
    """Outputs, states and cells, as torch returns them."""
    source = list((x.transpose(0, 1) if lstm.batch_first else x).unbind())
    states, cells = [], []
    for layer in range(len(kernels) // lstm.directions):
        both_ways = []
        for direction in range(lstm.directions):
            n = layer * lstm.directions + direction
            steps, state, cell = _run_cell(kernels[n], source[::-1] if direction else source, h0[n], c0[n])
            both_ways.append(steps[::-1] if direction else steps)
            states.append(state)
            cells.append(cell)
        source = both_ways[0] if lstm.directions == 1 else [torch.cat(both, 1) for both in zip(*both_ways)]
    out = torch.stack(source, 1 if lstm.batch_first else 0)
    return out, torch.stack(states), torch.stack(cells)


def _run_cell(
    kernel: LinearKernel, source: list[Tensor], state: Tensor, cell: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Runs one cell along the sequence: its state after each step, the final state, and the final cell."""
    from sipp.runtime.gpu.kernels import gates  # imports Triton

    steps = []
    for x in source:
        state, cell = gates(kernel.call(torch.cat((x, state), 1), kernel.tensors), cell)
        steps.append(state)
    return steps, state, cell
