"""The GPU kernels on the CPU: the portable one by Triton's interpreter, the hand-placed one as far as the assembler."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from types import ModuleType

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: GPU kernels cannot be tested")


def test_the_portable_kernel_by_the_interpreter() -> None:
    """In a process of its own: Triton decides whether to interpret when it is imported."""
    script = Path(__file__).parent / "interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(script), "-o", "addopts=", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.fixture(scope="module")
def tiles() -> ModuleType:
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    return importlib.import_module("sipp.kernels.gpu_tiles")


def test_tiles_fit_the_shape(tiles: ModuleType) -> None:
    assert (tiles.tile_for(256, 2304).n_rows, tiles.tile_for(256, 2304).n_columns) == (64, 64)
    assert tiles.tile_for(1, 9).n_rows == 4  # depthwise
    for tile in tiles.TILES:
        assert tile.lane_rows * tile.lane_columns == 32
        assert tiles.WHOLE_STAGES % tile.n_patches == 0
        shared = 4 * tile.n_stages * tile.n_patches * (tile.n_columns + 2 * tile.n_rows)
        assert shared <= 160 << 10  # bytes of shared memory: an A100 has 163 KB for one program


def test_operands_are_padded_with_what_raises_no_maximum(tiles: ModuleType) -> None:
    padded = tiles._aligned(torch.ones(2, 3, 33, dtype=torch.float16))
    assert padded.dtype == torch.float32 and padded.shape == (2, 3, 64)
    assert bool((padded[..., :33] == 1).all()) and not bool(padded[..., 33:].any())
    whole = torch.ones(2, 3, 64)
    assert tiles._aligned(whole) is whole


def test_two_maxima_become_one_instruction(tiles: ModuleType) -> None:
    """Compiles the smallest tile for a Hopper GPU, which takes no GPU; side by side, the assembler fuses them."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    tile = list(tiles.TILES)[-1]
    names = tiles._max_times.arg_names
    constants = dict(zip(names[-len(astuple(tile)) :], astuple(tile)))
    pointers = {"patches": "*fp32", "inverse": "*fp32", "positive": "*i8", "best": "*i32"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = GluonASTSource(tiles._max_times, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.n_warps})
    text = compiled.asm["ptx"]
    assert text.count("mul.f32") == 2 * tile.n_patches  # a thread with one row and one column: either sign
    assert text.count("max.s32 t,") == tile.n_patches
