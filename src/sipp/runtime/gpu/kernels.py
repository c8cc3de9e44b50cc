"""Triton kernels for a linear layer on few tokens: only the kept weights are read, each once.

A weight is packed as walks (`layouts.py`): each thread goes along a row from kept weight to kept weight. A program
computes the rows of a slice, on one token or on the tokens that fill a word of 64 bits. It first starts loading its
first blocks of weights; meanwhile it checks the input and copies it into shared memory, where each weight looks up its
value. Each block that was used is replaced by a later one. A dense layer would multiply zeros with infinities and give
NaN, so a token with a value that is not finite gets NaN in all rows. Sums are float32.

On Hopper GPUs and newer, a kernel starts before the previous one has finished (programmatic dependent launch).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sipp.runtime.gpu import assembly
from sipp.runtime.gpu.layouts import LEVELS, WARP, Walks

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton: kernels do not start early
    gdc_launch_dependents = gdc_wait = None

SLICES_ABOVE = [f"above_{i}" for i in range(LEVELS)]  # names of arguments, see `Walks.slices_above`
ALIGNED = 16  # divisibility of sizes and addresses that Triton specialises for
STARTS_EARLY = (9, 0)  # compute capability
TURNED = 64  # columns per program that transposes several tokens
# exponent bits of a number, all 1 if it is not finite; and the bit that carries into the sign
EXPONENT = {torch.float16: (0x7C00, 0x0400), torch.bfloat16: (0x7F80, 0x0080), torch.float32: (0x7F800000, 0x00800000)}
STORE_4, STORE_8, STORE_16 = (tl.constexpr(a) for a in (assembly.STORE_4, assembly.STORE_8, assembly.STORE_16))
OPERANDS, ANY_BEHIND_BARRIER = tl.constexpr(assembly.OPERANDS), tl.constexpr(assembly.ANY_BEHIND_BARRIER)


class Kept(NamedTuple):
    """A packed weight (`Walks`) as a kernel reads it."""

    weights: Tensor  # in words of 32 bits, like the distances
    distances: Tensor
    starts: Tensor
    slices: Tensor | None  # None: computed, see `_first_block`
    order: Tensor
    scales: Tensor | None  # None: 1


class Form(NamedTuple):
    """What is known when a kernel is compiled; each form has a kernel of its own."""

    n_rows: int  # of a slice
    n_lanes: int  # threads of a row
    bits: int  # of a value
    tokens: int  # of a word of the input
    mask: int  # the exponent bits of all numbers in a word
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
    launch = {"launch_pdl": True} if early else {}
    n_tokens, dtype, n_rows = len(x), x.dtype, weight.shape[0]
    out = torch.empty(n_tokens, n_rows, dtype=dtype, device=x.device)
    if n_tokens == 1:
        tokens_per_word = n_words = 1  # tokens per word, and words per column
        is_whole = all(n * x.itemsize % 4 == 0 for n in (x.shape[1], x.storage_offset()))
        words = x.view(-1).view(torch.int32 if is_whole else torch.int16)
    else:
        tokens_per_word = 8 // x.itemsize
        n_words = triton.cdiv(n_tokens, tokens_per_word)
        n_padded = n_words * tokens_per_word
        transposed_x = torch.empty(x.shape[1], n_padded, dtype=dtype, device=x.device)
        _transpose[(triton.cdiv(x.shape[1], TURNED),)](
            x, transposed_x, n_tokens, x.shape[1], n_padded, triton.next_power_of_2(n_padded), TURNED, early, **launch,
        )  # fmt: skip
        x = words = transposed_x.view(torch.int64)
    n_input_words, n_threads = words.numel() // n_words, weight.n_rows * weight.n_lanes
    chunk = n_threads * (16 if n_tokens == 1 else 8)  # bytes of the input per iteration
    n_shared = triton.cdiv(n_input_words * words.itemsize, chunk) * chunk
    in_shared = is_nvidia and words.dtype != torch.int16 and tokens_per_word != 2 and n_shared <= assembly.MOST_SHARED
    kept = Kept(
        weight.values.view(torch.int32), weight.distances.view(torch.int32), weight.starts,
        None if weight.slices_above else weight.slices, weight.order, weight.scales if len(weight.scales) else None,
    )  # fmt: skip
    mask, carry = (_repeated(bits, dtype, words.dtype) for bits in EXPONENT[dtype])
    form = Form(
        weight.n_rows, weight.n_lanes, weight.values.itemsize * 8, tokens_per_word, mask, carry, early, ahead,
        # lets Triton give each thread four neighbouring words
        n_input_words % ALIGNED == 0 and x.data_ptr() % ALIGNED == 0,
        assembly.declare_shared(n_shared) if in_shared else "",
        assembly.four_steps(weight.values.dtype, dtype, tokens_per_word) if in_shared else "",
    )  # fmt: skip
    _few_tokens[(len(weight.slices) - 1, n_words)](
        x, words, kept, bias, out, n_rows, n_input_words, n_tokens, n_words,
        weight.min_blocks, *(weight.slices_above or (0,) * LEVELS), form,
        num_warps=max(1, n_threads // WARP), **launch,
    )  # fmt: skip
    return out


def _repeated(bits: int, dtype: torch.dtype, word: torch.dtype) -> int:
    """The bits of a number, repeated for each number in a word."""
    return sum(bits << 8 * dtype.itemsize * i for i in range(word.itemsize // dtype.itemsize))


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]
    x, transposed_x, n_tokens, n_columns, n_padded, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """transposed_x[k, t] = x[t, k], 0 beyond the last token."""
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, TOKENS)
    inside = (k < n_columns)[:, None]
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + t[None, :] * n_columns + k[:, None], inside & (t < n_tokens)[None, :], other=0.0)
    tl.store(transposed_x + k[:, None] * n_padded + t[None, :], value, inside & (t < n_padded)[None, :])


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
def _first_block(own_slice, slices, n_blocks):  # type: ignore[no-untyped-def]
    """The number of a slice's first block; without a table, computed from how many slices have more blocks than others.

    Longer slices come first, so all slices before this one have n_blocks[0], the first n_blocks[1] of them one more,
    and the first n_blocks[2] yet another.
    """
    if slices is None:
        block = own_slice * n_blocks[0]
        block += tl.minimum(own_slice, n_blocks[1]) + tl.minimum(own_slice, n_blocks[2])
        block += tl.minimum(own_slice, n_blocks[3])
        block += tl.minimum(own_slice, n_blocks[4]) + tl.minimum(own_slice, n_blocks[5])
    else:
        block = tl.load(slices + own_slice)
    return block


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
def _read_input(words, shared, n_input_words, n_words, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copies the input of these tokens into shared memory; the sign of a number in the result marks what is not finite.

    Adding the carry to the bits of an exponent that are all 1 carries into the sign.
    """
    CHUNK: tl.constexpr = FORM.n_threads * 4 if FORM.tokens == 1 else FORM.n_threads
    k = tl.arange(0, CHUNK)
    bad = tl.zeros((CHUNK,), words.dtype.element_ty)
    for i in range(0, n_input_words, CHUNK):
        if FORM.tokens == 1:
            word = tl.load(words + i + k, i + k < n_input_words, other=0)
        else:
            word = tl.load(words + (i + k) * n_words, i + k < n_input_words, other=0)
        bad |= (word & FORM.mask) + FORM.carry
        if FORM.four_steps != "":
            to = shared + (i + k) * (4 if FORM.tokens == 1 else 8)
            if FORM.tokens == 1 and FORM.four_at_once:
                tl.inline_asm_elementwise(
                    STORE_16, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [word, to], dtype=tl.int32, is_pure=False, pack=4
                )
            elif FORM.tokens == 1:
                tl.inline_asm_elementwise(STORE_4, "=r,r,r", [word, to], dtype=tl.int32, is_pure=False, pack=1)
            else:
                tl.inline_asm_elementwise(STORE_8, "=r,l,r", [word, to], dtype=tl.int32, is_pure=False, pack=1)
    return bad


