"""The record of a pruned network, built once from what each stage gave."""

from __future__ import annotations

from sipp.bounds.statements import Statements
from sipp.errors import DeadRowsWarning, warn_caller
from sipp.pruning.cutting import Cut
from sipp.pruning.ranking import ranking_seen_keys
from sipp.records.assumption import Assumption
from sipp.records.display import listed
from sipp.records.network_hash import tensors_hash
from sipp.records.pruned import OutputChange, Pruned, Repaired
from sipp.records.ranking import Ranking


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
    seen, is_all = ranking_seen_keys(ranking)
    return Pruned(
        model=cut.model,
        masks=cut.masks,
        layers=said.layers,
        guarantee=said.guarantee,
        bound=said.bound,
        method=ranking.method_name,
        budget=cut.budget,
        kept=sum(layer.kept for layer in said.layers),
        seed=cut.seed,
        draws=ranking.options.draws,
        measured=said.measured,
        choice=cut.choice,
        assumption=assumption,
        repair=None if repaired is None else repaired.record,
        described_hash=tensors_hash(cut.model),
        pattern=None if ranking.pattern is None else str(ranking.pattern),
        moved=moved if repaired is None else repaired.moved,
        seen=seen | (frozenset() if repaired is None else repaired.keys),
        seen_all=is_all,
    )


def warn_of_dead(pruned: Pruned) -> None:
    """One warning for all rows that died, and one for all layers, however many there are."""
    gone = [layer.name for layer in pruned.layers if layer.kept == 0]
    rows = [
        f"{layer.name} ({len(layer.dead_rows)} of {layer.n_rows})"
        for layer in pruned.layers
        if layer.kept and layer.dead_rows
    ]
    if gone:
        what = "this layer lost all its weights" if len(gone) == 1 else f"{len(gone)} layers lost all their weights"
        text = f"{what}: {listed(gone)}; floor=0.1 prevents this"
        warn_caller(text, DeadRowsWarning)
    if rows:
        text = f"these rows lost all their weights: {listed(rows)}; floor=0.0 keeps at least one weight in each"
        warn_caller(text, DeadRowsWarning)
