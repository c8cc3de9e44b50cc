"""Sparsifies rows by sampling, or by whichever of sampling and sorting has the smaller bound (T6, T8, T9)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sipp.allocation.largest_scores import best_in_each_row, minimum_of_layers
from sipp.allocation.optimal import AllocationProblem, allocate_within
from sipp.allocation.rows import (
    MAX_DRAWS,
    add_up,
    as_array,
    compiled_rows,
    draws_of_row,
    eps_rand,
    fill_rates,
    kept_after,
    over_rows,
    row_part,
    sampling_constant,
    smallest_of,
    total_of,
)
from sipp.allocation.sparse_rows import DET, RAND, WHOLE, SparseRows, with_restored
from sipp.errors import DataError
from sipp.pruning.sampling import DrawRequest, batches, draw_fixed, draw_rows_until
from sipp.results.numerics import BOUND_DTYPE
from sipp.results.options import Draws
from sipp.results.ranking import Ranking
from sipp.scoring.methods import method_of

EMPTY_ROW_EPS = 1.0  # a row without weights outputs 0 in every quadrant, and |0 - z| = z
_DRAW_SLACK = 1e-9  # N(m) has rounding errors: a whole number (N(1) = 1) must not be floored to the one below


def sampled_rows(
    ranking: Ranking, dense: Sequence[Tensor], problem: AllocationProblem, budget: int, *, seed: int
) -> list[SparseRows]:
    """The rows of all layers at this budget: each has its share (T10), and is sampled or, if hybrid, perhaps sorted.

    With a floor, a row that cannot be drawn from keeps its best weight.
    """
    assert ranking.sensitivities is not None
    generator = torch.Generator().manual_seed(seed)
    least, layer_least = 0, [0] * len(dense)
    undrawable = [torch.zeros(rank_FK.shape, dtype=torch.bool, device="cpu") for rank_FK in ranking.scores]
    if ranking.floor is not None:
        least, layer_least = 1, minimum_of_layers(ranking.scores, budget, ranking.floor)
        best = [_best_of_undrawable_rows(*layer) for layer in zip(ranking.scores, dense)]
        n_rows = sum(int(mask_FK.sum()) for mask_FK in best) + int((problem.caps_R > 0).sum())
        undrawable = best if n_rows <= budget else undrawable  # rows that can be drawn from come first
    n_undrawable = [int(mask_FK.sum()) for mask_FK in undrawable]
    layer_least = [max(0, limit - n) for limit, n in zip(layer_least, n_undrawable)]
    rows = sparsify_layers(
        dense,
        ranking.scores,
        allocate_within(problem, budget - sum(n_undrawable), generator=generator, least=least, layer_least=layer_least),
        is_hybrid=method_of(ranking.options.method).cut == "hybrid",
        draws=ranking.options.draws,
        n_outputs=ranking.sensitivities.n_outputs,
        delta=ranking.options.delta,
        c_constant=ranking.options.constants.c_constant,
        generator=generator,
    )
    layers = zip(rows, undrawable, dense)
    return [with_restored(*layer) if n else layer[0] for n, layer in zip(n_undrawable, layers)]


def _best_of_undrawable_rows(rank_FK: Tensor, weight_FK: Tensor) -> Tensor:
    """The best weight of each row whose weights have no sensitivity, so that none of them can be sampled."""
    can_draw_F = ((rank_FK > 0) & (weight_FK != 0)).any(1)
    return best_in_each_row(rank_FK, weight_FK) & ~can_draw_F[:, None]


def sparsify_layers(
    weights: Sequence[Tensor],
    sensitivities: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    is_hybrid: bool,
    draws: Draws,
    n_outputs: int,
    delta: float,
    c_constant: float,
    generator: torch.Generator,
) -> list[SparseRows]:
    """Sparsifies every row to its number of kept weights: the most sensitive ones unchanged, or a re-weighted sample.

    All rows are sampled (T6), or, `is_hybrid`, those where that has the smaller bound (T9). draws: "until" the row has
    m distinct weights, so the count is exact; or a "fixed" number floor(N(m)), so that the sample is unbiased, T6 holds
    exactly, and the expected number of distinct weights is at most m (T8). Weights that are zero or have no sensitivity
    are never drawn. A row that may keep every weight that can be drawn is kept whole. All layers go through each step
    together, which is faster for small ones. `kept` must have been allocated from the same sensitivities.
    """
    weights = [weight_FK.detach() for weight_FK in weights]
    layers = [_Layer(*map(as_array, (_wide(w), s, m.to(torch.int64)))) for w, s, m in zip(weights, sensitivities, kept)]
    one = torch.ones((), dtype=BOUND_DTYPE, device="cpu")
    scale = float(sampling_constant(one, n_outputs=n_outputs, delta=delta, c_constant=c_constant))
    _choose_strategies(layers, is_hybrid=is_hybrid, is_whole=draws == "fixed", c_constant=c_constant, scale=scale)
    _sample(layers, draws, generator)
    results = []
    for weight_FK, layer in zip(weights, layers):
        # With "until" the number of draws is a result of the draws: a lucky one must not tighten the claim, so no more
        # than N(m) count. Deviates: T6 is proved for a number of draws fixed beforehand; for "until" it is a guide.
        entitled_F = layer.n_draws_F if draws == "fixed" else np.minimum(layer.n_draws_F, layer.expected_F)
        _bound_drawn(layer.strategy_F, layer.total_F, entitled_F, scale, layer.eps_F)
        values_FK = _in_range(layer.values_FK, layer.n_draws_F, weight_FK.dtype)
        others = map(torch.from_numpy, (layer.mask_FK, layer.strategy_F, layer.n_draws_F, layer.eps_F))
        results.append(SparseRows(*(result.to(weight_FK.device) for result in (values_FK, *others))))
    return results


class _Layer:
    """Inputs and results of one layer, as CPU arrays."""

    def __init__(self, weight_FK: np.ndarray, worth_FK: np.ndarray, kept_F: np.ndarray) -> None:
        self.weight_FK, self.worth_FK, self.kept_F = weight_FK, worth_FK, kept_F
        self.values_FK, self.mask_FK = np.zeros_like(weight_FK), np.zeros(weight_FK.shape, dtype=np.bool_)
        self.strategy_F = np.empty(len(weight_FK), dtype=np.int8)
        self.total_F, self.expected_F, self.n_draws_F, self.eps_F = np.zeros((4, len(weight_FK)))


def _choose_strategies(
    layers: list[_Layer], *, is_hybrid: bool, is_whole: bool, c_constant: float, scale: float
) -> None:
    """Chooses each row's strategy (T9) and fills in what is not sampled. `is_whole`: N(m) is rounded down."""
    n_unused = [np.zeros(len(layer.kept_F), dtype=np.int64) for layer in layers]

    def work(i: int, first: int, end: int, scratch: np.ndarray) -> None:
        layer, part = layers[i], slice(first, end)
        given = (layer.weight_FK, layer.worth_FK, layer.kept_F)
        results = (layer.values_FK, layer.mask_FK, layer.strategy_F, layer.total_F, layer.expected_F, layer.eps_F)
        options = (is_hybrid, is_whole, c_constant, scale, scratch, scratch.view(np.int64))
        _choose_row_strategies(*(a[part] for a in given), *options, *(a[part] for a in results), n_unused[i][part])

    over_rows(work, [layer.worth_FK.shape for layer in layers], n_scratch=3)
    for layer, n_unused_F in zip(layers, n_unused):
        if n_unused_F.any():  # a weight of 0 is worth nothing, whatever its score
            layer.worth_FK = np.where(layer.weight_FK != 0, layer.worth_FK, np.zeros_like(layer.worth_FK))


