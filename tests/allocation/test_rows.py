"""The compiled loops behind T7: an exponential and a logarithm of our own, and work spread over threads."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from sipp.allocation import curves, rows
from sipp.allocation.rows import compiled_rows, decay, draws_of_row, fill_rates, kept_after, over_rows
from sipp.native.compiling import stamp_of
from sipp.pruning import sampling
from sipp.scoring.kernels import skipping
from sipp.scoring.kernels.cpu import maxima


def test_a_change_of_a_file_that_is_called_makes_cached_code_stale(tmp_path: Path) -> None:
    """`curves.py` calls loops of `rows.py`, `pruning/` calls both, kernels on the CPU use numbers of the folder above.

    Numba's cache looks at none of these.
    """
    folder, other, kernels = (Path(file.__file__).parent for file in (rows, sampling, skipping))
    stamp, home = stamp_of(folder), folder.parent
    assert curves._double.__qualname__.endswith(f"_{stamp_of(folder, home):x}")
    assert sampling._first_hits.__qualname__.endswith(f"_{stamp_of(other, home, folder):x}")
    assert maxima.scan._function.__qualname__.endswith(f"_{stamp_of(kernels / 'cpu', kernels):x}")
    for path in folder.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert stamp_of(tmp_path) == stamp
    (tmp_path / "rows.py").write_text((tmp_path / "rows.py").read_text() + "# other\n")
    assert stamp_of(tmp_path) != stamp


@compiled_rows
def _each_decay(y: np.ndarray, hit: np.ndarray, left: np.ndarray) -> None:
    for i in range(y.shape[0]):
        hit[i], left[i] = decay(y[i])


def test_decay_is_exact_to_rounding() -> None:
    rng = np.random.default_rng(0)
    halves = np.arange(1, 2000) * (math.log(2.0) / 2)  # where the reduction changes its step
    y = np.concatenate(
        [10.0 ** rng.uniform(-300, 2.84, 50_000), rng.uniform(0, 707, 50_000), rng.random(50_000), halves]
    )
    y = y[y < 707]
    hit, left = np.empty_like(y), np.empty_like(y)
    _each_decay(y, hit, left)
    np.testing.assert_allclose(hit, -np.expm1(-y), rtol=1e-15, atol=0)
    np.testing.assert_allclose(left, np.exp(-y), rtol=1e-15, atol=0)


def test_decay_at_its_ends() -> None:
    y = np.array([0.0, 5e-324, 1e-300, 708.0, 1e4, 1e300, math.inf])
    hit, left = np.empty_like(y), np.empty_like(y)
    _each_decay(y, hit, left)
    assert hit.tolist() == [0.0, 5e-324, 1e-300, 1.0, 1.0, 1.0, 1.0]
    assert left.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_rates_are_exact_to_rounding() -> None:
    rng = np.random.default_rng(1)
    share = np.concatenate([10.0 ** rng.uniform(-320, 0, 20_000), rng.random(20_000), [0.0, 5e-324, 0.3, 1.0]])
    rates = np.empty_like(share)
    fill_rates(share, 1.0, rates)
    np.testing.assert_allclose(rates, -np.log1p(-np.minimum(share, 1 - 2.0**-53)), rtol=2e-15, atol=0)


def test_kept_after_gives_three_exact_sums() -> None:
    rates = np.random.default_rng(2).random(77) ** 5
    for n_draws in (0.0, 1e-9, 0.7, 30.0, 1e9):
        y = rates * n_draws
        exact = [math.fsum(-np.expm1(-y)), math.fsum(y * np.exp(-y)), math.fsum(y * y * np.exp(-y))]
        assert kept_after(rates, n_draws) == pytest.approx(exact, rel=1e-14)


def test_a_plateau_and_a_step_are_solved() -> None:
    """Two weights of a row next to certain, the others so rare that U stands still for many octaves."""
    rates = np.array([1.0, 0.7, *[1e-40] * 5])
    assert draws_of_row(rates, 7.0, 4.5) == pytest.approx(math.log(2.0) / 1e-40, rel=1e-9)
    assert kept_after(rates, draws_of_row(rates, 7.0, 2.0 - 1e-6))[0] == pytest.approx(2.0 - 1e-6, rel=1e-12)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_every_row_is_worked_on_once(n_threads: int) -> None:
    shapes = [(0, 5), (7, 9000), (1, 30_000), (40, 0), (3, 1), (2000, 40)]
    seen = [np.zeros(n_rows, dtype=np.int64) for n_rows, _ in shapes]
    threads_before = torch.get_num_threads()

    def work(layer: int, first: int, end: int, scratch: np.ndarray) -> None:
        assert scratch.shape == (2, shapes[layer][1])
        seen[layer][first:end] += 1

    try:
        torch.set_num_threads(n_threads)
        over_rows(work, shapes, n_scratch=2)
    finally:
        torch.set_num_threads(threads_before)
    assert all((count == 1).all() for (_, fan_in), count in zip(shapes, seen) if fan_in)
