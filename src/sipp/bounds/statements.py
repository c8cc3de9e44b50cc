"""A ranking and the new rows in, everything that is promised about them out (T4, T5, T11, T12, T17-T19).

The one way for all: the rows of a method, a mask of the caller's, a network that was repaired.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from sipp.allocation.row_bounds import eps_given
from sipp.bounds.network import (
    Guarantee,
    Measured,
    NetworkBound,
    floored,
    measure,
    measured_network,
    no_bound,
    paper_bound,
    row_guarantee,
)
from sipp.inputs.data import AnyData
from sipp.inputs.network_hash import tensors_hash
from sipp.inputs.scoring_task import ScoringTask
from sipp.pruning.result import Pruned, PrunedLayer, Ranking, layer_bound
from sipp.pruning.sparse_rows import RAND, STRATEGIES, SparseRows
from sipp.records import Scores
from sipp.scoring.sensitivities import score
from sipp.scoring.theory_points import factor_of


def state(
    ranking: Ranking,
    rows: Sequence[SparseRows],
    dense: Sequence[Tensor],
    model: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    budget: int,
    seed: int,
    others: Sequence[str] = (),
) -> Pruned:
    """The record of a pruned network with all of its statements; `others` are tensors that differ beside the rows."""
    measured, eps_measured = _measured(ranking, rows, dense, others)
    guarantee, bound = _statements(ranking, rows, dense, others)
    layers = tuple(_layer_record(ranking, i, row, dense[i], bound, eps_measured[i]) for i, row in enumerate(rows))
    return Pruned(
        model=model,
        masks=dict(masks),
        layers=layers,
        guarantee=guarantee,
        bound=bound,
        method=ranking.method,
        budget=budget,
        kept=sum(layer.kept for layer in layers),
        seed=seed,
        draws=ranking.draws,
        measured=measured,
        stated=tensors_hash(model),
        seen=ranking.seen,
    )


def holdout_norms(task: ScoringTask, holdout: AnyData) -> Scores:
    """The norms of every layer at points that are new to the pruning (T18)."""
    return score(replace(task.with_points(None, holdout), seed=0))


def _statements(
    ranking: Ranking, rows: Sequence[SparseRows], dense: Sequence[Tensor], others: Sequence[str]
) -> tuple[Guarantee | None, NetworkBound]:
    """What is promised for rows and layers, and for the network, with every reason against it."""
    if ranking.scores is None:
        return None, no_bound(ranking.unscored, ranking.delta)
    is_sampled = any(bool((row.strategy_F == RAND).any()) for row in rows)
    reasons = []
    if is_sampled and ranking.draws == "until":
        reasons.append("draws='until' makes the number of draws depend on the draws, T6 is proved for draws='fixed'")
    n_unknown = sum(int(row.eps_F.isinf().sum()) for row in rows)
    if n_unknown:
        reasons.append(f"{n_unknown} rows hold a weight that was 0 and is not any more: no statement for them (T17)")
    delta, confidence = ranking.delta, ranking.confidence
    c_constant, k_constant = ranking.constants.c_constant, ranking.constants.k_constant
    conditions = row_guarantee(
        ranking.scores,
        dense,
        factor=factor_of(ranking.method),
        reasons=reasons,
        delta=delta,
        confidence=confidence,
        c_constant=c_constant,
        k_constant=k_constant,
    )
    bound = paper_bound(
        ranking.scores,
        [float(row.eps_F.max()) for row in rows],
        dense,
        [row.values_FK for row in rows],
        is_sampled=is_sampled,
        obstacle=_obstacle(ranking, others),
        reasons=reasons,
        holdout=ranking.holdout,
        delta=delta,
        confidence=confidence,
        c_constant=c_constant,
        k_constant=k_constant,
    )
    return conditions, bound


def _obstacle(ranking: Ranking, others: Sequence[str]) -> str:
    if others:
        return f"{others[0]} differs too, and is no pruned weight"
    return ranking.obstacle


def _measured(
    ranking: Ranking, rows: Sequence[SparseRows], dense: Sequence[Tensor], others: Sequence[str]
) -> tuple[Measured | None, list[float | None]]:
    """The measured constant (T19), and eps of each layer with it (T17), of sampled rows too.

    For a sampled row T17 takes its new values as they are; T6, which profits from chance, is proved for T4's C only.
    """
    scores = ranking.scores
    if scores is None:
        return None, [None] * len(rows)
    found = measure(scores, ranking.confidence)
    if found.c_constant is None:
        return found, [None] * len(rows)
    eps: list[float] = []
    for layer, row, dense_FK in zip(scores.layers, rows, dense):
        first_FK = floored(layer).cpu()
        eps.append(float(eps_given(dense_FK, row.values_FK, first_FK, c_constant=found.c_constant).max()))
    values = [row.values_FK for row in rows]
    obstacle = _obstacle(ranking, others)
    known: list[float | None] = list(eps)
    return measured_network(found, scores, eps, dense, values, obstacle=obstacle, holdout=ranking.holdout), known


def _layer_record(
    ranking: Ranking, i: int, rows: SparseRows, dense_FK: Tensor, bound: NetworkBound, eps_measured: float | None
) -> PrunedLayer:
    weight, scores = ranking.weights[i], ranking.scores
    has_bound = scores is not None and scores.reduce == "max"
    complexity = scores.layers[i].sign_complexity if scores is not None else None
    is_dead = (dense_FK != 0).any(1) & ~((rows.values_FK != 0).any(1))
    names = STRATEGIES if ranking.method.startswith("sipp") else {}
    eps = float(rows.eps_F.max()) if has_bound else None
    return PrunedLayer(
        name=weight.name,
        layer_type=weight.layer_type,
        n_rows=weight.n_rows,
        fan_in=weight.fan_in,
        kept=int(rows.mask_FK.sum()),
        strategies={name: int((rows.strategy_F == code).sum()) for code, name in names.items()},
        dead_rows=tuple(is_dead.nonzero().flatten().tolist()),
        eps_F=rows.eps_F if has_bound else None,
        eps=eps,
        sign_complexity=complexity,
        bound=layer_bound(eps, complexity),
        kappa=bound.kappas.get(weight.name) if has_bound else None,
        eps_measured=eps_measured if eps_measured is not None and math.isfinite(eps_measured) else None,
    )
