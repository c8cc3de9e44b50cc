"""The GPU kernels on the CPU: by Triton's interpreter, and compiled as far as the assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: GPU kernels cannot be tested")


def test_the_kernels_by_the_interpreter() -> None:
    """In a process of its own: Triton decides whether to interpret when it is imported."""
    script = Path(__file__).parent / "interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(script), "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_the_kernels_compile_for_a_gpu() -> None:
    """For a Hopper GPU, which takes no GPU: no loop over patches is unrolled, threads meet in one instruction."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sipp.scoring.kernels import gpu

    constants = {"STRETCH": 4096, "ROWS": 128, "CHUNK": gpu.CHUNK, "MOST_SINGLE": gpu.MOST_SINGLE}
    names = ("patches", "transposed", "scales", "reach", "positive", "best")
    pointers = dict(zip(names, ("*fp32", "*fp32", "*fp32", "*fp32", "*i8", "*i32")))
    arguments = gpu._raise_best.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in arguments}
    source = ASTSource(gpu._raise_best, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    text = compiled.asm["ptx"]
    assert "redux.sync.max.s32" in text and "redux.sync.min.s32" in text
    assert text.count("ld.global") < 100
