"""PTX for what Triton cannot express in `kernels.py`: the input in shared memory, and four steps of a walk.

A walk is the way of a thread along its row, from kept weight to kept weight (`layouts.py`). A step takes five
instructions: the next position (`dp4a` sums the distances in a word, in bytes), one load, two conversions to float32,
one multiply-add. Triton's own code, which loads from global memory, needs 10 to 15.
"""

from __future__ import annotations

from functools import cache

import torch

MOST_SHARED = 47 * 1024  # bytes that a kernel may declare, out of 48 KB; Triton's sums over warps take some of the rest
# outputs: the position and two sums; inputs: the position, a word of distances, four words of values, the sums
OPERANDS = "=&r,=&f,=&f,r,r,r,r,r,r,f,f"
STORE_4 = "st.shared.b32 [$2], $1; mov.u32 $0, 0;"
STORE_16 = (
    "st.shared.v4.b32 [$8], {$4, $5, $6, $7}; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0; // $9 $10 $11"
)
# a barrier after which all of the input is in shared memory, and whether any thread saw a value that is not finite
ANY_BEHIND_BARRIER = "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; bar.red.or.pred q, 0, p; selp.s32 $0, 1, 0, q; }"


def declare_shared(n_bytes: int) -> str:
    """Declares this much shared memory and returns its address."""
    return f".shared .align 16 .b8 sipp_input[{n_bytes}]; mov.u32 $0, sipp_input; // $1"


@cache
def four_steps(value: torch.dtype, x: torch.dtype) -> str:
    """Four weights of a walk times their inputs, added to two sums in turn."""
    so_far = [sum(x.itemsize << 8 * i for i in range(k + 1)) for k in range(4)]
    lines = [
        "{ .reg .u32 p<4>; .reg .b16 h<4>; .reg .b16 g; .reg .b16 zero; .reg .f32 w<4>; .reg .f32 v;",
        "mov.b16 zero, 0;",
        *(f"dp4a.u32.u32 p{k}, $4, {so_far[k]:#x}, $3;" for k in range(4)),
        *_weights(value),
        *(f"mov.f32 ${1 + i}, ${9 + i};" for i in range(2)),
    ]
    for k in range(4):
        load = f"ld.shared.f32 v, [p{k}];"
        if x != torch.float32:
            load = f"ld.shared.b16 g, [p{k}]; {_as_float('v', 'g', x)}"
        lines.append(f"{load} fma.rn.f32 ${1 + k % 2}, w{k}, v, ${1 + k % 2};")
    return "\n".join([*lines, "mov.u32 $0, p3; }"])


def _as_float(to: str, half: str, dtype: torch.dtype) -> str:
    """Converts a 16-bit number to float32; bf16 is its upper half."""
    return f"cvt.f32.f16 {to}, {half};" if dtype == torch.float16 else f"mov.b32 {to}, {{zero, {half}}};"


def _weights(value: torch.dtype) -> list[str]:
    """Unpacks w0 to w3 from the words $5 to $8, or as many as needed."""
    if value == torch.float32:
        return [f"mov.b32 w{k}, ${5 + k};" for k in range(4)]
    if value == torch.int8:
        bytes_of = "mov.b32 {h0, h2}, $5; shr.s16 h1, h0, 8; shr.s16 h3, h2, 8;"
        return [bytes_of, *(f"cvt.rn.f32.s8 w{k}, h{k};" for k in range(4))]
    words = "mov.b32 {h0, h1}, $5; mov.b32 {h2, h3}, $6;"
    return [words, *(_as_float(f"w{k}", f"h{k}", value) for k in range(4))]
