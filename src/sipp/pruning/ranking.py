"""A subject and a method in, the score of every prunable weight out, with what statements about it rest on.

Everything that does not depend on the budget: one ranking serves any number of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from sipp.allocation.patterns import pattern_of
from sipp.checking import check_choice, check_flag, check_record, check_seed, check_share
from sipp.errors import OptionError
from sipp.inputs.apart import ASIDE_SHARE, keep_aside
from sipp.inputs.batches import Data, batches_of, count_points, fresh, points_at
from sipp.inputs.layers import warn_of_frozen
from sipp.inputs.pointkeys import draw_keys_of
from sipp.inputs.subject import Subject
from sipp.options import CONFIDENCE, DELTA, Constants, Draws, Floor, Reduce, check_floor
from sipp.progress import progress_bar
from sipp.pruning.blending import Blend
from sipp.pruning.result import Ranking
from sipp.records import Batch, Scores, to_rows
from sipp.scoring.methods import DEFAULT, Method, MethodRow, method_of, score_of
from sipp.scoring.sensitivities import score
from sipp.scoring.theory_points import check_delta, resolve_points
from sipp.scoring.wanda import wanda

N_EXAMPLES = 4  # points on which a graph must repeat the model
N_SAMPLE = 32  # points on which the output of a cut is measured


@dataclass(frozen=True)
class RankOptions:
    """What a ranking depends on beside its subject: the method, and what is to be said of it. Wrong values are refused.

    `reduce` and `floor` left alone are the method's own.
    """

    method: Method = DEFAULT
    delta: float = DELTA
    confidence: float = CONFIDENCE
    draws: Draws = "until"
    reduce: Reduce | None = None
    floor: Floor = "method"
    constants: Constants = Constants()
    pattern: str | None = None

    def __post_init__(self) -> None:
        method_of(self.method)
        check_delta(self.delta)
        check_share("confidence", self.confidence)
        check_choice("draws", self.draws, get_args(Draws))
        if self.reduce is not None:
            check_choice("reduce", self.reduce, get_args(Reduce))
        check_floor(self.floor)
        check_record("constants", self.constants, Constants)
        if self.pattern is not None:
            pattern_of(self.pattern)
            if self.row.is_sampled:
                raise OptionError(
                    f"method={self.method!r} draws weights, and a pattern says which ones there may be",
                    fix="choose a method that ranks, such as sipp-det, or leave out the pattern",
                    option="method",
                )

    @property
    def row(self) -> MethodRow:
        """What is known of the method."""
        return method_of(self.method)

    @property
    def least_share(self) -> float | None:
        """The floor under rows and layers: the one that is asked for, or the method's own."""
        return self.row.floor if self.floor == "method" else None if isinstance(self.floor, str) else float(self.floor)


def rank_subject(subject: Subject, options: RankOptions, *, progress: bool, statements: bool) -> Ranking:
    """The scores of every prunable weight by one method.

    `statements` asks for what only statements need: sensitivities beside the scores of a baseline (T17), and the
    constant measured (T19).
    """
    check_seed(subject.seed)
    check_flag("progress", progress)
    row = options.row
    warn_of_frozen(subject.model, subject.weights)
    if subject.data is None and row.needs_data:
        raise OptionError(
            f"method={row.name!r} needs data: an iterable of batches, a tensor of points or a Dataset", option="method"
        )
    aside: Data | None = None
    if row.is_blend:
        subject, aside = take_aside(subject, options)
    else:
        subject = resolve_points(subject, options.delta, method=row.name, constants=options.constants)
    by_name = None
    if not row.is_scored:
        with progress_bar(f"scoring by {row.name}", None, shown=progress and row.needs_data):
            by_name = score_of(row)(subject)
    unscored = _why_unscored(row, subject.data, statements)
    scores, first = None, None
    if not unscored and subject.data is not None:
        n_points = subject.n_points or count_points(subject.data)
        with progress_bar("scoring", n_points, shown=progress) as advance:
            scores, first = _scored(subject, row, options.reduce or row.reduce, statements, advance)
            scores = chosen_on(scores, aside)
    if by_name is not None:
        ranks = tuple(to_rows(weight, by_name[weight.name]).cpu() for weight in subject.weights)
    else:
        assert scores is not None
        ranks = tuple(layer.sensitivity_FK.cpu() for layer in scores.layers)
    return Ranking(
        model=subject.model,
        weights=subject.weights,
        ranks=ranks,
        scores=scores,
        method=row.name,
        draws=options.draws,
        delta=options.delta,
        confidence=options.confidence,
        constants=options.constants,
        unscored=unscored,
        example=None if first is None else _few(first),
        sample=None if first is None else points_at(first, slice(N_SAMPLE)),
        floor=options.least_share,
        pattern=None if options.pattern is None else pattern_of(options.pattern),
        blend=_blend(subject, scores, aside) if row.is_blend and scores is not None else None,
    )


