"""The GPU runtime on the CPU: layouts, kernels by Triton's interpreter, and compiled as far as the assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sipp.runtime.gpu.layouts import DEPTH, GROUP, LANES, ROWS, Places, with_places


def weight_of(places: Places) -> Tensor:
    """The dense weight that places stand for, entry by entry as the layout says."""
    depth, made = places.depth, torch.zeros(places.shape, dtype=places.values.dtype)
    values = places.values.view(-1, ROWS, LANES, depth)
    steps = places.steps.view(-1, ROWS, LANES, depth).to(torch.int64)
    if places.bits == 8:
        firsts = places.firsts.view(-1, ROWS, LANES // GROUP, depth).to(torch.int64)
        steps = steps + firsts.repeat_interleave(GROUP, 2)
    for s in range(len(places.slices) - 1):
        for block in range(int(places.slices[s]), int(places.slices[s + 1])):
            for r in range(ROWS):
                row = int(places.order[s * ROWS + r])
                if row < 0:
                    assert not values[block, r].any()
                else:
                    made[row].index_add_(0, steps[block, r].flatten(), values[block, r].flatten())
    return made


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n_rows=st.integers(1, 10),
    n_columns=st.sampled_from([1, 2, 31, 256, 257, 900]),
    keep=st.sampled_from([0.0, 0.004, 0.1, 0.5, 1.0]),
    bits=st.sampled_from([8, 16]),
    depth=st.sampled_from([2, DEPTH]),
    seed=st.integers(0, 99),
)
def test_places_hold_the_weight(n_rows: int, n_columns: int, keep: float, bits: int, depth: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, n_columns, generator=generator)
    weight = weight * (torch.rand(weight.shape, generator=generator) < keep)
    if seed % 3 == 0:
        weight[seed % n_rows] = 1.0
    places = with_places(weight, bits=bits, depth=depth)
    assert torch.equal(weight_of(places), weight)
    per_slice = places.slices.diff()
    assert places.n_even == (int(per_slice[0]) if bool((per_slice == per_slice[0]).all()) else 0)


def test_columns_that_only_16_bits_reach() -> None:
    weight = torch.zeros(3, 65536)
    weight[0, [0, 32767, 32768, 65535]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for bits in (8, 16):
        assert torch.equal(weight_of(with_places(weight, bits=bits, depth=2)), weight)


def test_bytes_are_counted() -> None:
    """At 90 % zeros: two bytes a value, one a place, an eighth for the first columns, and the gaps."""
    torch.manual_seed(0)
    weight = (torch.randn(64, 4096) * (torch.rand(64, 4096) < 0.1)).half()
    places = with_places(weight, bits=8)
    n_kept = int((weight != 0).sum())
    assert 3.125 * n_kept < places.n_bytes < 1.3 * 3.125 * n_kept


triton = pytest.importorskip("triton", reason="Triton is not installed: GPU kernels cannot be tested")


def test_the_kernels_by_the_interpreter() -> None:
    """In a process of its own: Triton decides whether to interpret when it is imported."""
    script = Path(__file__).parent / "gpu_interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(script), "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def test_the_kernel_compiles_for_a_gpu() -> None:
    """For a Hopper GPU, which takes no GPU: values come 16 bytes a load, and nothing takes the way of shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sipp.runtime.gpu import kernels

    constants = {"ROWS": ROWS, "LANES": LANES, "DEPTH": DEPTH, "GROUP": GROUP, "LOOKED_AT": kernels.LOOKED_AT}
    constants |= {"HAS_BIAS": False, "A_WORD": 1, "BITS": 8, "IS_EVEN": False, "EARLY": True, "AHEAD": 1}
    pointers = {"steps": "*u8", "firsts": "*u16", "slices": "*i32", "order": "*i32"}
    pointers |= dict.fromkeys(("x", "values", "bias", "out"), "*fp16")
    names = kernels._few_tokens.arg_names
    signature = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers}
    source = ASTSource(kernels._few_tokens, signature, constexprs=constants, attrs=aligned)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert "ld.global.v4.b32" in text and "griddepcontrol.wait" in text
    assert text.count("st.shared") < 8  # of the look for what is not finite alone
