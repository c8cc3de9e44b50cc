"""The GPU kernels compiled as far as the assembler; `runtime/test_gpu_kernels.py` runs `interpreted.py` too."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: GPU kernels cannot be tested")


def test_the_kernels_compile_for_a_gpu() -> None:
    """For a Hopper GPU, which takes no GPU: no loop over patches is unrolled, threads meet in one instruction."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sipp.scoring.kernels import gpu

    def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], n_warps: int) -> str:
        ones = ("n_groups", "n_rows")
        constants = constants | {name: 1 for name in ones if name in kernel.arg_names}  # as Triton does
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=constants)
        options = {"num_warps": n_warps}
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])

    float_pointers = dict.fromkeys(("patches", "transposed", "reach", "sums", "first", "inverse"), "*fp32")
    pointers = float_pointers | {"totals": "*fp32", "factors": "*fp64", "squares": "*fp64"}
    pointers |= {"signed": "*fp32", "best": "*i32"}
    constants = {"STRETCH": 4096, "ROWS": 128, "CHUNK": gpu.CHUNK, "MOST_SINGLE": gpu.MOST_SINGLE}
    text = compiled(gpu._raise_best, pointers, constants, 1)
    assert "redux.sync.max.s32" in text and "redux.sync.min.s32" in text
    assert text.count("ld.global") < 100
    for is_second, rows_last in ((False, True), (True, False)):
        constants = {"SIGN": 0, "IS_SECOND": is_second, "ROWS_LAST": rows_last, "ROWS": 64, "PATCHES": gpu.PATCHES}
        assert "div.rn.f32" in compiled(gpu._invert, pointers, constants, 4)
    compiled(gpu._reaches, pointers, {"ROWS": 64, "PATCHES": gpu.PATCHES}, 4)