def chosen_on(scores: Scores, data: Data | None) -> Scores:
    """The scores, with these points as ones that chose the pruning too."""
    if data is None or (isinstance(data, list) and not data) or scores.batch_dependent:
        return scores
    keys = {key for batch in batches_of(data, role="calibration") for key in draw_keys_of(batch)}
    return replace(scores, chose=scores.chose | keys)


def _blend(subject: Subject, scores: Scores, aside: Data | None) -> Blend:
    """What a blend is chosen from; with too few points to keep some aside, it is chosen on those that were scored."""
    sensitivities: dict[Reduce, tuple[Tensor, ...]] = {}
    sensitivities["max"] = tuple(layer.sensitivity_FK.cpu() for layer in scores.layers)
    means = [layer.mean_FK.cpu() for layer in scores.layers if layer.mean_FK is not None]
    if len(means) == len(scores.layers):
        sensitivities["mean"] = tuple(means)
    lengths: tuple[Tensor, ...] | None = None
    if subject.scoring.norm_stats != "batch":
        by_name = wanda(subject)
        lengths = tuple(to_rows(weight, by_name[weight.name]).cpu() for weight in subject.weights)
        if not all(bool(torch.isfinite(score_FK).all()) for score_FK in lengths):
            lengths = None
    chosen: Any = aside or subject.data
    return Blend(sensitivities, list(chosen), bool(aside), subject.scoring.norm_stats, lengths)


def _why_unscored(row: MethodRow, data: Data | None, statements: bool) -> str:
    """Why a method gets no sensitivities; empty if it does."""
    if row.is_scored:
        return ""
    if data is None:
        return f"{row.name} looks at no data: give some, and there is a statement (T17)"
    if not statements:
        return f"{row.name} needs no sensitivities, and none were scored; sipp.assess gives a statement for its masks"
    if row.needs_data and hasattr(data, "__next__"):
        return f"{row.name} has used up the iterator: give a list, a loader or a tensor, and there is a statement (T17)"
    return ""


def _scored(
    subject: Subject, row: MethodRow, reduce: Reduce, splits: bool, advance: Callable[[int], None]
) -> tuple[Scores, Batch]:
    """The scores of a model, and the first batch of points."""
    examples: list[Batch] = []

    def on_batch(batch: Batch) -> None:
        advance(batch.n_points)
        if not examples:
            examples.append(fresh(batch))

    scores = score(subject, reduce=reduce, on_batch=on_batch, splits=splits, with_means=row.is_blend)
    return scores, examples[0]


def _few(batch: Batch) -> Any:
    """The first points of a batch, as a model takes them; all of it where points cannot be cut off."""
    given: Any = batch.kwargs or batch.args
    values = list(given.values()) if isinstance(given, dict) else list(given)
    few = [value[:N_EXAMPLES] if isinstance(value, Tensor) else value for value in values]
    return dict(zip(given, few)) if isinstance(given, dict) else few


def take_aside(subject: Subject, options: RankOptions) -> tuple[Subject, Data]:
    """The subject with the points to score, and those that are kept aside for a sound statement (T18)."""
    is_theory = subject.scoring.n_points == "theory"
    subject = resolve_points(subject, options.delta, method=options.method, constants=options.constants)
    if is_theory and subject.n_points is not None:  # so many are to be left
        subject = subject.with_points(math.ceil(subject.n_points / (1 - ASIDE_SHARE)), subject.data)
    scored, aside = keep_aside(subject.batches())
    return subject.with_points(None, scored), aside


def only_alive(ranking: Ranking, alive: Mapping[str, Tensor]) -> Ranking:
    """The ranking with the scores of pruned weights at 0 and, where scores alone decide, all others above 0.

    Without this, a budget above the number of positive scores would be filled up with pruned weights, in their order;
    and `random` would rank them like any other.
    """
    if not alive:
        return ranking
    ranks = []
    for weight, scores_FK in zip(ranking.weights, ranking.ranks):
        alive_FK = to_rows(weight, alive[weight.name]).to(scores_FK.device)
        # The smallest normal number: it decides ties only, and can only add to a bound (T5), never lower it.
        least = torch.finfo(scores_FK.dtype).tiny if not method_of(ranking.method).is_sampled else 0.0
        ranks.append(torch.where(alive_FK, scores_FK.clamp(min=least), 0.0))
    return replace(ranking, ranks=tuple(ranks), is_thinned=True)
