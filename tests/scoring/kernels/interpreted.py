"""The GPU kernels, interpreted on the CPU. Run by runtime/test_gpu_kernels.py, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import faster_interpreter  # noqa: F401
import pytest
import torch
import triton
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import sipp
from sipp.inputs.data import Batch
from sipp.inputs.layers.conv import conv_uses
from sipp.inputs.patches import Weight, value_range
from sipp.results.options import Reduce
from sipp.scoring import kernels
from sipp.scoring.kernels import gpu, reference
from sipp.scoring.kernels.protocol import Chunk
from sipp.scoring.running import RunningWeight

assert os.environ.get("TRITON_INTERPRET") == "1"


def operands(groups: int, rows: int, fan_in: int, patches: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = (torch.rand(groups, fan_in, patches, generator=generator) - 0.3).clamp(min=0)
    weight = torch.randn(groups, rows, fan_in, generator=generator)
    sums = reference.quadrant_sums(weight, a)
    return a, torch.where(sums > 0, 1 / sums, 0).float(), weight > 0


def max_times(a_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """The (max, x) product alone, of any reciprocals."""
    inverse_GPSR = inverse_SGRP.permute(1, 3, 0, 2).contiguous()
    best_GRK = torch.zeros(positive_GRK.shape)
    return gpu._raised(a_GKP, inverse_GPSR, inverse_GPSR.sum(1), positive_GRK.view(torch.int8), best_GRK)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 5, 7, 33), (3, 2, 2, 70), (1, 18, 3, 65), (1, 140, 1, 140)])
def test_the_product_agrees(shape: tuple[int, int, int, int]) -> None:
    given = operands(*shape)
    torch.testing.assert_close(max_times(*given).double(), reference.max_times(*given), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("shape", "occurs"),
    [
        *(((1, 5, 3, 36), occurs) for occurs in ((True, True), (True, False), (False, True))),
        *((shape, (True, True)) for shape in ((2, 2, 2, 70), (1, 70, 1, 34))),
    ],
)
def test_chunks_agree(shape: tuple[int, int, int, int], occurs: tuple[bool, bool]) -> None:
    groups, rows, fan_in, patches = shape
    generator = torch.Generator().manual_seed(1)
    a, weight = (torch.randn(groups, *sizes, generator=generator) for sizes in ((fan_in, patches), (rows, fan_in)))
    weight = weight.mT.contiguous().mT  # rows last in memory
    a = a if all(occurs) else a.abs() * (a > -0.5) * (1 if occurs[0] else -1)
    factors, before = torch.rand(groups, rows, generator=generator).double(), torch.zeros_like(weight)
    before[:, 0, 0] = 0.8  # known already
    given = Chunk(a, 2, weight, factors, occurs)
    wide = Chunk(a.double(), 2, weight.double(), factors, occurs)
    for one, other in (
        (gpu.max_chunk(given, before.clone()), reference.max_chunk(wide, before)),
        (gpu.sum_chunk(given), reference.sum_chunk(wide)),
    ):
        torch.testing.assert_close(one[0].double(), other[0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one[1], other[1], rtol=1e-5, atol=1e-9)


def images() -> tuple[nn.Module, list[Tensor]]:
    """Layers of one and of both signs, of several groups, of one patch a point, and rows that lie last in memory."""
    torch.manual_seed(3)
    made = [nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, 2, groups=2), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*made), list(torch.randn(5, 1, 5, 5).split(4))


def test_means_agree_with_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "pick", lambda *_: gpu.KERNEL)
    model, batches = images()
    found = sipp.sensitivity(model, batches, reduce="mean")
    expected = sipp.sensitivity(model.double(), [x.double() for x in batches], reduce="mean")
    for name, score in found.items():
        assert float(score.max()) > 0
        torch.testing.assert_close(score, expected[name], rtol=1e-4, atol=1e-6)


_NO_WORK = {torch.ops.aten.empty, torch.ops.aten.lift_fresh, torch.ops.aten._unsafe_view}


class _Launches(TorchDispatchMode):
    """Counts what a GPU would be asked for: torch's operations, but for memory and views, and kernels."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += not (func.is_view or func.overloadpacket in _NO_WORK)
        return func(*args, **(kwargs or {}))

    def counted(self, kernel: Any) -> Any:
        """The kernel as it is called, `kernel[grid](...)`; what the interpreter does for it is not counted."""

        def launch(*given: Any, grid: Any, **options: Any) -> None:
            self.n += 1
            with _disable_current_modes():
                kernel[grid](*given, **options)

        launcher = mock.MagicMock()
        launcher.__getitem__.side_effect = lambda grid: partial(launch, grid=grid)
        return launcher


