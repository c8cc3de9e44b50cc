"""A model, data and a method in, the score of every prunable weight out, with what statements about it rest on.

Everything that does not depend on the budget: one ranking serves any number of budgets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from sipp.bounds.chain import chain_obstacle
from sipp.checking import check_choice, check_flag, check_number, check_seed, check_share
from sipp.errors import OptionError
from sipp.inputs.apart import ASIDE_SHARE, keep_aside
from sipp.inputs.batches import Data, batches_of, count_points, fresh
from sipp.inputs.layers import Selector, find_sites, unwrap, warn_of_frozen
from sipp.progress import progress_bar
from sipp.pruning.result import CONFIDENCE, Allocation, Draws, Method, Ranking
from sipp.records import Batch, NormStats, Reduce, Scores, Weight, to_rows
from sipp.scoring import baselines
from sipp.scoring.baselines import Loss
from sipp.scoring.kernels import Kernel
from sipp.scoring.sensitivities import ChunkBytes, score
from sipp.scoring.theory_points import C_CONSTANT, K_CONSTANT, check_delta, resolve_points

N_EXAMPLES = 4  # points on which a graph must repeat the model
ROW_METHODS: dict[str, Literal["det", "rand", "hybrid"]] = {
    "sipp-det": "det",
    "sipp-simple": "det",
    "sipp-rand": "rand",
    "sipp-hybrid": "hybrid",
}


def rank(
    model: nn.Module,
    data: Data | None,
    *,
    method: Method = "sipp-hybrid",
    delta: float = 1e-16,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    draws: Draws = "until",
    allocation: Allocation = "rows",
    reduce: Reduce = "max",
    norm_stats: NormStats = "running",
    n_points: int | Literal["theory"] | None = None,
    include: Selector | None = None,
    exclude: Selector | None = None,
    loss: Loss = F.cross_entropy,
    c_constant: float = C_CONSTANT,
    k_constant: float = K_CONSTANT,
    chunk_bytes: ChunkBytes = "auto",
    kernel: Kernel = "auto",
    progress: bool = False,
    statements: bool = False,
) -> Ranking:
    """The scores of every prunable weight by `method`: all of pruning that does not depend on the budget.

    `statements` asks for what only statements need: sensitivities beside the scores of a baseline (T17), and the
    constant measured (T19).
    """
    _check_options(method, draws, allocation, delta)
    c_constant = check_number("c_constant", c_constant, above=0)
    k_constant = check_number("k_constant", k_constant, above=0)
    check_share("confidence", confidence)
    check_choice("reduce", reduce, get_args(Reduce))
    check_choice("norm_stats", norm_stats, get_args(NormStats))
    check_seed(seed)
    check_flag("progress", progress)
    if not callable(loss):
        raise OptionError(f"loss={loss!r:.60} must be a function of (outputs, labels), such as F.cross_entropy")
    model = unwrap(model)
    weights = weights_of(model, include, exclude)
    warn_of_frozen(model, weights)
    if data is None and method not in ("wt", "random"):
        raise OptionError(f"method={method!r} needs data: an iterable of batches, a tensor of points or a Dataset")
    by_name, n = None, None
    if data is not None:
        n, data = resolve_points(
            model, data, n_points, delta, method=method, k_constant=k_constant, include=include, exclude=exclude
        )
    if method == "wt":
        by_name = baselines.wt(model, include=include, exclude=exclude)
    elif method == "random":
        by_name = baselines.random(model, include=include, exclude=exclude, seed=seed)
    elif method == "snip":
        assert data is not None
        by_name = baselines.snip(
            model, data, loss=loss, include=include, exclude=exclude, norm_stats=norm_stats, n_points=n, seed=seed
        )
    unscored = _why_unscored(method, data, statements)
    scores, obstacle = None, ""
    if data is not None and not unscored:
        with progress_bar("scoring", n or count_points(data), shown=progress) as advance:
            scores, obstacle = _scored(
                model,
                data,
                reduce=reduce,
                norm_stats=norm_stats,
                n_points=n,
                include=include,
                exclude=exclude,
                seed=seed,
                chunk_bytes=chunk_bytes,
                kernel=kernel,
                splits=statements,
                advance=advance,
            )
    if by_name is not None:
        ranks = tuple(to_rows(weight, by_name[weight.name]).cpu() for weight in weights)
    else:
        assert scores is not None
        ranks = tuple(layer.sensitivity_FK.cpu() for layer in scores.layers)
    options = (method, draws, allocation, delta, c_constant, k_constant, confidence)
    return Ranking(model, weights, ranks, scores, *options, obstacle, unscored)


def _why_unscored(method: str, data: Data | None, statements: bool) -> str:
    """Why a method gets no sensitivities; empty if it does."""
    if method in ROW_METHODS:
        return ""
    if data is None:
        return f"{method} looks at no data: give some, and there is a statement (T17)"
    if not statements:
        return f"{method} needs no sensitivities, and none were scored; sipp.assess gives a statement for its masks"
    if method == "snip" and hasattr(data, "__next__"):
        return "snip has used up the iterator: give a list, a loader or a tensor, and there is a statement (T17)"
    return ""


def _scored(
    model: nn.Module,
    data: Data,
    *,
    reduce: Reduce,
    norm_stats: NormStats,
    n_points: int | None,
    include: Selector | None,
    exclude: Selector | None,
    seed: int,
    chunk_bytes: ChunkBytes,
    kernel: Kernel,
    splits: bool,
    advance: Callable[[int], None],
) -> tuple[Scores, str]:
    """The scores of a model, and why T12 does not bind it (whether it is a chain is read on a few of the points)."""
    examples: list[Batch] = []

    def on_batch(batch: Batch) -> None:
        advance(batch.n_points)
        if not examples:
            examples.append(fresh(batch))

    scores = score(
        model,
        find_sites(model, include=include, exclude=exclude),
        data,
        reduce=reduce,
        norm_stats=norm_stats,
        n_points=n_points,
        seed=seed,
        chunk_bytes=chunk_bytes,
        kernel=kernel,
        on_batch=on_batch,
        splits=splits,
    )
    return scores, chain_obstacle(model, {layer.weight.name for layer in scores.layers}, _few(examples[0]))


def _few(batch: Batch) -> Any:
    """The first points of a batch, as a model takes them; all of it where points cannot be cut off."""
    given: Any = batch.kwargs or batch.args
    values = list(given.values()) if isinstance(given, dict) else list(given)
    few = [value[:N_EXAMPLES] if isinstance(value, Tensor) else value for value in values]
    return dict(zip(given, few)) if isinstance(given, dict) else few


def holdout_norms(
    ranking: Ranking,
    holdout: Data,
    *,
    include: Selector | None,
    exclude: Selector | None,
    chunk_bytes: ChunkBytes,
    kernel: Kernel,
) -> Scores:
    """The norms of every layer at points that are new to the pruning (T18)."""
    assert ranking.scores is not None
    return score(
        ranking.model,
        find_sites(ranking.model, include=include, exclude=exclude),
        holdout,
        norm_stats=ranking.scores.norm_stats,
        chunk_bytes=chunk_bytes,
        kernel=kernel,
    )


def take_aside(
    model: nn.Module,
    data: Data,
    n_points: int | Literal["theory"] | None,
    delta: float,
    *,
    method: Method,
    k_constant: float,
    include: Selector | None,
    exclude: Selector | None,
    seed: int,
) -> tuple[Data, Data]:
    """The points to score, and those that are kept aside for a sound statement (T18)."""
    n, data = resolve_points(
        unwrap(model), data, n_points, delta, method=method, k_constant=k_constant, include=include, exclude=exclude
    )
    if n_points == "theory" and n is not None:  # so many are to be left
        n = math.ceil(n / (1 - ASIDE_SHARE))
    return keep_aside(batches_of(data, n_points=n, seed=seed))


def weights_of(model: nn.Module, include: Selector | None, exclude: Selector | None) -> tuple[Weight, ...]:
    """The prunable weights that are chosen, in the order of the model's parameters."""
    sites = find_sites(model, include=include, exclude=exclude)
    return tuple({weight.name: weight for site in sites for weight in site.weights.values()}.values())


def _check_options(method: str, draws: str, allocation: str, delta: float) -> None:
    check_choice("method", method, get_args(Method))
    check_choice("draws", draws, get_args(Draws))
    check_choice("allocation", allocation, get_args(Allocation))
    check_delta(delta)
