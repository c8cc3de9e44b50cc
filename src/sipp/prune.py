"""The whole way in one readable function: scores -> budget -> rows -> bounds -> a pruned copy of the model.

`rank` does everything that does not depend on the budget, `cut` the rest, so one ranking serves any number of budgets.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp import baselines
from sipp.assumption import check_assumption
from sipp.baselines import Loss
from sipp.batches import Data, count_points
from sipp.bounds import (
    Guarantee,
    Mode,
    NetworkBound,
    layer_bound,
    layer_weights,
    no_bound,
    paper_bound,
    row_guarantee,
)
from sipp.budget import Posed, allocate_posed, largest, order_of, pose
from sipp.errors import OptionError
from sipp.kernels import Kernel
from sipp.layers import Selector, find_sites, unwrap, warn_of_frozen
from sipp.numerics import budget_of
from sipp.progress import progress_bar
from sipp.pruned import Allocation, Draws, Method, Pruned, PrunedLayer, Ranking
from sipp.records import NormStats, Reduce, Weight, from_rows, to_rows
from sipp.sample_size import C_CONSTANT, K_CONSTANT, PRUNE_FACTOR, SIMPLE_FACTOR, check_delta, resolve_points
from sipp.sensitivity import ChunkBytes, score
from sipp.sound import sound_network_bound
from sipp.sparsify import RAND, STRATEGIES, SparseRows, det_rows, keep_masked, sparsify_layers

_ROW_METHODS: dict[str, Literal["det", "rand", "hybrid"]] = {
    "sipp-det": "det",
    "sipp-simple": "det",
    "sipp-rand": "rand",
    "sipp-hybrid": "hybrid",
}


def prune(
    model: nn.Module,
    data: Data | None,
    *,
    keep: float | None = None,
    budget: int | None = None,
    method: Method = "sipp-hybrid",
    delta: float = 1e-16,
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
    bound: Mode = "paper",
    looks_at_assumption: bool = False,
    holdout: Data | None = None,
    progress: bool = False,
) -> Pruned:
    """A pruned copy of `model` with `keep` of its prunable weights (or `budget` of them), and what that costs.

    `allocation="network"` weighs a row's error by what it costs the network (kappa_l Delta_l), `bound` chooses how the
    network statement is computed: the paper's formula, or operator norms on the graph of the model.
    `looks_at_assumption` adds what the data (and a `holdout`, which serves nothing else here) says of T4's assumption.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(model, torch.rand(200, 8), keep=0.5)
        >>> pruned.kept, pruned.n_weights
        (96, 192)
    """
    if bound not in get_args(Mode):
        raise OptionError(f"bound={bound!r} is not one of {', '.join(get_args(Mode))}")
    if (bound == "sound" or looks_at_assumption) and hasattr(data, "__next__"):
        raise OptionError(
            "bound='sound' and looks_at_assumption read the data twice: give a list, a loader or a tensor"
        )
    if holdout is not None and not looks_at_assumption:
        raise OptionError("holdout is only looked at with looks_at_assumption=True; to certify, use sipp.certify")
    n_weights = sum(weight.n_weights for weight in _weights(unwrap(model), include, exclude))
    n_kept = _budget(keep, budget, n_weights)  # before the work: a wrong budget should not cost a pass over the data
    ranking = rank(
        model,
        data,
        method=method,
        delta=delta,
        seed=seed,
        draws=draws,
        allocation=allocation,
        reduce=reduce,
        norm_stats=norm_stats,
        n_points=n_points,
        include=include,
        exclude=exclude,
        loss=loss,
        c_constant=c_constant,
        k_constant=k_constant,
        chunk_bytes=chunk_bytes,
        kernel=kernel,
        progress=progress,
    )
    pruned = cut(ranking, n_kept, seed=seed)
    if bound == "sound" and ranking.scores is not None and data is not None:
        constants = {"delta": delta, "c_constant": c_constant, "k_constant": k_constant}
        statement = sound_network_bound(ranking.model, pruned.model, data, ranking.scores, seed=seed, **constants)
        pruned = replace(pruned, bound=statement)
    if looks_at_assumption and data is not None and ranking.scores is not None:
        found = check_assumption(
            ranking.model,
            data,
            holdout,
            c_constant=c_constant,
            k_constant=k_constant,
            include=include,
            exclude=exclude,
            norm_stats=norm_stats,
            n_points=ranking.scores.n_points,
            seed=seed,
        )
        pruned = replace(pruned, assumption=found)
    return pruned


def rank(
    model: nn.Module,
    data: Data | None,
    *,
    method: Method = "sipp-hybrid",
    delta: float = 1e-16,
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
) -> Ranking:
    """The scores of every prunable weight by `method`: all of pruning that does not depend on the budget."""
    _check_options(method, draws, allocation, delta, c_constant, k_constant)
    model = unwrap(model)
    weights = _weights(model, include, exclude)
    warn_of_frozen(model, weights)
    if data is None and method not in ("wt", "random"):
        raise OptionError(f"method={method!r} needs data: an iterable of batches, a tensor of points or a Dataset")
    scores = None
    if method == "wt":
        by_name = baselines.wt(model, include=include, exclude=exclude)
    elif method == "random":
        by_name = baselines.random(model, include=include, exclude=exclude, seed=seed)
    else:
        assert data is not None
        n, data = resolve_points(model, data, n_points, delta, k_constant=k_constant, include=include, exclude=exclude)
        if method == "snip":
            by_name = baselines.snip(
                model, data, loss=loss, include=include, exclude=exclude, norm_stats=norm_stats, n_points=n, seed=seed
            )
        else:
            with progress_bar("scoring", n or count_points(data), shown=progress) as advance:
                scores = score(
                    model,
                    find_sites(model, include=include, exclude=exclude),
                    data,
                    reduce=reduce,
                    norm_stats=norm_stats,
                    n_points=n,
                    seed=seed,
                    chunk_bytes=chunk_bytes,
                    kernel=kernel,
                    on_batch=lambda batch: advance(batch.n_points),
                )
    if scores is None:
        ranks = tuple(to_rows(weight, by_name[weight.name]).cpu() for weight in weights)
    else:
        ranks = tuple(layer.sensitivity_FK.cpu() for layer in scores.layers)
    return Ranking(model, weights, ranks, scores, method, draws, allocation, delta, c_constant, k_constant)


def cut(ranking: Ranking, budget: int, *, seed: int = 0) -> Pruned:
    """The network pruned to `budget` weights. The same ranking, budget and seed give the same bits."""
    uncut = before_cut(ranking)
    dense, rows = uncut.dense, sparse_rows(ranking, uncut, budget, seed=seed)
    pruned_model = copy.deepcopy(ranking.model)
    write_rows(pruned_model, ranking, rows)
    masks = {}
    for weight, row in zip(ranking.weights, rows):
        parameter = pruned_model.get_parameter(weight.name)
        masks[weight.name] = from_rows(weight, row.mask_FK, parameter).to(parameter.device)
    has_bound = ranking.scores is not None and ranking.scores.reduce == "max"
    guarantee, bound = _statements(ranking, rows, dense)
    layers = tuple(_layer_record(ranking, i, row, dense[i], bound, has_bound=has_bound) for i, row in enumerate(rows))
    _warn_of_dead(layers)
    return Pruned(
        model=pruned_model,
        masks=masks,
        layers=layers,
        guarantee=guarantee,
        bound=bound,
        method=ranking.method,
        budget=budget,
        kept=sum(layer.kept for layer in layers),
        seed=seed,
    )


@dataclass(frozen=True)
class Uncut:
    """What all budgets share: the weights before pruning (F x K, on the CPU), and what is worth preparing for many."""

    dense: list[Tensor]
    order: Tensor | None  # of the scores
    posed: Posed | None  # OptAlloc without its budget, for the methods that sample


def before_cut(ranking: Ranking, *, n_cuts: int = 1) -> Uncut:
    """The weights of a ranking, ready for this many budgets. Rows do not depend on the number."""
    dense = [to_rows(w, ranking.model.get_parameter(w.name).detach()).cpu() for w in ranking.weights]
    is_sampled = ranking.scores is not None and _ROW_METHODS.get(ranking.method) in ("rand", "hybrid")
    order = order_of(ranking.ranks) if n_cuts > 1 and not is_sampled else None
    return Uncut(dense, order, _pose(ranking, dense) if n_cuts > 1 and is_sampled else None)


def _pose(ranking: Ranking, dense: list[Tensor]) -> Posed:
    assert ranking.scores is not None
    return pose(
        ranking.ranks,
        n_outputs=ranking.scores.n_outputs,
        delta=ranking.delta,
        c_constant=ranking.c_constant,
        layer_weights=layer_weights(ranking.scores.layers, dense) if ranking.allocation == "network" else None,
    )


def write_rows(model: nn.Module, ranking: Ranking, rows: list[SparseRows]) -> None:
    """Nothing; puts the rows' values into the parameters of a copy of the ranked model."""
    with torch.no_grad():
        for weight, row in zip(ranking.weights, rows):
            parameter = model.get_parameter(weight.name)
            parameter.copy_(from_rows(weight, row.values_FK.to(parameter.dtype), parameter))