def n_launches(reduce: Reduce, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many it takes to take in one use of a convolution, once more."""
    model, weight = nn.Conv2d(2, 4, 3), Weight("weight", (), "Conv2d", 4, 18, rows_last=False)
    running, launches = RunningWeight(weight, model.weight, gpu.KERNEL, reduce, 1 << 20), _Launches()
    (use,) = conv_uses(model, (torch.rand(3, 2, 6, 6),), {}, 3)
    batch, values = Batch(0, "", (), {}, None, 3), value_range(use.windows, gpu.KERNEL.extremes)
    with monkeypatch.context() as patch:
        for name in ("_invert", "_reaches", "_raise_best"):
            patch.setattr(gpu, name, launches.counted(getattr(gpu, name)))
        running.add(use, batch, values, 1)
        launches.n = 0
        with launches:
            running.add(use, batch, values, 1)
    return launches.n


def test_a_use_takes_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert n_launches("max", monkeypatch) <= 10
    assert n_launches("mean", monkeypatch) <= 27  # matrix products, and what folds their sums


def test_stretches_of_patches_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SHORTEST_STRETCH", gpu.CHUNK)
    given = operands(1, 3, 1, 3 * gpu.CHUNK + 7)
    torch.testing.assert_close(max_times(*given).double(), reference.max_times(*given), rtol=1e-6, atol=0)


def hard_cases() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    a, inverse, positive = operands(1, 5, 2, 100)
    alone = torch.zeros(1, 2, 100)
    alone[..., 99] = 1e-20
    own_patch = torch.ones_like(inverse)  # each row has its maximum elsewhere
    own_patch[..., range(5), range(3, 28, 5)] = 9.0
    vanishing = torch.full_like(inverse, 1e30)  # the product of the last patch and its reach is no float32 above 0
    vanishing[..., 99] = 1e10
    return {
        "each row by its own patch": (torch.ones_like(a), own_patch, positive),
        "products that vanish in the test": (alone * 1e-10, vanishing, positive),
        "zeros": (torch.zeros_like(a), inverse, positive),
        "no reciprocals": (a, torch.zeros_like(inverse), positive),
        "a sign that never occurs": (a, inverse * torch.tensor([1.0, 0.0]).view(2, 1, 1, 1), positive),
        "ties": (torch.ones_like(a), torch.ones_like(inverse), positive),
        "growing": (a.sort(dim=-1).values, inverse.sort(dim=-1).values, positive),
        "falling": (a.sort(dim=-1, descending=True).values, inverse, positive),
        "tiny and huge": (a * 1e-30, inverse * 1e30, positive),
        "huge and tiny": (a * 1e30, inverse * 1e-30, positive),
        "the last patch alone": (alone, inverse, positive),
        "reciprocals that add up to infinity": (a, torch.full_like(inverse, 1e37), positive),
        "lines of very different scale": (a, inverse * torch.logspace(-30, 30, 5).view(1, 1, 5, 1), positive),
    }


@pytest.mark.parametrize(
    ("case", "n_single"), [*((case, 32) for case in hard_cases()), ("each row by its own patch", 2), ("ties", 2)]
)
def test_skipping_changes_nothing(case: str, n_single: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_SINGLE", n_single)
    monkeypatch.setattr(gpu, "CHUNK", 32)  # the interpreter takes its time
    a, inverse, positive = hard_cases()[case]
    products = a[0, None, :, :] * torch.where(positive[0, ..., None], *inverse[:, 0, :, None, :])  # float32, as there
    assert torch.equal(max_times(a, inverse, positive)[0], products.amax(-1))


def test_skipping_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(1, 3, 1, 300)
    expected = max_times(*given)
    monkeypatch.setattr(gpu, "BAR_SLACK", triton.language.constexpr(20.0))
    assert not torch.equal(max_times(*given), expected)


def test_weights_beyond_the_reach_of_32_bits(tmp_path: Path) -> None:
    """Three rows of 2^30 weights and one more, in files of which only what is written to is ever there."""
    fan_in, n_rows, n_patches = 2**30 + 1, 3, 4
    positive, best = (
        torch.from_file(str(tmp_path / str(dtype)), shared=True, size=n_rows * fan_in, dtype=dtype)
        for dtype in (torch.int8, torch.int32)
    )
    a, inverse = torch.rand(1, 1, n_patches), torch.rand(n_patches, 2, n_rows)
    positive[fan_in] = 1
    totals = torch.full((2, n_rows), float(n_patches))  # every line has the scale 1
    gpu._raise_best[(1, 1, 1)](
        a, inverse, totals, torch.full((n_patches,), 1e9), positive, best, n_rows, fan_in, n_patches,
        STRETCH=32, ROWS=4, CHUNK=32, MOST_SINGLE=2,
    )  # fmt: skip
    signs = torch.tensor([1, 0, 1])  # the second row has a positive weight
    expected = (a.view(-1, 1) * inverse[:, signs, torch.arange(n_rows)]).amax(0)
    assert torch.equal(best[::fan_in].clone().view(torch.float32), expected)
