"""The record of a pruned network, built once from what each stage gave."""

from __future__ import annotations

from sipp.bounds.statements import Statements
from sipp.pruning.cutting import Cut
from sipp.pruning.ranking import points_seen
from sipp.records.assumption import Assumption
from sipp.records.network_hash import tensors_hash
from sipp.records.pruned import OutputChange, Pruned
from sipp.records.ranking import Ranking
from sipp.repairing.layer_by_layer import Repaired


def pruned_of(
    ranking: Ranking,
    cut: Cut,
    said: Statements,
    *,
    moved: OutputChange | None = None,
    repaired: Repaired | None = None,
    assumption: Assumption | None = None,
) -> Pruned:
    """The record of a cut: its network, what is promised about it, and how it came about."""
    return Pruned(
        model=cut.model,
        masks=cut.masks,
        layers=said.layers,
        guarantee=said.guarantee,
        bound=said.bound,
        method=ranking.method,
        budget=cut.budget,
        kept=sum(layer.kept for layer in said.layers),
        seed=cut.seed,
        draws=ranking.draws,
        measured=said.measured,
        choice=cut.choice,
        assumption=assumption,
        repair=None if repaired is None else repaired.record,
        stated=tensors_hash(cut.model),
        pattern=None if ranking.pattern is None else str(ranking.pattern),
        moved=moved if repaired is None else repaired.moved,
        seen=points_seen(ranking) | (frozenset() if repaired is None else repaired.keys),
    )
