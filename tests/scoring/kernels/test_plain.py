"""A processor without vector code: plain loops run, and give the same but for rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fresh_process import run_python
from torch import Tensor, nn

import sipp
from sipp.scoring.kernels import reference
from sipp.scoring.kernels.cpu import plain_loops

ELSEWHERE = """
import logging, platform, sys
platform.machine = lambda: "riscv64"
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
sys.path.insert(0, sys.argv[1])
from scoring.kernels.test_plain import found
import torch
torch.save(found(), sys.argv[2])
from sipp.native.processor import HAS_VECTOR_CODE
assert not HAS_VECTOR_CODE
assert "sipp.scoring.kernels.cpu.kernel" not in sys.modules and "sipp.scoring.kernels.cpu.maxima" not in sys.modules
"""


def found() -> dict[str, Tensor]:
    """Scores and a pruning of a small network, with a point that float32 does not hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 40))
    x = torch.randn(5, 2, 6, 6)
    x[3] *= torch.logspace(-30, 30, 36).view(6, 6)
    scores = {f"{r} {k}": v for r in ("max", "mean") for k, v in sipp.sensitivity(model, x, reduce=r).items()}
    torch.set_num_threads(1)
    scores |= {f"alone {k}": v for k, v in sipp.sensitivity(model, list(x.split(1)), reduce="mean").items()}
    pruned = sipp.prune(model, x, keep=0.4, method="sipp-hybrid", seed=1)
    return scores | {f"kept {k}": mask for k, mask in pruned.masks.items()}


def test_a_processor_without_vector_code(tmp_path: Path) -> None:
    """Plain loops throughout, with one warning: the same scores up to rounding, the same number of weights."""
    saved = tmp_path / "found.pt"
    done = run_python(ELSEWHERE, Path(__file__).parents[2], saved)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("no vector code is written for riscv64 processors") == 1
    n_threads = torch.get_num_threads()
    try:
        here, there = found(), torch.load(saved)
    finally:
        torch.set_num_threads(n_threads)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        if name.startswith("kept"):
            assert int(tensor.sum()) == int(there[name].sum())
        else:
            torch.testing.assert_close(there[name], tensor, rtol=1e-5, atol=1e-30)
    assert torch.equal(there["mean 0.weight"], there["alone 0.weight"])  # whatever stands beside a point


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 5, 70), (1, 17, 40, 9)])
def test_plain_maxima_are_those_of_the_definition(shape: tuple[int, int, int, int]) -> None:
    groups, rows, fan_in, patches = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(groups, fan_in, patches, generator=generator, dtype=torch.float64)
    inverse = torch.rand(2, groups, rows, patches, generator=generator, dtype=torch.float64)
    positive = torch.rand(groups, rows, fan_in, generator=generator) > 0.5
    assert torch.equal(plain_loops.max_times(a, inverse, positive), reference.max_times(a, inverse, positive))
