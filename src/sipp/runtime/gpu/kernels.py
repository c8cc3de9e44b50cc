"""Linear layers on few tokens in Triton: weights without zeros are read once, sums are float32.

`bitmap_linear`: a thread holds four neighbouring columns; the bits before them in their word, counted, say where their
values lie. Zeros are multiplied too, so that what is not finite in the input is not finite in the output.

`index_linear`: a thread holds values and where they stand, and picks the inputs. Only kept weights cost time. The
input is looked through for numbers that are not finite, which zeros would have turned into NaN.

With early=True a kernel may start before the one in front of it has ended, and reads its first weights meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sipp.runtime.gpu.layouts import Bitmap, Index

MOST_TOKENS = 16
LOOKED_AT = 1024  # inputs at a time, for numbers that are not finite


def bitmap_linear(
    x: Tensor, layout: Bitmap, bias: Tensor | None, *, rows: int, quads: int, warps: int, early: bool = False
) -> Tensor:
    """x (tokens x columns) times the weight's transpose, plus the bias; `quads` times four columns at a time."""
    n_tokens, (n_rows, n_columns) = len(x), layout.shape
    out = torch.empty(n_tokens, n_rows, dtype=x.dtype, device=x.device)
    _bitmap[(triton.cdiv(n_rows, rows),)](
        x, layout.values, layout.words, layout.starts, layout.rows, out if bias is None else bias, out,
        n_rows, n_columns, layout.words.shape[1], n_tokens, bias is not None,
        rows, quads, 1 if n_tokens == 1 else MOST_TOKENS, early, num_warps=warps, **_launch(early),
    )  # fmt: skip
    return out


def index_linear(
    x: Tensor, layout: Index, bias: Tensor | None, *, blocks: int, warps: int, turns: int, early: bool
) -> Tensor:
    """x (tokens x columns) times the weight's transpose, plus the bias; `blocks` of the layout at a time."""
    n_tokens, (n_rows, n_columns) = len(x), layout.shape
    out = torch.empty(n_tokens, n_rows, dtype=x.dtype, device=x.device)
    a_word = 1 if n_tokens == 1 else 8 // x.itemsize
    n_words = triton.cdiv(n_tokens, a_word)
    turned = x
    if n_tokens > 1:
        turned = torch.empty(n_columns, n_words * a_word, dtype=x.dtype, device=x.device)
        _turn[(triton.cdiv(n_columns, 64),)](
            x, turned, n_tokens, n_columns, n_words * a_word, triton.next_power_of_2(n_words * a_word), 64, early,
            **_launch(early),
        )  # fmt: skip
        turned = turned.view(torch.int64)
    n_slices = len(layout.slices) - 1
    _index[(triton.cdiv(n_slices, turns), n_words)](
        turned, layout.values, layout.steps, layout.firsts, layout.slices, layout.order,
        out if bias is None else bias, out, n_rows, n_columns, n_tokens, n_words, layout.n_even, n_slices, bias is not None,
        layout.n_rows, layout.lanes, layout.depth, blocks, a_word, layout.bits, layout.n_even > 0, LOOKED_AT, early, turns,
        num_warps=warps, **_launch(early),
    )  # fmt: skip
    return out


def _launch(early: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}


