"""`prune_to`: finds the sparsest network within a tolerance, by fixed-sequence testing on a holdout (T15).

The levels of keep, dense to sparse, are fixed before the holdout is used. Each is tested in order at the full
confidence. The first failure ends the walk, and the last level that passed is returned. The first level to test may be
chosen on the calibration data, which is independent of the holdout. Scores are computed once for all levels. If levels
are repaired, the first one that is tried chooses the blend for all others.

The data is read once for every level, and both networks run on the same batch, so a loader may shuffle. It must give
the same inputs in every pass; random augmentation does not, and then the certificate is about the inputs of its own
pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from sipp.certificates import (
    Output,
    Tolerance,
    check_model,
    first_failure,
    follows_positions,
    holdout_data,
    measure_outputs,
    refuse_dependent,
    refuse_shared,
    run_model,
    tolerance_of,
    without_padding,
)
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs import OUTPUT_BYTES, AnyData, Batch, Data, copy_of, data_of, point_hashes, scoring_mode
from sipp.progress import estimate_line, progress_bar
from sipp.pruning import Ranking, cut, cut_as_given, cut_rows, prepare_rows, rank, write_rows
from sipp.repairing import DataSplit, Repaired, apply_repairs, split_data
from sipp.results import (
    CONFIDENCE,
    DEFAULT_METHOD,
    BlendChoice,
    Level,
    Loss,
    Method,
    NormStats,
    Pruned,
    PrunedTo,
    PruneOptions,
    RepairChoice,
    Selector,
    check,
    numerics,
    repairs_asked,
)
from sipp.scoring import checked_method, refuse_fitted, task_of
from sipp.verbs.prune import pruned_of, warn_of_dead_rows

N_LEVELS, SPARSEST = 30, 0.02
N_REPAIRED_LEVELS = 59  # twice as fine: a repair's error grows fast from one level to the next
DENSE_END = 1.5  # exponent: 1 would be evenly spaced, with 0.87 as the first level below 1
# The walk starts this many levels before the sparsest one that passes on the calibration data, which flatters the
# network because it chose the weights.
START_MARGIN = 3


def default_levels(n: int = N_LEVELS) -> tuple[float, ...]:
    """The values of `keep` that are tested: n, from 1 to 0.02, on a log scale that is finer at the dense end."""
    return tuple(SPARSEST ** ((i / (n - 1)) ** DENSE_END) for i in range(n))


@check.explain_unknown_options
@torch.inference_mode(False)
def prune_to(
    model: nn.Module,
    data: AnyData,
    holdout: Any,
    *,
    epsilon: float | None = None,
    max_accuracy_drop: float | None = None,
    share: float | None = None,
    confidence: float = CONFIDENCE,
    method: Method = DEFAULT_METHOD,
    levels: Sequence[float] | None = None,
    seed: int = 0,
    include: Selector | None = None,
    exclude: Selector | None = None,
    output: Output = None,
    repair: RepairChoice = False,
    norm_stats: NormStats = "running",
    loss: Loss | None = None,
    progress: bool = True,
) -> PrunedTo:
    """Returns the sparsest network that can be certified on the holdout, or the dense one if none can.

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
        repair=repair, norm_stats=norm_stats, loss=loss,
    )  # fmt: skip
    checked_method(options)
    refuse_fitted(options.method, "prune_to would have to fit every level again")
    tolerance = tolerance_of(epsilon, max_accuracy_drop, share, options.confidence)
    grid = _checked_levels(levels, N_REPAIRED_LEVELS if options.repair else N_LEVELS)
    check_model("dense", model)
    n_holdout = _count_new_points(data, holdout)
    task = task_of(
        model,
        data,
        include=options.include,
        exclude=options.exclude,
        seed=options.seed,
        norm_stats=options.norm_stats,
        loss=options.loss,
    )
    if tolerance.n_needed > n_holdout:  # known before anything is scored
        why = f"refused: needs n >= {tolerance.n_needed}, the holdout has {n_holdout:,} different inputs"
        return _dense_result(task.model, grid, 0, (), why)
    calibration = data if data_of(data).can_be_read_again else None
    ranking = rank(task, options, progress=progress)
    networks = _LevelNetworks(ranking, options, _split(ranking, options, calibration))
    tests = _LevelTests(ranking.model, networks, tolerance, output)
    start = _first_level(tests, calibration, n_holdout, grid, progress)
    tests.check_independence(holdout)
    path, n_passed = _walk(tests, holdout, grid[start:], progress)
    if n_passed == 0:
        why = f"not certified: keep {path[0].keep:.2%}, the first level tested, does not pass; {tolerance.words}"
        return _dense_result(ranking.model, grid, start, path, why)
    pruned = networks.record(path[n_passed - 1].budget)
    warn_of_dead_rows(pruned)
    certificate = tolerance.certificate(
        measure_outputs(
            ranking.model,
            pruned,
            holdout,
            tolerance.measure,
            output,
            calibration,
            drops_padding=tolerance.drops_padding,
            finest=tolerance.finest,
            progress=progress,
        )
    )
    if not tolerance.holds(certificate):  # never return a claim that its own numbers contradict
        why = f"not certified: the certificate contradicts the search; {tolerance.words}"
        return _dense_result(ranking.model, grid, start, path, why)
    outcome = f"certified at keep {pruned.keep:.2%}:" if pruned.keep < 1 else "no level below the dense network passes:"
    return PrunedTo(
        model=pruned.model,
        pruned=pruned,
        certificate=certificate,
        path=path,
        levels=grid,
        start=start,
        verdict=f"{outcome} {tolerance.words}",
    )