def _sample(layers: list[_Layer], draws: Draws, generator: torch.Generator) -> None:
    """Samples the rows whose strategy is RAND: fills in their values, masks and numbers of draws (T8)."""
    requests = [DrawRequest(x.worth_FK, x.total_F, np.flatnonzero(x.strategy_F == RAND), x.kept_F) for x in layers]
    for batch in batches(requests):
        if draws == "until":
            counts = draw_rows_until([request for _, request in batch], generator)
        else:
            counts = [_fixed_counts(request, layers[i].expected_F, generator) for i, request in batch]
        for (i, request), count_DK in zip(batch, counts):
            layer, given = layers[i], (request.rows_D, request.worth_FK, request.total_F, count_DK)
            _reweigh(*given, layer.weight_FK, layer.values_FK, layer.mask_FK, layer.n_draws_F)


def _fixed_counts(request: DrawRequest, expected_F: np.ndarray, generator: torch.Generator) -> np.ndarray:
    share_DK = request.worth_FK[request.rows_D].astype(np.float64) / request.total_F[request.rows_D, None]
    # The most draws with U(N) <= m: the paper's "at most B weights" holds for what is expected, not for every draw.
    n_draws_D = np.maximum(1.0, np.floor(expected_F[request.rows_D] + _DRAW_SLACK))
    return as_array(draw_fixed(torch.from_numpy(share_DK), torch.from_numpy(n_draws_D), generator))


@compiled_rows
def _bound_drawn(
    strategy_F: np.ndarray, total_F: np.ndarray, n_draws_F: np.ndarray, scale: float, eps_F: np.ndarray
) -> None:
    """eps_rand of T6 for the rows that were drawn."""
    for i in range(strategy_F.shape[0]):
        if strategy_F[i] == RAND:
            eps_F[i] = eps_rand(scale * total_F[i] / n_draws_F[i])


