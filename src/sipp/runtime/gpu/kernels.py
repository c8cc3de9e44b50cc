"""The Triton kernel for a linear layer on few tokens: only the kept weights are read.

A weight is packed as walks (`layouts.py`): each thread goes along a row from kept weight to kept weight. A program
computes the rows of a slice for one token; those of other tokens find the weights in the second-level cache. It first
starts loading its first blocks of weights; meanwhile it checks the input and copies it into shared memory, where each
weight looks up its value. Each block that was used is replaced by a later one. A dense layer would multiply zeros with
infinities and give NaN, so a token with a value that is not finite gets NaN in all rows. Sums are float32.

On Hopper GPUs and newer, a kernel starts before the previous one has finished (programmatic dependent launch).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sipp.runtime.gpu import assembly
from sipp.runtime.gpu.layouts import WARP, Walks

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton: kernels do not start early
    gdc_launch_dependents = gdc_wait = None

ALIGNED = 16  # divisibility of sizes and addresses that Triton specialises for
STARTS_EARLY = (9, 0)  # compute capability
# exponent bits of a number, all 1 if it is not finite; and the bit that carries into the sign
EXPONENT = {torch.float16: (0x7C00, 0x0400), torch.bfloat16: (0x7F80, 0x0080), torch.float32: (0x7F800000, 0x00800000)}
STORE_4, STORE_16 = tl.constexpr(assembly.STORE_4), tl.constexpr(assembly.STORE_16)
OPERANDS, ANY_BEHIND_BARRIER = tl.constexpr(assembly.OPERANDS), tl.constexpr(assembly.ANY_BEHIND_BARRIER)


class Kept(NamedTuple):
    """A packed weight (`Walks`) as a kernel reads it."""

    weights: Tensor  # in words of 32 bits, like the distances
    distances: Tensor
    starts: Tensor
    n_blocks: Tensor
    order: Tensor
    scales: Tensor | None  # None: 1


class Form(NamedTuple):
    """The key by which kernels are compiled: each form has a kernel of its own."""

    n_rows: int  # of a slice
    n_lanes: int  # threads of a row
    bits: int  # of a value
    mask: int  # the exponent bits of all numbers in a word of the input
    carry: int  # added to those of a number that is not finite, it carries into the sign
    is_early: bool  # whether to start before the previous kernel ends
    ahead: int  # pairs of blocks under way
    four_at_once: bool  # whether to store four words at once
    declare_shared: str  # PTX (`assembly.py`); both are empty if the input is not copied into shared memory
    four_steps: str

    @property
    def n_threads(self) -> int:
        return self.n_rows * self.n_lanes

    @property
    def depth(self) -> int:
        """Weights per thread and block."""
        return 8 if self.bits == 8 else 4


def few_tokens(x: Tensor, weight: Walks, bias: Tensor | None, *, ahead: int) -> Tensor:
    """x (tokens x columns) times the weight's transpose, plus the bias; prefetches up to 4 pairs of blocks."""
    is_nvidia = x.is_cuda and torch.version.hip is None  # for torch, AMD GPUs are cuda too
    early = is_nvidia and gdc_wait is not None and torch.cuda.get_device_capability(x.device) >= STARTS_EARLY
    n_tokens, n_columns = x.shape
    n_rows, n_threads = weight.shape[0], weight.n_rows * weight.n_lanes
    out = torch.empty(n_tokens, n_rows, dtype=x.dtype, device=x.device)
    is_whole = all(n * x.itemsize % 4 == 0 for n in (n_columns, x.storage_offset()))
    words = x.view(-1).view(torch.int32 if is_whole else torch.int16)
    n_input_words = words.numel() // n_tokens
    chunk = n_threads * 16  # bytes of the input per iteration
    n_shared = triton.cdiv(n_input_words * words.itemsize, chunk) * chunk
    in_shared = is_nvidia and is_whole and n_shared <= assembly.MOST_SHARED
    kept = Kept(
        weight.values.view(torch.int32), weight.distances.view(torch.int32), weight.starts, weight.n_blocks,
        weight.order, weight.scales if len(weight.scales) else None,
    )  # fmt: skip
    mask, carry = (_repeated(bits, x.dtype, words.dtype) for bits in EXPONENT[x.dtype])
    form = Form(
        weight.n_rows, weight.n_lanes, weight.values.itemsize * 8, mask, carry, early, ahead,
        # lets Triton give each thread four neighbouring words
        n_input_words % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0,
        assembly.declare_shared(n_shared) if in_shared else "",
        assembly.four_steps(weight.values.dtype, x.dtype) if in_shared else "",
    )  # fmt: skip
    _few_tokens[(len(weight.n_blocks), n_tokens)](
        x, words, kept, bias, out, n_rows, n_input_words, weight.most_blocks, form,
        num_warps=max(1, n_threads // WARP), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def _repeated(bits: int, dtype: torch.dtype, word: torch.dtype) -> int:
    """The bits of a number, repeated for each number in a word."""
    return sum(bits << 8 * dtype.itemsize * i for i in range(word.itemsize // dtype.itemsize))


@triton.jit
def _or(a, b):  # type: ignore[no-untyped-def]
    return a | b


@triton.jit
def _part(word, PART: tl.constexpr, like):  # type: ignore[no-untyped-def]
    """Number PART of those packed in a word, as float32."""
    if like.dtype.element_ty == tl.float32:
        part = (word >> (32 * PART)).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        part = (word >> (16 * PART)).to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    return part


@triton.jit
def _load(values, distances, block, n_blocks, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads two blocks as words: values and distances of each. Zeros past the end."""
    THREADS: tl.constexpr = FORM.n_threads
    DEPTH: tl.constexpr = FORM.depth
    WORDS: tl.constexpr = DEPTH * FORM.bits // 32
    thread = tl.arange(0, THREADS)  # one-dimensional: with two, Triton may put neighbours into different warps
    at = thread[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    if DEPTH == 8:
        distance_at = thread[:, None] * 2 + tl.arange(0, 2)[None, :]
    else:
        distance_at = thread
    there, next_there = block < n_blocks, block + 1 < n_blocks
    values += block * (THREADS * WORDS)
    distances += block * (THREADS * DEPTH // 4)
    value = tl.load(values + at, there, other=0)
    distance = tl.load(distances + distance_at, there, other=0)
    next_value = tl.load(values + THREADS * WORDS + at, next_there, other=0)
    next_distance = tl.load(distances + THREADS * DEPTH // 4 + distance_at, next_there, other=0)
    return value, distance, next_value, next_distance


@triton.jit
def _read_input(words, shared, n_input_words, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies the token into shared memory; the sign of a number in the result marks what is not finite.

    Adding the carry to the bits of an exponent that are all 1 carries into the sign.
    """
    CHUNK: tl.constexpr = FORM.n_threads * 4
    k = tl.arange(0, CHUNK)
    bad = tl.zeros((CHUNK,), words.dtype.element_ty)
    for i in range(0, n_input_words, CHUNK):
        word = tl.load(words + i + k, i + k < n_input_words, other=0)
        bad |= (word & FORM.mask) + FORM.carry
        if FORM.four_steps != "":
            to = shared + (i + k) * 4
            if FORM.four_at_once:
                tl.inline_asm_elementwise(
                    STORE_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [word, to], dtype=tl.int32, is_pure=False, pack=4
                )
            else:
                tl.inline_asm_elementwise(STORE_4, "=r,r,r", [word, to], dtype=tl.int32, is_pure=False, pack=1)
    return bad


@triton.jit
def _signs(word, NUMBER_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sign of any number of this many bits in a word, as its last bit."""
    return (word >> (word.dtype.primitive_bitwidth - 1)) | (word >> (NUMBER_BITS - 1))


@triton.jit
def _four_steps(x, place, step, words, sums, like, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four steps of a walk: adds four weights times their inputs, and returns the new position and sums."""
    v0, v1, v2, v3 = words
    a, b = sums
    if FORM.four_steps != "":
        place, a, b = tl.inline_asm_elementwise(
            FORM.four_steps, OPERANDS, [place, step, v0, v1, v2, v3, a, b],
            dtype=(tl.int32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        if FORM.bits == 8:
            w0, w1, w2, w3 = (v0 << 24) >> 24, (v0 << 16) >> 24, (v0 << 8) >> 24, v0 >> 24
        elif FORM.bits == 16:
            w0, w1, w2, w3 = _part(v0, 0, like), _part(v0, 1, like), _part(v1, 0, like), _part(v1, 1, like)
        else:
            w0, w1, w2, w3 = _part(v0, 0, like), _part(v1, 0, like), _part(v2, 0, like), _part(v3, 0, like)
        place += step & 255
        a += w0.to(tl.float32) * tl.load(x + place).to(tl.float32)
        place += (step >> 8) & 255
        b += w1.to(tl.float32) * tl.load(x + place).to(tl.float32)
        place += (step >> 16) & 255
        a += w2.to(tl.float32) * tl.load(x + place).to(tl.float32)
        place += (step >> 24) & 255
        b += w3.to(tl.float32) * tl.load(x + place).to(tl.float32)
    return place, (a, b)


@triton.jit
def _block(x, place, value, step, sums, like, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """All steps of one block."""
    if FORM.bits == 32:
        even, odd = tl.split(tl.reshape(value, (value.shape[0], 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
    else:
        v0, v1 = tl.split(value)
        v2, v3 = v1, v1
    if FORM.bits == 8:
        step, next_step = tl.split(step)
        place, sums = _four_steps(x, place, step, (v0, v0, v0, v0), sums, like, FORM)
        step, v0 = next_step, v1
    return _four_steps(x, place, step, (v0, v1, v2, v3), sums, like, FORM)


@triton.jit
def _two_blocks(x, like, place, sums, pair, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """All steps of a pair of blocks."""
    value, step, next_value, next_step = pair
    place, sums = _block(x, place, value, step, sums, like, FORM)
    return _block(x, place, next_value, next_step, sums, like, FORM)


@triton.jit
def _rows_of_threads(own_slice, kept, bias, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """For each thread: its row, whether it writes the row's sum, and the row's scale and bias."""
    THREADS: tl.constexpr = FORM.n_threads
    thread = tl.arange(0, THREADS)
    row = tl.load(kept.order + own_slice * FORM.n_rows + thread // FORM.n_lanes)
    writes = (row >= 0) & (thread % FORM.n_lanes == 0)
    scale = tl.full((THREADS,), 1.0, tl.float32)
    if kept.scales is not None:
        scale = tl.load(kept.scales + own_slice * FORM.n_rows + thread // FORM.n_lanes)
    offset = tl.zeros((THREADS,), tl.float32)
    if bias is not None:
        offset = tl.load(bias + row, writes, other=0.0).to(tl.float32)
    return row, writes, scale, offset


@triton.jit(do_not_specialize=["n_rows", "most_blocks"])
def _few_tokens(  # type: ignore[no-untyped-def]
    # the input, the same memory in words, the packed weight (`Kept`), the bias, which may be None, and the result
    x, words, kept, bias, out, n_rows, n_input_words, most_blocks, FORM: tl.constexpr,
):  # fmt: skip
    """One slice of rows times one token."""
    THREADS: tl.constexpr = FORM.n_threads
    NUMBER_BITS: tl.constexpr = out.dtype.element_ty.primitive_bitwidth
    WORD_BITS: tl.constexpr = words.dtype.element_ty.primitive_bitwidth
    AHEAD: tl.constexpr = FORM.ahead
    IN_SHARED: tl.constexpr = FORM.four_steps != ""
    own_slice, token = tl.program_id(0), tl.program_id(1)
    words += token * n_input_words
    x += token * (n_input_words * (WORD_BITS // NUMBER_BITS))

    # 1. Start to load the first blocks of the slice: up to four pairs, each with the values and steps of two blocks.
    A_BLOCK: tl.constexpr = THREADS * FORM.depth  # weights
    begin = own_slice.to(tl.int64) * most_blocks
    values = kept.weights + begin * (A_BLOCK * FORM.bits // 32)
    distances = kept.distances + begin * (A_BLOCK // 4)
    pairs = ()
    for k in tl.static_range(AHEAD):  # what lies behind the slice's own blocks is 0, and not used
        pairs = pairs + (_load(values, distances, 2 * k, most_blocks, FORM),)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)
    n = tl.load(kept.n_blocks + own_slice)
    place = tl.load(kept.starts + own_slice * THREADS + tl.arange(0, THREADS)).to(tl.int32)
    row, writes, scale, offset = _rows_of_threads(own_slice, kept, bias, FORM)

    # 2. Check the input, which the previous kernel may have written, and copy it into shared memory.
    if FORM.is_early:
        gdc_launch_dependents()
        gdc_wait()
    shared = 0
    if IN_SHARED:
        shared = tl.inline_asm_elementwise(
            FORM.declare_shared, "=r,r", [own_slice], dtype=tl.int32, is_pure=False, pack=1
        )
        place = shared + place * (NUMBER_BITS // 8)
    bad = _read_input(words, shared, n_input_words, FORM)
    if IN_SHARED and FORM.four_at_once:  # each thread has four neighbours, so it meets the barrier once
        own = _signs(tl.reduce(tl.reshape(bad, (THREADS, 4)), 1, _or), NUMBER_BITS) & 1
        is_bad = tl.inline_asm_elementwise(ANY_BEHIND_BARRIER, "=r,r", [own], dtype=tl.int32, is_pure=False, pack=1)
    else:
        if IN_SHARED:
            tl.debug_barrier()
        is_bad = _signs(tl.reduce(bad, 0, _or), NUMBER_BITS)

    # 3. Walk along the rows, with two sums that alternate.
    zero = tl.zeros((THREADS,), tl.float32)
    sums = (zero, zero)
    for i in range(0, n, 2 * AHEAD):
        for k in tl.static_range(AHEAD):  # the first pair is replaced by a later one, which goes last
            if k == 0 or i + 2 * k < n:
                place, sums = _two_blocks(x, out, place, sums, pairs[0], FORM)  # type: ignore[misc]
                pairs = pairs[1:] + (_load(values, distances, i + 2 * (AHEAD + k), n, FORM),)  # type: ignore[assignment]  # noqa: RUF005
            else:
                pairs = pairs[1:] + pairs[:1]

    # 4. Add up the sums of each row's threads, and write them; NaN if the last bit of `is_bad` says so.
    of_rows = tl.sum(tl.reshape(sums[0] + sums[1], (FORM.n_rows, FORM.n_lanes)), axis=1)[:, None]
    of_threads = tl.reshape(tl.broadcast_to(of_rows, (FORM.n_rows, FORM.n_lanes)), (THREADS,))
    result = tl.where((is_bad & 1) != 0, float("nan"), of_threads * scale + offset)
    tl.store(out + token * n_rows + row, result.to(out.dtype.element_ty), writes)
