"""Attention for tokens stored side by side: scores, softmax and weighted values for a strip of queries.

    S[j, i] = scale * sum over d of k[d, j] q[d, i]      P = exp(S - max over j)      out[d, i] = sum over j of v[d, j] P[j, i] / sum P

A vector holds several queries i; j and d are scalars, so heads are never transposed. The scores of a strip stay in
the second-level cache.
"""  # noqa: E501

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.native import machine_code, memory, processor, vector
from sipp.runtime.activations import exp
from sipp.runtime.buffers import Arena, Fill, Work, filled_run, token_buffer
from sipp.runtime.graph import Op
from sipp.runtime.kernel import LONG_SECONDS, PreparedKernel, Watch, raise_flag, tasks
from sipp.runtime.steps import Step, Values

AT_ONCE = 4  # keys (or features of values) whose sums are kept in registers
MOST_SCORES = 2**16  # floats per strip


def _strided_arguments(name: str, x: Tensor | None, dims: tuple[int, int, int]) -> dict[str, int]:
    """The address of a tensor, and the strides in bytes of point, head and feature (key for a mask).

    0 if there is no tensor, or for a dimension of size 1.
    """
    names = (f"{name}_per_point", f"{name}_per_head", f"{name}_pitch")
    if x is None:
        return dict.fromkeys((name, *names), 0)
    steps = (vector.FLOAT_BYTES * x.stride(dim) if x.shape[dim] > 1 else 0 for dim in dims)
    return {name: memory.strided_address(x), **dict(zip(names, steps))}


@dataclass(frozen=True)
class QueryTile:
    """A strip of queries, n_vectors x lanes of them, and all keys."""

    lanes: int
    n_vectors: int
    n_keys: int
    has_mask: bool

    @property
    def kind(self) -> Any:
        return vector.of(self.lanes)

    @property
    def n_bytes(self) -> int:
        return self.lanes * vector.FLOAT_BYTES