@triton.jit
def _ones(word):  # type: ignore[no-untyped-def]
    """How many bits are set: LLVM knows this form, and makes one instruction of it."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bitmap(  # type: ignore[no-untyped-def]
    x, values, words, starts, row_starts, bias, out, n_rows, n_columns, n_words, n_tokens,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr, TOKENS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = r < n_rows
    quad = tl.arange(0, QUADS)
    bit = (quad % 8 * 4)[None, :]
    below = ((1 << bit) - 1).to(tl.uint32)
    t = tl.arange(0, TOKENS)
    if TOKENS == 1:
        total = tl.zeros((ROWS, QUADS), tl.float32)
    else:
        total = tl.zeros((ROWS, TOKENS), tl.float32)
    row_at = tl.load(row_starts + r, is_row, other=0)[:, None]
    w = (quad // 8)[None, :]
    from_row = r.to(tl.int64)[:, None] * n_words
    inside = is_row[:, None] & (w < n_words)
    next_word = tl.load(words + from_row + w, inside, other=0)
    next_start = tl.load(starts + from_row + w, inside, other=0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    for first in range(0, n_columns, 4 * QUADS):
        word = next_word.to(tl.uint32, bitcast=True)
        place = row_at + next_start.to(tl.int32) + _ones(word & below)
        w += QUADS // 8
        inside = is_row[:, None] & (w < n_words)
        next_word = tl.load(words + from_row + w, inside, other=0)  # while this one is at work
        next_start = tl.load(starts + from_row + w, inside, other=0)
        four = (word >> bit.to(tl.uint32)).to(tl.int32, bitcast=True)
        for i in tl.static_range(4):
            is_kept = (four >> i) & 1
            value = tl.load(values + place, is_kept != 0, other=0.0)
            place += is_kept
            k = first + 4 * quad + i
            if TOKENS == 1:
                picked = tl.load(x + k, k < n_columns, other=0.0)
                total += value.to(tl.float32) * picked.to(tl.float32)[None, :]
            else:
                is_there = (k < n_columns)[:, None] & (t < n_tokens)[None, :]
                picked = tl.load(x + t[None, :] * n_columns + k[:, None], is_there, other=0.0)
                total = tl.dot(value, picked, total, input_precision="ieee")
    if TOKENS == 1:
        result = tl.sum(total, axis=1)
        if HAS_BIAS:
            result += tl.load(bias + r, is_row, other=0.0).to(tl.float32)
        tl.store(out + r, result.to(out.dtype.element_ty), is_row)
    else:
        if HAS_BIAS:
            total += tl.load(bias + r, is_row, other=0.0).to(tl.float32)[:, None]
        to = out + t[None, :] * n_rows + r[:, None]
        tl.store(to, total.to(out.dtype.element_ty), is_row[:, None] & (t < n_tokens)[None, :])


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, turned, n_tokens, n_columns, n_padded, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """turned[k, t] = x[t, k], and 0 beyond the last token."""
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, TOKENS)
    inside = (k < n_columns)[:, None]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + t[None, :] * n_columns + k[:, None], inside & (t < n_tokens)[None, :], other=0.0)
    tl.store(turned + k[:, None] * n_padded + t[None, :], value, inside & (t < n_padded)[None, :])


@triton.jit
def _part(word, PART: tl.constexpr, like):  # type: ignore[no-untyped-def]
    """Number PART of those packed in 64 bits, as float32."""
    if like.dtype.element_ty == tl.float32:
        return (word >> (32 * PART)).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return (word >> (16 * PART)).to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _block(values, steps, firsts, is_there, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks that begin at these places, 0 where they are not there."""
    value = tl.load(values, is_there, other=0.0)
    step = tl.load(steps, tl.min(is_there.to(tl.int32), axis=0, keep_dims=True) > 0 if BITS == 4 else is_there, other=0)
    if BITS == 16:
        first = step
    else:
        first = tl.load(firsts, is_there, other=0)
    return value, step, first


