"""Pipeline iterative: train once; then, level by level, prune what is left and retrain with the full schedule.

All methods of a seed share its trained dense network.
"""

from __future__ import annotations

from sipp_lab.pipelines import Network, Pipeline, Prepared, RunContext
from sipp_lab.runs.plan import Stage


def parent(stage: Stage) -> Stage:
    """The previous level; the dense stage for the first level."""
    return Stage(stage.seed, stage.method if stage.level > 1 else None, stage.level - 1)


def prepare(context: RunContext, stage: Stage, parent_network: Network | None) -> Prepared:
    """The trained network of the previous level, pruned to alpha of its remaining weights, or to this level's keep."""
    from sipp_lab.pipelines.shared import clock, cut_to, level_budget, next_budget, rank_for

    assert parent_network is not None
    began = clock()
    ranking = rank_for(context, stage, parent_network, norm_stats="running")
    scored_in = clock() - began
    left = sum(int(mask.sum()) for mask in parent_network.masks.values()) if parent_network.masks else ranking.n_weights
    alpha = context.recipe.prune.alpha
    budget = next_budget(left, alpha) if alpha is not None else level_budget(context, stage, ranking.n_weights)
    return cut_to(context, stage, ranking, parent_network.masks, min(left, budget), scored_in)


PIPELINE = Pipeline(
    description="train, then prune and retrain level by level",
    compared_with="the network it was pruned from",
    metric="delta_top1",
    parent=parent,
    prepare=prepare,
)
