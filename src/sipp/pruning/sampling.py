"""Samples weights with replacement (T8), for rows of many layers at once.

A row takes microseconds, so sampling layer by layer would spend most of its time in calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sipp.allocation.rows import MAX_DRAWS, as_array, compiled_rows, decay, over_rows, smallest_of
from sipp.results.numerics import BOUND_DTYPE

_BATCH = 2**22  # weights drawn from at once: bounds memory
_INVERTED_RATE = 10.0
_LARGEST_INVERTED = 100.0  # a count beyond it has a chance below 1e-60: a uniform number so close to 1 is rounding
_LARGEST_RATE = 2.0**52  # above it a Poisson count is its mean: they differ by one part in 2^26


@dataclass(frozen=True)
class DrawRequest:
    """D rows of one layer to sample from: weight i of row `rows_D[d]` is drawn with probability worth / total."""

    worth_FK: np.ndarray  # float32 or float64
    total_F: np.ndarray
    rows_D: np.ndarray
    kept_F: np.ndarray  # int64: 0 < kept < number of positive shares

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows_D), self.worth_FK.shape[1]


def batches(requests: Sequence[DrawRequest]) -> Iterator[list[tuple[int, DrawRequest]]]:
    """Groups of (index, request) with a bounded number of weights each; a request that is too large is split."""
    group: list[tuple[int, DrawRequest]] = []
    room = _BATCH
    for i, request in enumerate(requests):
        n_rows, fan_in = request.shape
        step = max(1, _BATCH // max(1, fan_in))
        for start in range(0, n_rows, step):
            part = DrawRequest(request.worth_FK, request.total_F, request.rows_D[start : start + step], request.kept_F)
            size = math.prod(part.shape)
            if group and size > room:
                yield group
                group, room = [], _BATCH
            group.append((i, part))
            room -= size
    if group:
        yield group


def draw_rows_until(requests: Sequence[DrawRequest], generator: torch.Generator) -> list[np.ndarray]:
    """D x K float64 counts of each request: draws with replacement, made until `kept_F` columns were hit (T8a).

    In continuous time: column j is hit at rate q_j, first at T_j ~ Exp(q_j), and the clock stops at tau, the m-th
    smallest T. Then it was hit 1 + Poisson(q_j (tau - T_j)) times.
    """
    sizes = [math.prod(request.shape) for request in requests]
    uniform = torch.rand(sum(sizes), dtype=BOUND_DTYPE, device=generator.device, generator=generator)
    flat = as_array(uniform.neg_().log1p_())
    counts = [part.reshape(request.shape) for part, request in zip(np.split(flat, np.cumsum(sizes)[:-1]), requests)]
    n_kept = np.concatenate([np.zeros(0, dtype=np.int64), *(request.kept_F[request.rows_D] for request in requests)])
    ends = np.cumsum(n_kept)
    first = np.cumsum([0, *(len(request.rows_D) for request in requests)])
    rates = torch.empty(int(n_kept.sum()), dtype=BOUND_DTYPE, device="cpu")

    def arrive(i: int, begin: int, end: int, scratch: np.ndarray) -> None:
        request, rows = requests[i], slice(first[i] + begin, first[i] + end)
        given = (request.worth_FK, request.total_F, request.rows_D[begin:end], n_kept[rows], ends[rows])
        _first_hits(*given, scratch, counts[i][begin:end], rates.numpy())

    over_rows(arrive, [request.shape for request in requests], n_scratch=2)
    _add_repeats(flat, poisson(rates, generator))
    return counts


def poisson(rates: Tensor, generator: torch.Generator) -> np.ndarray:
    """One Poisson sample per rate, as float64; small rates by inversion, which is faster than torch.poisson."""
    uniform = torch.rand(len(rates), dtype=BOUND_DTYPE, device=generator.device, generator=generator)
    counts = as_array(uniform)

    def invert(_: int, first: int, end: int, __: np.ndarray) -> None:
        _invert_poisson(rates.numpy()[first:end], counts[first:end])

    over_rows(invert, [(len(counts), 1)], n_scratch=0)
    large = (rates > _INVERTED_RATE).nonzero()[:, 0]
    rate = rates[large].to(generator.device)
    drawn = torch.poisson(rate.clamp(max=_LARGEST_RATE), generator=generator)
    counts[large.numpy()] = as_array(torch.where(rate < _LARGEST_RATE, drawn, rate))
    return counts


@compiled_rows
def _invert_poisson(rates: np.ndarray, uniform: np.ndarray) -> None:
    """The least n with P(count <= n) >= u in place of each uniform number u, for rates up to _INVERTED_RATE."""
    for i in range(rates.shape[0]):
        chance = decay(rates[i])[1]
        below, n = chance, 0.0
        if rates[i] <= _INVERTED_RATE:
            while uniform[i] > below and n < _LARGEST_INVERTED:
                n += 1.0
                chance *= rates[i] / n
                below += chance
            uniform[i] = n


@compiled_rows
def _first_hits(
    worth_FK: np.ndarray,
    total_F: np.ndarray,
    rows_D: np.ndarray,
    kept_D: np.ndarray,
    ends_D: np.ndarray,
    scratch: np.ndarray,
    arrival_DK: np.ndarray,
    rates: np.ndarray,
) -> None:
    """The m first columns of each row: 1 in `arrival_DK`, which held log(1 - u) of uniform numbers, 0 for the others.

    `rates` gets q (tau - T) of each of these, T = -log(1 - u) / q; a row's rates end at `ends_D`. Numbers are written
    before it is known whether they count, and then the next ones over them: a branch could not be foreseen.
    """
    times, row_rates = scratch[0], scratch[1]
    for d in range(rows_D.shape[0]):
        worth, total, arrival = worth_FK[rows_D[d]], total_F[rows_D[d]], arrival_DK[d]
        for j in range(worth.shape[0]):
            time = min(abs(arrival[j]) * (total / worth[j]), MAX_DRAWS)
            arrival[j] = time if worth[j] > 0 else math.inf
        keys = arrival.view(np.int64)  # numbers >= 0 are in the order of their bits
        edge, room = smallest_of(keys, kept_D[d])
        at, tau = 0, 0.0
        for j in range(worth.shape[0]):
            is_tied = int(keys[j] == edge) & int(room > 0)
            is_first = int(keys[j] < edge) | is_tied
            room -= is_tied
            times[at] = arrival[j]
            tau = max(tau, arrival[j] if is_first else 0.0)
            arrival[j] = is_first
            at += is_first
        at = 0
        for j in range(worth.shape[0]):
            row_rates[at] = worth[j] / total * (tau - times[at])
            at += int(arrival[j] > 0)
        for i in range(kept_D[d]):
            rates[ends_D[d] - kept_D[d] + i] = row_rates[i]


@compiled_rows
def _add_repeats(count: np.ndarray, again: np.ndarray) -> None:
    """Adds the next number of `again` wherever the count is not 0, without an unpredictable branch."""
    at, last = 0, again.shape[0] - 1
    for j in range(count.shape[0] if last >= 0 else 0):
        is_drawn = int(count[j] > 0)
        more = again[min(at, last)]
        count[j] += more if is_drawn else 0.0
        at += is_drawn


def draw_fixed(share_FK: Tensor, n_draws_F: Tensor, generator: torch.Generator) -> Tensor:
    """F x K float64 counts of `n_draws_F` draws with replacement from `share_FK` (T8b): exact multinomial counts.

    A row is halved again and again; the draws of a part go to its left half with probability left / part (binomial), so
    that there are as many calls as K has binary digits.
    """
    fan_in = share_FK.shape[1]
    n_leaves = 1 << max(0, fan_in - 1).bit_length()
    parts = [torch.nn.functional.pad(share_FK, (0, n_leaves - fan_in))]  # leaves first, the whole row last
    while parts[-1].shape[1] > 1:
        parts.append(parts[-1][:, 0::2] + parts[-1][:, 1::2])
    count = n_draws_F[:, None].to(generator.device)
    for part, halves in zip(parts[:0:-1], parts[-2::-1]):
        chance = torch.where(part > 0, halves[:, 0::2] / part, 0.0).to(generator.device)
        left = torch.binomial(count, chance, generator=generator)
        count = torch.stack([left, count - left], dim=2).flatten(1)
    return count[:, :fan_in].to(share_FK.device)
