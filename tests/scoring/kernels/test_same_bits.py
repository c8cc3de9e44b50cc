"""The same seed gives the same bits: cold, warm and half-warm caches, threads, splits; another processor, nearly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fresh_process import run_script
from scoring.kernels.many_ways import scores

from sipp.pruning import rows

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


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 5000, 200_000])
def test_sums_of_rows_do_not_depend_on_threads(n: int, threads: object) -> None:
    """torch splits the sum of one long row among its threads."""
    row = torch.rand(1, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for n_threads in (1, 2, 3):
        threads(n_threads)  # type: ignore[operator]
        found.append(float(rows.row_totals(row)))
    assert found[0] == found[1] == found[2] == pytest.approx(float(row.sum()), rel=1e-13)
    lanes = np.zeros(rows.N_SUMS)
    for j, value in enumerate(row[0].tolist()):
        lanes[j % rows.N_SUMS] += value
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert found[0] == lanes[0]  # the order that is promised
