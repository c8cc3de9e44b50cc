"""The norms of a weight's outputs, by whatever uses and points they come in."""

from __future__ import annotations

import numpy as np
import torch

from sipp.scoring.running_norms import RunningNorms, finish_norms

N = 3
ONES = np.ones(N)


def test_squares_add_up_whatever_parts_they_come_in() -> None:
    squares_QB = torch.rand(5, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    everyone, twice, by_point, mixed = range(4)
    running = [RunningNorms() for _ in range(4)]
    for one in running:
        one.start_batch(N)
    running[everyone].add(2 * squares_QB, ONES, slice(0, N))
    for _ in range(2):
        running[twice].add(squares_QB.clone(), ONES, slice(0, N))
    for b in range(N):  # of points that were scaled by 2^b
        running[by_point].add(2 * 4**b * squares_QB[:, b : b + 1], ONES[:1] * 2**b, slice(b, b + 1))
    running[mixed].add(squares_QB[:, 1:].clone(), ONES[1:], slice(1, N))
    running[mixed].add(squares_QB.clone(), ONES, slice(0, N))
    running[mixed].add(squares_QB[:, :1].clone(), ONES[:1], slice(0, 1))
    running[mixed].add(squares_QB[:, 1:] * 0, ONES[1:], slice(1, N))
    finish_norms(running, torch.ones(N, dtype=torch.float64))
    expected = running[everyone]
    assert expected.output_ratio == float((2 * squares_QB[4]).sqrt().max())
    for one in running:
        assert (one.sign_complexity, one.output_ratio) == (expected.sign_complexity, expected.output_ratio)
        assert one.quadrants is not None and expected.quadrants is not None
        assert torch.equal(one.quadrants[0], expected.quadrants[0])


def test_a_weight_that_met_no_activation_has_norms_of_zero() -> None:
    used, silent, unused = RunningNorms(), RunningNorms(), RunningNorms()
    for one in (used, silent):
        one.start_batch(N)
    used.add(torch.ones(5, N, dtype=torch.float64), ONES, slice(0, N))
    finish_norms([used, silent, unused], torch.ones(N, dtype=torch.float64))
    assert used.output_ratio == 1.0
    for one in (silent, unused):
        assert (one.sign_complexity, one.output_ratio) == (0.0, 0.0)
        assert one.quadrants is not None and not one.quadrants[0].any()
