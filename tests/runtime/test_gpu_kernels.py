"""The GPU runtime on the CPU: layouts, kernels by Triton's interpreter, and compiled as far as the assembler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from runtime import ptx_machine
from torch import Tensor

from sipp.runtime.gpu import assembly
from sipp.runtime.gpu.layouts import MOST_COLUMNS, Walks, as_walks, depth_of, int8_scales


def weight_of(walks: Walks) -> Tensor:
    """The dense weight that walks stand for, step by step as the layout says."""
    made = torch.zeros(walks.shape, dtype=torch.float64)
    depth, threads = depth_of(walks.values.dtype), (walks.n_rows, walks.n_lanes)
    values, distances = (
        laid.view(-1, *threads, depth).permute(0, 3, 1, 2).reshape(-1, *threads)
        for laid in (walks.values.double(), walks.distances.to(torch.int64))
    )
    starts = walks.starts.view(-1, *threads).to(torch.int64)
    for s, n_blocks in enumerate(walks.n_blocks.tolist()):
        begin = s * walks.most_blocks * depth
        assert not values[begin + n_blocks * depth : begin + walks.most_blocks * depth].any()
        place = starts[s].clone()
        for step in range(begin, begin + n_blocks * depth):
            place += distances[step]
            for r in range(walks.n_rows):
                row = int(walks.order[s * walks.n_rows + r])
                scale = float(walks.scales[s * walks.n_rows + r]) if len(walks.scales) else 1.0
                if row < 0:
                    assert not values[step, r].any()
                else:
                    made[row].index_add_(0, place[r], values[step, r] * scale)
    return made


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n_rows=st.integers(1, 10),
    n_columns=st.sampled_from([1, 2, 31, 256, 257, 900]),
    keep=st.sampled_from([0.0, 0.004, 0.1, 0.5, 1.0]),
    n_lanes=st.sampled_from([1, 8, 32]),
    a_slice=st.sampled_from([1, 4]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_the_packed_layout_holds_the_weight(n_rows, n_columns, keep, n_lanes, a_slice, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, n_columns, generator=generator)
    weight = (weight * (torch.rand(weight.shape, generator=generator) < keep)).to(dtype)
    if seed % 3 == 0:
        weight[seed % n_rows] = 1.0
    assert torch.equal(weight_of(as_walks(weight, n_lanes=n_lanes, n_rows=a_slice)), weight.double())


def test_columns_that_only_16_bits_reach() -> None:
    weight = torch.zeros(3, MOST_COLUMNS)
    weight[0, [0, 255, 511, 32767, 32768, 65535]] = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    weight[1, -1] = 7.0
    for n_lanes in (1, 4):
        assert torch.equal(weight_of(as_walks(weight, n_lanes=n_lanes, n_rows=2)), weight.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_levels_are_known_by_their_scales(dtype: torch.dtype) -> None:
    """As `sipp.save(values="int8")` leaves them; others are not, nor are these once a weight has moved."""
    torch.manual_seed(0)
    levels = torch.randint(-127, 128, (5, 300)) * (torch.rand(5, 300) < 0.3)
    levels[:, 0], levels[2] = 127, 0
    weight = (levels * torch.tensor([0.5, 1e-3, 1.0, 3.3, 0.07])[:, None]).to(dtype)
    scales = int8_scales(weight)
    assert scales is not None
    walks = as_walks(weight, n_lanes=8, n_rows=2, scales=scales)
    assert walks.values.dtype == torch.int8
    off_by = (weight_of(walks) - weight.double()).abs()
    assert bool((off_by <= torch.finfo(dtype).eps * weight.double().abs()).all())
    weight[4, 0] *= 1.3
    assert int8_scales(weight) is None and int8_scales(torch.randn(5, 300).to(dtype)) is None


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_four_steps_in_ptx(dtype: torch.dtype, is_int8: bool) -> None:
    """Instruction by instruction: from a start on, over distances up to 255, four weights times their inputs."""
    torch.manual_seed(0)
    x, value = torch.randn(1200).to(dtype), torch.int8 if is_int8 else dtype
    weights = (torch.randn(4) * 50).round().to(value)
    start, distances, sums = 7, torch.tensor([0, 255, 128, 200]), torch.randn(2)
    words = [int(word) & ptx_machine.WORD for word in weights.view(torch.int32)]
    words += [0] * (4 - len(words))
    registers = {"$3": start * x.itemsize, "$4": sum(int(d) << 8 * i for i, d in enumerate(distances))}
    registers |= {f"${5 + i}": word for i, word in enumerate(words)}
    registers |= {f"${9 + i}": ptx_machine.bits_of(float(s)) for i, s in enumerate(sums)}
    shared = x.view(torch.uint8).numpy().tobytes()
    found = ptx_machine.run(assembly.four_steps(value, dtype), registers, shared)
    columns = start + distances.cumsum(0)
    assert found["$0"] == int(columns[-1]) * x.itemsize
    new = [float(ptx_machine.float_of(found[f"${1 + i}"])) for i in range(2)]
    wanted = sums.double().sum() + (weights.double() * x[columns].double()).sum()
    assert sum(new) == pytest.approx(float(wanted), rel=1e-6, abs=1e-5)


triton = pytest.importorskip("triton", reason="Triton is not installed: GPU kernels cannot be tested")


def test_the_kernels_by_the_interpreter() -> None:
    """Those of scoring too, in one process of their own: Triton decides whether to interpret when it is imported."""
    here = Path(__file__).parent
    scripts = (str(here / "gpu_interpreted.py"), str(here.parent / "scoring" / "kernels" / "interpreted.py"))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", *scripts, "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


AHEAD = 2


def _compiled(value: torch.dtype, dtype: torch.dtype, capability: int):
    """The kernel for a GPU of this kind, which takes no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sipp.runtime.gpu import kernels

    number, aligned = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}[dtype], [["tt.divisibility", 16]]
    mask, carry = (kernels._repeated(bits, dtype, torch.int32) for bits in kernels.EXPONENT[dtype])
    form = kernels.Form(
        n_rows=16, n_lanes=16, bits=8 * value.itemsize, mask=mask, carry=carry,
        is_early=capability >= 90, ahead=AHEAD, four_at_once=True,
        declare_shared=assembly.declare_shared(8192), four_steps=assembly.four_steps(value, dtype),
    )  # fmt: skip
    scales = "*fp32" if value == torch.int8 else "constexpr"
    kept = kernels.Kept("*i32", "*i32", "*u16", n_blocks="*i32", order="*i32", scales=scales)
    known = {"x": number, "words": "*i32", "kept": kept, "out": number, "bias": "constexpr", "FORM": "constexpr"}
    names = kernels._few_tokens.arg_names
    signature = {name: known.get(name, "i32") for name in names}
    at = {name: i for i, name in enumerate(names)}
    constants = {(at["bias"],): None, (at["FORM"],): form}
    if value != torch.int8:
        constants[at["kept"], 5] = None
    places = [(at[name],) for name in ("x", "words", "out", "n_input_words")] + [(at["kept"], i) for i in range(6)]
    attributes = {place: aligned for place in places if place not in constants}
    source = ASTSource(kernels._few_tokens, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})


@pytest.mark.parametrize("value", [torch.float16, torch.int8])
def test_the_kernel_compiled_for_hopper(value: torch.dtype) -> None:
    """Neighbouring threads read neighbouring words, several at once; the input lies in shared memory and nothing else;
    few instructions a weight."""
    made = _compiled(value, torch.float16, 90)
    text = made.asm["ptx"]
    assert "griddepcontrol.wait" in text and "ld.shared.b16" in text and made.metadata.shared == 0
    loads = [line for line in text.splitlines() if "ld.global" in line and "@%p" in line]
    assert sum(".v2.b32" in line for line in loads) >= 2 * AHEAD  # of weights
    assert "ld.global.v4.b32" in text and "st.shared.v4.b32" in text  # of the input
    of_warp = re.findall(r"sizePerThread = \[1, 2\], threadsPerWarp = \[(\d+), 1\]", made.asm["ttgir"])
    assert set(of_warp) == {"32"}


def test_the_kernel_compiles_for_ampere() -> None:
    assert "griddepcontrol" not in _compiled(torch.bfloat16, torch.bfloat16, 80).asm["ptx"]
