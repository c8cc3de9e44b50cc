"""The same seed gives the same bits: cold, warm and half-warm caches, threads, splits; another processor, nearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fresh_process import run_script
from scoring.kernels.many_ways import scores

SCRIPT = Path(__file__).parent / "many_ways.py"
BETWEEN_TARGETS = 1e-6
TARGETS = {
    "no wide vectors, no fused product": {"NUMBA_CPU_NAME": "generic"},
    "AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+popcnt"},
}


def run(*asked: str, **environment: str) -> str:
    """What the script prints in a process of its own."""
    done = run_script(SCRIPT, *asked, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_same_bits_from_any_cache(tmp_path: Path) -> None:
    """One test, because the first process compiles everything, and the others are compared with it."""
    found = json.loads(run("caches", str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path)))
    (cold,) = found["cold"].values()
    assert len(found["warm"]) == 3
    assert all(one == cold for one in found["warm"].values()), "threads, batches or the cache change bits"
    assert found["n"] >= 3


@pytest.mark.parametrize("target", TARGETS)
def test_another_processor_gives_nearly_the_same(target: str, tmp_path: Path) -> None:
    saved = tmp_path / "scores.pt"
    run(str(saved), "max", "mean", NUMBA_CACHE_DIR=str(tmp_path), **TARGETS[target])
    other, here = torch.load(saved), scores("max", "mean")
    assert other.keys() == here.keys()
    assert max(float((other[name] - here[name]).abs().max()) for name in here) <= BETWEEN_TARGETS
    differ = any(not torch.equal(other[name], here[name]) for name in here)
    assert differ is (target != "AVX2")  # only a product that is not fused with its sum rounds otherwise
