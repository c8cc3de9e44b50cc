"""A linear layer on few tokens in Triton: weights without zeros are read once, only kept ones cost time.

A program goes through the blocks of a slice: while it multiplies one, the next one or two are on their way.
Each weight picks its input from the cache nearest to the processor, where the look for numbers that are not finite
has put it: a zero would have turned these into NaN, so all sums of such a token do. Sums are float32.

On Hopper GPUs and newer a kernel starts early, before the one in front of it has ended, and reads its
first weights meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sipp.runtime.gpu.layouts import GROUP, LANES, ROWS, Places

LOOKED_AT = 1024  # inputs at a time, for numbers that are not finite
WARP = 32  # threads
STARTS_EARLY = (9, 0)  # compute capability
TURNED = 64  # columns of one program that lays several tokens side by side


def few_tokens(x: Tensor, weight: Places, bias: Tensor | None, *, ahead: int) -> Tensor:
    """x (tokens x columns) times the weight's transpose, plus the bias; 1 or 2 blocks are on their way."""
    early = x.is_cuda and torch.cuda.get_device_capability(x.device) >= STARTS_EARLY
    launch = {"launch_pdl": True} if early else {}
    n_tokens, (n_rows, n_columns) = len(x), weight.shape
    out = torch.empty(n_tokens, n_rows, dtype=x.dtype, device=x.device)
    a_word = 1 if n_tokens == 1 else 8 // x.itemsize  # tokens that a thread reads in one load
    n_words = triton.cdiv(n_tokens, a_word)
    if n_tokens > 1:
        turned = torch.empty(n_columns, n_words * a_word, dtype=x.dtype, device=x.device)
        _turn[(triton.cdiv(n_columns, TURNED),)](
            x, turned, n_tokens, n_columns, n_words * a_word, triton.next_power_of_2(n_words * a_word), TURNED, early,
            **launch,
        )  # fmt: skip
        x = turned.view(torch.int64)
    _few_tokens[(len(weight.slices) - 1, n_words)](
        x, weight.values, weight.steps, weight.firsts, weight.slices, weight.order, out if bias is None else bias, out,
        n_rows, n_columns, n_tokens, n_words, weight.n_even,
        bias is not None, ROWS, LANES, weight.depth, GROUP, a_word, weight.bits, weight.n_even > 0, LOOKED_AT, early,
        ahead, num_warps=ROWS * LANES // WARP, **launch,
    )  # fmt: skip
    return out


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
        part = (word >> (32 * PART)).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        part = (word >> (16 * PART)).to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    return part


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    values, steps, firsts, ahead, end, at, group_at, A_BLOCK: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr
):
    """Block number `ahead`, or zeros where that is past the end."""
    is_there = ahead < end
    value = tl.load(values + ahead * A_BLOCK + at, is_there, other=0.0)
    step = tl.load(steps + ahead * A_BLOCK + at, is_there, other=0)
    if BITS == 16:
        first = step
    else:
        first = tl.load(firsts + ahead * (A_BLOCK // GROUP) + group_at, is_there, other=0)
    return value, step, first


@triton.jit
def _few_tokens(  # type: ignore[no-untyped-def]  # noqa: PLR0912
    x, values, steps, firsts, slices, order, bias, out, n_rows, n_columns, n_tokens, n_words, n_blocks,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    A_WORD: tl.constexpr, BITS: tl.constexpr, IS_EVEN: tl.constexpr, LOOKED_AT: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One slice, for the tokens of one word of 64 bits, or for the only token."""
    s = tl.program_id(0)
    token_word = tl.program_id(1)
    if IS_EVEN:  # no need to wait for where it lies
        begin = s * n_blocks
        end = begin + n_blocks
    else:
        begin = tl.load(slices + s)
        end = tl.load(slices + s + 1)
    r = tl.arange(0, ROWS)
    row = tl.load(order + s * ROWS + r)
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    A_BLOCK: tl.constexpr = ROWS * LANES * DEPTH
    lane = tl.arange(0, LANES)[None, :, None]
    d = tl.arange(0, DEPTH)[None, None, :]
    at = (r[:, None, None] * LANES + lane) * DEPTH + d
    group_at = (r[:, None, None] * (LANES // GROUP) + lane // GROUP) * DEPTH + d
    ahead = begin.to(tl.int64)  # a number, not pointers: Triton may carry these through shared memory
    next_value, next_step, next_first = _block(
        values, steps, firsts, ahead, end, at, group_at, A_BLOCK, GROUP, BITS
    )  # fmt: skip
    if AHEAD == 2:
        ahead += 1
        later_value, later_step, later_first = _block(
            values, steps, firsts, ahead, end, at, group_at, A_BLOCK, GROUP, BITS
        )  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
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
    total = tl.zeros((ROWS, LANES), tl.float32)
    total_1 = total
    total_2 = total
    total_3 = total
    for _ in range(begin, end):
        value = next_value.to(tl.float32)
        k = next_step.to(tl.uint32)
        if BITS == 8:
            k += next_first.to(tl.uint32)
        ahead += 1
        if AHEAD == 2:
            next_value = later_value
            next_step = later_step
            next_first = later_first
            later_value, later_step, later_first = _block(
                values, steps, firsts, ahead, end, at, group_at, A_BLOCK, GROUP, BITS
            )  # fmt: skip
        else:
            next_value, next_step, next_first = _block(
                values, steps, firsts, ahead, end, at, group_at, A_BLOCK, GROUP, BITS
            )  # fmt: skip
        if A_WORD == 1:
            place = (x.to(tl.pointer_type(tl.uint8)) + k * SIZE).to(x.dtype)  # 32 bits: half the instructions
            total += tl.sum(value * tl.load(place).to(tl.float32), axis=2)
        else:
            word = tl.load(x + k * n_words + token_word)
            total += tl.sum(value * _part(word, 0, out), axis=2)
            total_1 += tl.sum(value * _part(word, 1, out), axis=2)
            if A_WORD == 4:
                total_2 += tl.sum(value * _part(word, 2, out), axis=2)
                total_3 += tl.sum(value * _part(word, 3, out), axis=2)
    token = token_word * A_WORD
    _finish(total, lost, bias, out, row, token, n_rows, n_tokens, HAS_BIAS)
    if A_WORD > 1:
        _finish(total_1, lost_1, bias, out, row, token + 1, n_rows, n_tokens, HAS_BIAS)
    if A_WORD == 4:
        _finish(total_2, lost_2, bias, out, row, token + 2, n_rows, n_tokens, HAS_BIAS)
        _finish(total_3, lost_3, bias, out, row, token + 3, n_rows, n_tokens, HAS_BIAS)


@triton.jit
def _finish(total, lost, bias, out, row, token, n_rows, n_tokens, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the sums of one token; `lost` is NaN where a number of its input was not finite."""
    result = tl.sum(total, axis=1) + tl.sum(lost, axis=0)
    if HAS_BIAS:
        result += tl.load(bias + row, row >= 0, other=0.0).to(tl.float32)
    tl.store(out + token * n_rows + row, result.to(out.dtype.element_ty), (row >= 0) & (token < n_tokens))