# --- checks -------------------------------------------------------------------------------------------------------


def _checked_levels(levels: Sequence[float] | None, n_default: int) -> tuple[float, ...]:
    if levels is None:
        return default_levels(n_default)
    if not isinstance(levels, Sequence) or isinstance(levels, str | bytes):
        raise OptionError(
            f"levels is a {type(levels).__name__}, not a list of values of keep, such as (0.5, 0.25, 0.1)"
        )
    grid = tuple(check.number("levels", level, above=0) for level in levels)
    if not grid or any(keep > 1 for keep in grid) or any(a <= b for a, b in itertools.pairwise(grid)):
        raise OptionError(
            "levels must be values of keep in (0, 1], falling from dense to sparse, such as (0.5, 0.25, 0.1)"
        )
    return grid


def _count_new_points(data: AnyData, holdout: Any) -> int:
    """The number of different holdout points; raises if one is a calibration point, or if it can be read only once."""
    if not data_of(holdout).can_be_read_again:
        raise DataError(
            "the holdout is an iterator, but it is read for every level", fix="give a list, a loader or a tensor"
        )
    hashes = holdout_data(holdout).hashes()
    if data_of(data).can_be_read_again:  # otherwise the certificate finds them, after all the work
        refuse_shared(hashes, set(holdout_data(data, "calibration").hashes()))
    return len(set(hashes))


def _split(ranking: Ranking, options: PruneOptions, calibration: AnyData | None) -> DataSplit | None:
    """The points that levels are repaired on; None without repair."""
    if not options.repair:
        return None
    if calibration is None:
        raise OptionError("repair=True reads the data again", fix="give a list, a loader or a tensor")
    return split_data(ranking.model, calibration)


# --- the network of a level -------------------------------------------------------------------------------------------


class _LevelNetworks:
    """Makes the network of a level: cut into one copy that all levels share, or repaired."""

    def __init__(self, ranking: Ranking, options: PruneOptions, split: DataSplit | None) -> None:
        self.ranking, self.options = ranking, options
        self.prepared = prepare_rows(ranking, many_budgets=True)
        self.shared_copy = copy_of(ranking.model)
        self.split = split  # None: levels are not repaired
        self.repaired: dict[int, tuple[Repaired, BlendChoice | None]] = {}  # by budget

    def network(self, budget: int) -> nn.Module:
        """The network of a level; without repair, it is valid until the next call."""
        if self.split is not None:
            return self._repaired(self.split, budget)[0].model
        rows, _ = cut_rows(self.ranking, self.prepared, budget, seed=self.options.seed)
        write_rows(self.shared_copy, self.ranking, rows)
        return self.shared_copy

    def record(self, budget: int) -> Pruned:
        """The network of a level, as `prune` returns it."""
        seed = self.options.seed
        if self.split is None:
            return pruned_of(self.ranking, cut(self.ranking, budget, seed=seed))
        repaired, choice = self._repaired(self.split, budget)
        network_cut = cut_as_given(
            self.ranking, repaired.model, repaired.masks, seed=seed, budget=budget, choice=choice
        )
        return pruned_of(self.ranking, network_cut, repaired=repaired)

    def forget_denser_than(self, budget: int) -> None:
        """Frees the networks of denser levels, which the walk has passed."""
        self.repaired = {other: level for other, level in self.repaired.items() if other <= budget}

    def _repaired(self, split: DataSplit, budget: int) -> tuple[Repaired, BlendChoice | None]:
        """The repaired network of a level, and which blend it started from."""
        if budget not in self.repaired:
            network_cut = cut(self.ranking, budget, seed=self.options.seed)
            self._fix_blend(network_cut.choice)
            repairs = repairs_asked(self.options.repair)
            repaired = apply_repairs(self.ranking, network_cut.masks, split, repairs, start=network_cut.model)
            self.repaired[budget] = repaired, network_cut.choice
        return self.repaired[budget]

    def _fix_blend(self, choice: BlendChoice | None) -> None:
        """Takes this blend for all later levels."""
        if choice is not None and self.ranking.blend is not None:
            self.ranking = replace(self.ranking, blend=replace(self.ranking.blend, taken=choice.taken))


# --- the test of a level ----------------------------------------------------------------------------------------------