def attention_step(op: Op, work: Work) -> Step | None:
    """The step for attention whose heads are in buffers; None to leave it to torch."""
    scale = op.kwargs.get("scale")
    if set(op.kwargs) - {"scale"} or any(op.args[4:]):
        return None
    arena = work.arena
    q, k, v = (work.values[ref.value] for ref in op.args[:3])
    if not all(_has_token_layout(x, arena) for x in (q, k, v)) or q.shape[:2] != k.shape[:2] or k.shape != v.shape:
        return None
    n_points, n_heads, n_queries, size = q.shape
    n_keys = k.shape[2]
    lanes = processor.LANES if n_queries % processor.LANES == 0 else 8
    if n_queries % lanes or n_keys % AT_ONCE or size % AT_ONCE or k.shape[3] != size:
        return None
    fit = (n for n in (4, 2, 1) if n_queries // lanes % n == 0 and n_keys * n * lanes <= MOST_SCORES)
    if (n_vectors := next(fit, None)) is None:
        return None
    mask, fills = _mask(op, work, q, n_keys)
    out = arena.take(token_buffer(n_points * n_queries, n_heads * size))
    columns = out.data_CHWN.shape[3]
    result = out.data_CHWN.as_strided(tuple(q.shape), (n_queries, size * columns, 1, columns))
    n_strips = n_queries // (lanes * n_vectors)
    arguments = {
        **_strided_arguments("q", q, (0, 1, 3)),
        **_strided_arguments("k", k, (0, 1, 3)),
        **_strided_arguments("v", v, (0, 1, 3)),
        **_strided_arguments("out", result, (0, 1, 3)),
        **_strided_arguments("mask", mask, (0, 1, 2)),
        "n_points": n_points,
        "n_heads": n_heads,
        "n_strips": n_strips,
        "size": size,
        "scale": 1 / math.sqrt(size) if scale is None else float(scale),
        "flag": arena.flag.cell,
    }
    tile = QueryTile(lanes, n_vectors, n_keys, mask is not None)
    n_tasks, also = n_points * n_heads * n_strips, (q, k, v, out, mask)
    kernel = PreparedKernel(("attention", tile), arguments, n_tasks, lambda b, args: _emit(b, args, tile), also)
    kernel.time_and_set_threads(LONG_SECONDS)
    run_step = filled_run(fills, kernel, op.out, result)
    return Step(op.name, "ours", run_step, op.out, "attention of tokens", is_watched=True)


def _mask(op: Op, work: Work, q: Tensor, n_keys: int) -> tuple[Tensor | None, list[Fill]]:
    """The additive mask, keys x queries, and the copy into it; none if a constant mask allows everything."""
    if len(op.args) < 4 or op.args[3] is None:
        return None, []
    number, mask = op.args[3].value, work.input(op, 3)
    if number in work.constants and mask.dtype == torch.bool and bool(mask.all()):
        return None, []
    lead = (1,) * (4 - mask.ndim) + tuple(mask.shape[:-2])
    data = memory.zeros(*lead, n_keys, q.shape[2])

    def fill(values: Values) -> None:
        given = values[number]
        if given.dtype == torch.bool:
            given = torch.where(given, 0.0, float("-inf")).float()
        data.copy_(given.expand(*lead, q.shape[2], n_keys).transpose(2, 3))

    return data, [fill]


def _has_token_layout(x: Any, arena: Arena) -> bool:
    """Whether queries (keys, values) N x H x T x D are in a buffer with tokens side by side."""
    is_heads = isinstance(x, Tensor) and x.ndim == 4 and x.dtype == torch.float32
    return is_heads and arena.buffer_of(x) is not None and x.stride(2) == 1 and x.shape[2] > 1


def _emit(b: Any, args: machine_code.Arguments, tile: QueryTile) -> None:
    n_vectors, n_keys = tile.n_vectors, tile.n_keys
    n_strips, n_heads = args.number("n_strips"), args.number("n_heads")
    n_tasks = b.mul(b.mul(args.number("n_points"), n_heads), n_strips)
    with vector.floats_on_heap(b, n_keys * n_vectors * tile.lanes) as scores:
        has_room = b.icmp_unsigned("!=", scores, vector.I64(0))
        with b.if_then(b.not_(has_room)):
            raise_flag(b, args)
        with tasks(b, tile.lanes, args, b.select(has_room, n_tasks, vector.I64(0))) as (task, watch):
            strip, rest = b.srem(task, n_strips), b.sdiv(task, n_strips)
            head, point = b.srem(rest, n_heads), b.sdiv(rest, n_heads)

            def start(name: str) -> Any:
                steps = args.number(f"{name}_per_point"), args.number(f"{name}_per_head")
                return b.add(args.number(name), b.add(b.mul(point, steps[0]), b.mul(head, steps[1])))

            moved = b.mul(strip, vector.I64(n_vectors * tile.n_bytes))
            q, out, mask = (b.add(start(name), moved) for name in ("q", "out", "mask"))
            largest = _emit_scores(b, args, tile, q, start("k"), mask, scores)
            totals = _emit_powers(b, tile, largest, scores)
            inverse = [b.fdiv(vector.like(total, 1.0), total) for total in totals]
            _emit_means(b, args, tile, start("v"), scores, inverse, out, watch)


def _line(b: Any, tile: QueryTile, scores: Any, key: Any) -> Any:
    """Where the scores of a key are."""
    return vector.address_of(b, scores, b.mul(key, vector.I64(tile.n_vectors * tile.lanes)))


def _emit_scores(
    b: Any, args: machine_code.Arguments, tile: QueryTile, q: Any, k: Any, mask: Any, scores: Any
) -> list[Any]:
    """Emits the scores; returns the largest one for each query."""
    n_vectors, zero = tile.n_vectors, vector.constant(0.0, tile.lanes)
    scale = vector.splat(b, args.real("scale"), tile.lanes)
    largest = vector.variables(b, [vector.like(zero, float("-inf"))] * n_vectors)
    with vector.each(b, 0, vector.I64(tile.n_keys), AT_ONCE) as key:
        sums = [vector.variables(b, [zero] * n_vectors) for _ in range(AT_ONCE)]
        with vector.each(b, 0, args.number("size")) as d:
            q_at, k_at = b.add(q, b.mul(d, args.number("q_pitch"))), b.add(k, b.mul(d, args.number("k_pitch")))
            queries = [vector.load(b, q_at, tile.kind, i * tile.n_bytes) for i in range(n_vectors)]
            for j, line in enumerate(sums):
                key_splat = vector.splat_item(b, k_at, key, tile.lanes, j * vector.FLOAT_BYTES)
                for cell, query in zip(line, queries):
                    b.store(vector.fused(b, key_splat, query, b.load(cell)), cell)
        for j, line in enumerate(sums):
            to = _line(b, tile, scores, b.add(key, vector.I64(j)))
            mask_at = b.add(mask, b.mul(b.add(key, vector.I64(j)), args.number("mask_pitch")))
            for i, cell in enumerate(line):
                value, best = b.fmul(b.load(cell), scale), b.load(largest[i])
                if tile.has_mask:
                    value = b.fadd(value, vector.load(b, mask_at, tile.kind, i * tile.n_bytes))
                b.store(vector.maximum(b, best, value), largest[i])
                vector.store(b, value, to, i * tile.n_bytes)
    return [b.load(cell) for cell in largest]


def _emit_powers(b: Any, tile: QueryTile, largest: list[Any], scores: Any) -> list[Any]:
    """Replaces scores by exp(score - largest); returns their sums."""
    totals = vector.variables(b, [vector.constant(0.0, tile.lanes)] * tile.n_vectors)
    with vector.each(b, 0, vector.I64(tile.n_keys)) as key:
        line = _line(b, tile, scores, key)
        for i, cell in enumerate(totals):
            power = exp(b, b.fsub(vector.load(b, line, tile.kind, i * tile.n_bytes), largest[i]))
            vector.store(b, power, line, i * tile.n_bytes)
            b.store(b.fadd(b.load(cell), power), cell)
    return [b.load(cell) for cell in totals]


def _emit_means(
    b: Any, args: machine_code.Arguments, tile: QueryTile, values: Any, scores: Any, inverse: list[Any], out: Any,
    watch: Watch,
) -> None:  # fmt: skip
    """Emits the weighted means of the values, a few features at a time."""
    n_vectors, zero = tile.n_vectors, vector.constant(0.0, tile.lanes)
    with vector.each(b, 0, args.number("size"), AT_ONCE) as d:
        rows = [b.add(values, b.mul(b.add(d, vector.I64(r)), args.number("v_pitch"))) for r in range(AT_ONCE)]
        sums = [vector.variables(b, [zero] * n_vectors) for _ in rows]
        with vector.each(b, 0, vector.I64(tile.n_keys)) as key:
            line = _line(b, tile, scores, key)
            powers = [vector.load(b, line, tile.kind, i * tile.n_bytes) for i in range(n_vectors)]
            for row, cells in zip(rows, sums):
                value_splat = vector.splat_item(b, row, key, tile.lanes)
                for cell, power in zip(cells, powers):
                    b.store(vector.fused(b, value_splat, power, b.load(cell)), cell)
        for r, cells in enumerate(sums):
            to = b.add(out, b.mul(b.add(d, vector.I64(r)), args.number("out_pitch")))
            for i, cell in enumerate(cells):
                value = b.fmul(b.load(cell), inverse[i])
                vector.store(b, value, to, i * tile.n_bytes)
                watch(value)
