"""Layer norm for tokens stored side by side: three passes over a strip, a few vectors of them, in the cache."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from sipp.native import machine_code, processor, vector
from sipp.runtime.buffers import Work, filled_run, fills_of, token_buffer, token_input
from sipp.runtime.graph import Op
from sipp.runtime.kernel import LONG_SECONDS, Argument, PreparedKernel, tasks
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
    out = arena.take(token_buffer(n_tokens, features))
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
    key = ("norm", lanes, n_vectors)
    kernel = PreparedKernel(key, arguments, n_strips, lambda b, args: _emit(b, args, lanes, n_vectors))
    kernel.time_and_set_threads(LONG_SECONDS)
    run_step = filled_run(fills_of(source), kernel, op.out, out.tokens(tuple(x.shape[:-1]), strides))
    return Step(op.name, "ours", run_step, op.out, "norm of tokens", is_watched=True)


def _emit(b: Any, args: machine_code.Arguments, lanes: int, n_vectors: int) -> None:
    kind, n_bytes = vector.of(lanes), lanes * vector.FLOAT_BYTES
    share, epsilon = (vector.splat(b, args.real(name), lanes) for name in ("share", "epsilon"))
    one = vector.constant(1.0, lanes)
    with tasks(b, lanes, args, args.number("n_strips")) as (strip, watch):
        x, out = (b.add(args.number(n), b.mul(strip, vector.I64(n_vectors * n_bytes))) for n in ("x", "out"))
        # about the first feature: where all are nearly equal and large, a rounded sum would show after the division
        first = [vector.load(b, x, kind, i * n_bytes) for i in range(n_vectors)]
        totals = _over(b, args, x, kind, n_vectors, lambda i, value: b.fsub(value, first[i]))
        mean = [vector.fused(b, total, share, start) for total, start in zip(totals, first)]
        squares = _over(b, args, x, kind, n_vectors, lambda i, value: _square(b, b.fsub(value, mean[i])))
        for total, middle in zip(squares, mean):
            for square in (total, _square(b, middle)):  # torch squares partial means too
                watch(b.fmul(square, vector.constant(MARGIN, lanes)))
        variances = [vector.fused(b, total, share, epsilon) for total in squares]
        scale = [b.fdiv(one, vector.call(b, f"llvm.sqrt.v{lanes}f32", kind, [x])) for x in variances]
        with vector.each(b, 0, args.number("n_features")) as feature:
            moved = b.mul(feature, args.number("pitch"))
            gain, shift = (vector.splat_item(b, args.number(name), feature, lanes) for name in ("gain", "shift"))
            for i in range(n_vectors):
                value = vector.load(b, b.add(x, moved), kind, i * n_bytes)
                value = vector.fused(b, b.fmul(b.fsub(value, mean[i]), scale[i]), gain, shift)
                vector.store(b, value, b.add(out, moved), i * n_bytes)
                watch(value)


def _over(
    b: Any, args: machine_code.Arguments, x: Any, kind: Any, n_vectors: int, term: Callable[[int, Any], Any]
) -> list[Any]:
    """Emits sums over the features, one for each vector of a strip."""
    cells = vector.variables(b, [vector.constant(0.0, kind.count)] * n_vectors)
    with vector.each(b, 0, args.number("n_features")) as feature:
        line = b.add(x, b.mul(feature, args.number("pitch")))
        for i, cell in enumerate(cells):
            b.store(
                b.fadd(b.load(cell), term(i, vector.load(b, line, kind, i * kind.count * vector.FLOAT_BYTES))), cell
            )
    return [b.load(cell) for cell in cells]


def _square(b: Any, value: Any) -> Any:
    return b.fmul(value, value)
