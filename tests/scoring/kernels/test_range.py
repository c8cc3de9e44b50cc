"""Activations and weights over the whole range of float32, within one point: no patch is lost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fresh_process import run_python
from hypothesis import example, given, settings, strategies as st
from oracles.sensitivity import row_sensitivity
from torch import Tensor, nn

import sipp
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.cpu import kernel as cpu, plain_loops
from sipp.scoring.kernels.protocol import KernelFunctions, max_chunk

EXPONENTS = st.integers(-148, 127)  # of float32, subnormal numbers too


def expected(weight_FK: Tensor, x_BPK: Tensor, reduce: str) -> Tensor:
    points = [point.double().numpy() for point in x_BPK]
    rows = [row_sensitivity(w, points, reduce) for w in weight_FK.detach().double().numpy()]
    return torch.stack([torch.from_numpy(row) for row in rows])


def values(exponents: Tensor, seed: int, share_of_zeros: float) -> Tensor:
    """Random numbers of these magnitudes and both signs, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    shape = exponents.shape
    numbers = (1 + torch.rand(shape, generator=generator, dtype=torch.float64)) * torch.exp2(exponents.double())
    signs = torch.where(torch.rand(shape, generator=generator) < 0.4, -1.0, 1.0)
    kept = torch.rand(shape, generator=generator) >= share_of_zeros
    return (numbers.clamp(max=3e38) * signs * kept).float()


def agree(layer: nn.Linear, x: Tensor, reduce: str, kernel: str) -> None:
    got = sipp.sensitivity(layer, [x], reduce=reduce, kernel=kernel)["weight"]
    torch.testing.assert_close(got.double(), expected(layer.weight, x, reduce), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
@settings(max_examples=60, deadline=None)
@given(
    patches=st.lists(EXPONENTS, min_size=1, max_size=5),
    spread=st.sampled_from([0, 3, 40, 120]),
    weights=st.lists(st.integers(-60, 0), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    zeros=st.sampled_from([0.0, 0.5, 0.9]),
)
@example(patches=[100, -60], spread=0, weights=[0] * 4, seed=0, zeros=0.0)  # the second patch is 2^-160 of the first
@example(patches=[-140], spread=0, weights=[0] * 4, seed=0, zeros=0.0)  # its scale, 2^140, is no float32
@example(patches=[127], spread=0, weights=[0] * 4, seed=0, zeros=0.0)
def test_patches_of_any_scale(
    kernel: str, reduce: str, patches: list[int], spread: int, weights: list[int], seed: int, zeros: float
) -> None:
    """Two points; each patch has a scale of its own, each value strays from it."""
    generator = torch.Generator().manual_seed(seed)
    strays = torch.randint(-spread, spread + 1, (2, len(patches), 4), generator=generator)
    exponents = (torch.tensor(patches)[None, :, None] + strays).clamp(-148, 127)
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data = values(torch.tensor(weights).expand(3, 4), seed + 1, 0.2)
    x = values(exponents, seed, zeros)
    if not bool(torch.isfinite(layer(x)).all()):  # the model overflows: another matter
        return
    agree(layer, x, reduce, kernel)


def narrow_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    return torch.stack((weight_GRK.clamp(min=0), (-weight_GRK).clamp(min=0))) @ patches_GKP


def narrow_max(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    return torch.where(positive_GRK, *(patches_GKP[None, :, None] * inverse_SGRP[:, :, :, None]).amax(-1))


NARROW = KernelFunctions(  # as on a GPU: float32, patches are not divided by their sums
    reference.extremes,
    cpu.KERNEL.sum_chunk,
    partial(max_chunk, narrow_sums, narrow_max),
    in_float64=reference.KERNEL,
)


@pytest.mark.parametrize("gap", [20, 90, 110, 125, 140])
def test_a_kernel_that_scales_nothing(gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sipp.scoring.kernels.pick", lambda name, device: NARROW)
    layer = nn.Linear(4, 3, bias=False)
    layer.weight.data = values(torch.tensor([0, -10, -20, -40]).expand(3, 4), 1, 0.0)
    agree(layer, values(torch.tensor([[100], [100 - gap]]).expand(1, 2, 4), 0, 0.0), "max", "auto")


def test_ordinary_points_need_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Tensor:
        raise AssertionError("float64 for an ordinary point")

    kernel = replace(cpu.KERNEL, in_float64=replace(plain_loops.KERNEL, max_chunk=never))
    monkeypatch.setattr("sipp.scoring.kernels.pick", lambda *_: kernel)
    layer = nn.Linear(4, 3, bias=False)
    sipp.sensitivity(layer, [torch.randn(50, 4).exp() * torch.tensor([1.0, 1e-8, 1e8, 0.0])])
    with pytest.raises(AssertionError, match="ordinary"):
        sipp.sensitivity(layer, [torch.tensor([[1e38, 1.0, 1e-30, 1e-8]])])


INTERPRETED = """
import logging, sys, torch, sipp
from torch import nn
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(20, 6)
torch.save(sipp.sensitivity(model, x), sys.argv[1])
for method, draws in (("sipp-hybrid", "until"), ("sipp-rand", "fixed"), ("sipp-rand", "until"), ("sipp-det", "until")):
    pruned = sipp.prune(model, x, keep=0.5, method=method, draws=draws)
    print(method, draws, sum(int((p != 0).sum()) for p in pruned.model.parameters() if p.ndim == 2), "weights")
"""


def test_without_a_compiler(tmp_path: Any) -> None:
    """NUMBA_DISABLE_JIT=1: the definition runs, row loops are plain Python, and it is said once."""
    saved = tmp_path / "scores.pt"
    done = run_python(INTERPRETED, saved, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("NUMBA_DISABLE_JIT") == 1
    assert done.stdout.count("until 23 weights") == 3 and "fixed" in done.stdout  # half of 45
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(20, 6)
    for name, score in sipp.sensitivity(model, x).items():
        torch.testing.assert_close(torch.load(saved)[name], score, rtol=1e-5, atol=0)
