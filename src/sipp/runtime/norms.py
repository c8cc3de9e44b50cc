"""Layer norm for tokens stored side by side: three passes over a strip, a few vectors of them, in the cache."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from sipp.native import machine_code, processor, vector
from sipp.runtime.buffers import Work, filled_run, fills_of, token_buffer, token_input
from sipp.runtime.graph import Op
from sipp.runtime.kernel import Argument, PreparedKernel, tasks
from sipp.runtime.steps import Step

MARGIN = 2.0**8  # torch handles squares this close to overflow: it sums them in another order


def norm_step(op: Op, work: Work) -> Step | None:
    """The step for a layer norm over the last dimension; None to leave it to torch."""
    x, constants, arena = work.input(op), work.constants, work.arena
    refs = [*op.args[2:4], None, None][:2]
    if not work.are_constant(refs):
        return None
    n_tokens, features = prod(x.shape[:-1]), x.shape[-1]
    is_float = all(t.dtype == torch.float32 for t in (x, *(constants[ref.value] for ref in refs if ref is not None)))
    if list(op.args[1]) != [features] or not is_float or n_tokens < 2 or not x.numel():
        return None
    gain, shift = (
        torch.full((features,), default, dtype=torch.float32, device="cpu")
        if ref is None
        else constants[ref.value].contiguous()
        for ref, default in zip(refs, (1.0, 0.0))
    )
    source, strides = token_input(op.args[0].value, x, arena)
    out = arena.add(token_buffer(n_tokens, features))
    lanes = processor.LANES if source.n % processor.LANES == 0 else 8
    n_vectors = next(n for n in (4, 2, 1) if source.n // lanes % n == 0)
    epsilon = op.args[4] if len(op.args) > 4 else 1e-5
    n_strips = source.n // (lanes * n_vectors)
    arguments: dict[str, Argument] = {
        "x": source.data,
        "out": out.data_CHWN,
        "gain": gain,
        "shift": shift,
        "n_features": features,
        "pitch": vector.FLOAT_BYTES * source.n,  # bytes from one feature to the next
        "n_strips": n_strips,
        "share": 1 / features,
        "epsilon": float(epsilon),
        "flag": arena.flag.cell,
    }
    kernel = PreparedKernel(
        ("norm", lanes, n_vectors), arguments, n_strips, lambda b, args: _emit(b, args, lanes, n_vectors)
    )
    run_step = filled_run(fills_of(source), kernel, op.out, out.tokens(tuple(x.shape[:-1]), strides))
    return Step(op.name, "norm of tokens", run_step, op.out)


def _emit(b: Any, args: machine_code.Arguments, lanes: int, n_vectors: int) -> None:
    width = lanes * n_vectors * vector.FLOAT_BYTES
    share, epsilon = (vector.splat(b, args.real(n), lanes) for n in ("share", "epsilon"))
    one = vector.constant(1.0, lanes)
    with tasks(b, args, args.number("n_strips"), lanes) as (strip, watch):
        x, out = (b.add(args.number(n), b.mul(strip, vector.I64(width))) for n in ("x", "out"))
        zeros = [vector.constant(0.0, lanes)] * n_vectors
        # about the first feature: where all are nearly equal and large, a rounded sum would show after the division
        first = [vector.load(b, x, vector.of(lanes), v * lanes * vector.FLOAT_BYTES) for v in range(n_vectors)]
        totals = _over(b, args, lanes, x, zeros, lambda v, value: b.fsub(value, first[v]))
        mean = [vector.fused(b, total, share, start) for total, start in zip(totals, first)]
        squares = _over(b, args, lanes, x, zeros, lambda v, value: _square(b, b.fsub(value, mean[v])))
        for total, middle in zip(squares, mean):
            for square in (total, _square(b, middle)):  # torch squares partial means too
                watch(b.fmul(square, vector.constant(MARGIN, lanes)))
        variances = [vector.fused(b, total, share, epsilon) for total in squares]
        scale = [b.fdiv(one, vector.call(b, f"llvm.sqrt.v{lanes}f32", vector.of(lanes), [x])) for x in variances]
        with vector.each(b, 0, args.number("n_features")) as feature:
            moved = b.mul(feature, args.number("pitch"))
            gain, shift = (
                vector.splat(b, vector.load(b, vector.address_of(b, args.number(n), feature)), lanes)
                for n in ("gain", "shift")
            )
            for v in range(n_vectors):
                value = vector.load(b, b.add(x, moved), vector.of(lanes), v * lanes * vector.FLOAT_BYTES)
                value = vector.fused(b, b.fmul(b.fsub(value, mean[v]), scale[v]), gain, shift)
                vector.store(b, value, b.add(out, moved), v * lanes * vector.FLOAT_BYTES)
                watch(value)


def _over(b: Any, args: machine_code.Arguments, lanes: int, x: Any, start: list[Any], term: Any) -> list[Any]:
    """Emits sums over the features, one for each vector of a strip."""
    cells = vector.variables(b, start)
    with vector.each(b, 0, args.number("n_features")) as feature:
        line = b.add(x, b.mul(feature, args.number("pitch")))
        for v, cell in enumerate(cells):
            value = vector.load(b, line, vector.of(lanes), v * lanes * vector.FLOAT_BYTES)
            b.store(b.fadd(b.load(cell), term(v, value)), cell)
    return [b.load(cell) for cell in cells]


def _square(b: Any, value: Any) -> Any:
    return b.fmul(value, value)