@triton.jit
def _signs(word, NUMBER_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sign of any number of this many bits in a word, as its last bit."""
    return (word >> (word.dtype.primitive_bitwidth - 1)) | (word >> (NUMBER_BITS - 1))


@triton.jit
def _accumulate(x, place, weight, n_words, sums, like, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds a weight times its inputs to the sums."""
    a, b, c, d = sums
    if FORM.tokens == 1:
        a += weight * tl.load(x + place).to(tl.float32)
    else:
        word = tl.load(x + place * n_words)
        a += weight * _part(word, 0, like)
        b += weight * _part(word, 1, like)
        if FORM.tokens == 4:
            c += weight * _part(word, 2, like)
            d += weight * _part(word, 3, like)
    return a, b, c, d


@triton.jit
def _four_steps(x, place, step, words, n_words, sums, like, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Four steps of a walk: adds four weights times their inputs, and returns the new position and sums."""
    v0, v1, v2, v3 = words
    if FORM.four_steps != "":
        a, b, c, d = sums
        place, a, b, c, d = tl.inline_asm_elementwise(
            FORM.four_steps, OPERANDS, [place, step, v0, v1, v2, v3, a, b, c, d],
            dtype=(tl.int32, tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        sums = (a, b, c, d)
    else:
        if FORM.bits == 8:
            w0, w1, w2, w3 = (v0 << 24) >> 24, (v0 << 16) >> 24, (v0 << 8) >> 24, v0 >> 24
        elif FORM.bits == 16:
            w0, w1, w2, w3 = _part(v0, 0, like), _part(v0, 1, like), _part(v1, 0, like), _part(v1, 1, like)
        else:
            w0, w1, w2, w3 = _part(v0, 0, like), _part(v1, 0, like), _part(v2, 0, like), _part(v3, 0, like)
        place += step & 255
        sums = _accumulate(x, place, w0.to(tl.float32), n_words, sums, like, FORM)
        place += (step >> 8) & 255
        sums = _accumulate(x, place, w1.to(tl.float32), n_words, sums, like, FORM)
        place += (step >> 16) & 255
        sums = _accumulate(x, place, w2.to(tl.float32), n_words, sums, like, FORM)
        place += (step >> 24) & 255
        sums = _accumulate(x, place, w3.to(tl.float32), n_words, sums, like, FORM)
    return place, sums


@triton.jit
def _block(x, place, value, step, n_words, sums, like, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
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
        place, sums = _four_steps(x, place, step, (v0, v0, v0, v0), n_words, sums, like, FORM)
        step, v0 = next_step, v1
    return _four_steps(x, place, step, (v0, v1, v2, v3), n_words, sums, like, FORM)


@triton.jit
def _two_blocks(x, n_words, like, place, sums, pair, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """All steps of a pair of blocks."""
    value, step, next_value, next_step = pair
    place, sums = _block(x, place, value, step, n_words, sums, like, FORM)
    return _block(x, place, next_value, next_step, n_words, sums, like, FORM)


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


@triton.jit(do_not_specialize=["n_rows", "n_tokens", "min_blocks", *SLICES_ABOVE])
def _few_tokens(  # type: ignore[no-untyped-def]
    # (the order of the numbers matters: neighbours are loaded together, and another order costs 2 to 4 % of 2 us)
    # the input, the same memory in words, and the packed weight (`Kept`)
    x, words, kept,
    # the bias, which may be None, the result, and the sizes
    bias, out, n_rows, n_input_words, n_tokens, n_words,
    # blocks of the shortest slice, and how many slices have more (no tuple: Triton would specialise for its numbers)
    min_blocks, above_0, above_1, above_2, above_3, above_4, FORM: tl.constexpr,
):  # fmt: skip
    """One slice of rows times one token, or times the tokens of one 64-bit word."""
    THREADS: tl.constexpr = FORM.n_threads
    NUMBER_BITS: tl.constexpr = out.dtype.element_ty.primitive_bitwidth
    TOKENS: tl.constexpr = FORM.tokens
    AHEAD: tl.constexpr = FORM.ahead
    IN_SHARED: tl.constexpr = FORM.four_steps != ""
    own_slice, token_word = tl.program_id(0), tl.program_id(1)
    if TOKENS > 1:
        x += token_word
        words += token_word

    # 1. Start to load the first blocks of the slice: up to four pairs, each with the values and steps of two blocks.
    n_blocks = (min_blocks, above_0, above_1, above_2, above_3, above_4)
    begin = _first_block(own_slice, kept.slices, n_blocks)
    n = _first_block(own_slice + 1, kept.slices, n_blocks) - begin
    A_BLOCK: tl.constexpr = THREADS * FORM.depth  # weights
    values = kept.weights + begin.to(tl.int64) * (A_BLOCK * FORM.bits // 32)
    distances = kept.distances + begin.to(tl.int64) * (A_BLOCK // 4)
    pairs = ()
    for k in tl.static_range(AHEAD):
        pairs = pairs + (_load(values, distances, 2 * k, n, FORM),)  # type: ignore[assignment]  # noqa: RUF005 (Triton knows no stars)
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
        place = shared + place * (x.dtype.element_ty.primitive_bitwidth // 8)
    bad = _read_input(words, shared, n_input_words, n_words, FORM)
    if IN_SHARED and TOKENS == 1:
        own = _signs(tl.reduce(tl.reshape(bad, (THREADS, 4)), 1, _or), NUMBER_BITS) & 1
        is_bad = tl.inline_asm_elementwise(ANY_BEHIND_BARRIER, "=r,r", [own], dtype=tl.int32, is_pure=False, pack=1)
    elif IN_SHARED:
        tl.debug_barrier()

    # 3. Walk along the rows. Sums: one for each of up to four tokens; a single token has two, which alternate.
    zero = tl.zeros((THREADS,), tl.float32)
    sums = (zero, zero, zero, zero)
    for i in range(0, n, 2 * AHEAD):
        for k in tl.static_range(AHEAD):  # the first pair is replaced by a later one, which goes last
            if k == 0 or i + 2 * k < n:
                place, sums = _two_blocks(x, n_words, out, place, sums, pairs[0], FORM)  # type: ignore[misc]
                pairs = pairs[1:] + (_load(values, distances, i + 2 * (AHEAD + k), n, FORM),)  # type: ignore[assignment]  # noqa: RUF005
            else:
                pairs = pairs[1:] + pairs[:1]

    # 4. Add up the sums of each row's threads, and write them.
    token = token_word * TOKENS
    to = out + token * n_rows + row
    if TOKENS == 1:
        if not IN_SHARED:
            is_bad = _signs(tl.reduce(bad, 0, _or), NUMBER_BITS)
        _finish(sums[0] + sums[1], is_bad, scale, offset, to, writes, FORM)
    else:
        flags = tl.reduce(bad, 0, _or)
        for t in tl.static_range(TOKENS):  # the signs of the flags mark tokens with bad inputs
            is_bad = flags >> ((t + 1) * NUMBER_BITS - 1)
            _finish(sums[t], is_bad, scale, offset, to + t * n_rows, writes & (t < n_tokens - token), FORM)


@triton.jit
def _finish(total, is_bad, scale, offset, to, writes, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes the sums of one token; NaN if the last bit of `is_bad` marks its input as not finite."""
    THREADS: tl.constexpr = FORM.n_threads
    of_rows = tl.sum(tl.reshape(total, (FORM.n_rows, FORM.n_lanes)), axis=1)[:, None]
    of_threads = tl.reshape(tl.broadcast_to(of_rows, (FORM.n_rows, FORM.n_lanes)), (THREADS,))
    result = tl.where((is_bad & 1) != 0, float("nan"), of_threads * scale + offset)
    tl.store(to, result.to(to.dtype.element_ty), writes)