def sparse_rows(ranking: Ranking, uncut: Uncut, budget: int, *, seed: int) -> list[SparseRows]:
    """Budget (T10), then rows (T5, T6, T8, T9). Without a method for rows: the largest scores, values unchanged."""
    generator = torch.Generator().manual_seed(seed)
    row_method, dense = _ROW_METHODS.get(ranking.method), uncut.dense
    if ranking.scores is None or row_method is None or budget == ranking.n_weights:
        masks = largest(ranking.ranks, budget, order=uncut.order)
        return [keep_masked(w, mask) for w, mask in zip(dense, masks)]
    if row_method == "det" and ranking.allocation == "rows":  # the largest scores of all are the largest of each row
        masks = largest(ranking.ranks, budget, order=uncut.order)
        triples = zip(dense, ranking.ranks, masks)
        return [det_rows(weight, rank, mask, c_constant=ranking.c_constant) for weight, rank, mask in triples]
    if row_method == "det":
        weights = layer_weights(ranking.scores.layers, dense)
        ranks = [rank.double() * w for rank, w in zip(ranking.ranks, weights)]
        kept = [mask.sum(1) for mask in largest(ranks, budget)]
    else:
        posed = uncut.posed if uncut.posed is not None else _pose(ranking, dense)
        kept = allocate_posed(posed, budget, generator=generator)
    return sparsify_layers(
        dense,
        ranking.ranks,
        kept,
        method=row_method,
        draws=ranking.draws,
        n_outputs=ranking.scores.n_outputs,
        delta=ranking.delta,
        c_constant=ranking.c_constant,
        generator=generator,
    )


