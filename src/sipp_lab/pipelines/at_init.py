"""Pipeline at-init: for each level, prune the initial network, then train.

All methods of a seed share its initial network.
"""

from __future__ import annotations

from typing import Any

from sipp_lab.pipelines import Network, Pipeline, Prepared, RunContext, no_parent
from sipp_lab.runs.plan import Stage


def prepare(context: RunContext, stage: Stage, parent_network: Network | None) -> Prepared:
    """The initial network, pruned to the budget of this level."""
    from sipp_lab.pipelines.shared import clock, cut_to, level_budget

    began = clock()
    ranking = _ranking(context, stage)
    scored_in = clock() - began
    return cut_to(context, stage, ranking, {}, level_budget(context, stage, ranking.n_weights), scored_in)


def _ranking(context: RunContext, stage: Stage) -> Any:
    """The scores of the initial network, computed once per method for all levels."""
    from sipp_lab.pipelines.shared import rank_for
    from sipp_lab.runs.context import initial_network

    first = Stage(stage.seed, stage.method, 0)
    if first not in context.memory:
        context.memory.clear()  # a ranking is as large as the network
        # An untrained network has no useful running statistics.
        context.memory[first] = rank_for(context, first, initial_network(context, stage.seed), norm_stats="batch")
    return context.memory[first]


PIPELINE = Pipeline(
    description="prune the initial network to each level, then train",
    compared_with="the initial network, untrained like the pruned one",
    metric="top1",
    parent=no_parent,
    prepare=prepare,
    note_on_time="One scoring pass serves all levels of a method and counts at the first.",
)
