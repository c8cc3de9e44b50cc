"""The record of a cut, with everything that is guaranteed for its rows, layers and network (T4, T5, T11, T12, T17-T19).

Rows of a method, masks of the caller's and repaired networks are all treated alike.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sipp.allocation.rows import eps_given
from sipp.bounds.network import chain_obstacle, floored, measure, measured_network, paper_bound, row_guarantee
from sipp.bounds.sound.new_inputs import sound_network_bound
from sipp.inputs.data import AnyData
from sipp.inputs.scoring_task import ScoringTask
from sipp.pruning.cutting import Cut, dead_rows
from sipp.pruning.ranking import ranking_seen_keys
from sipp.pruning.sparse_rows import RAND, STRATEGIES
from sipp.records.display import listed
from sipp.records.network_hash import tensors_hash
from sipp.records.options import Mode
from sipp.records.pruned import (
    Guarantee,
    Measured,
    NetworkBound,
    OutputChange,
    Pruned,
    PrunedLayer,
    Repaired,
    layer_bound,
    no_bound,
)
from sipp.records.ranking import Ranking, Scores
from sipp.scoring.sensitivities import score
from sipp.scoring.theory_points import factor_of


def pruned_of(
    ranking: Ranking,
    cut: Cut,
    task: ScoringTask | None = None,
    *,
    mode: Mode = "paper",
    new_points: AnyData | None = None,
    moved: OutputChange | None = None,
    repaired: Repaired | None = None,
) -> Pruned:
    """The record of a cut network: how it came about, how far its output `moved`, and what is guaranteed.

    With inputs that are new to the pruning, the bound on the network is smaller in mode "paper" (T18), where their
    norms are taken as the `task` says; in mode "sound" (T13) there is none without them.
    """
    scores, norms = ranking.scores, None
    if scores is not None and mode == "paper" and new_points is not None and task is not None:
        norms = score(replace(task.with_points(None, new_points), seed=0))
    obstacle = "" if scores is None else _obstacle(ranking, cut)
    measured, eps_measured = _measured(ranking, cut, obstacle, norms)
    guarantee, bound = _guarantee_and_bound(ranking, cut, obstacle, norms)
    left_out = listed(cut.others) if cut.others else ""
    measured = None if measured is None else replace(measured, left_out=left_out)
    guarantee = None if guarantee is None else replace(guarantee, left_out=left_out)
    layers = tuple(_layer_record(ranking, i, cut, bound, eps) for i, eps in enumerate(eps_measured))
    if scores is not None and mode == "sound" and new_points is not None:
        bound = sound_network_bound(ranking.model, cut.model, new_points, scores, confidence=ranking.options.confidence)
    seen, is_all = ranking_seen_keys(ranking)
    return Pruned(
        model=cut.model,
        masks=cut.masks,
        layers=layers,
        guarantee=guarantee,
        bound=bound,
        method=ranking.method_name,
        budget=cut.budget,
        kept=sum(layer.kept for layer in layers),
        seed=cut.seed,
        draws=ranking.options.draws,
        measured=measured,
        choice=cut.choice,
        repair=None if repaired is None else repaired.record,
        described_hash=tensors_hash(cut.model),
        pattern=None if ranking.pattern is None else str(ranking.pattern),
        moved=moved if repaired is None else repaired.moved,
        seen=seen | (frozenset() if repaired is None else repaired.keys),
        seen_all=is_all,
    )


def _guarantee_and_bound(
    ranking: Ranking, cut: Cut, obstacle: str, holdout: Scores | None
) -> tuple[Guarantee | None, NetworkBound]:
    """What is promised for rows and layers, and for the network, with every reason against it."""
    if ranking.scores is None:
        return None, no_bound(ranking.unscored, ranking.options.delta)
    is_sampled = any(bool((row.strategy_F == RAND).any()) for row in cut.rows)
    reasons = []
    if is_sampled and ranking.options.draws == "until":
        reasons.append(
            "draws='until' makes the number of draws depend on the draws, but bounds are proved for draws='fixed' only"
        )
    n_unknown = sum(int(row.eps_F.isinf().sum()) for row in cut.rows)
    if n_unknown:
        rows_have = "row has" if n_unknown == 1 else "rows have"
        reasons.append(f"{n_unknown} {rows_have} a weight that was 0 and no longer is, so there is no bound")
    conditions = row_guarantee(ranking, cut.dense, factor_of(ranking.method_name), reasons)
    bound = paper_bound(ranking, cut, is_sampled=is_sampled, obstacle=obstacle, reasons=reasons, holdout=holdout)
    return conditions, bound


def _obstacle(ranking: Ranking, cut: Cut) -> str:
    """Why T12 does not bind the model; empty if it does."""
    if cut.others:
        return f"{cut.others[0]} changed too, and is not a pruned weight"
    return chain_obstacle(ranking.model, {weight.name for weight in ranking.weights}, ranking.example)


def _measured(
    ranking: Ranking, cut: Cut, obstacle: str, holdout: Scores | None
) -> tuple[Measured | None, list[float | None]]:
    """The measured constant (T19), and eps of each layer with it (T17), of sampled rows too.

    For a sampled row T17 takes its new values as they are; T6, which profits from chance, is proved for T4's C only.
    """
    scores = ranking.scores
    measured = None if scores is None else measure(scores, ranking.options.confidence)
    if scores is None or measured is None or measured.c_constant is None:
        return measured, [None] * len(cut.rows)
    eps: list[float] = []
    for layer, row, dense_FK in zip(scores.layers, cut.rows, cut.dense):
        first_FK = floored(layer).cpu()
        eps.append(float(eps_given(dense_FK, row.values_FK, first_FK, c_constant=measured.c_constant).max()))
    return measured_network(measured, scores, eps, cut, obstacle=obstacle, holdout=holdout), [*eps]


def _layer_record(ranking: Ranking, i: int, cut: Cut, bound: NetworkBound, eps_measured: float | None) -> PrunedLayer:
    rows = cut.rows[i]
    weight, scores = ranking.weights[i], ranking.scores
    has_bound = scores is not None and scores.reduce == "max"
    complexity = scores.layers[i].sign_complexity if scores is not None else None
    names = STRATEGIES if ranking.method_name.startswith("sipp") else {}
    eps = float(rows.eps_F.max()) if has_bound else None
    return PrunedLayer(
        name=weight.name,
        layer_type=weight.layer_type,
        n_rows=weight.n_rows,
        fan_in=weight.fan_in,
        kept=int(rows.mask_FK.sum()),
        strategies={name: int((rows.strategy_F == code).sum()) for code, name in names.items()},
        dead_rows=dead_rows(cut.dense[i], rows),
        eps_F=rows.eps_F if has_bound else None,
        eps=eps,
        sign_complexity=complexity,
        bound=layer_bound(eps, complexity),
        kappa=bound.kappas.get(weight.name) if has_bound else None,
        eps_measured=eps_measured if eps_measured is not None and math.isfinite(eps_measured) else None,
    )
