"""The record of a pruned network, built once from what each stage gave."""

from __future__ import annotations

from sipp.bounds.statements import statements_of
from sipp.inputs.data import AnyData
from sipp.inputs.scoring_task import ScoringTask
from sipp.pruning.cutting import Cut
from sipp.pruning.ranking import ranking_seen_keys
from sipp.records.network_hash import tensors_hash
from sipp.records.options import Mode
from sipp.records.pruned import OutputChange, Pruned, Repaired
from sipp.records.ranking import Ranking


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
    """The record of a cut network: how it came about, how far its output `moved`, and what is guaranteed."""
    stated = statements_of(ranking, cut, task, mode, new_points)
    seen, is_all = ranking_seen_keys(ranking)
    return Pruned(
        model=cut.model,
        masks=cut.masks,
        layers=stated.layers,
        guarantee=stated.guarantee,
        bound=stated.bound,
        method=ranking.method_name,
        budget=cut.budget,
        kept=sum(layer.kept for layer in stated.layers),
        seed=cut.seed,
        draws=ranking.options.draws,
        measured=stated.measured,
        choice=cut.choice,
        repair=None if repaired is None else repaired.record,
        described_hash=tensors_hash(cut.model),
        pattern=None if ranking.pattern is None else str(ranking.pattern),
        moved=moved if repaired is None else repaired.moved,
        seen=seen | (frozenset() if repaired is None else repaired.keys),
        seen_all=is_all,
    )
