"""`prune_to`: finds the sparsest network within a tolerance, by fixed-sequence testing on a holdout (T15).

The levels of keep, dense to sparse, are fixed before the holdout is used. Each is tested in order at the full
confidence. The first failure ends the walk, and the last level that passed is returned. Which levels are tested may be
chosen on the calibration data, which is independent of the holdout. Scores are computed once for all levels. If levels
are repaired, the middle one chooses the blend for all others.

A level passes if its certificate holds. The data is read once for every level, and both networks run on the same
batch, so a loader may shuffle. It must give the same inputs in every pass; random augmentation does not, and then the
certificate is about the inputs of its own pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sipp.certificates import (
    AccuracyClaim,
    DenseOutputs,
    Output,
    OutputClaim,
    check_model,
    claim_of,
    holdout_data,
    refuse_shared,
)
from sipp.errors import DataError, OptionError
from sipp.inputs import AnyData, Data, copy_of, data_of
from sipp.progress import progress_bar
from sipp.pruning import Cut, Ranking, cut, rank
from sipp.repairing import DataSplit, Repaired, split_data
from sipp.results import (
    AnyCertificate,
    Certificate,
    Level,
    Method,
    NormStats,
    Pruned,
    PrunedTo,
    PruneOptions,
    SeenInputs,
    Selector,
    hashing,
    numerics,
    other_names,
)
from sipp.scoring import checked_method, task_of
from sipp.verbs.record import pruned_of, repaired_cut, warn_of_dead_rows

N_LEVELS, SPARSEST = 30, 0.02
N_REPAIRED_LEVELS = 59  # twice as fine: a repair's error grows fast from one level to the next
DENSE_END = 1.5  # exponent: 1 would be evenly spaced, with 0.87 as the first level below 1
# Every level is tested from this many before the sparsest one that passes on the calibration data, which flatters the
# network because it chose the weights.
START_MARGIN = 3


def levels_of(n: int) -> tuple[float, ...]:
    """The values of `keep` that are tested: n, from 1 to 0.02, on a log scale that is finer at the dense end."""
    return tuple(SPARSEST ** ((i / (n - 1)) ** DENSE_END) for i in range(n))


@other_names.explain_unknown_options
@torch.inference_mode(False)
def prune_to(
    model: nn.Module,
    data: AnyData,
    holdout: Any,
    *,
    epsilon: float | None = None,
    max_accuracy_drop: float | None = None,
    share: float | None = None,
    confidence: float = PruneOptions.confidence,
    method: Method = PruneOptions.method,
    seed: int = PruneOptions.seed,
    include: Selector | None = None,
    exclude: Selector | None = None,
    output: Output = None,
    repair: bool = PruneOptions.repair,
    norm_stats: NormStats = PruneOptions.norm_stats,
    progress: bool = True,
) -> PrunedTo:
    """Returns the sparsest network that passed on the holdout, or the dense one if none did.

    The claim is either P(||f^(x) - f(x)|| <= epsilon ||f(x)||) >= 1 - share, or that the accuracy falls by at most
    `max_accuracy_drop`; both with the given confidence. `share` goes with `epsilon` only, and is 0.05 if not given.
    With `repair`, the repaired networks are certified.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> best = sipp.prune_to(net, torch.rand(200, 8), torch.rand(500, 8), epsilon=0.5, method="magnitude")
        >>> best.certificate.verdict, best.keep < 1, best.certificate.epsilon
        ('certified', True, 0.5)
    """
    options = PruneOptions(
        method=method, confidence=confidence, seed=seed, include=include, exclude=exclude,
        repair=repair, norm_stats=norm_stats,
    )  # fmt: skip
    checked_method(options, masks_only="prune_to would have to fit every level again")
    claim = claim_of(epsilon, max_accuracy_drop, share, options.confidence)
    grid = levels_of(N_REPAIRED_LEVELS if options.repair else N_LEVELS)
    check_model("dense", model)
    n_holdout = _count_new_points(data, holdout)
    task = task_of(model, data, include=include, exclude=exclude, seed=seed, norm_stats=norm_stats)
    if claim.n_needed > n_holdout:  # known before anything is scored
        why = f"refused: needs n >= {claim.n_needed}, the holdout has {n_holdout:,} different inputs"
        return _dense_result(task.model, (), why)
    calibration = holdout_data(data, "calibration") if data_of(data).can_be_read_again else None
    if options.repair and calibration is None:
        raise OptionError(
            "repair=True reads the data twice, but it is an iterator", fix="give a list, a loader or a tensor"
        )
    ranking = rank(task, options, progress=progress)
    split = None
    if options.repair and calibration is not None:
        ranking, split = _with_blend_of(ranking, grid[len(grid) // 2]), split_data(calibration)
    networks = _Levels(ranking, claim, output, split, copy_of(ranking.model))
    seen = ranking.seen if calibration is None else SeenInputs(frozenset(calibration.hashes()), is_all=True)
    likely = 0 if calibration is None else _sparsest_likely(networks, calibration, n_holdout, grid, progress)
    path, certificate = _walk(networks, [grid[i] for i in _order(likely, len(grid))], holdout, seen, progress)
    if certificate is None:
        why = f"not certified: keep {path[0].keep:.2%}, the first level tested, does not pass (asked: {claim.words})"
        return _dense_result(ranking.model, path, why)
    pruned = networks.record([level for level in path if level.passed][-1].budget)
    assert certificate.pruned_hash == hashing.of_model(pruned.model)
    warn_of_dead_rows(pruned)
    outcome = f"certified at keep {pruned.keep:.2%}:" if pruned.keep < 1 else "no level below the dense network passes:"
    return PrunedTo(pruned.model, pruned, certificate, path, f"{outcome} {claim.words}")


def _dense_result(model: nn.Module, path: tuple[Level, ...], why: str) -> PrunedTo:
    return PrunedTo(model, None, None, path, f"{why}; the dense network is returned")


def _count_new_points(data: AnyData, holdout: Any) -> int:
    """The number of different holdout inputs; raises if one is a calibration input, or they can be read only once."""
    if not data_of(holdout).can_be_read_again:
        raise DataError(
            "the holdout is an iterator, but it is read for every level", fix="give a list, a loader or a tensor"
        )
    hashes = holdout_data(holdout).hashes()
    if data_of(data).can_be_read_again:  # otherwise the certificate finds them, after all the work
        refuse_shared(hashes, set(holdout_data(data, "calibration").hashes()))
    return len(set(hashes))


@dataclass(frozen=True)
class _Levels:
    """Makes the network of a level (pruned in one copy that all levels share, or repaired) and tests it."""

    ranking: Ranking
    claim: OutputClaim | AccuracyClaim
    output: Output
    split: DataSplit | None  # of the calibration data; None: levels are not repaired
    shared_copy: nn.Module
    # What is remembered from level to level
    dense_outputs: DenseOutputs = field(default_factory=dict)
    repaired: dict[int, tuple[Cut, Repaired]] = field(default_factory=dict)  # by budget

    def test(self, keep: float, data: Data, seen: SeenInputs | None) -> tuple[Level, AnyCertificate]:
        """Tests one level on the data, none of which may be among the `seen` inputs."""
        budget = numerics.budget_of(keep, self.ranking.n_weights)
        found = self.claim.test(
            self.ranking.model, self._network(budget), data, self.output, seen, dense_outputs=self.dense_outputs
        )
        if isinstance(found, Certificate):
            count, limit = found.violations, found.proved_share
        else:
            count = found.n_lost if found.mode == "labels" else found.n_differ
            limit = found.drop_upper
        return Level(keep, budget, count, limit, self.claim.holds(found)), found

    def record(self, budget: int) -> Pruned:
        """The network of a level, as `prune` returns it."""
        if self.split is None:
            return pruned_of(self.ranking, self._cut(budget))
        network_cut, repaired = self._repaired(self.split, budget)
        return pruned_of(self.ranking, network_cut, repaired=repaired)

    def forget_denser_than(self, budget: int) -> None:
        """Frees the networks of levels that are done."""
        for other in [other for other in self.repaired if other > budget]:
            del self.repaired[other]

    def _network(self, budget: int) -> nn.Module:
        """The network of a level; without repair, it is valid until the next call."""
        if self.split is not None:
            return self._repaired(self.split, budget)[0].model
        return self._cut(budget, into=self.shared_copy).model

    def _cut(self, budget: int, into: nn.Module | None = None) -> Cut:
        return cut(self.ranking, budget, seed=self.ranking.options.seed, into=into)

    def _repaired(self, split: DataSplit, budget: int) -> tuple[Cut, Repaired]:
        """The repaired network of a level, which is made once."""
        if budget not in self.repaired:
            first = self._cut(budget)
            self.repaired[budget] = repaired_cut(
                self.ranking, first.masks, split, ["joint"],
                start=first.model, budget=budget, seed=first.seed, choice=first.choice,
            )  # fmt: skip
        return self.repaired[budget]


def _with_blend_of(ranking: Ranking, keep: float) -> Ranking:
    """The ranking with the blend that is best at this level: no other is tried at any level."""
    if ranking.blend is None:
        return ranking
    choice = cut(ranking, numerics.budget_of(keep, ranking.n_weights), seed=ranking.options.seed).choice
    assert choice is not None
    return replace(ranking, blend=replace(ranking.blend, taken=choice.taken))


def _walk(
    levels: _Levels, grid: Sequence[float], holdout: Any, seen: SeenInputs, progress: bool
) -> tuple[tuple[Level, ...], AnyCertificate | None]:
    """The tested levels, and the certificate of the last that passed; None if the first does not.

    Fixed-sequence testing: nothing is tested after the first failure (T15).
    """
    path: list[Level] = []
    certificate: AnyCertificate | None = None
    with progress_bar("walking the levels", len(grid), shown=progress) as advance:
        for keep in grid:
            level, found = levels.test(keep, holdout_data(holdout), seen)
            path.append(level)
            advance(1)
            if not level.passed:
                break
            certificate = found
            levels.forget_denser_than(level.budget)
    return tuple(path), certificate


def _order(likely: int, n_levels: int) -> list[int]:
    """The levels to test, in order: three that are much denser than the likely one, then all from shortly before it.

    If the calibration data promised too much, the last of the denser ones that passes is returned, not the dense
    network.
    """
    first = max(0, likely - START_MARGIN)
    return [*sorted({first * k // 4 for k in (1, 2, 3)} - {first}), *range(first, n_levels)]


def _sparsest_likely(
    levels: _Levels, calibration: Data, n_holdout: int, grid: tuple[float, ...], progress: bool
) -> int:
    """The sparsest level that passes on the calibration data, found by bisection.

    Only the size of the holdout is used, so a bad guess costs sparsity, never validity. No more calibration points are
    counted than the holdout has, because more would prove more than the holdout can.
    """
    data = replace(calibration, n_points=min(n_holdout, len(calibration.hashes())))
    low, high = 0, len(grid)  # level `low` passes, or is the first, which is not tried; level `high` does not pass
    with progress_bar("where to begin", len(grid).bit_length(), shown=progress) as advance:
        while high - low > 1:
            middle = (low + high) // 2
            level, _ = levels.test(grid[middle], data, None)
            low, high = (middle, high) if level.passed else (low, middle)
            advance(1)
    return low