def _statements(ranking: Ranking, rows: list[SparseRows], dense: list[Tensor]) -> tuple[Guarantee | None, NetworkBound]:
    """What is promised for rows and layers, and for the network, with every reason against it."""
    if ranking.scores is None:
        return None, no_bound(f"{ranking.method} is a heuristic: the statements rest on sensitivities", ranking.delta)
    is_sampled = any(bool((row.strategy_F == RAND).any()) for row in rows)
    reasons = []
    if is_sampled and ranking.draws == "until":
        reasons.append("draws='until' makes the number of draws depend on the draws, T6 is proved for draws='fixed'")
    conditions = row_guarantee(
        ranking.scores,
        delta=ranking.delta,
        factor=SIMPLE_FACTOR if ranking.method == "sipp-simple" else PRUNE_FACTOR,
        c_constant=ranking.c_constant,
        k_constant=ranking.k_constant,
        reasons=reasons,
    )
    bound = paper_bound(
        ranking.model,
        ranking.scores,
        [float(row.eps_F.max()) for row in rows],
        dense,
        [row.values_FK for row in rows],
        delta=ranking.delta,
        is_sampled=is_sampled,
        c_constant=ranking.c_constant,
        k_constant=ranking.k_constant,
        reasons=reasons,
    )
    return conditions, bound


def _layer_record(
    ranking: Ranking, i: int, rows: SparseRows, dense_FK: Tensor, bound: NetworkBound, *, has_bound: bool
) -> PrunedLayer:
    weight = ranking.weights[i]
    complexity = ranking.scores.layers[i].sign_complexity if ranking.scores is not None else None
    is_dead = (dense_FK != 0).any(1) & ~((rows.values_FK != 0).any(1))
    names = {} if ranking.scores is None else STRATEGIES
    return PrunedLayer(
        name=weight.name,
        layer_type=weight.layer_type,
        n_rows=weight.n_rows,
        fan_in=weight.fan_in,
        kept=int(rows.mask_FK.sum()),
        strategies={name: int((rows.strategy_F == code).sum()) for code, name in names.items()},
        dead_rows=tuple(is_dead.nonzero().flatten().tolist()),
        eps_F=rows.eps_F if has_bound else None,
        eps=float(rows.eps_F.max()) if has_bound else None,
        sign_complexity=complexity,
        bound=layer_bound(rows.eps_F, complexity) if has_bound else None,
        kappa=bound.kappas.get(weight.name) if has_bound else None,
    )


def _warn_of_dead(layers: tuple[PrunedLayer, ...]) -> None:
    for layer in layers:
        if layer.kept == 0:
            warnings.warn(f"{layer.name}: the whole layer died, none of its weights was kept", stacklevel=4)
        elif layer.dead_rows:
            n_dead = len(layer.dead_rows)
            warnings.warn(
                f"{layer.name}: {n_dead} of {layer.n_rows} rows died, no weight of theirs was kept", stacklevel=4
            )


def _weights(model: nn.Module, include: Selector | None, exclude: Selector | None) -> tuple[Weight, ...]:
    sites = find_sites(model, include=include, exclude=exclude)
    return tuple({weight.name: weight for site in sites for weight in site.weights.values()}.values())


def _budget(keep: float | None, budget: int | None, n_weights: int) -> int:
    if (keep is None) == (budget is None):
        raise OptionError("give exactly one of keep (a share in (0, 1]) and budget (a number of weights)")
    if keep is not None:
        return budget_of(keep, n_weights)
    if not isinstance(budget, int) or not 1 <= budget <= n_weights:
        raise OptionError(f"budget={budget!r} is not a whole number between 1 and {n_weights}, the prunable weights")
    return budget


def _check_options(
    method: str, draws: str, allocation: str, delta: float, c_constant: float, k_constant: float
) -> None:
    chosen = (("method", method, Method), ("draws", draws, Draws), ("allocation", allocation, Allocation))
    for name, value, allowed in chosen:
        if value not in get_args(allowed):
            raise OptionError(f"{name}={value!r} is not one of {', '.join(get_args(allowed))}")
    check_delta(delta)
    for name, constant in (("c_constant", c_constant), ("k_constant", k_constant)):
        if not constant > 0:
            raise OptionError(f"{name}={constant!r} must be positive")