@triton.jit
def _index(  # type: ignore[no-untyped-def]
    x, values, steps, firsts, slices, order, bias, out, n_rows, n_columns, n_tokens, n_words, n_blocks, n_slices,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr,
    A_WORD: tl.constexpr, BITS: tl.constexpr, IS_EVEN: tl.constexpr, LOOKED_AT: tl.constexpr, EARLY: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """A few slices of rows, one after the other; the tokens of one word of 64 bits, or the only one."""
    s = tl.program_id(0) * TURNS
    token_word = tl.program_id(1)
    if IS_EVEN:  # no need to wait for where it lies
        begin = s * n_blocks
        last = tl.minimum(s + TURNS, n_slices) * n_blocks
    else:
        begin = tl.load(slices + s)
        last = tl.load(slices + tl.minimum(s + TURNS, n_slices))
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    SHARE: tl.constexpr = 8 if BITS == 4 else 16
    A_BLOCK: tl.constexpr = ROWS * LANES * DEPTH
    b = tl.arange(0, BLOCKS)[:, None, None, None]
    r = tl.arange(0, ROWS)
    rr = r[None, :, None, None]
    lane = tl.arange(0, LANES)[None, None, :, None]
    d = tl.arange(0, DEPTH)[None, None, None, :]
    values += begin.to(tl.int64) * A_BLOCK + ((b * ROWS + rr) * LANES + lane) * DEPTH + d
    if BITS == 4:
        steps += begin.to(tl.int64) // 2 * A_BLOCK + (rr * LANES + lane) * DEPTH + d
    else:
        steps += begin.to(tl.int64) * A_BLOCK + ((b * ROWS + rr) * LANES + lane) * DEPTH + d
    firsts += begin.to(tl.int64) * (A_BLOCK // SHARE) + ((b * ROWS + rr) * (LANES // SHARE) + lane // SHARE) * DEPTH + d
    next_value, next_step, next_first = _block(values, steps, firsts, begin + b < last, BITS)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    # NaN for a token with a number that is not finite; the input is close by from here on
    lost = tl.zeros((LOOKED_AT,), tl.float32)
    lost_1 = lost
    lost_2 = lost
    lost_3 = lost
    for start in range(0, n_columns, LOOKED_AT):
        column = start + tl.arange(0, LOOKED_AT)
        if A_WORD == 1:
            lost += tl.load(x + column, column < n_columns, other=0.0).to(tl.float32) * 0.0
        else:
            word = tl.load(x + column * n_words + token_word, column < n_columns, other=0)
            lost += _part(word, 0, out) * 0.0
            lost_1 += _part(word, 1, out) * 0.0
            if A_WORD == 4:
                lost_2 += _part(word, 2, out) * 0.0
                lost_3 += _part(word, 3, out) * 0.0
    nan = tl.sum(lost, axis=0)
    nan_1 = tl.sum(lost_1, axis=0)
    nan_2 = tl.sum(lost_2, axis=0)
    nan_3 = tl.sum(lost_3, axis=0)
    for turn in range(s, tl.minimum(s + TURNS, n_slices)):
        row = tl.load(order + turn * ROWS + r)
        if IS_EVEN:
            end = begin + n_blocks
        else:
            end = tl.load(slices + turn + 1)
        total = tl.zeros((ROWS, LANES), tl.float32)
        total_1 = total
        total_2 = total
        total_3 = total
        for block in range(begin, end, BLOCKS):
            value = next_value.to(tl.float32)
            k = next_step.to(tl.uint32)
            if BITS == 8:
                k += next_first.to(tl.uint32)
            elif BITS == 4:  # as many zeros skipped since the first of the group
                k = ((k >> (b * 4).to(tl.uint32)) & 15) + next_first.to(tl.uint32) + (lane % 8).to(tl.uint32)
            values += BLOCKS * A_BLOCK
            steps += BLOCKS * A_BLOCK // (2 if BITS == 4 else 1)
            firsts += BLOCKS * (A_BLOCK // SHARE)
            next_value, next_step, next_first = _block(values, steps, firsts, block + BLOCKS + b < last, BITS)
            if A_WORD == 1:
                place = (x.to(tl.pointer_type(tl.uint8)) + k * SIZE).to(x.dtype)  # 32 bits: half the instructions
                total += tl.sum(tl.sum(value * tl.load(place).to(tl.float32), axis=3), axis=0)
            else:
                word = tl.load(x + k * n_words + token_word)
                total += tl.sum(tl.sum(value * _part(word, 0, out), axis=3), axis=0)
                total_1 += tl.sum(tl.sum(value * _part(word, 1, out), axis=3), axis=0)
                if A_WORD == 4:
                    total_2 += tl.sum(tl.sum(value * _part(word, 2, out), axis=3), axis=0)
                    total_3 += tl.sum(tl.sum(value * _part(word, 3, out), axis=3), axis=0)
        begin = end
        token = token_word * A_WORD
        _finish(total, nan, bias, out, row, token, n_rows, n_tokens, HAS_BIAS)
        if A_WORD > 1:
            _finish(total_1, nan_1, bias, out, row, token + 1, n_rows, n_tokens, HAS_BIAS)
        if A_WORD == 4:
            _finish(total_2, nan_2, bias, out, row, token + 2, n_rows, n_tokens, HAS_BIAS)
            _finish(total_3, nan_3, bias, out, row, token + 3, n_rows, n_tokens, HAS_BIAS)


@triton.jit
def _finish(total, nan, bias, out, row, token, n_rows, n_tokens, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the sums of one token."""
    result = tl.sum(total, axis=1) + nan
    if HAS_BIAS:
        result += tl.load(bias + row, row >= 0, other=0.0).to(tl.float32)
    tl.store(out + token * n_rows + row, result.to(out.dtype.element_ty), (row >= 0) & (token < n_tokens))