@compiled_rows
def _choose_row_strategies(
    weight_FK: np.ndarray,
    rows_FK: np.ndarray,
    kept_F: np.ndarray,
    is_hybrid: bool,
    is_whole: bool,
    c_constant: float,
    scale: float,
    scratch: np.ndarray,
    scratch_bits: np.ndarray,
    values_FK: np.ndarray,
    mask_FK: np.ndarray,
    strategy_F: np.ndarray,
    total_F: np.ndarray,
    expected_F: np.ndarray,
    eps_F: np.ndarray,
    n_unused_F: np.ndarray,
) -> None:
    """Keeps rows whole, or their most sensitive weights (T5), or marks them RAND if sampling has a smaller bound."""
    worth, rates = scratch[0], scratch[2]
    for i in range(rows_FK.shape[0]):
        m, n_unused = kept_F[i], 0
        for j in range(worth.shape[0]):
            n_unused += int((rows_FK[i, j] > 0.0) & (weight_FK[i, j] == 0.0))
            worth[j] = rows_FK[i, j] if weight_FK[i, j] != 0.0 else 0.0
        total, cap = add_up(worth)
        n_unused_F[i], total_F[i] = n_unused, total
        strategy_F[i] = WHOLE if m >= cap else DET
        if 0 < m < cap:
            if is_hybrid:
                eps_F[i] = c_constant * _keep_largest(scratch, scratch_bits, m, mask_FK[i])
            fill_rates(worth, total, rates)
            # eps = t + sqrt(t (t + 6)) has t = S~ / N = eps^2 / (6 + 2 eps): sampling m weights has a bound of at most
            # eps if N(m) is at least that N, which m >= U(N) tells without N(m)
            enough = scale * total * ((6.0 / eps_F[i] + 2.0) / eps_F[i]) if is_hybrid else 0.0
            enough = math.ceil(enough) if is_whole and enough < MAX_DRAWS else enough
            if enough < math.inf and (not is_hybrid or m >= kept_after(rates, enough)[0]):
                strategy_F[i] = RAND
                expected_F[i] = draws_of_row(rates, np.float64(cap), np.float64(m))
                continue
        elif m == 0 and cap > 0:  # T5 would say C S and T6 nothing; the error is known, so neither is needed
            eps_F[i] = EMPTY_ROW_EPS
        else:  # exactly the weights of positive sensitivity, even where the number to keep leaves more room
            for j in range(worth.shape[0]):
                mask_FK[i, j] = worth[j] > 0
        for j in range(worth.shape[0]):
            values_FK[i, j] = weight_FK[i, j] if mask_FK[i, j] else 0.0


@row_part
def _keep_largest(scratch: np.ndarray, scratch_bits: np.ndarray, m: int, mask_K: np.ndarray) -> float:
    """Masks the m largest of scratch[0] and returns the sum of the others; ties go to the smaller column.

    `scratch_bits` is the same memory read as integers; its second row is overwritten.
    """
    bits, keys = scratch_bits[0], scratch_bits[1]  # numbers >= 0 are in the order of their bits
    for j in range(bits.shape[0]):
        keys[j] = -bits[j]
    edge, room = smallest_of(keys, m)
    for j in range(bits.shape[0]):
        mask_K[j] = keys[j] < edge
    for j in range(bits.shape[0]):
        if room == 0:
            break
        if keys[j] == edge:
            mask_K[j] = True
            room -= 1
    for j in range(bits.shape[0]):
        keys[j] = 0 if mask_K[j] else bits[j]
    return total_of(scratch[1])  # the tail is added up itself, not as a difference of sums


@compiled_rows
def _reweigh(
    rows_D: np.ndarray,
    worth_FK: np.ndarray,
    total_F: np.ndarray,
    count_DK: np.ndarray,
    weight_FK: np.ndarray,
    values_FK: np.ndarray,
    mask_FK: np.ndarray,
    n_draws_F: np.ndarray,
) -> None:
    """Fills in values, masks and numbers of draws of the rows `rows_D`; NaN draws mark a value out of range."""
    for d in range(rows_D.shape[0]):
        i, n_draws, n_outside = rows_D[d], total_of(count_DK[d]), 0
        for j in range(count_DK.shape[1]):
            mask_FK[i, j] = count_DK[d, j] > 0
            factor = count_DK[d, j] / (n_draws * worth_FK[i, j]) * total_F[i]
            values_FK[i, j] = weight_FK[i, j] * factor if count_DK[d, j] > 0 else 0.0
            n_outside += int(not abs(values_FK[i, j]) < math.inf)
        n_draws_F[i] = n_draws if n_outside == 0 else math.nan


def _in_range(values_FK: np.ndarray, n_draws_F: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The values in this dtype; raises if one is out of its range."""
    values = torch.from_numpy(values_FK)
    is_narrowed = values.dtype != dtype
    values = values.to(dtype)
    if np.isnan(n_draws_F).any() or (is_narrowed and not bool(values.isfinite().all())):
        raise DataError(
            f"a re-weighted weight leaves the range of {dtype}: the row's sensitivities differ by too many "
            "orders of magnitude to sample from",
            fix="use method='sipp-det', or a wider dtype",
        )
    return values


def _wide(weight_FK: Tensor) -> Tensor:
    """The weights in a dtype that compiled loops can read."""
    return weight_FK if weight_FK.dtype in (torch.float32, torch.float64) else weight_FK.to(torch.float32)
