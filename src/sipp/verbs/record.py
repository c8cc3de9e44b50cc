"""What several of the public functions do with a ranking: repair a cut, record it, warn of rows it emptied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sipp import bounds, repairing
from sipp.errors import DeadRowsWarning, warn_caller
from sipp.inputs import AnyData
from sipp.pruning import Cut, Ranking, cut_of
from sipp.results import BlendChoice, Mode, OutputChange, Pruned, RepairMethod, hashing, words
from sipp.scoring import ScoringTask

WAY_OUT = "keep more, or use the default method, which leaves weights in each (in Python also: floor=0.1)"


def repaired_cut(
    ranking: Ranking,
    masks: Mapping[str, Tensor],
    split: repairing.DataSplit,
    repairs: Sequence[RepairMethod],
    *,
    start: nn.Module | None,
    budget: int,
    seed: int,
    choice: BlendChoice | None,
    progress: bool = False,
) -> tuple[Cut, repairing.Repaired]:
    """The cut to `masks` after these repairs in a row; `start` has its values, None: they are the dense ones.

    `budget`, `seed` and `choice` are those of the cut.
    """
    scores = ranking.sensitivities
    for method in repairs:
        repaired = repairing.repair_network(
            ranking.model,
            masks,
            split,
            method,
            pattern=ranking.pattern,
            keeps_rows=ranking.floor is not None,
            start=start,
            known=scores.map if scores is not None and scores.norm_stats == "running" else None,
            progress=progress,
        )
        start, masks = repaired.model, repaired.masks
    found = cut_of(ranking, repaired.model, repaired.masks, seed=seed, budget=budget, choice=choice)
    return found, repaired


def pruned_of(
    ranking: Ranking,
    network_cut: Cut,
    task: ScoringTask | None = None,
    *,
    mode: Mode = "paper",
    new_points: AnyData | None = None,
    moved: OutputChange | None = None,
    repaired: repairing.Repaired | None = None,
) -> Pruned:
    """Builds the record of a cut network: how it was made, how far its output `moved`, and what is guaranteed.

    A repair has measured itself how far the output moved.
    """
    stated = bounds.statements_of(ranking, network_cut, task, new_points, mode)
    return Pruned(
        model=network_cut.model,
        masks=network_cut.masks,
        layers=stated.layers,
        guarantee=stated.guarantee,
        bound=stated.bound,
        method=ranking.method_name,
        budget=network_cut.budget,
        kept=sum(layer.kept for layer in stated.layers),
        seed=network_cut.seed,
        draws=ranking.options.draws,
        measured=stated.measured,
        choice=network_cut.choice,
        repair=None if repaired is None else repaired.record,
        described_hash=hashing.of_model(network_cut.model),
        pattern=None if ranking.pattern is None else str(ranking.pattern),
        moved=moved if repaired is None else repaired.moved,
        seen=ranking.seen if repaired is None else ranking.seen | repaired.seen,
    )


def warn_of_dead_rows(pruned: Pruned) -> None:
    """Warns once about all neurons and filters that lost every weight."""
    dead = [f"{layer.name} ({layer.dead_rows} of {layer.n_rows})" for layer in pruned.layers if layer.dead_rows]
    if not dead:
        return
    n_rows, way_out = sum(layer.n_rows for layer in pruned.layers), WAY_OUT
    if pruned.kept < n_rows:
        way_out = f"{pruned.kept:,} weights are fewer than the {n_rows:,} neurons or filters: keep more"
    listed = words.listed(dead)
    warn_caller(f"these neurons or filters lost all their weights: {listed}; {way_out}", DeadRowsWarning)
