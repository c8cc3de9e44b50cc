"""The whole way in one readable function: scores -> budget -> rows -> bounds -> a pruned copy of the model.

`rank` does everything that does not depend on the budget, `cut` the rest, so one ranking serves any number of budgets.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.allocation import Posed, allocate_posed, largest, order_of, pose
from sipp.bounds.assumption import check_assumption
from sipp.bounds.network import Mode, layer_weights
from sipp.bounds.sound.new_inputs import sound_network_bound
from sipp.bounds.statements import state
from sipp.checking import check_choice, check_flag, check_whole
from sipp.errors import OptionError
from sipp.inputs.batches import Data
from sipp.inputs.layers import Selector, unwrap
from sipp.inputs.restore import copy_of
from sipp.numerics import budget_of
from sipp.pruning.ranking import ROW_METHODS, holdout_norms, take_aside, weights_of
from sipp.pruning.ranking import rank as rank  # scores without a budget: `cut` them at any
from sipp.pruning.result import CONFIDENCE, Allocation, Draws, Method, Pruned, PrunedLayer, Ranking
from sipp.pruning.sparse_rows import SparseRows, det_rows, given_rows, sparsify_layers
from sipp.records import NormStats, Reduce, from_rows, to_rows
from sipp.scoring.baselines import Loss
from sipp.scoring.kernels import Kernel
from sipp.scoring.sensitivities import ChunkBytes
from sipp.scoring.theory_points import C_CONSTANT, K_CONSTANT


def prune(
    model: nn.Module,
    data: Data | None,
    *,
    keep: float | None = None,
    budget: int | None = None,
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
    bound: Mode = "paper",
    looks_at_assumption: bool = False,
    holdout: Data | None = None,
    progress: bool = False,
) -> Pruned:
    """A pruned copy of `model` with `keep` of its prunable weights (or `budget` of them), and what that costs.

    `allocation="network"` weighs a row's error by what it costs the network (kappa_l Delta_l), `bound` chooses how the
    network statement is computed: the paper's formula, or operator norms on the graph of the model. What rests on a
    maximum over points holds for all but a share of inputs, at `confidence` (T18); for the network statement that share
    is smallest with a `holdout` of points that serve nothing else. `bound="sound"` needs such points: without a holdout
    the last quarter of `data` is kept aside, not scored. `looks_at_assumption` adds what data and holdout say of T4.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(model, torch.rand(200, 8), keep=0.5)
        >>> pruned.kept, pruned.n_weights
        (96, 192)
    """
    _check_reading(data, holdout, bound, looks_at_assumption)
    n_weights = sum(weight.n_weights for weight in weights_of(unwrap(model), include, exclude))
    n_kept = _budget(keep, budget, n_weights)  # before the work: a wrong budget should not cost a pass over the data
    aside = holdout
    if bound == "sound" and data is not None and holdout is None:
        data, aside = take_aside(
            model,
            data,
            n_points,
            delta,
            method=method,
            k_constant=k_constant,
            include=include,
            exclude=exclude,
            seed=seed,
        )
        n_points = None
    ranking = rank(
        model,
        data,
        method=method,
        delta=delta,
        confidence=confidence,
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
        statements=True,
    )
    if bound == "paper" and holdout is not None and ranking.scores is not None:
        ranking = replace(
            ranking,
            holdout=holdout_norms(
                ranking, holdout, include=include, exclude=exclude, chunk_bytes=chunk_bytes, kernel=kernel
            ),
        )
    pruned = cut(ranking, n_kept, seed=seed)
    if bound == "sound" and ranking.scores is not None and aside is not None:
        pruned = replace(
            pruned, bound=sound_network_bound(ranking.model, pruned.model, aside, ranking.scores, confidence=confidence)
        )
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


def cut(ranking: Ranking, budget: int, *, seed: int = 0) -> Pruned:
    """The network pruned to `budget` weights. The same ranking, budget and seed give the same bits."""
    uncut = before_cut(ranking)
    dense, rows = uncut.dense, sparse_rows(ranking, uncut, budget, seed=seed)
    pruned_model = copy_of(ranking.model)
    write_rows(pruned_model, ranking, rows)
    masks = {}
    for weight, row in zip(ranking.weights, rows):
        parameter = pruned_model.get_parameter(weight.name)
        masks[weight.name] = from_rows(weight, row.mask_FK, parameter).to(parameter.device)
    pruned = state(ranking, rows, dense, pruned_model, masks, budget=budget, seed=seed)
    _warn_of_dead(pruned.layers)
    return pruned


@dataclass(frozen=True)
class Uncut:
    """What all budgets share: the weights before pruning (F x K, on the CPU), and what is worth preparing for many."""

    dense: list[Tensor]
    order: Tensor | None  # of the scores
    posed: Posed | None  # OptAlloc without its budget, for the methods that sample


def before_cut(ranking: Ranking, *, n_cuts: int = 1) -> Uncut:
    """The weights of a ranking, ready for this many budgets. Rows do not depend on the number."""
    dense = [to_rows(w, ranking.model.get_parameter(w.name).detach()).cpu() for w in ranking.weights]
    is_sampled = ranking.scores is not None and ROW_METHODS.get(ranking.method) in ("rand", "hybrid")
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
    row_method, dense = ROW_METHODS.get(ranking.method), uncut.dense
    if ranking.scores is None or row_method is None or budget == ranking.n_weights:
        masks = largest(ranking.ranks, budget, order=uncut.order)
        return [masked_rows(ranking, i, w, mask) for i, (w, mask) in enumerate(zip(dense, masks))]
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


def masked_rows(ranking: Ranking, i: int, weight_FK: Tensor, mask_FK: Tensor) -> SparseRows:
    """The weights of layer i under a mask, unchanged, with the bound of T17 where there are sensitivities."""
    if ranking.scores is None:
        values_FK = torch.where(mask_FK, weight_FK, 0.0)
        return given_rows(weight_FK, values_FK, mask_FK, None, c_constant=ranking.c_constant)
    sensitivity_FK = ranking.scores.layers[i].sensitivity_FK.cpu()
    return det_rows(weight_FK, sensitivity_FK, mask_FK, c_constant=ranking.c_constant)


def _warn_of_dead(layers: tuple[PrunedLayer, ...]) -> None:
    for layer in layers:
        if layer.kept == 0:
            warnings.warn(f"{layer.name}: the whole layer died, none of its weights was kept", stacklevel=4)
        elif layer.dead_rows:
            n_dead = len(layer.dead_rows)
            warnings.warn(
                f"{layer.name}: {n_dead} of {layer.n_rows} rows died, no weight of theirs was kept", stacklevel=4
            )


def _budget(keep: float | None, budget: int | None, n_weights: int) -> int:
    if (keep is None) == (budget is None):
        raise OptionError("give exactly one of keep (a share in (0, 1]) and budget (a number of weights)")
    if keep is not None:
        return budget_of(keep, n_weights)
    return check_whole("budget", budget, least=1, most=n_weights)  # all prunable weights


def _check_reading(data: Data | None, holdout: Data | None, bound: str, looks_at_assumption: bool) -> None:
    """Refuses what cannot be read as often as it must be, and a holdout that would serve nothing."""
    check_choice("bound", bound, get_args(Mode))
    check_flag("looks_at_assumption", looks_at_assumption)
    if (bound == "sound" or looks_at_assumption) and hasattr(data, "__next__"):
        raise OptionError(
            "bound='sound' and looks_at_assumption read the data twice: give a list, a loader or a tensor"
        )
    if holdout is not None and data is None:
        raise OptionError("holdout serves statements about points, and there is no data: give both, or neither")
    if looks_at_assumption and hasattr(holdout, "__next__"):
        raise OptionError("looks_at_assumption reads the holdout again: give a list, a loader or a tensor")