class _LevelTests:
    """Tests levels against the dense network."""

    def __init__(self, dense: nn.Module, networks: _LevelNetworks, tolerance: Tolerance, output: Output) -> None:
        self.dense, self.networks, self.tolerance, self.output = dense, networks, tolerance, output
        self.dense_outputs: dict[tuple[str, ...], Tensor] = {}  # by the hashes of a batch's points
        self.bytes_left = OUTPUT_BYTES
        self.has_positions: bool | None = None if tolerance.drops_padding else False

    def check_independence(self, holdout: Any) -> None:
        """Raises a ModelError if the dense output at a point depends on the rest of the first batch."""
        batch = next(holdout_data(holdout).batches())
        with scoring_mode(self.dense, "running"):
            whole = run_model(self.dense, batch, self.output)
            refuse_dependent("dense", self.dense, batch, self.output, whole)

    def test(self, data: Any, role: str, keep: float, n_counted: int | None = None) -> Level:
        """Tests one level on all points of the data, or on `n_counted` of them."""
        budget = numerics.budget_of(keep, self.networks.ranking.n_weights)
        measured, hashes = self._measured(self.networks.network(budget), holdout_data(data, role))
        self.tolerance.check(measured, role)
        n = len(set(hashes))
        if n_counted is not None and n_counted < n:
            at = numerics.integers(0, n_counted) * len(measured) // n_counted
            measured, hashes = measured[at.to(measured.device)], [hashes[i] for i in at.tolist()]
            n = len(set(hashes))
        return Level(keep, budget, *self.tolerance.test(measured, hashes, n))

    def _measured(self, network: nn.Module, data: Data) -> tuple[Tensor, list[str]]:
        """What the tolerance measures of this network at every point, and the hash of each point."""
        measured, hashes = [], list[str]()
        with scoring_mode(network, "running"), scoring_mode(self.dense, "running"):
            for batch in data.batches():
                of_batch = point_hashes(batch)
                hashes += of_batch
                f, g = self._dense(batch, of_batch), run_model(network, batch, self.output)
                if f.shape != g.shape:
                    raise ModelError(f"dense gives {tuple(f.shape)}, pruned {tuple(g.shape)}", where=batch.where)
                if self.has_positions is None:
                    self.has_positions = follows_positions(self.dense, batch, self.output, f)
                f, g = (without_padding(t, batch, self.has_positions) for t in (f, g))
                measured.append(self.tolerance.measure(f, g, batch))
        return torch.cat(measured), hashes

    def _dense(self, batch: Batch, hashes: list[str]) -> Tensor:
        """The dense output of a batch: the one of an earlier level, if the batch was the same and there was memory."""
        key = tuple(hashes)
        if batch.real_BT is None and key in self.dense_outputs:  # with padding, which hashes leave out, it may differ
            return self.dense_outputs[key]
        f = run_model(self.dense, batch, self.output)
        if f.nbytes <= self.bytes_left:
            self.dense_outputs[key] = f
            self.bytes_left -= f.nbytes
        return f


# --- the walk ---------------------------------------------------------------------------------------------------------


def _first_level(
    tests: _LevelTests, calibration: AnyData | None, n_holdout: int, grid: tuple[float, ...], progress: bool
) -> int:
    """The level to start from: a few before the sparsest that passes on the calibration data, found by bisection.

    Only the size of the holdout is used, so a bad start costs sparsity, never validity. No more calibration points are
    counted than the holdout has, because more would prove more than the holdout can. With too few points for a test,
    or none that can be read again, the walk starts at the first level.
    """
    if calibration is None:
        return 0
    low, high = 0, len(grid)  # level `low` passes, or is the first, which is not tried; level `high` does not pass
    n_left = len(grid).bit_length()
    with progress_bar("where to begin", n_left, shown=progress) as advance:
        while high - low > 1:
            began = monotonic()
            middle = (low + high) // 2
            passed = tests.test(calibration, "calibration", grid[middle], n_holdout).passed
            low, high = (middle, high) if passed else (low, middle)
            advance(1)
            n_left -= 1
            if n_left == len(grid).bit_length() - 2:  # the first level also chooses for all others, and takes longer
                n_more = n_left + START_MARGIN
                text = f"prune_to tries about {n_more} more levels"
                estimate_line(text, n_more * (monotonic() - began), shown=progress)
    return max(0, low - START_MARGIN)


def _walk(tests: _LevelTests, holdout: Any, levels: tuple[float, ...], progress: bool) -> tuple[tuple[Level, ...], int]:
    """The levels that were tested, the first failure last, and how many passed."""
    path: list[Level] = []
    with progress_bar("walking the levels", len(levels), shown=progress) as advance:

        def passes() -> Iterator[bool]:
            for keep in levels:
                path.append(tests.test(holdout, "holdout", keep))
                if path[-1].passed:
                    tests.networks.forget_denser_than(path[-1].budget)
                advance(1)
                yield path[-1].passed

        n_passed = first_failure(passes())
    return tuple(path), n_passed


# --- the result -------------------------------------------------------------------------------------------------------


def _dense_result(model: nn.Module, grid: tuple[float, ...], start: int, path: tuple[Level, ...], why: str) -> PrunedTo:
    return PrunedTo(
        model=model,
        pruned=None,
        certificate=None,
        path=path,
        levels=grid,
        start=start,
        verdict=f"{why}; the dense network is returned",
    )
